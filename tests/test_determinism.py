"""The promise of docs/determinism.md: what is the same to the last bit, and what is the same up to rounding."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tiny_models import model_of, run_of

from diffusionbert import load
from diffusionbert.diffusion.rng import Noise, Purpose
from diffusionbert.model import Model

GOLDEN = [
    "0x1.49a7a22f55b44p-3",
    "0x1.36195a4196a5bp-1",
    "0x1.211b21f8e881cp-3",
    "0x1.6933a13c10762p-2",
    "0x1.a25c3d429e4fcp-3",
    "0x1.4c5be588d63a6p-2",
]
SENTENCE = "the king saw a river today ."


def answers(model: Model) -> dict[str, object]:
    """Texts and figures that depend on the seed."""
    return {
        "generate": model.generate(num_return_sequences=3, length=9, steps=8, seed=3),
        "fill": model.fill("the [MASK] saw a [MASK] today .", seed=3),
        "rewrite": model.rewrite(SENTENCE, 0.5, seed=3),
        "score": [score.nats.hex() for score in model.score([SENTENCE, "nobody ."], precision=1.0)],
    }


@pytest.fixture(scope="module")
def model() -> Model:
    return model_of("linear")


def test_noise_is_the_same_everywhere():
    """Exact numbers: 52 bits of Philox and one half, which any machine and any version must draw."""
    drawn = Noise(7, step=3).uniform(torch.tensor([0, 5, 2**40]), Purpose.SAMPLE, 2)
    assert [number.hex() for number in drawn.flatten().tolist()] == GOLDEN


def test_a_call_changes_no_later_call(model):
    first = answers(model)
    model.generate(num_return_sequences=2, seed=9)
    torch.manual_seed(5)
    assert answers(model) == first
    assert answers(load(run_of("linear"), device="cpu")) == first


@pytest.mark.slow
def test_another_process_gets_the_same(model, tmp_path):
    (tmp_path / "run.py").write_text(
        "import json, sys, torch; torch.set_num_threads(int(sys.argv[2]))\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_determinism import answers; import diffusionbert\n"
        "print(json.dumps(answers(diffusionbert.load(sys.argv[1], device='cpu'))))\n"
    )
    command = [sys.executable, str(tmp_path / "run.py"), str(run_of("linear")), str(torch.get_num_threads())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == answers(model)


@pytest.mark.slow
def test_threads_get_the_same(model):
    expected = answers(model)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(answers, [model] * 4)) == [expected] * 4


def test_for_equal_shapes_the_company_does_not_matter(model):
    """To the last bit: the first sequence of a batch has the same log-probabilities beside any others."""
    vocabulary, network = model.engine.vocabulary, model.engine.network
    first = torch.tensor(vocabulary.encode([SENTENCE])[0])
    others = torch.randint(5, vocabulary.size, (4, 3, len(first)), generator=torch.Generator().manual_seed(0))
    found = []
    for company in others:
        tokens = torch.cat([first[None], company])
        mask = torch.ones_like(tokens, dtype=torch.bool)
        with torch.no_grad():
            log_f = network(tokens, mask, torch.full((4,), 0.5, dtype=torch.float64), mask)
        found.append(log_f[: len(first)])
    assert all(torch.equal(one, found[0]) for one in found)


def test_other_shapes_round_otherwise_and_no_more(model):
    vocabulary, network = model.engine.vocabulary, model.engine.network
    first = torch.tensor(vocabulary.encode([SENTENCE]))
    found = []
    for copies in (1, 2, 7, 16):
        tokens = first.repeat(copies, 1)
        mask = torch.ones_like(tokens, dtype=torch.bool)
        with torch.no_grad():
            log_f = network(tokens, mask, torch.full((copies,), 0.5, dtype=torch.float64), mask)
        found.append(log_f[: first.shape[1]])
    for one in found[1:]:
        torch.testing.assert_close(one, found[0], atol=1e-5, rtol=0)


def test_texts_do_not_depend_on_their_number(model):
    """The noise of a text has its number; so small a network rounds alike in all shapes."""
    several = model.generate(num_return_sequences=5, length=8, steps=6, seed=2)
    assert model.generate(num_return_sequences=2, length=8, steps=6, seed=2) == several[:2]
    filled = model.fill(["the [MASK] saw a river .", "nobody [MASK] the sea ."], seed=2)
    assert model.fill("nobody [MASK] the sea .", seed=2) == filled[1]


@pytest.mark.slow
def test_a_saved_model_answers_the_same(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    assert answers(load(tmp_path / "model", device="cpu")) == answers(model)
