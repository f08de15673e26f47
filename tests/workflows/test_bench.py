"""The bench at a tiny size: what is run and how often, and how it is reported. No time is asserted."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from diffusionbert.cli.main import main
from diffusionbert.networks.loading import NewBert, NewModernBert
from diffusionbert.recipes import bundled
from diffusionbert.training.batches import BatchPlan, TokenBudget
from diffusionbert.training.config import DataConfig, RunConfig, TrainingConfig
from diffusionbert.training.step import TrainingStep
from diffusionbert.training.trainer import Trainer
from diffusionbert.workflows import bench, timing, training_work
from diffusionbert.workflows.sampling_work import DecoderSampling, DecoderScoring, Forwards, OurSampling, Texts
from diffusionbert.workflows.timing import Amount, Machine, Program, Stopwatch, Work
from diffusionbert.workflows.training_work import (
    HandWrittenTraining,
    OurTraining,
    PresetTraining,
    TrainingSize,
    mixed_sequences,
)

TINY = TrainingSize(1, 16, 2, 0.0, 60, sequences=4, length=12, ema=0.9)
FEW = Texts(2, 5, NewBert(1, 16, 2, 0.0), vocabulary=60)
MACHINE = Machine(torch.device("cpu"), compile=False, folder=Path("nowhere"))


@dataclass(frozen=True)
class Counted(Work):
    """Counts the steps of another work, at its own size on any device."""

    work: Work
    steps: Counter[str]

    def describe(self) -> str:
        return self.work.describe()

    def on(self, device: str) -> Work:
        return self

    def program(self, machine: Machine) -> Program:
        program = self.work.program(machine)

        def step() -> Amount:
            self.steps[type(self.work).__name__] += 1
            return program.step()

        return replace(program, step=step)


@pytest.fixture
def counted(monkeypatch):
    """One tiny row, and the number of steps of each program."""
    steps = Counter[str]()
    row = bench.Row("train-tiny", Counted(OurTraining(TINY), steps), Counted(HandWrittenTraining(TINY), steps))
    monkeypatch.setattr(bench, "ROWS", (row, bench.ROWS[0]))
    monkeypatch.setattr(timing, "SECONDS_PER_TURN", 0.0)
    return steps


def test_both_programs_take_turns_equally_often(counted):
    result = bench.bench(device="cpu", rounds=3)
    (row,) = result.rows
    # Five to warm up, then one per round.
    assert counted == {"OurTraining": 5 + 3, "HandWrittenTraining": 5 + 3}
    assert row.ratio == row.ours.tokens_per_second / row.reference.tokens_per_second
    assert row.ours.memory_gib is None
    assert list(result.skipped) == ["train-base"]
    assert "train-tiny" in result.table()


def test_the_tokens_of_all_steps_of_a_turn_are_counted():
    amounts = iter([Amount(1, 2.0), Amount(5, 50.0), Amount(10, 100.0), Amount(30, 300.0)])

    class Uneven(Work):
        def describe(self) -> str:
            return "uneven"

        def on(self, device: str) -> Work:
            return self

        def program(self, machine: Machine) -> Program:
            return Program(lambda: next(amounts))

    watch = Stopwatch(Uneven(), MACHINE)
    watch.steps = 2
    watch.take_turn()
    speed = watch.speed(1.0)
    assert speed.tokens_per_second * speed.milliseconds_per_step == pytest.approx(20e3)
    assert speed.flops_fraction * speed.milliseconds_per_step == pytest.approx(200e3)


def test_the_command_prints_one_json_object(counted, capsys):
    main(["bench", "--json", "--rounds", "1", "--device", "cpu", "--only", "train-tiny"])
    plain = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in plain["rows"]] == ["train-tiny"]
    assert plain["rows"][0]["ours"]["work"] == "BERT 1×16, 4 × 12, linear"


def test_a_bench_without_rounds_is_refused_before_any_work(counted, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--rounds", "0"])
    assert "--rounds must be >= 1, got 0" in capsys.readouterr().err
    assert not counted


def test_an_unknown_row_is_refused_by_name(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--only", "train-nothing"])
    assert "--only must name rows (train-base" in capsys.readouterr().err


@pytest.mark.parametrize(
    "work",
    [
        OurSampling(FEW, steps=4),
        OurSampling(FEW, "ancestral", top_k=3, steps=4),
        OurSampling(FEW, "entropy", top_p=0.5, prompt="w1 w2"),
        Forwards(FEW, 2),
        DecoderSampling(FEW),
        DecoderScoring(FEW),
    ],
    ids=lambda work: work.describe(),
)
def test_a_sampling_program_does_its_work(work):
    done = work.program(MACHINE).step()
    assert done.flops > 0
    assert done.num_tokens == 10


@pytest.fixture
def trained_batches(monkeypatch):
    """The batches that programs train on."""
    found, train = [], TrainingStep.__call__
    monkeypatch.setattr(TrainingStep, "__call__", lambda self, batch: found.append(batch) or train(self, batch))
    return found


@pytest.mark.parametrize("packing", [True, False])
def test_sequences_of_mixed_lengths_are_batched_as_the_trainer_does(trained_batches, packing):
    training = TrainingConfig(batching=TokenBudget(512), optimizer="muon", ema=0.9, packing=packing)
    config = RunConfig(DataConfig("random", vocabulary=60), NewModernBert(1, 16, 2, 0.0), training=training)
    program = PresetTraining(config).program(MACHINE)
    done = [program.step() for _ in range(4)]
    sequences = mixed_sequences(config.data)
    plan = BatchPlan(sequences.lengths, training.batching, training.seed, packed=packing).epoch(0)
    for amount, batch, planned in zip(done, trained_batches, plan, strict=False):
        (part,) = batch.micro_batches
        assert part.example.tolist() == planned.tolist()
        assert amount.num_tokens == sequences.lengths[planned].sum()
        assert batch.num_tokens == amount.num_tokens - 2 * len(planned)  # all but [CLS] and [SEP] can be masked
        rows = part.packing.positions if packing else part.tokens
        assert rows.shape[1] == (128 if packing else sequences.lengths[planned].max())
        assert amount.num_tokens <= rows.numel() <= 512 + 128 * packing
    assert len(trained_batches) == 4


def test_the_memory_kept_between_steps_is_that_of_parameters_optimizer_and_ema(monkeypatch):
    trainers = []

    class Kept(Trainer):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            trainers.append(self)

    monkeypatch.setattr(training_work, "Trainer", Kept)
    training = TrainingConfig(batching=TokenBudget(64), optimizer="muon", ema=0.9)
    config = RunConfig(DataConfig("random", vocabulary=60), NewModernBert(1, 16, 2, 0.0), training=training)
    program = PresetTraining(config).program(MACHINE)
    program.step()
    (trainer,) = trainers
    moments = [value for state in trainer.optimizer.state.values() for value in state.values()]
    num_moments = sum(value.numel() for value in moments if torch.is_tensor(value) and value.ndim)
    num_parameters = sum(parameter.numel() for parameter in trainer.module.parameters())
    assert program.kept_bytes == 4 * (2 * num_parameters + num_moments)


def test_lengths_are_those_of_sentences():
    lengths = mixed_sequences(DataConfig("random")).lengths
    assert 22.5 < lengths.mean() < 23.5
    assert (lengths.min(), lengths.max()) == (3, 128)


def test_packing_is_compared_with_the_padded_batches_of_the_same_preset():
    (row,) = (row for row in bench.ROWS if row.name == "train-packed")
    preset = bundled("random")
    assert row.ours == PresetTraining(preset)
    assert row.reference == PresetTraining(replace(preset, training=replace(preset.training, packing=False)))
    assert row.on("cuda") == row
    assert row.ours.describe() == "ModernBERT 10×512, 98,304 positions, packed"
    assert row.on("cpu").reference.describe() == "ModernBERT 10×512, 1,024 positions, padded"


def test_each_row_is_about_one_kind_of_device_or_both():
    for row in bench.ROWS:
        kinds = {device for device in ("cpu", "cuda") if row.on(device) is not None}
        assert kinds == ({"cpu"} if "cpu" in row.name else {"cuda"} if "sample" in row.name else kinds | {"cuda"})


def test_a_row_that_fails_does_not_lose_the_others(counted, monkeypatch, tmp_path, capsys):
    @dataclass(frozen=True)
    class Failing(Counted):
        def program(self, machine: Machine) -> Program:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

    good, failing = bench.ROWS[0], Failing(OurTraining(TINY), counted)
    monkeypatch.setattr(bench, "ROWS", (good, bench.Row("train-huge", failing, failing)))
    output = tmp_path / "bench.json"
    main(["bench", "--device", "cpu", "--rounds", "1", "--output", str(output), "--json"])
    written = json.loads(output.read_text())
    assert written == json.loads(capsys.readouterr().out)
    assert [row["name"] for row in written["rows"]] == ["train-tiny"]
    assert written["skipped"] == {"train-huge": "it failed: CUDA out of memory."}


def test_the_output_has_every_row_as_soon_as_it_is_measured(counted, monkeypatch):
    monkeypatch.setattr(bench, "ROWS", (bench.ROWS[0], replace(bench.ROWS[0], name="again")))
    numbers = []
    bench.bench(device="cpu", rounds=1, on_row=lambda result: numbers.append(len(result.rows)))
    assert numbers == [1, 2]
