"""A fixed sample of the faults that `make torture` tries: one at every kind of call, and both while resuming or not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torture import KINDS, compiled

SAMPLE = 7


@pytest.mark.slow
def test_runs_survive_faults_and_resume_to_the_same_files(tmp_path):
    if compiled(tmp_path) is None:
        pytest.skip("the shim needs Linux and a C compiler")
    worker = Path(__file__).with_name("torture.py")
    done = subprocess.run(
        [sys.executable, str(worker), "10", f"--sample={SAMPLE}", "--seed=5"],
        env={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{SAMPLE} cases, 0 flaws" in done.stdout
    assert all(kind in done.stdout for kind in KINDS)
