"""Retention: likeness of representations and probes, against definitions, on tiny encoders."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForMaskedLM, BertConfig

from diffusionbert.assessment import retention as module
from diffusionbert.assessment.retention import Encoder, Probe, centred_cosine, linear_cka, retention
from diffusionbert.conditioning import LayerwiseTime, PrefixTime, SinusoidalTime, TimeAgnostic
from diffusionbert.networks import Denoiser
from diffusionbert.text.corpus import parse_corpus
from diffusionbert.text.vocabulary import Vocabulary, train_wordpiece


@pytest.fixture(scope="module")
def sentences() -> list[str]:
    return sorted((text.lower() for text in parse_corpus("pydoc")), key=len)[:160]


@pytest.fixture(scope="module")
def vocabulary(sentences) -> Vocabulary:
    return train_wordpiece(sentences, 600)


def backbone(vocabulary: Vocabulary, seed: int = 0):
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=vocabulary.size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=60,
        initializer_range=0.3,
    )
    return AutoModelForMaskedLM.from_config(config).eval()


def encoder(vocabulary: Vocabulary, seed: int = 0, conditioning=None) -> Encoder:
    network = Denoiser(backbone(vocabulary, seed), conditioning or TimeAgnostic(), vocabulary.writable)
    return Encoder(network.eval(), vocabulary)


def vectors(*shape: int, seed: int = 0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- likeness -------------------------------------------------------------------------------------------------------


def hsic_by_definition(first, second) -> float:
    """The mean of K_ij L_ij + K_ij L_qr - 2 K_ij L_iq over all four different sentences (Song et al. 2012)."""
    k, l = first @ first.T, second @ second.T  # noqa: E741
    total = [
        k[i, j] * l[i, j] + k[i, j] * l[q, r] - 2 * k[i, j] * l[i, q]
        for i, j, q, r in itertools.permutations(range(len(first)), 4)
    ]
    return float(torch.stack(total).mean())


def test_cka_is_its_definition():
    first, second = vectors(7, 3), vectors(7, 2, seed=1) + 0.5 * vectors(7, 3)[:, :2]
    expected = hsic_by_definition(first, second) / math.sqrt(
        hsic_by_definition(first, first) * hsic_by_definition(second, second)
    )
    assert linear_cka(first, second) == pytest.approx(expected, abs=1e-12)
    assert linear_cka(second, first) == pytest.approx(expected, abs=1e-12)


def test_cka_sees_no_rotation_scale_or_shift_and_no_likeness_in_chance():
    first = vectors(100, 60)
    turn = torch.linalg.qr(vectors(60, 60, seed=1)).Q
    assert linear_cka(first, first) == pytest.approx(1, abs=1e-12)
    assert linear_cka(first, 3 * first @ turn + 5) == pytest.approx(1, abs=1e-9)
    independent = vectors(100, 60, seed=2)
    assert abs(linear_cka(first, independent)) < 0.1
    centred = [v - v.mean(dim=0) for v in (first, independent)]
    biased = (centred[0].T @ centred[1]).norm() ** 2 / math.prod((v.T @ v).norm() for v in centred)
    assert biased > 0.3  # the usual estimate would find likeness between random vectors
    assert linear_cka(first, torch.ones(100, 4)) == 0


def test_the_cosine_is_centred_and_sees_rotations():
    first = vectors(50, 8)
    assert centred_cosine(first, first + 100) == pytest.approx(1)
    assert centred_cosine(first, -2 * first) == pytest.approx(-1)
    assert abs(centred_cosine(first + 100, vectors(50, 8, seed=1) + 100)) < 0.3
    assert centred_cosine(first, first.roll(1, dims=1)) < 0.5


# ---- embeddings -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_an_embedding_is_the_mean_over_own_tokens(vocabulary, sentences):
    reader = encoder(vocabulary)
    texts = [sentences[index] for index in (100, 0, 50, 150, 20, 70)]
    together = reader.embed(texts)
    for text, vector in zip(texts, together, strict=True):
        [row] = vocabulary.encode([text])
        hidden = reader.network.backbone.base_model(input_ids=torch.tensor([row])).last_hidden_state[0]
        assert torch.allclose(vector, hidden[1:-1].double().mean(dim=0), atol=1e-5)
        assert torch.allclose(vector, reader.embed([text])[0], atol=1e-5)


@torch.no_grad()
def test_a_network_that_is_told_the_time_is_told_that_text_is_clean(vocabulary, sentences):
    text = sentences[60]
    [row] = vocabulary.encode([text])
    tokens, attend = torch.tensor([row]), torch.ones(1, len(row), dtype=torch.bool)
    for conditioning in (PrefixTime(backbone(vocabulary), 16), LayerwiseTime(backbone(vocabulary), SinusoidalTime(32))):
        for parameter in conditioning.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        reader = encoder(vocabulary, conditioning=conditioning)
        expected = []
        for time in (0.0, 0.5):
            t = torch.tensor([time]).double()
            hidden = conditioning(reader.network.backbone.base_model, tokens, attend, t).last_hidden_state[0]
            expected.append(hidden[1 + conditioning.num_prefix : -1].double().mean(dim=0))
        assert torch.allclose(reader.embed([text])[0], expected[0], atol=1e-5)
        assert not torch.allclose(expected[0], expected[1], atol=1e-3)


def test_texts_that_do_not_fit_are_refused(vocabulary, sentences):
    reader = encoder(vocabulary)
    long = " ".join(["word"] * 80)
    assert reader.fits(sentences[0])
    assert not reader.fits(long)
    assert not reader.fits(" ")
    for text in (long, " "):
        with pytest.raises(ValueError, match="leave out"):
            reader.embed([sentences[0], text])


# ---- probes ---------------------------------------------------------------------------------------------------------


def test_bigram_shift_swaps_two_neighbours_and_nothing_gives_it_away():
    texts = ["The cat sat on the mat, quietly.", "No!", "Every word counts here", "a a a a", "One two, three"] * 9
    probe = Probe.bigram_shift(texts)
    assert len(probe.texts) == 2 * 2 * 9
    places = set()
    for intact, shifted in zip(probe.texts[::2], probe.texts[1::2], strict=True):
        before, after = intact.split(), shifted.split()
        moved = [place for place in range(len(before)) if before[place] != after[place]]
        assert len(moved) == 2
        assert moved[1] == moved[0] + 1
        assert before[moved[0]] == after[moved[1]]
        assert before[moved[1]] == after[moved[0]]
        assert moved[0] > 0  # the first word may have a capital
        assert all(before[place].isalpha() for place in moved)
        places.add((intact, moved[0]))
    assert places == {(texts[0], 1), (texts[0], 2), (texts[0], 3), (texts[2], 1), (texts[2], 2)}
    assert probe.labels.tolist() == [0, 1] * 18
    assert torch.equal(probe.held_out[::2], probe.held_out[1::2])  # no sentence is on both sides
    assert 0 < int(probe.held_out.sum()) < len(probe.texts)


def test_equal_texts_are_on_one_side():
    labelled = [(f"text {number % 40}", str(number % 3)) for number in range(120)]
    probe = Probe.of_labels("x", labelled)
    sides: dict[str, set[bool]] = {}
    for text, side in zip(probe.texts, probe.held_out.tolist(), strict=True):
        sides.setdefault(text, set()).add(side)
    assert len(sides) == 40
    assert all(len(side) == 1 for side in sides.values())
    assert 0.15 < float(probe.held_out.double().mean()) < 0.45


def test_a_probe_of_one_label_is_refused():
    with pytest.raises(ValueError, match="at least two labels"):
        Probe.of_labels("x", [(f"text {number}", "same") for number in range(100)])
    with pytest.raises(ValueError, match="too few"):
        Probe.bigram_shift(["one two three"])


def numbered(labels: list[int]) -> Probe:
    return Probe.of_labels("x", [(f"text {index}", str(label)) for index, label in enumerate(labels)])


def test_a_probe_finds_what_is_there_and_nothing_in_chance():
    chance = random.Random(0)
    labels = [chance.randrange(3) for _ in range(400)]
    probe, noise = numbered(labels), vectors(400, 12)
    informed = noise.clone()
    informed[:, 4] += 6 * torch.tensor(labels)
    assert float(probe.answers(informed).double().mean()) > 0.9
    assert abs(float(probe.answers(noise).double().mean()) - 1 / 3) < 0.12


def test_the_probe_is_not_judged_on_what_it_was_fitted_to():
    """With more dimensions than texts any labels can be fitted, and none predicted."""
    labels = [index % 2 for index in range(200)]
    assert abs(float(numbered(labels).answers(vectors(200, 300)).double().mean()) - 0.5) < 0.2


def test_the_probe_is_the_minimum_of_the_penalised_loss():
    features, labels = vectors(60, 5) * 3 + 1, torch.arange(60) % 3
    fitted = module._fitted(features, labels, 3, penalty=0.1)
    scaled = (features - features.mean(dim=0)) / features.std(dim=0)
    weights, offsets = fitted.weights.clone().requires_grad_(), fitted.offsets.clone().requires_grad_()
    loss = cross_entropy(scaled @ weights + offsets, labels) + 0.05 * weights.square().sum()
    loss.backward()
    assert float(weights.grad.abs().max()) < 1e-5
    assert float(offsets.grad.abs().max()) < 1e-5
    constant = module._fitted(torch.ones(60, 2, dtype=torch.float64), labels, 3, penalty=0.1)
    assert bool(constant.weights.isfinite().all())


# ---- before and after -----------------------------------------------------------------------------------------------


def test_identical_encoders_retain_everything(vocabulary, sentences):
    found = retention(encoder(vocabulary), encoder(vocabulary), sentences[40:120])
    assert found.cka == pytest.approx(1, abs=1e-9)
    assert found.cosine == pytest.approx(1, abs=1e-9)
    assert found.before == found.after
    assert found.change.value == found.change.low == found.change.high == 0
    assert found.probe == "bigram shift"
    assert found.chance == 0.5
    assert found.sentences == 80
    assert found.to_json()["before"]["value"] == found.before.value


def test_a_new_encoder_retains_little_and_a_nudged_one_much(vocabulary, sentences):
    before, nudged = encoder(vocabulary), encoder(vocabulary)
    with torch.no_grad():
        for index, parameter in enumerate(nudged.network.parameters()):
            parameter += 0.01 * vectors(*parameter.shape, seed=index).float()
    probe = Probe.bigram_shift(sentences)
    alike = retention(before, nudged, sentences[40:120], probe)
    other = retention(before, encoder(vocabulary, seed=1), sentences[40:120], probe)
    assert alike.cka > 0.95
    assert alike.cosine > 0.95
    assert other.cka < 0.6
    assert abs(other.cosine) < 0.3


def test_a_lost_ability_shows(vocabulary, sentences, monkeypatch):
    """After is blind to what before could tell."""
    before, after = encoder(vocabulary), encoder(vocabulary)
    probe = Probe.bigram_shift(sentences)

    def embed(self, texts):
        flags = torch.tensor([[1.0 if text in shifted else 0.0] for text in texts]).double()
        return vectors(len(texts), 4) + (5 * flags if self is before else 0)

    shifted = set(probe.texts[1::2])
    monkeypatch.setattr(Encoder, "embed", embed)
    found = retention(before, after, sentences, probe)
    assert found.before.value > 0.9 > 0.7 > found.after.value
    assert found.change.value == pytest.approx(found.after.value - found.before.value)
    assert found.change.high < 0
    assert found.change.p_value < 0.01
    assert found.before.low <= found.before.value <= found.before.high
    assert found.held_out == int(probe.held_out.sum())


def test_widths_may_differ_and_then_there_is_no_cosine(vocabulary, sentences, monkeypatch):
    before, after = encoder(vocabulary), encoder(vocabulary)
    embed = Encoder.embed
    monkeypatch.setattr(Encoder, "embed", lambda self, texts: embed(self, texts)[:, : 32 if self is before else 20])
    found = retention(before, after, sentences[:60])
    assert found.cosine is None
    assert 0 < found.cka < 1


def test_few_sentences_are_refused(vocabulary, sentences):
    with pytest.raises(ValueError, match="at least 4"):
        retention(encoder(vocabulary), encoder(vocabulary), sentences[:3])


def test_chance_is_that_of_the_commonest_label(vocabulary, sentences):
    labelled = [(text, "often" if index % 4 else "seldom") for index, text in enumerate(sentences)]
    probe = Probe.of_labels("x", labelled)
    found = retention(encoder(vocabulary), encoder(vocabulary), sentences[:20], probe)
    held_out = probe.labels[probe.held_out]
    assert found.chance == pytest.approx(max(1 - float(held_out.double().mean()), float(held_out.double().mean())))
    assert replace(found, chance=0.0) != found
