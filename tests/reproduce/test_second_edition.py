"""The rows of the second edition: unique, in order, fair; trained, resumed and evaluated at tiny size."""

from __future__ import annotations

import io
import itertools
import re
import shutil
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import second_edition
from experiment import keep
from report import report
from second_edition import Work, Worker
from second_edition_rows import (
    CURVE,
    EVALUATION_SEED,
    JUDGE,
    ORDERS,
    RATES,
    SIZES,
    Evaluation,
    Row,
    main_rows,
    rows,
    searches,
)
from second_judge import judge as second_judge
from tiny_models import toy_sentences

from diffusionbert.evaluation.result import EvaluationResult
from diffusionbert.networks.time_conditioning import TimeEmbedding
from diffusionbert.objectives.base import Estimator
from diffusionbert.recipes import SYSTEMS
from diffusionbert.storage.files import read_json, write_json
from diffusionbert.training.run import stored_config

ROWS = {row.key: row for row in rows()}


def folders(row: Row) -> list[str]:
    return [one.folder.format(group=row.group, name=row.name) for one in row.evaluations]


@pytest.mark.parametrize("size", SIZES)
def test_rows_and_evaluations_are_unique_and_rows_come_after_those_they_need(size):
    keys = [row.key for row in rows(SIZES[size])]
    assert len({*keys}) == len(keys)
    every = [folder for row in rows(SIZES[size]) for folder in folders(row)]
    assert len({*every}) == len(every)
    for row in rows(SIZES[size]):
        assert all(keys.index(needed) < keys.index(row.key) for needed in row.needs)
        assert row.system in {*SYSTEMS, "masked", "causal"}
        assert not row.name.endswith("-again")  # this is what `experiment.py` calls a row that was run twice


def test_every_kind_of_network_has_a_search_of_equal_size():
    found = [*searches("modern"), *searches("bert")]
    kinds = {row.kind for row in rows() if row.rate is None}
    assert {kind: sorted(row.rate for row in found if row.kind == kind) for kind in kinds} == dict.fromkeys(
        kinds, sorted(RATES)
    )
    assert len({row.tokens(SIZES["full"]) for row in found}) == 1


def test_the_small_size_has_the_same_rows_with_rates_of_its_own_and_without_samples():
    size = SIZES["small"]
    own = {row.key: row for row in rows(size) if row.rate is None}
    assert own.keys() == {row.key for row in rows() if row.rate is None}
    for row in own.values():
        assert [key.rpartition("-")[2] for key in row.search] == [f"{rate:g}" for rate in size.rates]
        assert all(one.scored and one.sequences(size) <= size.max_sequences for one in row.evaluations)
    starts = {row.rate for row in rows(size) if row.system in ("masked", "causal")}
    assert starts == {size.pretraining_rate} < {*size.rates}
    exact = {one.quantity for row in own.values() for one in row.evaluations} & {*ORDERS}
    assert exact == {"left-to-right", "confidence", "entropy"}  # many random orders would take too long


def test_rows_differ_in_what_they_compare_alone():
    """LTE and the hybrid term both ways, the same noise for all, which is no training's, and equal pretraining."""
    for first, second in (("diffusionbert-lte", "diffusionbert-lte-random"), ("d3pm-tad", "d3pm-tad-plain")):
        one, other = ROWS[f"seed1/{first}"], ROWS[f"seed1/{second}"]
        assert replace(other, name=one.name, time=None, objective=(), evaluations=one.evaluations) == one
    own = {row.key: row.evaluations[0] for seed in range(3) for row in main_rows(seed)}
    assert {(one.seed, one.draws, one.text) for one in own.values()} == {(EVALUATION_SEED, 64, "news.test")}
    assert EVALUATION_SEED not in {row.seed for row in rows()}
    assert len({row.tokens(SIZES["full"]) for row in rows() if row.group.endswith("starts")}) == 1
    assert {row.name for row in main_rows(1)} == {row.name for row in main_rows(2)} < {row.name for row in main_rows(0)}


def test_the_curve_counts_pretraining_and_spans_a_factor_of_30():
    size = SIZES["full"]

    def total(row: Row) -> int:
        return row.tokens(size) + (0 if row.start is None else total(ROWS[row.start]))

    points, terms = {}, {}
    for row in rows():
        for folder in folders(row):
            group, _, name = folder.partition("/")
            if group in ("curve", "curve-plain") and not name.endswith("-lm1b"):
                points.setdefault((group, name.rpartition("-")[0]), set()).add(total(row))
                own = dict(row.objective).get("hybrid", getattr(SYSTEMS[row.system].objective, "hybrid", None))
                terms.setdefault(group, set()).add(own)
    systems = {"d3pm", "other-text", "same-text"}
    assert points.keys() == {("curve", "causal"), *((group, one) for group in terms for one in systems)}
    shares = {"curve": CURVE, "curve-plain": [share for share in CURVE if share <= 2]}
    assert all(own == {round(share * size.tokens) for share in shares[group]} for (group, _), own in points.items())
    assert max(CURVE) >= 30 * min(CURVE)
    assert terms == {"curve": {0.01, None}, "curve-plain": {0.0}}  # a causal network has no such term


def test_some_lengths_of_the_curve_are_run_again_with_another_seed():
    again = {row.name: row for row in rows() if row.group == "curve1"}
    assert again.keys() == {"other-text-1", "same-text-1", "d3pm-8", "other-text-8", "same-text-8"}
    for name, row in again.items():
        group = "curve-long" if name.endswith("-8") else "curve"
        assert replace(ROWS[f"{group}/{name}"], group="curve1", seed=1, evaluations=row.evaluations) == row
        assert folders(row) == [f"curve1/{name}", f"curve1/{name}-lm1b"]


def test_the_plan_stays_within_its_budget(capsys):
    second_edition.plan()
    printed = capsys.readouterr().out
    assert all(row.key in printed for row in rows())
    assert sum(row.seconds(SIZES["full"]) for row in rows()) < 85 * 60


def test_what_would_not_end_in_time_is_not_started(work, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(second_edition, "_begin", None)
    second_edition.run(tmp_path, work.text, workers=4, minutes=0.5, only=("starts",))
    assert "starts/masked-wiki-modern" in capsys.readouterr().out.partition("not started: ")[2]


def test_a_row_takes_longer_with_others_and_if_its_network_is_new():
    row, size = ROWS["seed1/d3pm-tad"], SIZES["full"]
    alone = second_edition._seconds(row, size, 1, {row.network})
    assert alone == row.seconds(size)
    assert second_edition._seconds(row, size, 6, {row.network}) == 6 * alone
    assert second_edition._seconds(row, size, 1, {"another"}) == alone + second_edition.STARTING


# ---- tiny -----------------------------------------------------------------------------------------------------------

TEXTS = "news.train-0", "news.train-1", "news.valid", "news.test", "wiki.train-0", "wiki.valid", "lm1b.heldout"


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Work:
    folder = tmp_path_factory.mktemp("second")
    (folder / "text").mkdir()
    for seed, name in enumerate(TEXTS):
        (folder / "text" / f"{name}.txt").write_text("\n".join(toy_sentences(60, seed=seed)) + "\n", encoding="utf-8")
    return Work(folder / "output", folder / "text", SIZES["tiny"])


def do(work: Work, *keys: str, only: tuple[str, ...] = ("seed0/", "spindle/")) -> None:
    """Does rows after those they need, with those of their evaluations whose folders begin so, on all texts."""
    for key in keys:
        row = ROWS[key]
        if not work.is_done(row):
            do(work, *row.needs)
            chosen = [one for one, folder in zip(row.evaluations, folders(row), strict=True) if folder.startswith(only)]
            work.do(replace(row, evaluations=tuple(chosen)), 1)


def result(work: Work, folder: str) -> EvaluationResult:
    return EvaluationResult.load(work.evaluation(ROWS["seed0/diffusionbert"], Evaluation(folder)))


@pytest.mark.slow
def test_rows_are_trained_from_their_start_and_evaluated_with_shared_noise(work, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    do(work, "seed0/diffusionbert", only=("seed0/", "spindle/", "orders/"))
    do(work, "seed0/diffusionbert-lte-random", "spindle/lambda-0.1", "spindle/genmd4")
    config = stored_config(work.run_folder("seed0/diffusionbert-lte-random"))
    assert config.time is TimeEmbedding.LAYERS_RANDOM
    start = work.run_folder("starts/masked-wiki-modern")
    assert str(start) in str(config.backbone.pretrained)
    assert not (work.run_folder("seed0/diffusionbert") / "checkpoints").exists()
    found = [result(work, folder) for folder in ("spindle/lambda-0", "spindle/lambda-0.1", "spindle/genmd4")]
    found += [result(work, "seed0/diffusionbert"), result(work, "seed0/diffusionbert-lte-random")]
    protocols = [one.likelihoods["continuous"].protocol for one in found]
    assert len({(one.definition.estimator, one.seed, one.num_draws) for one in protocols}) == 1
    assert protocols[0].definition.estimator is Estimator.STRATIFIED_TIMES
    seen = read_json(start / "model" / "diffusionbert.json")["tokens_seen"]
    model = found[-2].model
    assert (model.pretraining_tokens, model.start, model.backbone) == (seen, "pretrained", "modernbert")
    orders = [result(work, f"orders/diffusionbert{name}") for name in ("", "-left-to-right", "-confidence", "-entropy")]
    assert [[*one.likelihoods] for one in orders] == [["continuous"], ["left-to-right"], ["confidence"], ["entropy"]]
    do(work, "spindle/lambda-0.3-released")
    scored = {"lambda-0-paper-quantity": "paper", "lambda-0.3-released-both": "released"}
    for name, quantity in scored.items():
        own = result(work, f"spindle/{name}").likelihoods["grid"]
        assert (own.kind.value, own.protocol.definition.quantity) == ("pseudo", quantity)
    assert result(work, "spindle/lambda-0.3-released-training").likelihoods["grid"].kind.value == "bound"


@pytest.mark.slow
def test_the_best_rate_of_the_search_is_used_also_if_only_its_log_was_kept(work, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    do(work, "seed0/diffusionbert")
    row = ROWS["seed0/diffusionbert"]
    last = {}
    for key in row.search:
        lines = (work.run_folder(key) / "log.jsonl").read_text().splitlines()
        last[ROWS[key].rate] = float(lines[-1].partition('"nats_per_token": ')[2].partition(",")[0])
    assert stored_config(work.run_folder(row.key)).training.learning_rate == min(last, key=last.get)
    keep(work.output, tmp_path / "kept")
    elsewhere = replace(work, output=tmp_path / "elsewhere", kept=tmp_path / "kept")
    assert elsewhere.best(row.search).rate == min(last, key=last.get)
    assert elsewhere.is_kept(row)
    assert not elsewhere.is_kept(ROWS["seed0/d3pm-spindle"])
    finished, waiting = second_edition._planned(elsewhere, ("seed0/diffusionbert", "seed0/diffusionbert-pte"))
    assert row.key in finished
    # Its start was trained elsewhere, and is not here.
    assert [one.key for one in waiting] == ["starts/masked-wiki-modern", "seed0/diffusionbert-pte"]


@pytest.mark.slow
def test_what_is_done_is_not_repeated(work, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    do(work, "seed0/diffusionbert")
    monkeypatch.setattr(second_edition, "train", None)
    monkeypatch.setattr(second_edition, "evaluate", None)
    row = ROWS["seed0/diffusionbert"]
    work.do(replace(row, evaluations=row.evaluations[:1]), 1)


@pytest.mark.slow
def test_a_row_with_other_settings_is_not_resumed(work, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    do(work, "seed0/diffusionbert")
    row = ROWS["seed0/diffusionbert"]
    elsewhere = replace(work, text=work.text.parent / "elsewhere", compile=True)
    shutil.copytree(work.text, elsewhere.text)
    assert elsewhere.trained(row) == work.trained(row)  # this is the same row
    settings = {"objective": (("hybrid", 0.5),)}, {"share": 0.5}, {"start": JUDGE}, {"text": "wiki"}, {"seed": 7}
    for changed in (replace(row, **own) for own in settings):
        with pytest.raises(SystemExit, match="was begun with other settings than seed0/diffusionbert has now"):
            work.trained(changed)
    with pytest.raises(SystemExit, match="choose another folder"):
        second_edition._planned(replace(work, size=replace(work.size, tokens=10 * work.size.tokens)), ())


@pytest.mark.slow
def test_tables_and_figures_are_made_of_what_is_kept(work, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    do(work, "seed0/diffusionbert", "seed0/diffusionbert-pte", "spindle/lambda-0.1")
    do(work, "curve/d3pm-0.25", only=("curve/",))
    row = ROWS["seed0/diffusionbert"]
    chosen = [one for one, folder in zip(row.evaluations, folders(row), strict=True) if folder.startswith("frontier/")]
    do(work, *row.needs)
    work.do(replace(row, evaluations=(*chosen[:2], *chosen[-2:])), 1)
    keep(work.output, tmp_path / "kept", samples=3)
    # Another judge reads the samples of another seed.
    shutil.copytree(tmp_path / "kept" / "frontier", tmp_path / "kept" / "frontier1")
    judge = str(work.run_folder(JUDGE) / "model")
    second_judge(
        tmp_path / "kept", tmp_path / "kept" / "frontier1" / "judged.json", judge, work.text / "news.test.txt", 2
    )
    found = read_json(tmp_path / "kept" / "frontier1" / "judged.json")
    assert found["rows"].keys() == {"diffusionbert-T=0.9", "diffusionbert-T=1.0"}
    assert [one["texts"] for one in (*found["rows"].values(), found["real"])] == [2, 2, 2]
    report(tmp_path / "kept", tmp_path / "tables")
    heading = (tmp_path / "tables" / "judged.md").read_text(encoding="utf-8").splitlines()[0]
    assert heading.endswith("| seed 0 | seed 1 | seed 1, model |")
    written = {path.name for path in (tmp_path / "tables").iterdir()}
    pages = {f"{name}.md" for name in ("claims", "main", "costs", "setup", "rates", "rows", "spindle", "curve")}
    assert pages | {"all-frontier.md", "curve.png", "frontier-temperatures.png"} <= written
    [curve] = read_json(tmp_path / "tables" / "curve-points.json")
    assert (curve["name"], len(curve["tokens"])) == ("D3PM", 1)
    main = (tmp_path / "tables" / "main.md").read_text(encoding="utf-8")
    for heading in ("schedule", "time", "start", "parameters", "tokens, pretraining included", "epochs"):
        assert f"| {heading} |" in main
    [claim] = [one for one in read_json(tmp_path / "tables" / "claims.json") if one["claim"].endswith("TAD beats PTE")]
    assert claim["noise"] == "shared"
    costs = (tmp_path / "tables" / "costs.md").read_text(encoding="utf-8").splitlines()[2:]
    # Every row has hashes of code, data and weights, and of what it started from; the commit is found later.
    assert {line.split(" | ")[0]: line.count("`–`") for line in costs} == {
        f"| `{row.key}`": 1 + (row.start is None) for row in rows() if work.is_done(row)
    }


@pytest.mark.slow
def test_other_systems_are_trained_and_evaluated_and_reported(work, monkeypatch, tmp_path):
    """Without a likelihood, on word vectors, on other noise, and scored as the released code does."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    keys = "peers/sundae", "peers/multinomial", "diffusion-lm/pretrained", "spindle/lambda-0-repeated"
    do(work, *keys, only=("peers/", "diffusion-lm/", "spindle/"))
    keep(work.output, tmp_path / "kept", samples=3)
    report(tmp_path / "kept", tmp_path / "tables")
    rows = (tmp_path / "tables" / "rows-peers.md").read_text(encoding="utf-8")
    assert "| `sundae` | none | – |" in rows
    assert "| `multinomial` | bound |" in rows
    spindle = (tmp_path / "tables" / "spindle.md").read_text(encoding="utf-8")
    assert re.search(r"\| `lambda-0-released-quantity` \| – \| – \| – \| [\d.]+ \[", spindle)
    conventions = result(work, "peers/multinomial-lm1b").conventions
    assert conventions is not None
    assert conventions[0].value is not None


@pytest.mark.slow
def test_a_run_that_is_killed_is_continued(work, tmp_path, monkeypatch):
    """Whatever was written when a process was killed, the same command ends the row."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    again = replace(work, output=tmp_path)
    worker, log = Worker(second_edition._begin(again, "tiny", 1)), tmp_path / "rates" / "logs" / "d3pm-tad-0.001.txt"
    worker.give(ROWS["rates/d3pm-tad-0.001"])
    while not (log.exists() and "step 0:" in log.read_text(encoding="utf-8")):  # its first validation
        assert worker.process.poll() is None
        time.sleep(0.05)
    worker.process.kill()
    worker.process.communicate()
    assert not again.is_done(ROWS["rates/d3pm-tad-0.001"])
    again.do(ROWS["rates/d3pm-tad-0.001"], 1)
    assert again.is_done(ROWS["rates/d3pm-tad-0.001"])
    assert {"code", "data", "weights"} <= read_json(again.record(ROWS["rates/d3pm-tad-0.001"])).keys()


@pytest.mark.slow
def test_a_vocabulary_is_trained_once_for_rows_of_all_texts(work, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    own = replace(work, output=tmp_path, size=replace(work.size, vocabulary=512, samples=0))
    trained = [own.trained(ROWS[key]) for key in ("starts/masked-wiki-modern", "rates/d3pm-tad-0.001")]
    tokenizers = {(folder / "model" / "tokenizer.json").read_bytes() for folder in trained}
    assert tokenizers == {(tmp_path / "vocabulary" / "tokenizer.json").read_bytes()}
    own.evaluate(replace(ROWS["seed0/d3pm-tad"], evaluations=ROWS["seed0/d3pm-tad"].evaluations[:1], rate=1e-3))
    found = EvaluationResult.load(tmp_path / "seed0" / "evaluations" / "d3pm-tad")
    assert "grid" in found.likelihoods
    assert len(found.bleu4.values) == 0


def test_what_has_not_arrived_whole_is_not_read(work, tmp_path):
    own, row = Work(tmp_path / "output", tmp_path, SIZES["tiny"]), ROWS["seed0/diffusionbert"]
    shutil.copytree(work.text, tmp_path, dirs_exist_ok=True)
    for key in row.models:
        (own.run_folder(key) / "model").mkdir(parents=True)
    assert own.is_ready(row)
    for part in (own.run_folder(row.start) / "model.part", own.text / "news.train.part", own.text / "news.test.part"):
        part.touch()
        assert not own.is_ready(row)
        part.unlink()
    (own.text / "news.train-1.txt.xz.unfinished").touch()
    assert [path.name for path in own.files("news.train")] == ["news.train-0.txt", "news.train-1.txt"]
    (own.text / "wiki.valid.txt").rename(own.text / "wiki.valid.txt.unfinished")
    assert not own.is_ready(ROWS["starts/masked-wiki-modern"])


def test_the_time_of_a_row_is_added_up_over_all_attempts(tmp_path):
    own, row = Work(tmp_path, tmp_path), ROWS["seed0/d3pm"]
    own.account(row, 20.0)
    own.account(row, 3.0)
    write_json(own.record(row), {"seconds": 9.0})
    own.account(row, 4.5)
    assert read_json(own.record(row)) == {"seconds": 9.0, "gpu_seconds": 27.5}


def test_a_model_that_is_arriving_is_waited_for_and_one_that_is_gone_is_trained_again(work, tmp_path):
    own, start = Work(tmp_path, work.text, SIZES["tiny"]), ROWS["starts/masked-wiki-modern"]
    rate = ROWS["rates/diffusionbert-0.001"]
    own.record(start).parent.mkdir(parents=True)
    write_json(own.record(start), {"tokens": start.tokens(own.size)})
    (own.run_folder(start.key) / "model.part").mkdir(parents=True)
    assert [one.key for one in second_edition._planned(own, (rate.key,))[1]] == [rate.key]
    assert own.awaits_files
    assert own.is_done(start)
    (own.run_folder(start.key) / "model.part").rmdir()
    assert not own.awaits_files
    finished, waiting = second_edition._planned(own, (rate.key,))
    assert [one.key for one in waiting] == [start.key, rate.key]
    assert not own.is_done(start)
    assert start.key not in finished


def test_rows_that_run_side_by_side_share_the_time(work, monkeypatch, tmp_path):
    own, shares = replace(work, output=tmp_path), {}
    ticks, clock = itertools.count(), itertools.count(0.0, 10.0)

    def sleep(_: float) -> None:
        """Both rows run for one tick, then one of them for another."""
        for key in ("rates/d3pm-tad-0.0004", *(["rates/d3pm-tad-0.001"] if next(ticks) == 1 else [])):
            own.record(ROWS[key]).parent.mkdir(parents=True, exist_ok=True)
            write_json(own.record(ROWS[key]), {})

    monkeypatch.setattr(second_edition, "_begin", lambda *_: Process(num_polls=1000))
    monkeypatch.setattr(second_edition, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=sleep))
    monkeypatch.setattr(Work, "account", lambda _, row, seconds: shares.update({row.key: seconds}))
    only = ("rates/d3pm-tad-0.0004", "rates/d3pm-tad-0.001")
    second_edition.run(tmp_path, work.text, workers=2, minutes=100, only=only, size="tiny")
    # The clock goes on by 10 s whenever it is read: 20 s side by side, and 30 s alone (a line was printed).
    assert shares == {only[0]: 10.0, only[1]: 10.0 + 30.0}


class Process:
    """A process that never does anything, and ends after some polls."""

    def __init__(self, num_polls: int = 0):
        self.num_polls, self.signals, self.stdin = num_polls, 0, io.StringIO()

    def poll(self) -> int | None:
        self.num_polls -= 1
        return 1 if self.num_polls < 0 else None

    def terminate(self) -> None:
        self.signals += 1

    def communicate(self) -> None:
        self.num_polls = -1


def test_what_is_late_is_stopped_by_one_signal(work, monkeypatch, tmp_path):
    """A second one would end a training before it has written its checkpoint."""
    slow, clock = Process(num_polls=9), itertools.count(0.0, 10.0)
    monkeypatch.setattr(second_edition, "_begin", lambda *_: slow)
    monkeypatch.setattr(second_edition, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None))
    second_edition.run(tmp_path, work.text, workers=1, minutes=0.5, only=("starts/masked-wiki-modern",), size="tiny")
    assert (slow.signals, slow.num_polls) == (1, -1)


def test_what_failed_is_told_and_what_needs_it_is_not_started(work, monkeypatch, tmp_path, capsys):
    begun = []
    monkeypatch.setattr(second_edition, "_begin", lambda *_: begun.append(Process()) or begun[-1])
    second_edition.run(tmp_path, work.text, only=("starts", "rates"), size="tiny")
    started = [process.stdin.getvalue().strip() for process in begun]
    # Networks from random parameters need no start.
    assert {ROWS[key].start for key in started} == {None}
    printed = capsys.readouterr().out
    assert "starts/masked-wiki-modern: not finished, see its log" in printed
    assert "rates/diffusionbert-0.001" in printed.partition("not started: ")[2]


def test_a_process_does_the_rows_of_one_network_after_another(work, monkeypatch, tmp_path):
    """So that it compiles few."""
    own, given = replace(work, output=tmp_path), []

    def give(worker: Worker, row: Row) -> None:
        worker.row = row
        worker.compiled.add(row.network)
        given.append(row)
        own.record(row).parent.mkdir(parents=True, exist_ok=True)
        write_json(own.record(row), {})

    monkeypatch.setattr(Worker, "give", give)
    monkeypatch.setattr(second_edition, "_begin", lambda *_: Process(num_polls=1000))
    second_edition.run(tmp_path, work.text, workers=1, only=("starts", "rates"), size="tiny")
    networks = [network for network, _ in itertools.groupby(row.network for row in given)]
    assert len(given) == 8
    assert len({*networks}) == len(networks) == 2


def test_unknown_rows_are_refused(work, tmp_path):
    with pytest.raises(SystemExit, match="no group or row is called curve1/d3pm-1, seed9; `plan` lists all"):
        second_edition.run(tmp_path, work.text, only=("starts", "seed9", "curve1/d3pm-1"), size="tiny")
