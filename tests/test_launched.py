"""Two processes of a launch: one is killed or stopped, and the run goes on in one or two; all exit as they should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it forks, and looks at /proc")
def test_a_launch_survives_its_processes():
    worker = Path(__file__).with_name("launched.py")
    command = [sys.executable, str(worker), "--faults=2", "--exits=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines()[:2]] == ["killed", "stopped"]
    assert "2 times two sharded processes, 0 other busy processes: 0 bad exits" in done.stdout
