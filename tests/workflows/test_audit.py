"""Audits: what is refuted, what passes, noise, lengths, every way to hand in a scorer, and the documented examples."""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_models import bundled, trained

import diffusionbert
from diffusionbert.cli.main import main
from diffusionbert.workflows.audit import (
    EXAMPLES,
    SentenceSet,
    Verdict,
    audit,
    birthplaces,
    command_scorer,
    find_language,
)

DOCUMENT = (Path(__file__).parents[2] / "docs" / "auditing.md").read_text(encoding="utf-8")
THREE = SentenceSet("three", ("x", "y", "z"), (0.5, 0.3, 0.2))


def nats_of(*probabilities: float):
    known = dict(zip(THREE.texts, probabilities, strict=True))
    return lambda texts: [-math.log(known[text]) for text in texts]


@pytest.mark.parametrize(
    ("name", "total", "expected", "verdict"),
    [
        ("spindle", 1.119, 0.855, Verdict.REFUTED),
        ("pseudo-likelihood", 1.846, 0.336, Verdict.REFUTED),
        ("bound", 0.717, 1.348, Verdict.CONSISTENT),
        ("exact", 1.0, 0.861, Verdict.CONSISTENT),
    ],
)
def test_the_examples_have_their_documented_figures(name, total, expected, verdict):
    report = audit(name)
    assert report.verdict is verdict
    assert (report.total, report.expected_nats) == pytest.approx((total, expected), abs=6e-4)
    row = next(line for line in DOCUMENT.splitlines() if line.startswith(f"| `{name}` |"))
    assert f"{total:.3f}" in row
    assert f"{expected:.3f}, {report.entropy:.3f}" in row
    assert row.endswith(f"| {verdict.value} |")
    assert set(EXAMPLES) == set(re.findall(r"^\| `([a-z-]+)` \| .* likelihood \|$", DOCUMENT, re.MULTILINE))


def test_the_truth_passes_and_either_limit_alone_refutes():
    assert audit(nats_of(0.5, 0.3, 0.2), THREE).verdict is Verdict.CONSISTENT
    too_much = audit(nats_of(0.4, 0.4, 0.4), THREE)  # expects 0.92 nats, and the entropy is 1.03
    assert (too_much.total, too_much.verdict) == (pytest.approx(1.2), Verdict.REFUTED)
    only_total = audit(nats_of(0.01, 0.05, 0.99), THREE)  # on the rare sentence: the expectation is high
    assert only_total.expected_nats > only_total.entropy
    assert only_total.verdict is Verdict.REFUTED
    [note, *_] = audit(nats_of(1e-9, 1e-8, 2e-9), THREE).notes
    assert note.startswith("the sentences have a total probability of only 1.3e-08")


def test_rounding_is_tolerated():
    assert audit(nats_of(0.50001, 0.30001, 0.20001), THREE).verdict is Verdict.CONSISTENT
    assert audit(nats_of(0.50001, 0.30001, 0.20001), THREE, tolerance=1e-9).verdict is Verdict.REFUTED


def test_stated_noise_widens_the_margin():
    def scorer(error):
        scored = [SimpleNamespace(nats=nats, standard_error=error) for nats in nats_of(0.45, 0.35, 0.3)(THREE.texts)]
        known = dict(zip(THREE.texts, scored, strict=True))
        return lambda texts: [known[text] for text in texts]

    assert audit(scorer(0.0), THREE).verdict is Verdict.REFUTED
    doubtful = audit(scorer(0.2), THREE)
    assert doubtful.verdict is Verdict.UNDECIDED
    assert doubtful.total_margin > 1.96 * 0.2


def test_a_valid_score_with_noise_is_not_refuted():
    """Its exponentials sum above 1 in nearly every draw of the noise."""
    generator, true, totals = np.random.default_rng(0), nats_of(0.5, 0.3, 0.2), []
    for _ in range(50):
        noise = dict(zip(THREE.texts, generator.normal(0, 0.3, 3), strict=True))

        def scorer(texts, noise=noise):
            pairs = zip(texts, true(texts), strict=True)
            return [SimpleNamespace(nats=nats + noise[text], standard_error=0.3) for text, nats in pairs]

        report = audit(scorer, THREE)
        totals.append(report.total)
        assert report.verdict is not Verdict.REFUTED
    assert sum(total > 1 for total in totals) > 20


def test_noise_that_is_not_stated_is_seen():
    generator, true = np.random.default_rng(0), nats_of(0.5, 0.3, 0.2)
    report = audit(lambda texts: [nats + generator.normal(0, 0.1) for nats in true(texts)], THREE)
    assert report.total_margin > 0.02
    assert any("scored again" in note for note in report.notes)


def test_scores_given_the_length_are_summed_by_length():
    sizes = {"x": 1, "y": 1, "z": 2}

    def scorer(texts):
        known = dict(zip(THREE.texts, nats_of(0.6, 0.4, 1.0)(THREE.texts), strict=True))
        return [SimpleNamespace(nats=known[one], num_tokens=sizes[one], conditional_on="length") for one in texts]

    report = audit(scorer, THREE)
    assert (report.total, report.given_length) == (pytest.approx(1.0), True)
    of_first, of_second = 5 / 8, 3 / 8
    assert report.entropy == pytest.approx(-0.5 * math.log(of_first) - 0.3 * math.log(of_second))
    assert report.verdict is Verdict.CONSISTENT
    assert audit(lambda texts: [one.nats for one in scorer(texts)], THREE).verdict is Verdict.REFUTED


@pytest.mark.slow
def test_the_pseudo_likelihood_of_the_bundled_model_fails_on_birthplaces_and_its_exact_likelihood_passes(
    monkeypatch, capsys
):
    """The document's Python, on fewer sentences."""
    assert len(birthplaces().texts) == 128
    texts = birthplaces().texts[::4]
    fewer = SentenceSet("some", texts, (1 / len(texts),) * len(texts))
    monkeypatch.setattr(diffusionbert, "load", bundled, raising=False)
    monkeypatch.setattr(diffusionbert, "audit", lambda scorer: audit(scorer, fewer), raising=False)
    [code] = re.findall(r"^```python\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    exec(compile(code, "auditing.md", "exec"), {})
    verdicts = re.findall(r"^verdict: ([a-z ]+) \(", capsys.readouterr().out, re.MULTILINE)
    assert verdicts == [Verdict.REFUTED.value, Verdict.CONSISTENT.value]


def test_the_scores_of_a_model_pass_on_sentences_that_it_knows(tmp_path):
    texts = ["the king saw a river today .", "the king saw the sea today .", "nobody met the sea again ."]
    (tmp_path / "known.txt").write_text("\n".join(texts) + "\n")
    report = audit(trained().score, tmp_path / "known.txt")
    assert (report.verdict, report.given_length) == (Verdict.CONSISTENT, True)
    assert report.scorer == "Model.score"


# ---- ways to hand in a scorer ---------------------------------------------------------------------------------------

SCRIPT = "import sys\nfor line in sys.stdin: print(1.0 * len(line.split()))\n"


def test_a_command_is_a_scorer(tmp_path, capsys):
    (tmp_path / "scorer.py").write_text(SCRIPT)
    command = shlex.join([sys.executable, str(tmp_path / "scorer.py")])
    assert command_scorer(command)(["a b", "a"]) == [2.0, 1.0]
    main(["audit", "--command", command, "--language", "twins", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "can be a likelihood"
    assert report["total"] == pytest.approx(4 * math.exp(-2))
    assert report["meaning"]


def test_a_function_of_a_module_in_this_folder_is_a_scorer(tmp_path, capsys, monkeypatch):
    (tmp_path / "my_scorer_module.py").write_text("def log_p(texts):\n    return [-0.5 for _ in texts]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    main(["audit", "my_scorer_module:log_p", "--log-probabilities", "--language", "twins"])
    printed = capsys.readouterr().out
    assert "verdict: cannot be a likelihood" in printed
    assert "have the same nats" in printed


def test_a_corpus_of_a_language_has_its_frequencies(tmp_path, capsys):
    main(["audit", "--language", "twins", "--corpus", str(tmp_path / "twins.txt")])
    lines = (tmp_path / "twins.txt").read_text().splitlines()
    assert lines.count("a a") / len(lines) == pytest.approx(0.48, abs=0.02)
    assert set(lines) == set(find_language("twins").texts)


def test_a_file_may_have_probabilities(tmp_path):
    (tmp_path / "own.tsv").write_text("x\t0.5\ny\t0.3\nz\t0.2\n")
    assert find_language(tmp_path / "own.tsv") == SentenceSet("own.tsv", THREE.texts, THREE.probabilities)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "a scorer is module:function, or an example (spindle"),
        (["no_such_module:f"], "cannot be imported"),
        (["math:pi"], "not a function"),
        (["spindle", "--command", "x"], "give one of them"),
        (["spindle", "--order", "entropy"], "leave it out"),
        (["math:sqrt", "--language", "none"], "--language must be one of birthplaces, paper, skewed, twins, or a file"),
        (["--command", "false"], "failed with exit code 1"),
        (["--command", "no-such-command"], "cannot be run"),
        (["--command", "echo 1"], "got 1 for 128 sentences"),
        (["--command", "sed s/.*/-1/"], "give --log-probabilities"),
        (["--command", "cat"], "a number is expected"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["audit", *arguments])
    assert exit.value.code == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert len(printed.splitlines()) == 1


def test_repeated_sentences_are_refused():
    with pytest.raises(ValueError, match="all distinct"):
        SentenceSet("same", ("x", "x"), (0.5, 0.5))
