"""DiffusionBERT: masked language models that write, by absorbing discrete diffusion (He et al. 2022)."""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffusionbert.model import Model, load

__version__ = "0.1.0.dev0"
__all__ = ["Model", "__version__", "load"]

# Threads that wait by spinning take the core from those that work: on a busy machine of two cores, four times slower.
# It must be said before torch starts; who sets it otherwise has the last word.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def __getattr__(name: str) -> Any:
    """Opens what is public when it is first asked for, so that `import diffusionbert` stays light."""
    if name in ("Model", "load"):
        from diffusionbert import model

        return getattr(model, name)
    raise AttributeError(f"module 'diffusionbert' has no attribute {name!r}")
