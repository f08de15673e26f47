"""How OpenMP's threads should wait between kernels: generation on idle cores and next to busy programs.

    python benchmarks/waiting_threads.py

prints, for 0, 1 and 2 programs that keep a core busy each, the seconds that 1 and 16 texts of 24 tokens take (medians
of three): with OpenMP's default, with threads that sleep at once, and as the command line sets it.
"""

from __future__ import annotations

import os
import subprocess
import sys

SETTINGS = {
    "OpenMP's default": {},
    "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
}
CODE = """
import time
import diffusionbert

model = diffusionbert.load(device="cpu")

def seconds(number):
    began = time.perf_counter()
    model.generate(length=24, num_return_sequences=number, seed=1)
    return time.perf_counter() - began

seconds(16)
print(*(f"{sorted(seconds(number) for _ in range(3))[1]:.2f} s" for number in (1, 16)), sep=", ")
"""


def main() -> None:
    for num_busy in (0, 1, 2):
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_busy)]
        try:
            for name, variables in SETTINGS.items():
                done = subprocess.run(
                    [sys.executable, "-c", CODE], env=os.environ | variables, capture_output=True, check=True
                )
                print(f"{num_busy} busy programs, {name}: {done.stdout.decode().strip()}", flush=True)
        finally:
            for program in busy:
                program.kill()
                program.wait()


if __name__ == "__main__":
    main()
