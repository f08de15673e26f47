"""Evaluations of format 1, in which a string said which number a likelihood is, converted to format 2."""

from __future__ import annotations

import ast
import re
from typing import Any

_RATES = (
    "nats_per_sentence",
    "nats_per_token",
    "perplexity_per_token",
    "nats_per_word",
    "perplexity_per_word",
    "bits_per_byte",
)
_PROTOCOL = "data", "weights", "special_tokens", "packed", "num_draws", "strata", "seed", "precision", "arithmetic"
_PAIR = re.compile(r"(\w+)=(?:<[^:>]*: '([^']*)'>|'([^']*)'|([\w.+-]+))")


def from_format_1(plain: Any, where: str) -> Any:
    """The same evaluation as plain JSON values of format 2; what was not recorded is null."""
    try:
        sampling, likelihoods = plain["sampling"], plain["likelihoods"]
        return {
            "name": plain["model"],
            "model": {},
            "weights": plain["weights"],
            "code": {"version": next((one["protocol"]["version"] for one in likelihoods.values()), "unknown")},
            "data": plain["data"],
            "seed": sampling["seed"],
            "likelihoods": {name: _likelihood(one) for name, one in likelihoods.items()},
            "generation": {
                "sampling": _sampling(sampling),
                "samples": _metrics(plain, plain["ci95"], sampling["number"]),
                "real": _metrics(plain["real"], {}, plain["real"]["number"]),
                "speed": plain["speed"],
                "judge": plain["judge"],
                "mauve": plain["mauve"],
            },
            "conventions": None if plain["conventions"] is None else [_convention(one) for one in plain["conventions"]],
            "notes": plain["notes"],
        }
    except (KeyError, TypeError, AttributeError, SyntaxError) as error:
        raise ValueError(f"the evaluation {where!r} is damaged ({error!r}); evaluate again") from None


def _likelihood(plain: Any) -> Any:
    protocol = plain["protocol"]
    is_given = protocol["interval"].startswith("95 %, over draws alone")
    return {
        "kind": plain["likelihood"],
        "rates": {name: _measurement(plain[name], plain["ci95"][name]) for name in _RATES},
        "protocol": {name: protocol[name] for name in (*_PROTOCOL, "version")}
        | {
            "definition": _definition(protocol["steps"], plain["likelihood"]),
            "length": "given" if protocol["length"] == "given" else "modelled",
            "interval": "draws" if is_given else "sentences and draws",
        },
        "standard_error": plain["standard_error_nats_per_token"],
        "limited_by": plain["limited_by"],
        **{name: plain[name] for name in ("num_sentences", "num_tokens", "num_words", "num_bytes", "num_infinite")},
    }


def _definition(steps: str, kind: str) -> Any:
    """Which number a likelihood is, from its description."""
    if steps == "one token after another":
        return {"quantity": "nll", "estimator": "left to right"}
    if steps == "each token given all others":
        return {"quantity": "pseudo-likelihood", "estimator": "each token given all others"}
    head, _, rest = steps.partition(", ")
    number = head.removesuffix(" steps")
    definition = {
        "quantity": "paper" if kind == "pseudo" else "strict",
        "time": {"steps": int(number) if number.isdigit() else None},
    }
    if rest == "estimated in any order":
        return definition | {"estimator": "order-agnostic"}
    if rest == "learned rates":
        return definition | {"schedule": {"name": "learned"}}
    settings = {
        name: ast.literal_eval(text) if text else word or quoted for name, word, quoted, text in _PAIR.findall(rest)
    }
    return definition | {"schedule": {"name": rest.partition("(")[0].lower(), "settings": settings}}


def _measurement(value: float | None, interval: Any) -> Any:
    """Infinity was null; a unit that was not counted had no interval."""
    if interval is None:
        return None
    return {"value": "inf" if value is None else value, "ci95": ["inf" if end is None else end for end in interval]}


def _metrics(plain: Any, intervals: Any, number: int) -> Any:
    bleu = {name: {"value": plain[name], "ci95": intervals.get(name)} for name in ("bleu4", "self_bleu4")}
    return bleu | {
        "number": number,
        "distinct": [plain[f"distinct_{n}"] for n in range(1, 5)],
        "repeated_4grams": plain["repetition"]["share"],
        "longest_run": plain["repetition"]["longest_run"],
        "entropy_pooled": plain["token_entropy"]["pooled"],
        "entropy_per_text": plain["token_entropy"]["per_sample"],
        "words_per_text": plain["words_per_text"],
    }


def _sampling(plain: Any) -> Any:
    name = plain["algorithm"]
    knobs = {"threshold": plain["threshold"]} if plain["threshold"] is not None else {}
    knobs |= {"remasking": plain["remasking"]} if name.startswith("remasking") else {}
    kept = "steps", "temperature", "top_k", "top_p", "block", "number", "seed"
    length = None if plain["length"] == "corpus" else plain["length"]
    return {key: plain[key] for key in kept} | {"sampler": {"name": name, "settings": knobs}, "length": length}


def _convention(plain: Any) -> Any:
    words = {name: plain[name] for name in ("name", "papers", "quotient", "note", "trained_for")}
    return {
        "meaning": words | {"scale": plain["unit"]},
        "kind": plain["likelihood"],
        "definition": _definition(plain["steps"], plain["likelihood"]),
        "value": _measurement(plain["value"], plain["ci95"]),
    }
