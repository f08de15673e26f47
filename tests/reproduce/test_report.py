"""The report: one rule for verdicts, and numbers on the page that occur in its tables."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from claims import (
    CLAIMS,
    QUALITY_CLAIMS,
    Claim,
    Kept,
    difference,
    of_runs,
    percent,
    quality_at_equal_diversity,
    verdict,
)
from code_commits import package_hash
from report import _diffusion_tokens, report, with_tables

from diffusionbert.storage.files import code_version, load_tensors, read_json, save_tensors, write_json

ROOT = Path(__file__).parents[2]
KEPT, PAGE = ROOT / "docs" / "results", ROOT / "docs" / "results.md"
PAGES = PAGE, KEPT / "details.md"

# ---- verdicts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interval", "sign", "size", "expected"),
    [
        ((-0.2, -0.1), -1, None, "holds"),
        ((-0.2, 0.01), -1, None, "undecided"),
        ((0.01, 0.2), -1, None, "does not hold"),
        ((0.01, 0.2), 1, None, "holds"),
        ((-0.2, -0.1), 1, None, "does not hold"),
        ((-0.08, -0.03), -1, -0.19, "does not hold"),  # on the claimed side, but not half as large
        ((-0.12, -0.03), -1, -0.19, "holds"),
        ((-0.12, 0.03), -1, -0.19, "undecided"),
        ((-0.04, 0.04), 0, None, "holds"),
        ((-0.04, 0.06), 0, None, "undecided"),
        ((0.06, 0.08), 0, None, "does not hold"),
        ((-0.08, -0.06), 0, None, "does not hold"),
    ],
)
def test_verdicts_follow_one_rule(interval, sign, size, expected):
    assert verdict(*interval, sign, size) == expected


def test_opposite_claims_have_opposite_verdicts():
    opposite = {"holds": "does not hold", "does not hold": "holds", "undecided": "undecided"}
    for low in (-0.3, -0.1, -0.04, 0.01, 0.04, 0.1):
        for width in (0.01, 0.1, 0.5):
            assert verdict(low, low + width, 1) == opposite[verdict(low, low + width, -1)]


@pytest.mark.parametrize(
    ("interval", "sign", "size", "is_near"),
    [
        ((-0.06, -0.04), -1, None, True),  # holds
        ((-0.08, -0.06), -1, None, False),
        ((0.04, 0.08), -1, None, True),  # does not hold
        ((-0.01, 0.01), -1, -0.06, True),  # half of the size is at −3 %
        ((-0.02, -0.01), -1, -0.19, False),  # and here at −9.5 %
        ((0.11, 0.13), 1, 0.34, True),
        ((0.00, 0.02), 0, None, False),
        ((-0.01, 0.01), -1, None, False),  # undecided as it is
    ],
)
def test_one_training_run_decides_nothing_that_five_points_would_change(interval, sign, size, is_near):
    said = verdict(*interval, sign, size)
    assert of_runs(said, *interval, sign, 1, size) == ("undecided: one training run" if is_near else said)
    assert of_runs(said, *interval, sign, 2, size) == said


def test_claims_are_unique():
    assert len({claim.text for claim in CLAIMS}) == len(CLAIMS)


def test_percentages_have_signs():
    assert [percent(value) for value in (0.123, -0.5, 0.0, -1e-5, None)] == [
        "+12.3\N{NO-BREAK SPACE}%",
        "−50.0\N{NO-BREAK SPACE}%",
        "±0.0\N{NO-BREAK SPACE}%",
        "±0.0\N{NO-BREAK SPACE}%",
        "–",
    ]


# ---- kept rows ------------------------------------------------------------------------------------------------------


def copied(target: Path, **names: str) -> Kept:
    """The kept evaluations under other names; GROUP__NAME stands for a group and a row. Those in seedN have seed N."""
    shutil.copytree(KEPT / "second" / "sentences", target / "sentences", dirs_exist_ok=True)
    for new, old in names.items():
        (group, name), (at, of) = new.split("__"), old.split("__")
        folder = target / group / "evaluations" / name
        shutil.copytree(KEPT / "second" / at / "evaluations" / of, folder)
        if group.startswith("seed") and group != at:
            found = read_json(folder / "evaluation.json")
            found["model"]["seed"] = seed = int(group.removeprefix("seed"))
            found["weights"]["sha256"] = f"{seed:064}"
            write_json(folder / "evaluation.json", found)
            scores = load_tensors(folder / "scores.safetensors")
            noise = {key: one * (1 + 0.001 * seed) if key.startswith("nats.") else one for key, one in scores.items()}
            save_tensors(noise, folder / "scores.safetensors")
    return Kept(target, target / "scratch")


@pytest.mark.slow
def test_the_report_has_the_claims_whose_rows_are_there(tmp_path):
    names = ("diffusionbert", "diffusionbert-bell")
    copied(tmp_path / "some", **{f"{seed}__{name}": f"seed0__{name}" for seed in ("seed0", "seed1") for name in names})
    report(tmp_path / "some", tmp_path / "tables")
    [bell] = read_json(tmp_path / "tables" / "claims.json")
    assert (bell["first"], bell["second"], bell["seeds"], bell["verdict"]) == (
        "diffusionbert-bell",
        "diffusionbert",
        2,
        "holds",
    )
    assert bell["interval"][0] < bell["change"] < bell["interval"][1] < 0
    written = {path.name for path in (tmp_path / "tables").iterdir()}
    assert {"claims.md", "main.md"} <= written
    assert not {"forest.png", "curve.png", "frontier-steps.png", "costs.md"} & written  # nothing is invented
    assert "| diffusionbert (2 seeds) |" in (tmp_path / "tables" / "main.md").read_text(encoding="utf-8")


def test_rows_with_different_sentences_are_not_compared(tmp_path):
    kept = copied(tmp_path / "kept", seed0__d3pm="seed0__d3pm", seed0__decoder="seed0__decoder-lm1b")
    with pytest.raises(ValueError, match="d3pm and decoder were scored on different sentences"):
        difference(kept, Claim("", "", "d3pm", "decoder"))


def test_quality_at_equal_diversity_is_averaged_over_seeds(tmp_path):
    claim = next(one for one in QUALITY_CLAIMS if one.at_equal_diversity and one.second == "decoder")
    settings = [f"{system}-T={value}" for system in ("diffusionbert", "decoder") for value in (0.6, 0.8, 1.0)]
    first = {f"frontier__{name}": f"frontier__{name}" for name in settings}
    one = quality_at_equal_diversity(copied(tmp_path / "one", **first), claim)
    same = first | {f"frontier1__{name}": f"frontier__{name}" for name in settings}
    two = quality_at_equal_diversity(copied(tmp_path / "two", **same), claim)
    assert (one["seeds"], two["seeds"]) == (1, 2)
    assert two["change"] == pytest.approx(one["change"])
    other = {"diffusionbert": "decoder", "decoder": "diffusionbert"}
    swapped = {
        f"frontier1__{re.sub(r'^[a-z]+', lambda own: other[own[0]], name)}": f"frontier__{name}" for name in settings
    }
    opposite = quality_at_equal_diversity(copied(tmp_path / "opposite", **first, **swapped), claim)
    assert opposite["change"] == pytest.approx(0, abs=1e-9)
    assert opposite["interval"][0] < min(one["change"], -one["change"]) < opposite["interval"][1]


def test_orders_of_another_seed_are_rows_of_their_own(tmp_path):
    """The bound is that of the main row."""
    ordered = {f"{group}__diffusionbert-left-to-right": "orders__diffusionbert-left-to-right" for group in ORDERED}
    kept = copied(tmp_path / "some", seed1__diffusionbert="seed0__diffusionbert", **ordered)
    copied(tmp_path / "some", orders__diffusionbert="orders__diffusionbert")
    report(kept.source, tmp_path / "tables")
    heading, _, *rows = (tmp_path / "tables" / "orders.md").read_text(encoding="utf-8").splitlines()
    assert heading == "| row | bound | left to right |"
    first, second = ([cell.strip() for cell in row.split("|")[1:-1]] for row in rows)
    assert (first[0], second[0]) == ("`diffusionbert`", "`diffusionbert`, seed 1")
    assert first[1] != second[1]
    assert first[2] == second[2]


ORDERED = "orders", "orders1"


def test_small_rows_are_shown_run_by_run_next_to_full_size(tmp_path):
    pair = ("diffusionbert-bell", "diffusionbert")
    small = {f"{seed}__{name}": f"seed0__{name}" for seed in ("seed0", "seed1") for name in pair}
    small |= {f"curve__{name}-1": f"curve__{name}-2" for name in ("d3pm", "other-text")}
    own = copied(tmp_path / "small", **small)
    full = copied(tmp_path / "full", **{f"seed0__{name}": f"seed0__{name}" for name in pair})
    report(full.source, tmp_path / "tables", own.source)
    heading, _, *rows = (tmp_path / "tables" / "small" / "runs.md").read_text(encoding="utf-8").splitlines()
    assert heading.endswith("| full size, one run | small size, mean over runs | small size, each run |")
    [row] = rows  # the curve has a table of its own
    claim, paper, larger, mean, each = (cell.strip() for cell in row.split("|")[1:-1])
    assert (claim, paper) == ("Bell-shaped times help DiffusionBERT", "–")
    changes = each.split(", ")
    assert larger.partition(" [")[0] == changes[0] == "−12.9\N{NO-BREAK SPACE}%"
    assert len(changes) == 2
    assert mean.partition(" [")[0] == changes[0]  # all nats of the second seed are larger by one factor
    curve = (tmp_path / "tables" / "small" / "curve.md").read_text(encoding="utf-8").splitlines()
    assert [row.split("|")[6].partition("[")[0].strip() for row in curve[2:]] == ["1.01"]


# ---- the code of rows -----------------------------------------------------------------------------------------------


def test_every_row_names_the_commit_of_its_code():
    for size in ("second", "small"):
        codes = {read_json(path)["code"] for path in (KEPT / size).glob("*/seconds/*.json")}
        assert codes == read_json(KEPT / size / "commits.json").keys()


def test_the_hash_of_a_commit_is_that_of_its_files():
    own = code_version()
    if own.commit is None or own.commit.endswith("dirty"):
        pytest.skip("the package is not that of a commit")
    assert package_hash("HEAD") == own.sha256


# ---- the curve ------------------------------------------------------------------------------------------------------


def test_masking_costs_less_compute_than_diffusion(tmp_path):
    kept = Kept(KEPT / "second", tmp_path)
    pretrained, scratch = (kept.result("curve", name) for name in ("other-text-1", "d3pm-1"))
    assert _diffusion_tokens(scratch) == scratch.model.tokens_seen
    tokens = _diffusion_tokens(pretrained)
    assert pretrained.model.tokens_seen < tokens < pretrained.model.tokens_seen + pretrained.model.pretraining_tokens
    # By hand: 0.3286 of 18.7M parameters are the output layer; of its work, masking does 15 %, diffusion 50 %.
    share = (1 - 0.3286 + 0.15 * 0.3286) / (1 - 0.3286 + 0.5 * 0.3286)
    assert tokens - pretrained.model.tokens_seen == pytest.approx(
        share * pretrained.model.pretraining_tokens, rel=0.001
    )


# ---- the page -------------------------------------------------------------------------------------------------------

NUMBER = re.compile(r"(?<![\w./§#-])[−±+]?\d[\d,]*(?:\.\d+)?M?(?![\w/]|-\w)")


def prose(text: str) -> str:
    """A page without code, tables, targets of links and years of papers."""
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|et al\. \d{4}", " ", text, flags=re.DOTALL)
    return "\n".join(line for line in text.splitlines() if not line.startswith("|"))


def numbers(text: str) -> set[str]:
    return {found.replace(",", "").lstrip("+±") for found in NUMBER.findall(text)}


def test_numbers_are_found_in_prose_and_not_in_names():
    text = "In 2,000 steps (29.4M) −7.5 % of `x 3`, see [figure](4.png) and §4.3 of D3PM-2.\n| 9 |\n"
    assert numbers(prose(text)) == {"2000", "29.4M", "−7.5"}


def in_no_table(text: str) -> list[str]:
    """The numbers of a text that are in no generated table; small counts are words, and what is lower has no sign."""
    known = numbers("\n".join(path.read_text(encoding="utf-8") for path in sorted((KEPT / "tables").rglob("*.md"))))
    return sorted(numbers(text) - known - {one.lstrip("−") for one in known} - set(map(str, range(11))))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_number_of_a_page_occurs_in_its_tables(page):
    assert not in_no_table(prose(page.read_text(encoding="utf-8")))


def test_every_number_of_the_headline_occurs_in_the_tables():
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Results\n")[2].partition("\n## ")[0]
    assert len(numbers(section)) > 20
    assert not in_no_table(re.sub(r"95 % interval|\]\([^)]*\)", " ", section))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_the_tables_as_they_were_generated(page):
    text = page.read_text(encoding="utf-8")
    assert text == with_tables(text, KEPT / "tables")
    assert {*re.findall(r"<!-- ([\w/-]+) -->", text)} in (
        {"claims", "rows"},
        {
            "curve",
            "curve-lm1b",
            "compute",
            "curve-plain",
            "repeats",
            "orders",
            "random-orders",
            "spindle",
            "released-spindle",
            "judged",
            "small/runs",
            "small/curve",
            "small/curve-runs",
            "small/diffusion-lm",
        },
    )


def test_the_page_is_short():
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) <= 200
