"""Every example runs from outside the package, at a few steps, and prints what it promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
PROMISES = {
    "train_tiny.py": ["t = 1.00", "t = 0.00"],
    "custom_schedule.py": ["quadratic (bend = 0.5)", "linear", "perplexity per token", "seconds per sample"],
    "custom_sampler.py": ["exact", "random-order", "calls per sample", "random-order:per_call=2"],
    "custom_backbone.py": ["MixerForMaskedLM: ", "mixer", "bert", "nats per token, p = "],
}


def run(example: str, *options: str, cwd: Path) -> str:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / example), *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("example", PROMISES)
def test_an_example_runs_and_leaves_nothing_behind(example, tmp_path):
    printed = run(example, "--steps=3", cwd=tmp_path)
    for promise in PROMISES[example]:
        assert promise in printed
    assert not list(tmp_path.iterdir())


def test_all_examples_are_run():
    demo = "demo.py"  # by `make demo`
    assert {path.name for path in EXAMPLES.glob("*.py")} - {demo} == set(PROMISES)
