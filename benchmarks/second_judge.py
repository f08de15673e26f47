"""Judges the samples of the second seed with another model, which shares no text or weights with any row.

    python benchmarks/second_judge.py KEPT docs/results/second/frontier1/judged.json --judge JUDGE --text TEXT

KEPT is a folder made by `experiment.py experiment KEPT --samples 500`; JUDGE is a causal language model (a folder, a
GGUF file or a Hub name); TEXT is the rows' test text, news.test. Only samples over temperatures are judged, of which
`report.py` makes a column of its table. The real sentences are as many, as the tokenizer of all rows spells them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import tyro

from diffusionbert.evaluation.dataset import open_evaluation_set
from diffusionbert.evaluation.judges import Judge, load_judge
from diffusionbert.inference.engine import load_engine
from diffusionbert.storage.files import write_json
from diffusionbert.training.model_folder import BUNDLED

Folder = tyro.conf.Positional[Path]


def judge(kept: Folder, output: Folder, judge: str, text: Path, samples: int = 500) -> None:
    """Write the perplexities of samples and of real sentences.

    Args:
        kept: The folder of kept evaluations, with all samples.
        output: The JSON file to write.
        judge: The judge.
        text: The test text.
        samples: The number of samples per row: those that BLEU-4 is computed from, which come first.
    """
    reader, rows = load_judge(judge, torch.device("cpu")), dict[str, Any]()
    for file in sorted(kept.glob("frontier1/evaluations/*/samples.txt")):
        name = file.parent.name
        if re.search(r"-T=[\d.]+$", name):
            rows[name] = _perplexity(reader, file.read_text(encoding="utf-8").splitlines()[:samples])
            print(f"{name:<36} {rows[name]['perplexity']:8.1f}", flush=True)
    texts = open_evaluation_set(load_engine(BUNDLED), str(text))
    real = _perplexity(reader, [texts.decoded[number] for number in texts.some(samples)])
    print(f"{'real sentences':<36} {real['perplexity']:8.1f}")
    name = Path(judge).stem if Path(judge).is_file() else Path(judge).name
    write_json(output, {"judge": name, "samples": samples, "rows": rows, "real": real})


def _perplexity(reader: Judge, texts: list[str]) -> dict[str, Any]:
    found = reader.read(texts).judged()
    return {"perplexity": found.perplexity, "ci95": list(found.ci95), "texts": len(texts)}


if __name__ == "__main__":
    tyro.cli(judge, description=__doc__)
