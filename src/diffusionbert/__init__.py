"""DiffusionBERT: turns masked language models into generators with absorbing discrete diffusion (He et al. 2022).

    import diffusionbert as db

    model = db.load()                                  # the bundled model; or a run directory, a folder, a Hub id
    model.generate("once upon a time", max_new_tokens=20)
    model.fill("the [MASK] said on [MASK] .")
    model.score("the capital of france is paris .")

    run = db.train(data="my.txt", output="runs/mine", preset="tiny")
    result = db.evaluate(run.path, data="test.txt")
    print(db.compare([result]))

Importing the package is light: torch and transformers are imported when they are first needed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffusionbert.evaluation.compare import compare
    from diffusionbert.model import Model, evaluate, load
    from diffusionbert.recipes import train
    from diffusionbert.registry import register
    from diffusionbert.reporting import set_verbosity
    from diffusionbert.samplers.base import SamplerConfig
    from diffusionbert.workflows.adapt import adapt
    from diffusionbert.workflows.audit import audit

__version__ = "0.1.0.dev0"
__all__ = [
    "Model",
    "SamplerConfig",
    "__version__",
    "adapt",
    "audit",
    "compare",
    "evaluate",
    "load",
    "register",
    "set_verbosity",
    "train",
]
_HOMES = {
    "Model": "model",
    "SamplerConfig": "samplers.base",
    "adapt": "workflows.adapt",
    "audit": "workflows.audit",
    "compare": "evaluation.compare",
    "evaluate": "model",
    "load": "model",
    "register": "registry",
    "set_verbosity": "reporting",
    "train": "recipes",
}


def __getattr__(name: str) -> Any:
    """Imports a public name on first use."""
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, for tab completion."""
    return sorted(__all__)
