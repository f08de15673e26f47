"""Configurations of version 0.1.0.dev0 before registered names: `{"kind": "Experiment", …}` becomes today's JSON."""

from __future__ import annotations

from typing import Any

_NAMES = {
    "Linear": "linear",
    "Cosine": "cosine",
    "Sqrt": "sqrt",
    "Power": "power",
    "Spindle": "spindle",
    "Even": "uniform",
    "Bell": "bell",
    "NewBert": "bert",
    "NewDecoder": "gpt2",
    "Pretrained": "pretrained",
    "Diffusion": "discrete-time",
    "ContinuousDiffusion": "continuous-time",
    "LearnedDiffusion": "learned-schedule",
    "AnyOrderWriting": "order-agnostic",
    "Masking": "masked-lm",
    "MouthMasking": "bert-mouth",
    "MaskPredicting": "cmlm",
    "StepUnrolling": "sundae",
    "VectorDiffusion": "gaussian",
    "NextWord": "autoregressive",
}
"""Registered names by kind."""
_PLAIN = {"Experiment", "Data", "Training", "TokenBudget", "FixedRows"}
"""Kinds that have no name."""
_FIELDS = {
    ("Experiment", "network"): "backbone",
    ("Training", "averaging"): "ema",
    ("Pretrained", "name"): "name_or_path",
    ("FixedRows", "rows"): "sequences",
    ("Diffusion", "proposal"): "time_sampling",
    ("ContinuousDiffusion", "proposal"): "time_sampling",
}


def is_legacy(plain: Any) -> bool:
    """Whether a configuration has the old format."""
    return isinstance(plain, dict) and "kind" in plain


def upgraded(plain: Any, where: str) -> Any:
    """The same in today's format, without its number; raises ValueError for an unknown kind."""
    if not is_legacy(plain):
        return plain
    kind = plain["kind"]
    if kind not in _PLAIN and kind not in _NAMES:
        raise ValueError(f"{where}: unknown kind {kind!r:.40}")
    name = {"name": _NAMES[kind]} if kind in _NAMES else {}
    rest = {key: value for key, value in plain.items() if key != "kind"}
    return name | {_FIELDS.get((kind, key), key): upgraded(value, f"{where}.{key}") for key, value in rest.items()}
