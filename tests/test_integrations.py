"""The Python of docs/integrations.md runs, at tiny size; backbone and embeddings are what other tools expect."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from tiny_models import MAX_LENGTH, model_of, toy_sentences, trained
from transformers import PreTrainedModel

import diffusionbert

DOCUMENT = (Path(__file__).parent.parent / "docs" / "integrations.md").read_text(encoding="utf-8")
TRANSFORMERS, SKLEARN, PANDAS = re.findall(r"^```python\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
SENTENCE = "the king saw a river today ."


def run(code: str) -> None:
    exec(compile(code, "integrations.md", "exec"), {})


@pytest.fixture(autouse=True)
def _tiny_model(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(diffusionbert, "load", trained, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_the_backbone_is_an_ordinary_model(capsys):
    assert isinstance(trained().backbone, PreTrainedModel)
    run(TRANSFORMERS)
    word, shape = capsys.readouterr().out.splitlines()
    assert word.strip()
    assert shape.startswith("torch.Size([1, ")


def test_embeddings_take_what_holds_texts_and_are_those_of_the_backbone():
    model, texts = trained(), toy_sentences(5)
    found = model.embed(texts)
    assert (tuple(found.shape), found.dtype) == ((5, model.backbone.config.hidden_size), torch.float32)
    assert torch.equal(model.embed(np.array(texts)), found)
    assert torch.equal(model.embed(tuple(texts)), found)
    inputs = model.tokenizer(SENTENCE, return_tensors="pt")
    with torch.no_grad():
        states = model.backbone(**inputs, output_hidden_states=True).hidden_states[-1][0, 1:-1]
    torch.testing.assert_close(model.embed(SENTENCE)[0], states.mean(dim=0))


def test_a_long_text_is_embedded_in_parts():
    model, own = trained(), trained().max_length
    words = (SENTENCE.split() * own)[: 2 * own + 3]
    parts = [" ".join(words[start : start + own]) for start in range(0, len(words), own)]
    sizes = torch.tensor([[float(len(part.split()))] for part in parts])
    expected = (model.embed(parts) * sizes).sum(dim=0) / sizes.sum()
    torch.testing.assert_close(model.embed(" ".join(words))[0], expected)
    with pytest.raises(ValueError, match="text 2 has no tokens"):
        model.embed([SENTENCE, " "])
    with pytest.raises(ValueError, match="trained on pairs"):
        model_of("pairs").embed(SENTENCE)


def test_embeddings_are_features(capsys):
    """With scikit-learn where it is installed; else a linear map by least squares, as it would fit one."""
    if importlib.util.find_spec("sklearn"):
        run(SKLEARN)
        assert len(re.findall("person|water", capsys.readouterr().out)) == 2
    texts = toy_sentences(60)
    features = trained().embed(texts).cpu().numpy()
    labels = np.array([1.0 if "river" in text or "sea" in text else -1.0 for text in texts])
    weights, *_ = np.linalg.lstsq(np.c_[features[:40], np.ones(40)], labels[:40], rcond=1e-3)
    assert (np.sign(np.c_[features[40:], np.ones(20)] @ weights) == labels[40:]).mean() > 0.7


class Rows:
    """What the document uses of a pandas table."""

    def __init__(self, rows, columns):
        self.rows, self.columns = rows, columns

    def sort_values(self, column):
        index = self.columns.index(column)
        return Rows(sorted(self.rows, key=lambda row: row[index]), self.columns)

    def to_string(self, index):
        return "\n".join("  ".join(map(str, row)) for row in [self.columns, *self.rows])


@pytest.mark.slow
def test_the_sweep_runs(capsys, monkeypatch):
    """With pandas where it is installed."""
    if not importlib.util.find_spec("pandas"):
        pandas = ModuleType("pandas")
        pandas.DataFrame = Rows
        monkeypatch.setitem(sys.modules, "pandas", pandas)
    for name in ("mine.txt", "test.txt"):
        Path(name).write_text("\n".join(toy_sentences(400)) + "\n", encoding="utf-8")
    train, evaluate = diffusionbert.train, diffusionbert.evaluate
    small = {"steps": 2, "validate_every": 2, "validation_draws": 1, "max_length": MAX_LENGTH, "vocabulary": 512}
    few = {"samples": 2, "sentences": 4, "max_draws": 2, "steps": 2}
    monkeypatch.setattr(
        diffusionbert, "train", lambda *given, **options: train(*given, cache="cache", **options | small), raising=False
    )
    monkeypatch.setattr(
        diffusionbert, "evaluate", lambda *given, **options: evaluate(*given, **options | few), raising=False
    )
    run(PANDAS)
    heading, *rows = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert "nats per token" in heading
    assert sorted(row.split()[0] for row in rows) == ["cosine", "cosine", "linear", "linear"]
    nats = [float(row.split()[2]) for row in rows]
    assert nats == sorted(nats)
    assert len(PANDAS.strip().splitlines()) <= 16  # ten lines and what they import and show
