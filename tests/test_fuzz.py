"""Mutated files: what the fuzzer has found, and a fixed number of new cases (`make fuzz` tries more)."""

from __future__ import annotations

import json

import pytest
from fuzz import FOUND, UNHURRIED, Case, cases, is_sound, tried
from hypothesis import given, settings

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", sorted(file.stem for file in FOUND.glob("*.json")))
def test_what_was_found_stays_mended(name):
    outcome = tried(json.loads((FOUND / f"{name}.json").read_text(encoding="utf-8")))
    assert is_sound(outcome), outcome


@settings(UNHURRIED, max_examples=12, derandomize=True)
@given(cases())
def test_a_mutated_file_opens_or_is_refused_in_one_line(case: Case):
    outcome = tried(case)
    assert is_sound(outcome), (case, outcome)
