"""Judges: perplexity against sums by hand, the start token, truncation, entropy, and the glue to MAUVE."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from diffusionbert.evaluation import judges
from diffusionbert.evaluation.judges import (
    Judge,
    Reading,
    compute_mauve,
    featurizer,
    load_judge,
    require_mauve,
)

WORDS = ["<end>", "<start>", "a", "b", "c", "d"]
TEXTS = ["a b c", "d", "a a b", "c d a b c d"]
CPU = torch.device("cpu")


def tokenizer_of(**special: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def gpt2(positions: int = 16) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=len(WORDS), n_positions=positions, n_embd=16, n_layer=2, n_head=2)
    ).eval()


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    return LlamaForCausalLM(config).eval()


def judge_of(model=None, **special: str) -> Judge:
    return Judge("tiny", model or gpt2(), tokenizer_of(**(special or {"eos_token": "<end>"})))


def by_hand(judge: Judge, ids: list[int]) -> list[float]:
    """-log q of each id but the first, one forward pass per text, no batch and no padding."""
    with torch.no_grad():
        log_q = judge.model(torch.tensor([ids])).logits[0].double().log_softmax(dim=-1)
    return [-float(log_q[position, token]) for position, token in enumerate(ids[1:])]


def ids_of(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


@pytest.mark.parametrize(
    ("special", "start"),
    [({"eos_token": "<end>"}, [0]), ({"eos_token": "<end>", "bos_token": "<start>"}, [1]), ({"unk_token": "a"}, [])],
    ids=["end in its role", "start", "none"],
)
@pytest.mark.parametrize("make", [gpt2, llama])
def test_nats_equal_those_of_each_text_alone(special, start, make):
    judge = judge_of(make(), **special)
    reading = judge.read(TEXTS)
    expected = [by_hand(judge, start + ids_of(text)) for text in TEXTS]
    assert reading.nats == pytest.approx([sum(nats) for nats in expected], abs=1e-5)
    assert reading.tokens.tolist() == [len(nats) for nats in expected]
    total = sum(map(sum, expected)) / sum(map(len, expected))
    assert reading.judged().perplexity == pytest.approx(math.exp(total), rel=1e-5)
    assert ("given" in judge.convention) == (not start)


def test_scores_do_not_depend_on_batches(monkeypatch):
    judge = judge_of()
    together = judge.read(TEXTS)
    monkeypatch.setattr(judges, "_POSITIONS_PER_CALL", 1)
    advanced: list[int] = []
    alone = judge.read(TEXTS, advanced.append)
    assert together.nats == pytest.approx(alone.nats, abs=1e-5)
    assert np.allclose(together.features, alone.features, atol=1e-5)
    assert sum(advanced) == len(TEXTS)
    assert len(advanced) > 2


def test_features_are_the_last_layer_at_the_last_token():
    judge = judge_of()
    with torch.no_grad():
        expected = judge.model.transformer(torch.tensor([[0, *ids_of(TEXTS[0])]])).last_hidden_state[0, -1]
    assert np.allclose(judge.read(TEXTS).features[0], expected.numpy(), atol=1e-5)


def test_long_texts_are_truncated_and_counted():
    judge = judge_of(gpt2(positions=4))
    long = "a b c d a b"
    reading = judge.read([long, "a b"])
    assert reading.num_truncated == 1
    assert reading.tokens.tolist() == [3, 2]  # the start token takes one of the four positions
    assert reading.nats[0] == pytest.approx(sum(by_hand(judge, [0, *ids_of("a b c")])), abs=1e-5)
    assert judge.read(["a b c"]).num_truncated == 0


@pytest.mark.parametrize("special", [{"eos_token": "<end>"}, {"unk_token": "a"}], ids=["start", "no start"])
def test_empty_texts_are_ignored(special):
    judge = judge_of(**special)
    some, more = judge.read(TEXTS).judged(), judge.read([*TEXTS, "", ""]).judged()
    assert (more.perplexity, more.entropy) == pytest.approx((some.perplexity, some.entropy))
    assert (some.num_empty, more.num_empty) == ((0, 2) if special.get("eos_token") else (1, 3))  # "d" is given
    with pytest.raises(ValueError, match="are empty to the judge"):
        judge.read(["", ""]).judged()


def test_figures_computed_by_hand():
    vectors = np.zeros((3, 2), np.float32)
    judged = Reading(
        np.array([2.0, 4.0, 0.0]), np.array([1.0, 3.0, 0.0]), np.array([0.5, 1.5, 0.0]), vectors, 1
    ).judged()
    assert judged.perplexity == pytest.approx(math.exp(6 / 4))
    assert judged.entropy == 1.0
    assert (judged.num_tokens, judged.num_empty, judged.num_truncated) == (4, 1, 1)
    assert judged.ci95 == pytest.approx((math.exp(4 / 3), math.exp(2)))  # both texts the one, or both the other


def test_entropy_is_computed_per_text():
    entropy = judge_of().read(["a a b", "c", "a b c d"]).entropy
    assert entropy == pytest.approx([math.log(3) - 2 / 3 * math.log(2), 0, math.log(4)])


def test_a_judge_is_loaded_from_a_folder(tmp_path):
    model = gpt2()
    model.save_pretrained(tmp_path)
    tokenizer_of(eos_token="<end>").save_pretrained(tmp_path)
    judge = load_judge(str(tmp_path), CPU)
    assert judge.read(TEXTS).nats == pytest.approx(Judge("", model, judge.tokenizer).read(TEXTS).nats, abs=1e-5)
    assert "'<end>'" in judge.convention


def saved_as_a_pickle(folder):
    tokenizer_of(eos_token="<end>").save_pretrained(folder)
    gpt2().config.save_pretrained(folder)
    torch.save(gpt2().state_dict(), folder / "pytorch_model.bin")


def two_gguf_files(folder):
    for name in "ab":
        (folder / f"{name}.gguf").write_bytes(b"GGUF")


@pytest.mark.parametrize(
    ("make", "name", "message"),
    [
        (lambda folder: None, "no/such-judge", "no judge at 'no/such-judge'"),
        (lambda folder: None, "", "no judge"),
        (saved_as_a_pickle, "", "no judge"),
        (lambda folder: (folder / "a.gguf").write_bytes(b"GGUF"), "a.gguf", "gguf"),
        (two_gguf_files, "", "name the one you want"),
    ],
    ids=["unknown", "empty folder", "pickle", "broken gguf", "two gguf files"],
)
def test_a_missing_judge_gives_a_one_line_error(tmp_path, capfd, make, name, message):
    make(tmp_path)
    path = name if "/" in name else str(tmp_path / name)
    with pytest.raises(ValueError, match=message) as caught:
        load_judge(path, CPU)
    assert "\n" not in str(caught.value)
    assert not capfd.readouterr().err


def test_features_come_from_gpt2_or_else_from_the_judge():
    """No Hub here, so gpt2-large is not to be had."""
    own, other = judge_of(), judge_of(llama())
    assert featurizer(own, CPU) is own
    assert featurizer(other, CPU) is other
    with pytest.raises(ValueError, match=r"--judge.*gpt2-large"):
        featurizer(None, CPU)


def test_features_of_gpt2_are_preferred(monkeypatch):
    published = judge_of()
    monkeypatch.setattr(judges, "load_judge", lambda name, device: published)
    own, other = judge_of(), judge_of(llama())
    assert featurizer(own, CPU) is own  # of the family, and open already
    assert featurizer(other, CPU) is featurizer(None, CPU) is published


def test_mauve_gets_real_text_as_p_and_samples_as_q(monkeypatch):
    targets = {}

    def compute(**options):
        targets.update(options)
        return SimpleNamespace(mauve=0.25, mauve_star=0.5, num_buckets=3)

    monkeypatch.setitem(sys.modules, "mauve", SimpleNamespace(compute_mauve=compute))
    samples, real = np.zeros((4, 2), np.float32), np.ones((5, 2), np.float32)
    found = compute_mauve(samples, real, "tiny", seed=7)
    assert (found.value, found.smoothed, found.features) == (0.25, 0.5, "tiny")
    assert (found.num_buckets, found.num_samples, found.num_real) == (3, 4, 5)
    assert targets["p_features"] is real
    assert targets["q_features"] is samples
    assert targets["seed"] == 7


def test_without_its_package_mauve_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mauve", None)
    with pytest.raises(ValueError, match=r"diffusionbert\[eval\]"):
        require_mauve()


@pytest.mark.filterwarnings("ignore")
def test_mauve_is_high_for_equal_and_low_for_different_texts():
    pytest.importorskip("mauve")
    chance = np.random.default_rng(0)
    texts, others = (chance.normal(size=(60, 8)).astype(np.float32) for _ in range(2))
    near, far = (compute_mauve(texts, other, "x").value for other in (others, np.abs(others) + 3))
    assert far < 0.1 < 0.5 < near
