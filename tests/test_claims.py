"""The verdicts on the paper's claims: each can be reached, sizes are told, and seeds that disagree decide nothing."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from made_up import NUM_SENTENCES, NUM_TOKENS, evaluate, train  # first: it says where the scripts are

import checks  # isort: skip
import claims  # isort: skip
import verdicts  # isort: skip
from kept import Results  # isort: skip
from verdicts import Interval, Verdict, against_exact, length_costs  # isort: skip

from diffusionbert.checkpoints import load_tensors, save_tensors, write_json
from diffusionbert.likelihood.scores import paired_bootstrap
from diffusionbert.metrics import PerSample

# ---- verdicts -------------------------------------------------------------------------------------------------------


LOW, ACROSS, HIGH = Interval(-0.3, -0.4, -0.2), Interval(0.0, -0.1, 0.1), Interval(0.3, 0.2, 0.4)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ([LOW], Verdict.HOLDS),
        ([LOW, LOW], Verdict.HOLDS),
        ([HIGH, HIGH], Verdict.FAILS),
        ([LOW, HIGH], Verdict.UNDECIDED),
        ([LOW, ACROSS], Verdict.UNDECIDED),
        ([ACROSS], Verdict.UNDECIDED),
    ],
)
def test_a_difference_is_real_only_if_all_seeds_say_so(found, verdict):
    assert verdicts.below(found) is verdict
    assert verdicts.above([Interval(-one.value, -one.high, -one.low) for one in found]) is verdict


def test_what_was_called_far_fails_if_even_half_of_it_is_ruled_out():
    assert verdicts.below([ACROSS], paper=-0.3) is Verdict.FAILS
    assert verdicts.below([ACROSS], paper=-0.15) is Verdict.UNDECIDED
    assert verdicts.below([ACROSS, LOW], paper=-0.3) is Verdict.UNDECIDED
    assert verdicts.below([LOW], paper=-3.0) is Verdict.HOLDS  # small, but real: its size is said beside it


def test_a_claimed_size_must_be_reached_and_real():
    assert verdicts.reaching([LOW, LOW], -0.35) is Verdict.HOLDS
    assert verdicts.reaching([LOW, LOW], -0.5) is Verdict.FAILS
    assert verdicts.reaching([ACROSS], -0.05) is Verdict.UNDECIDED  # it might be so large, or nothing at all
    assert verdicts.reaching([LOW, HIGH], -0.35) is Verdict.UNDECIDED
    assert verdicts.within([ACROSS], -0.2, 0.2) is Verdict.HOLDS
    assert verdicts.within([LOW, HIGH], -0.15, 0.15) is Verdict.FAILS
    assert verdicts.within([LOW, ACROSS], -0.15, 0.15) is Verdict.UNDECIDED


def test_parts_of_a_claim_add_up():
    holds, fails, open_, absent = Verdict.HOLDS, Verdict.FAILS, Verdict.UNDECIDED, Verdict.NOT_RUN
    assert [verdicts.together(one) for one in ([holds, holds], [holds, fails], [holds, open_], [holds, absent])] == [
        *(holds, fails, open_, absent)
    ]
    assert verdicts.together([fails, absent]) is fails  # whatever the rest will be
    assert [verdicts.either(one) for one in ([holds, fails], [fails, fails], [fails, open_])] == [holds, fails, open_]
    assert [verdicts.agreed(one) for one in ([fails, fails], [holds, fails])] == [fails, open_]


def test_differences_are_those_of_the_paired_bootstrap(tmp_path):
    evaluate(tmp_path, "seed0/one", 4.0)
    evaluate(tmp_path, "seed0/another", 4.1)
    first, second = (Results(tmp_path).scores(key, "grid") for key in ("one", "another"))
    expected = paired_bootstrap(first, second)
    assert verdicts.difference(first, second) == Interval(expected.value, expected.low, expected.high)
    with pytest.raises(ValueError, match="no pairs"):
        verdicts.difference(first, second.rows(torch.arange(5)))


def test_sizes_are_changes_of_perplexity():
    assert verdicts.change(math.log(0.81)) == "−19.0 %"
    assert verdicts.change(-1e-5) == verdicts.change(1e-5) == "±0.0 %"
    assert Interval(math.log(1.1), math.log(1.05), math.log(1.15)).per_cent == "+10.0 % [+5.0, +15.0]"
    assert Interval(-30.0, -31.0, -29.0).per_cent == "less than a thousandth"


# ---- claims ---------------------------------------------------------------------------------------------------------


def judge(check: checks.Check, root: Path) -> checks.Finding:
    return claims.Claim("it is so", "§1", check).judge(Results(root))


@pytest.mark.parametrize(
    ("others", "verdict"),
    [((4.5,), Verdict.HOLDS), ((3.5, 3.6), Verdict.FAILS), ((4.5, 3.5), Verdict.UNDECIDED), ((), Verdict.NOT_RUN)],
)
def test_a_system_is_better_in_all_seeds_or_it_is_not_said_to_be(tmp_path, others, verdict):
    evaluate(tmp_path, "seed0/first", 4.0)
    for seed, nats in enumerate(others):
        evaluate(tmp_path, f"seed{seed}/second", nats)
        if seed:
            evaluate(tmp_path, f"seed{seed}/first", 4.0)
    found = judge(checks.lower("first", "second"), tmp_path)
    assert found.verdict is verdict
    [words] = found.measured
    if verdict is Verdict.NOT_RUN:
        assert words == "not run yet: `second`"
    else:
        assert words.count("seed") == len(others)


def test_a_spindle_that_gains_by_the_papers_quantity_alone(tmp_path):
    evaluate(tmp_path, "seed0/base", 4.0)
    evaluate(tmp_path, "seed0/base-spindle", 3.99)
    evaluate(tmp_path, "seed0/theirs", 3.75, kind="pseudo")
    assert judge(checks.spindle_gains("base", 0.19, "theirs"), tmp_path).verdict is Verdict.BY_PAPER
    unknown = judge(checks.spindle_gains("base", 0.19, "nobody's"), tmp_path)
    assert unknown.verdict is Verdict.NOT_RUN
    assert "base-spindle" in unknown.measured[0]
    evaluate(tmp_path, "seed0/base-spindle-sentence", 3.75)
    assert judge(checks.spindle_gains("base", 0.19, "theirs"), tmp_path).verdict is Verdict.HOLDS


def test_a_bound_above_an_exact_value_proves_nothing(tmp_path):
    evaluate(tmp_path, "seed0/bound", 4.0)
    evaluate(tmp_path, "seed0/lower", 3.5, "exact")
    evaluate(tmp_path, "seed0/higher", 4.5, "exact")
    assert judge(checks.behind_exact("bound", "lower"), tmp_path).verdict is Verdict.BY_BOUND
    assert judge(checks.behind_exact("bound", "higher"), tmp_path).verdict is Verdict.FAILS


def test_a_bound_that_pays_for_lengths_must_still_be_lower(tmp_path):
    """Sentences are of one length, but for as many others as there could be: log((N − 1 + 128) / N) nats each."""
    evaluate(tmp_path, "seed0/bound", 4.0)
    for key, nats in (("little", 4.02), ("much", 4.5)):
        evaluate(tmp_path, f"seed0/{key}", nats, "exact")
    results = Results(tmp_path)
    bound = results.scores("bound", "grid")
    paid = math.log((NUM_SENTENCES - 1 + 128) / NUM_SENTENCES) / NUM_TOKENS
    little, much = (against_exact(bound, results.scores(key, "exact")) for key in ("little", "much"))
    assert little.charged.value - little.given.value == pytest.approx(paid, rel=1e-6)
    assert (little.given.high < 0, little.proves, much.proves) == (True, False, True)


def test_lengths_are_paid_for_by_how_many_others_have_them():
    assert length_costs(torch.tensor([3, 3, 3, 5])).exp().tolist() == pytest.approx([131 / 3] * 3 + [131])


@pytest.mark.parametrize(("fewer", "verdict"), [(4.5, Verdict.HOLDS), (4.05, Verdict.FAILS)])
def test_who_loses_more_by_fewer_steps(tmp_path, fewer, verdict):
    for key, nats in (("first-2", fewer), ("first-16", 4.0), ("second-64", 3.2), ("second-512", 3.0)):
        evaluate(tmp_path, f"seed0/{key}-steps", nats)
    found = judge(checks.loses_more("first", "second"), tmp_path)
    assert found.verdict is verdict
    assert "seed 0 alone" in found.measured[0]
    assert judge(checks.loses_more("first", "third"), tmp_path).verdict is Verdict.NOT_RUN


def test_better_text_may_not_be_bought_by_sameness(tmp_path):
    evaluate(tmp_path, "seed0/first", 4.0, bleu=0.4)
    evaluate(tmp_path, "seed0/second", 4.0, bleu=0.3)
    assert judge(checks.writes_better("first", "second"), tmp_path).verdict is Verdict.HOLDS
    assert judge(checks.writes_better("second", "first"), tmp_path).verdict is Verdict.FAILS
    assert judge(checks.writes_better("first", "second", as_diverse=True), tmp_path).verdict is Verdict.UNDECIDED
    assert judge(checks.writes_better("second", "first", as_diverse=True), tmp_path).verdict is Verdict.UNDECIDED


def test_a_few_samples_say_nothing(tmp_path):
    for key, number in (("first", 200), ("second", 2)):
        evaluate(tmp_path, f"seed0/{key}", 4.0)
        path = tmp_path / "seed0" / "evaluations" / key / "scores.safetensors"
        tensors = load_tensors(path)
        save_tensors(tensors | {name: tensors[name][:number].clone() for name in ("bleu4", "self_bleu4")}, path)
    assert judge(checks.writes_better("first", "second"), tmp_path).measured == ("not run yet: samples of `second`",)


def test_parts_that_are_missing_are_told_beside_those_that_are_not(tmp_path):
    evaluate(tmp_path, "seed0/first", 4.0)
    evaluate(tmp_path, "seed0/second", 4.5)
    found = judge(checks.all_of(checks.lower("first", "second"), checks.lower("first", "third")), tmp_path)
    assert found.verdict is Verdict.NOT_RUN
    assert found.measured[0].endswith("(*holds*)")
    assert found.measured[1] == "not run yet: `third`"
    alike = judge(checks.all_of(checks.lower("first", "second"), checks.lower("first", "second")), tmp_path)
    assert "holds" not in "".join(alike.measured)
    assert (alike.seeds, found.seeds) == (1, 0)


@pytest.mark.parametrize(("nats", "verdict"), [(5.0, Verdict.HOLDS), (9.5, Verdict.UNLEARNT)])
def test_nothing_follows_from_what_has_not_learnt(tmp_path, nats, verdict):
    (tmp_path / "alone").mkdir()
    write_json(tmp_path / "alone" / "frequencies.json", {"nats_per_token": 9.0})
    evaluate(tmp_path, "seed0/first", 4.0)
    evaluate(tmp_path, "seed0/second", nats)
    found = judge(checks.if_learnt(checks.lower("first", "second"), "second"), tmp_path)
    assert found.verdict is verdict
    assert ("`second` (9.5)" in found.measured[-1]) == (verdict is Verdict.UNLEARNT)


def test_a_budget_is_a_comparison_of_its_own(tmp_path):
    train(tmp_path, "seed0/first", [6.0, 5.0])
    for folder, nats in (("seed0", 4.0), ("steps60", 4.5)):
        evaluate(tmp_path, f"{folder}/first", nats)
        evaluate(tmp_path, f"{folder}/second", 4.2)
    assert judge(checks.lower("first", "second"), tmp_path).verdict is Verdict.HOLDS
    assert judge(checks.lower("first", "second", steps=60), tmp_path).verdict is Verdict.FAILS
    assert judge(checks.lower("first", "third", steps=60), tmp_path).measured == ("not run yet: `third` in 60 steps",)


@pytest.mark.parametrize(("fast", "slow", "verdict"), [(3.0, 2.0, Verdict.HOLDS), (5.0, 2.0, Verdict.FAILS)])
def test_better_in_as_little_time(tmp_path, fast, slow, verdict):
    for key, nats, seconds in (
        ("first-2-steps", fast, 1.0),
        ("first-64-steps", slow, 4.0),
        ("second-8-steps", 4.0, 2.0),
    ):
        evaluate(tmp_path, f"seed1/{key}", nats, seconds=seconds)
    found = judge(checks.faster_and_better("first", "second"), tmp_path)
    assert found.verdict is verdict
    assert "(2 steps)" in found.measured[0]
    assert judge(checks.faster_and_better("first", "third"), tmp_path).verdict is Verdict.NOT_RUN


def test_who_converges_faster(tmp_path):
    train(tmp_path, "seed0/d3pm", [9.0, 7.0, 5.0])
    train(tmp_path, "seed0/diffusionbert", [6.0, 4.0, 3.0])
    found = judge(checks.converges_faster, tmp_path)
    assert found.verdict is Verdict.HOLDS
    assert "below that from step 10 of 20 on" in found.measured[0]
    train(tmp_path, "seed1/d3pm", [9.0, 7.0, 5.0])
    train(tmp_path, "seed1/diffusionbert", [6.0, 8.0, 3.0])
    assert judge(checks.converges_faster, tmp_path).verdict is Verdict.UNDECIDED


@pytest.mark.parametrize(("nats", "verdict"), [(3.0, Verdict.HOLDS), (3.1, Verdict.FAILS)])
def test_a_share_of_the_budget(tmp_path, nats, verdict):
    train(tmp_path, "seed0/diffusionbert", [6.0, 5.0, 4.0])
    evaluate(tmp_path, "seed0/diffusionbert", 3.0)
    check = checks.budget(0.5, "diffusionbert", matches=True)
    assert judge(check, tmp_path).measured == ("not run yet: `diffusionbert` in 10 steps",)
    evaluate(tmp_path, "steps10/diffusionbert", nats)
    assert judge(check, tmp_path).verdict is verdict


@pytest.mark.parametrize(("nats", "verdict"), [(3.98, Verdict.HOLDS), (3.8, Verdict.FAILS)])
def test_more_steps(tmp_path, nats, verdict):
    for steps, value in ((2, 6.0), (16, 4.0), (128, nats)):
        evaluate(tmp_path, f"seed1/diffusionbert-{steps}-steps", value)
    found = judge(checks.few_steps_suffice("diffusionbert"), tmp_path)
    assert found.verdict is verdict
    assert "from 16 to 128" in found.measured[0]


def test_lines_are_compared_at_the_same_sameness(tmp_path):
    for key, bleu, self_bleu in (
        *(("low-k=5", 0.3, 0.30), ("low-k=30", 0.2, 0.20), ("low-k=100", 0.1, 0.10)),
        *(("high-T=0.6", 0.42, 0.35), ("high-T=0.9", 0.24, 0.20)),
        ("far-k=5", 0.4, 0.9),
        ("far-k=30", 0.4, 0.8),
    ):
        evaluate(tmp_path, f"seed1/{key}", 4.0)
        noise = torch.linspace(-0.01, 0.01, 200, dtype=torch.float64)
        path = tmp_path / "seed1" / "evaluations" / key / "scores.safetensors"
        save_tensors(load_tensors(path) | {"bleu4": bleu + noise, "self_bleu4": self_bleu + noise}, path)
    results = Results(tmp_path)
    assert list(results.tradeoff("low", "seed1")) == ["k=5", "k=30", "k=100"]
    apart = verdicts.tradeoffs_apart(*(list(results.tradeoff(one, "seed1").values()) for one in ("high", "low")))
    assert apart is not None
    assert apart.mean.low < 0.2 < apart.mean.high  # of self-BLEU 0.2 to 0.3: 0.24 to 0.36 over 0.2 to 0.3
    assert apart.mean.high - apart.mean.low < 0.05
    assert apart.diverse == pytest.approx(0.2) == apart.dull
    assert judge(checks.trades_off("high", "low", verdicts.above), tmp_path).verdict is Verdict.HOLDS
    assert judge(checks.trades_off("high", "far", verdicts.above), tmp_path).verdict is Verdict.UNDECIDED
    assert judge(checks.trades_off("high", "none", verdicts.above), tmp_path).verdict is Verdict.NOT_RUN


def test_means_of_samples_are_no_pairs():
    few, many = PerSample(np.linspace(0.1, 0.3, 50)), PerSample(np.linspace(0.3, 0.5, 400))
    apart = verdicts.means_apart(few, many)
    assert apart.value == pytest.approx(-0.2)
    assert apart.low < apart.value < apart.high < 0
