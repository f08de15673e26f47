"""Measures encoding, generating, scoring and evaluating in one process and in several, each on one core.

    python benchmarks/processes.py --processes 1 2

The text is random words from Python's documentation; the model is the bundled one. Seconds are those of the work,
without the start of the processes; in brackets is the processor time of the process that needs most, which other
programs on the machine affect less. Each line is also a check: its digest must be the same for every number of
processes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SENTENCES, TEXTS, SAMPLES = 200_000, 32, 64


def write_text(path: Path) -> None:
    """Writes sentences of 8 to 40 words."""
    from diffusionbert.data.corpus import parse_corpus
    from diffusionbert.data.sources import Split

    chance = random.Random(0)
    words = [word for text in parse_corpus("pydoc", Split.ALL) for word in text.split()]
    lines = (" ".join(chance.choices(words, k=chance.randint(8, 40))) for _ in range(SENTENCES))
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def work(text: Path, cache: Path) -> None:
    """Does all kinds of work, together with the other processes; the main one prints seconds and digests."""
    import torch

    from diffusionbert import parallel
    from diffusionbert.data.corpus import Cleaning, parse_corpus
    from diffusionbert.data.dataset import encode_corpus
    from diffusionbert.data.sources import Split
    from diffusionbert.model import evaluate, load

    torch.set_num_threads(1)
    processes, model = parallel.join(), load(device="cpu")
    corpus = parse_corpus(str(text), Split.ALL, cleaning=Cleaning(lower=True))
    texts = text.read_text(encoding="utf-8").splitlines()[:TEXTS]
    some = text.with_name("some.txt")
    processes.on_main(lambda: some.write_text("\n".join(texts) + "\n", encoding="utf-8"))

    def evaluated() -> str:
        result = evaluate(model, str(some), samples=SAMPLES // 2, steps=32, max_draws=8, precision=1.0)
        return f"{result.likelihoods} {result.samples}"

    kinds: dict[str, Callable[[], str]] = {
        f"encode {SENTENCES:,} sentences": lambda: encode_corpus(corpus, model.engine.vocabulary, cache).fingerprint,
        f"generate {SAMPLES} texts of 32 tokens": lambda: repr(
            model.generate(num_return_sequences=SAMPLES, length=32, steps=32, seed=0)
        ),
        f"score {TEXTS} texts": lambda: repr([one.nats for one in model.score(texts, precision=1.0)]),
        f"evaluate {TEXTS} sentences and {SAMPLES} samples": evaluated,
    }
    for name, make in kinds.items():
        processes.on_main(lambda: None)  # so that all begin at the same time
        start, own = time.perf_counter(), time.process_time()
        digest = hashlib.sha256(make().encode()).hexdigest()
        seconds, own = time.perf_counter() - start, time.process_time() - own
        most = max(processes.share([own] * processes.number, lambda _, own=own: own))
        if processes.is_main:
            print(json.dumps([name, f"{seconds:.1f} ({most:.1f})", digest]), flush=True)
    parallel.leave()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--work", type=Path, nargs=2, metavar=("TEXT", "CACHE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(*options.work)
        return
    found: dict[str, list[tuple[str, str]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        write_text(text)
        for number in options.processes:
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={number}"]
            command = [sys.executable, *launcher, __file__, "--work", str(text), str(Path(folder) / f"cache-{number}")]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            for name, seconds, digest in map(json.loads, done.stdout.splitlines()):
                found.setdefault(name, []).append((seconds, digest))
    print("| work | " + " | ".join(f"{number}, s" for number in options.processes) + " | equal |")
    print("|---" * (2 + len(options.processes)) + "|")
    for name, results in found.items():
        is_equal = "yes" if len({digest for _, digest in results}) == 1 else "NO"
        print(f"| {name} | " + " | ".join(seconds for seconds, _ in results) + f" | {is_equal} |")


if __name__ == "__main__":
    main()
