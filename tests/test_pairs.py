"""Models trained on pairs: scores given a source, evaluation against targets, lengths, and the tutorial's corpus."""

from __future__ import annotations

import json
import math
import re
import runpy
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import model_of, pairs, run_of, trained
from vocabularies import VOCABULARIES

from diffusionbert.cli.main import main
from diffusionbert.data.canvas import Sentences, num_source_tokens, target_histogram
from diffusionbert.data.files import Pair
from diffusionbert.evaluation.compare import compare
from diffusionbert.evaluation.metrics import PairedBleu, bleu4
from diffusionbert.evaluation.result import AnswerMetrics, EvaluationResult
from diffusionbert.inference.score import score
from diffusionbert.model import Model, evaluate

SOURCE, TARGET = "the king saw a river today .", "the king saw a river ."
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def model() -> Model:
    return model_of("pairs")


# ---- scores ---------------------------------------------------------------------------------------------------------


def test_a_score_is_that_of_the_target_given_the_source(model):
    """By hand: mask the target from each position on, ask the network for the token there."""
    found = model.score(TARGET, source=SOURCE, order="left-to-right", tokens=True)
    [tokens] = model.engine.vocabulary.encode_pairs([Pair(SOURCE, TARGET)])
    begin, end = num_source_tokens(model.engine.vocabulary, tokens) + 2, len(tokens) - 1
    total = 0.0
    for position in range(begin, end):
        state = torch.tensor([tokens])
        state[0, position:end] = model.tokenizer.mask_token_id
        with torch.no_grad():
            logits = model.backbone(input_ids=state).logits[0, position].double()
        allowed = torch.where(model.engine.network.allowed, logits, -torch.inf).log_softmax(-1)
        total -= float(allowed[tokens[position]])
    assert found.nats == pytest.approx(total, abs=1e-4)
    assert (found.num_tokens, len(found.tokens), found.conditional_on) == (end - begin, end - begin, "length, source")
    assert (found.text, found.num_words) == (TARGET, 6)


def test_a_bound_depends_on_its_source_and_not_on_company(model):
    scores = model.score([TARGET, "the sea ."], source=[SOURCE, "nobody met the sea again ."], precision=0.3)
    assert [one.kind.value for one in scores] == ["bound", "bound"]
    assert scores[0].nats == model.score(TARGET, source=SOURCE, precision=0.3).nats  # alone as in company
    assert scores[0].nats != model.score(TARGET, source="nobody met the sea again .", precision=0.3).nats
    same = model.score([TARGET, "the sea ."], source=SOURCE, precision=0.3)
    assert same[0].nats == scores[0].nats


def test_sources_and_models_must_fit(model):
    with pytest.raises(ValueError, match="trained on pairs of source and target and cannot score single texts"):
        model.score(TARGET)
    with pytest.raises(ValueError, match="not trained on pairs and takes no `source`"):
        trained().score(TARGET, source=SOURCE)
    with pytest.raises(ValueError, match="got 1 for 2 texts"):
        model.score([TARGET, TARGET], source=[SOURCE])
    with pytest.raises(ValueError, match="text 1 has no tokens"):
        model.score(" ", source=SOURCE)
    with pytest.raises(ValueError, match=r"its source have .* tokens, but this model reads at most"):
        model.score(TARGET, source=" ".join([SOURCE] * 5))
    assert model.score([TARGET, "."], source=[" ".join([SOURCE] * 5), SOURCE], overlong="skip")[0] is None


def test_a_text_is_scored_given_the_text_before_it():
    """The chain rule: log p(ab) = log p(a) + log p(b | a), left to right, for the same number of tokens masked."""
    engine, whole = trained().engine, "the king saw a river today ."
    [found] = score(engine, [" river today ."], given=["the king saw a"])
    assert (found.num_tokens, found.conditional_on) == (3, "length, text before it")
    tokens = trained().score(whole, order="left-to-right", tokens=True).tokens
    [ordered] = trained_ordered(engine, " river today .", "the king saw a")
    assert ordered.nats == pytest.approx(sum(nats for _, nats in tokens[4:]), abs=1e-4)
    [cut] = trained_ordered(
        engine, " river today .", " ".join(["the king saw a river today ."] * 9) + " the king saw a"
    )
    assert cut.num_tokens == 3


def trained_ordered(engine, text, before):
    from diffusionbert.inference.score import ScoreSettings
    from diffusionbert.likelihood.orders import Order

    return score(engine, [text], ScoreSettings(order=Order.LEFT_TO_RIGHT), given=[before])


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_the_editable_positions_of_a_pair_are_its_target(kind):
    vocabulary = VOCABULARIES[kind]()
    [one, other] = vocabulary.own(["the king", "a river ."])
    batch = Sentences(vocabulary, ("a river .", "the king"), ("the king", "a river .")).batch([0, 1])
    assert batch.tokens[0][batch.editable[0]].tolist() == other
    assert batch.tokens[1][batch.editable[1]].tolist() == one


def test_the_command_scores_columns(capsys, tmp_path):
    (tmp_path / "pairs.tsv").write_text(f"{SOURCE}\t{TARGET}\n{TARGET}\n")
    common = ["--model", str(run_of("pairs")), "--order", "left-to-right", "--json"]
    main(["score", TARGET, "--source", SOURCE, *common])
    alone = json.loads(capsys.readouterr().out)
    assert (alone["text"], alone["conditional_on"]) == (TARGET, "length, source")
    with pytest.raises(SystemExit) as exit:
        main(["score", "--file", str(tmp_path / "pairs.tsv"), *common])
    assert exit.value.code == 1
    printed = capsys.readouterr()
    first, *_ = map(json.loads, printed.out.splitlines())
    assert first["nats"] == alone["nats"]
    assert "line 2: this model was trained on pairs: a text is source, tab, target" in printed.err


# ---- lengths --------------------------------------------------------------------------------------------------------


def test_a_model_knows_how_long_targets_are_by_the_length_of_their_source(model):
    table, vocabulary = model.engine.metadata.source_lengths, model.engine.vocabulary
    lines = [line.split("\t") for line in pairs().read_text().splitlines()]
    counted = Counter(tuple(len(own) for own in vocabulary.own(line)) for line in lines)
    assert int(table[:, 2].sum()) < len(lines)  # some are held out
    assert {(int(n), int(m)) for n, m, _ in table} <= set(counted)
    assert all(int(number) <= counted[int(n), int(m)] for n, m, number in table)


def test_the_nearest_sources_give_the_lengths():
    table = torch.tensor([[3, 2, 30], [4, 5, 10], [5, 5, 15], [9, 9, 1]])
    assert target_histogram(table, 3).tolist() == [0, 0, 30, 0, 0, 0, 0, 0, 0, 0]
    assert target_histogram(table, 5).tolist() == [0, 0, 0, 0, 0, 25, 0, 0, 0, 0]  # 15 are too few
    assert target_histogram(table, 9).sum() == 26
    assert target_histogram(table, 100, least=1000).sum() == 56


def test_answers_have_lengths_of_such_targets(model):
    lengths = {m for n, m, _ in model.engine.metadata.source_lengths.tolist() if n == 7}
    answers = model.generate(source=SOURCE, num_return_sequences=5, steps=2, seed=0, capitalize=False)
    assert {len(own) for own in model.engine.vocabulary.own(answers)} <= {*range(max(lengths) + 1)}
    histogram = model.engine.lengths_after(SOURCE)
    assert set(histogram.nonzero()[:, 0].tolist()) == lengths


# ---- evaluation -----------------------------------------------------------------------------------------------------


def test_evaluation_has_the_bound_given_sources_and_bleu_against_targets(model, tmp_path):
    result = evaluate(model, pairs(), split="all", samples=4, sentences=6, max_draws=4, steps=4, num_candidates=2, output=tmp_path / "e")  # fmt: skip # noqa: E501
    assert result.primary is not None
    assert result.primary.protocol.source_given
    assert result.primary.num_sentences == 6
    answers = result.generation.answers
    assert (answers.number, answers.num_candidates, answers.length_given) == (4, 2, False)
    assert 0 <= answers.bleu4.value <= 1
    assert answers.copied_bleu4 > 0.3  # a target is its source without a time
    assert len(result.samples) == 4
    table = result.table()
    assert "BLEU-4, own target" in table
    assert "the most agreed of 2 candidates each" in table
    again = EvaluationResult.load(tmp_path / "e")
    assert (again.to_json(), again.samples, again.more_samples) == (result.to_json(), result.samples, ())


def test_the_nats_of_an_evaluation_are_those_of_targets(model):
    """Many draws of both estimators meet."""
    result = evaluate(model, pairs(), split="all", samples=2, sentences=2, max_draws=128, precision=1e-6, steps=2)
    lines = [line.split("\t") for line in pairs().read_text().splitlines()]
    numbers = result.primary_scores.example.tolist()
    scores = [model.score(lines[one][1], source=lines[one][0], steps=16, precision=0.1) for one in numbers]
    own = result.primary_scores
    assert own.tokens.tolist() == [one.num_tokens for one in scores]
    margins = [5 * (math.sqrt(v) + one.standard_error) for v, one in zip(own.draw_variance, scores, strict=True)]
    for nats, one, margin in zip(own.nats.tolist(), scores, margins, strict=True):
        assert nats == pytest.approx(one.nats, abs=margin)


def test_pair_models_are_compared_by_their_answers(model):
    settings = {"split": "all", "samples": 3, "sentences": 2, "max_draws": 2, "steps": 2}
    one, other = (evaluate(model, pairs(), **settings, num_candidates=number) for number in (1, 2))
    told = evaluate(model, pairs(), **settings, length="target")
    titles = [column.title for column in compare([one, other], names=["one", "other"]).columns]
    assert {"BLEU-4, own target", "exact match"} <= set(titles)
    warned = compare([one, told], names=["drawn", "told"]).warnings
    assert any("some answers were given the length of their target" in warning for warning in warned)


def test_a_long_source_leaves_room_for_what_fits(model):
    words = SOURCE.split()
    longest = " ".join((words * 5)[: model.engine.max_positions - 3 - 2])
    [answer] = model.generate(source=longest, steps=2, seed=0)
    assert len(answer.split()) <= 2


def test_answers_may_be_given_the_length_of_their_target(model):
    result = evaluate(model, pairs(), split="all", samples=3, sentences=2, max_draws=2, steps=2, length="target")
    assert result.generation.answers.length_given
    with pytest.raises(ValueError, match="is for models trained on pairs"):
        evaluate(trained(), run_of("linear").parent / "none", samples=2, length="target")


def test_single_sentences_and_pairs_are_not_confused(model, tmp_path):
    (tmp_path / "single.txt").write_text("the king .\n" * 3)
    with pytest.raises(ValueError, match="holds single sentences, but the model was trained on pairs"):
        evaluate(model, tmp_path / "single.txt", samples=2)
    with pytest.raises(ValueError, match="holds pairs, but the model was trained on single sentences"):
        evaluate(trained(), pairs(), samples=2)
    with pytest.raises(ValueError, match="leave out `conventions`"):
        evaluate(model, pairs(), samples=2, conventions=True)


def test_pooled_bleu_of_one_text_is_its_bleu_and_of_itself_1():
    texts = ["the cat sat on the mat today", "a dog sat on it and slept"]
    references = ["the cat sat on a mat today", "a dog sat on it and barked loudly"]
    for text, reference in zip(texts, references, strict=True):
        found = AnswerMetrics.of([text], [reference], [text], num_candidates=1, length_given=False)
        assert found.bleu4.value == pytest.approx(bleu4([text], [reference]).mean)
        assert found.copied_bleu4 == found.bleu4.value
    same = AnswerMetrics.of(texts, texts, references, num_candidates=1, length_given=True)
    assert (same.bleu4.value, same.exact_match.value) == (pytest.approx(1.0), 1.0)


def test_pooled_bleu_agrees_with_nltk():
    from nltk.translate.bleu_score import corpus_bleu

    texts = ["the cat sat on the mat today", "a dog sat on it and slept"]  # NLTK counts a 4-gram in shorter ones
    references = ["the cat sat on a mat today", "a dog sat on it and barked loudly"]
    counts = PairedBleu.of(texts, references).arrays
    expected = corpus_bleu([[one.split()] for one in references], [text.split() for text in texts])
    assert PairedBleu.value([np.array([one.sum()]) for one in counts])[0] == pytest.approx(expected)


# ---- the tutorial ---------------------------------------------------------------------------------------------------


def test_the_corpus_of_the_tutorial(tmp_path, monkeypatch, capsys):
    script = ROOT / "examples" / "passive_pairs.py"
    for arguments in (["a.tsv", "--number", "300"], ["b.tsv", "--number", "50", "--without", "a.tsv"]):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(script), *arguments])
        runpy.run_path(str(script), run_name="__main__")
    first, second = ([line.split("\t") for line in Path(name).read_text().splitlines()] for name in ("a.tsv", "b.tsv"))
    assert (len(first), len(second)) == (300, 50)
    assert not {source for source, _ in first} & {source for source, _ in second}
    assert all(
        source != target and re.search(r" by (the|an?|my|her|two|many|him|them|us|me)\b", target)
        for source, target in first
    )
