"""The scheduler: work joins and leaves between passes, and its result does not depend on its company."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from tiny_models import model_of, trained

from diffusionbert.inference.tasks import Task
from diffusionbert.inference.trace import trace_task
from diffusionbert.model import Model, load, sampling_request
from diffusionbert.serve import scheduler as module
from diffusionbert.serve.metrics import Metrics
from diffusionbert.serve.scheduler import CancelledWorkError, OvertimeError, QueueFullError, Scheduler, pause
from diffusionbert.serve.settings import Limits

REQUEST = sampling_request(None, 12, 1.0, 30, None, None)


@contextmanager
def scheduling(limits: Limits | None = None, model: Model | None = None) -> Iterator[Scheduler]:
    found = Scheduler((model or trained()).engine, limits or Limits(), Metrics())
    try:
        yield found
    finally:
        found.close()


def text(scheduler: Scheduler, seed: int, length: int = 6, watch: Callable[[int], None] = lambda step: None):
    def work() -> str:
        task = Task(prompt="the king", max_new_tokens=length, seed=seed)
        for state in trace_task(scheduler.engine, task, REQUEST):
            watch(state.step)
        return state.text

    return work


def text_alone(model: Model, seed: int, length: int = 6) -> str:
    return model.generate("the king", max_new_tokens=length, steps=12, top_k=30, top_p=1.0, seed=seed)[0]


def results(works) -> list:
    return [work.future.result(timeout=60) for work in works]


@pytest.mark.parametrize("kind", ["linear", "spindle", "layers", "prefix", "uniform", "unrolled"])
def test_a_text_is_the_same_alone_and_in_company(kind):
    with scheduling(model=model_of(kind)) as scheduler:
        alone = [results(scheduler.submit([text(scheduler, seed, 3 + seed)]))[0] for seed in range(4)]
        both = results(scheduler.submit([text(scheduler, seed, 3 + seed % 12) for seed in range(12)]))
    assert both[:4] == alone


def test_text_is_generated_as_outside_a_server_and_scored_as_outside(monkeypatch):
    """In int8 where that pays; passes of text and of scores are apart."""
    monkeypatch.setattr("diffusionbert.inference.engine.pays", lambda backbone: True)
    model = load(str(trained().engine.folder), device="cpu")
    calls = {"sampling": 0, "own": 0}
    for name, network in (("sampling", model.engine.sampling_network), ("own", model.engine.network)):
        embeddings = network.backbone.get_input_embeddings()
        embeddings.register_forward_hook(lambda *_, name=name: calls.update({name: calls[name] + 1}))
    with scheduling(model=model) as scheduler:
        shared = Model(scheduler.engine)
        work = [text(scheduler, 0), lambda: shared.score("the king saw the old man .", order="left-to-right").nats]
        results(scheduler.submit(work[:1]))
        assert calls["sampling"] > 0 == calls["own"]
        generated, nats = results(scheduler.submit(work))
        assert calls["own"] > 0
    assert generated == text_alone(model, 0)
    assert nats == pytest.approx(model.score("the king saw the old man .", order="left-to-right").nats, rel=1e-5)


@pytest.mark.parametrize("kind", ["decoder", "vectors"])
def test_other_networks_take_turns(kind):
    order: list[int] = []

    def work(scheduler: Scheduler, number: int) -> Callable[[], str]:
        def run() -> str:
            states = []
            for state in trace_task(scheduler.engine, Task(max_new_tokens=4, seed=number), REQUEST):
                states.append(state)
                order.append(number)
                pause()
            return states[-1].text

        return run

    with scheduling(model=model_of(kind)) as scheduler:
        found = results(scheduler.submit([work(scheduler, number) for number in range(2)]))
        assert found == [results(scheduler.submit([work(scheduler, number)]))[0] for number in range(2)]
    assert order[:4] == [0, 1, 0, 1]


def test_fillings_scores_choices_and_embeddings_do_not_depend_on_company_either():
    with scheduling() as scheduler:
        shared, alone = Model(scheduler.engine), trained()

        def work() -> tuple:
            return (
                shared.fill("the [MASK] saw [BLANK] .", num_alternatives=2, max_blank_tokens=2),
                shared.score("the king saw a river ."),
                shared.score("the king saw a river .", order="confidence"),
                shared.choose("the [BLANK] saw a river .", ["king", "old king"]),
                shared.embed(["the king", "a queen saw the sea"]).tolist(),
            )

        [first] = results(scheduler.submit([work]))
        crowd = [text(scheduler, seed, 8) for seed in range(6)]
        *_, second = results(scheduler.submit([*crowd, work, work]))
    assert first == second
    assert [one.text for one in first[0]] == [
        one.text for one in alone.fill("the [MASK] saw [BLANK] .", num_alternatives=2, max_blank_tokens=2)
    ]
    assert first[1].nats == pytest.approx(alone.score("the king saw a river .").nats)
    torch.testing.assert_close(torch.tensor(first[4]), alone.embed(["the king", "a queen saw the sea"]))


def test_work_joins_and_leaves_between_passes():
    """A second text is submitted while the first is at work, and is done before it."""
    with scheduling() as scheduler:
        late: list = []
        steps: list[tuple[str, int]] = []

        def watch(step: int) -> None:
            steps.append(("first", step))
            if step == 2:
                late.extend(scheduler.submit([text(scheduler, 1, 3, lambda step: steps.append(("late", step)))]))

        [first] = scheduler.submit([text(scheduler, 0, 12, watch)])
        results([first])
        results(late)
        passes, sequences = scheduler._metrics.passes._value.get(), scheduler._metrics.sequences._value.get()
    assert steps.index(("late", 0)) < len(steps) - 4
    assert steps[-1][0] == "first"
    assert sequences > passes  # some were shared


def test_cancelled_work_stops_at_its_next_call():
    with scheduling() as scheduler:
        reached, go_on = threading.Event(), threading.Event()
        steps: list[int] = []

        def watch(step: int) -> None:
            steps.append(step)
            if step == 1:
                reached.set()
                go_on.wait()

        [work] = scheduler.submit([text(scheduler, 0, 12, watch)])
        [waiting] = scheduler.submit([text(scheduler, 1)])
        reached.wait()
        work.cancel()
        waiting.cancel()
        go_on.set()
        for one in (work, waiting):
            with pytest.raises(CancelledWorkError):
                one.future.result(timeout=60)
        assert steps == [0, 1]
        assert results(scheduler.submit([text(scheduler, 2)]))


def test_a_full_queue_refuses_all_of_a_request():
    with scheduling(Limits(running=1, waiting=2, texts=3)) as scheduler:
        reached, go_on = threading.Event(), threading.Event()

        def block() -> None:
            reached.set()
            go_on.wait()
            pause()

        accepted = scheduler.submit([block, lambda: 1])
        reached.wait()
        with pytest.raises(QueueFullError) as refused:
            scheduler.submit([lambda: 2, lambda: 3, lambda: 4])
        assert 1 <= refused.value.seconds <= 60
        go_on.set()
        assert results(accepted) == [None, 1]
        assert results(scheduler.submit([lambda: 2, lambda: 3])) == [2, 3]


def test_work_that_takes_too_long_is_stopped(monkeypatch):
    with scheduling() as scheduler:
        clock = iter(range(0, 10**6, 200))
        monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
        [work] = scheduler.submit([text(scheduler, 0, 12)])
        with pytest.raises(OvertimeError):
            work.future.result(timeout=60)


def test_an_error_is_that_of_its_own_work(monkeypatch):
    with scheduling() as scheduler:

        def wrong() -> None:
            raise ValueError("no")

        bad, good = scheduler.submit([wrong, text(scheduler, 0)])
        with pytest.raises(ValueError, match="no"):
            bad.future.result(timeout=60)
        assert good.future.result(timeout=60)
        for method in ("rows_for", "run"):
            with monkeypatch.context() as patch:
                patch.setattr(module.FixedShapes, method, lambda *_: (_ for _ in ()).throw(RuntimeError("memory")))
                [failed] = scheduler.submit([text(scheduler, 0)])
                with pytest.raises(RuntimeError, match="memory"):
                    failed.future.result(timeout=60)
            assert results(scheduler.submit([text(scheduler, 0)]))


def test_work_is_done_even_if_the_sizes_of_passes_cannot_be_tried_out(monkeypatch, caplog):
    monkeypatch.setattr(module.FixedShapes, "warm_up", lambda *_: (_ for _ in ()).throw(RuntimeError("memory")))
    with caplog.at_level("WARNING", "diffusionbert"), scheduling() as scheduler:
        assert results(scheduler.submit([text(scheduler, 0)])) == [text_alone(trained(), 0)]
    assert "the sizes of passes could not be tried out: memory" in caplog.messages


def test_large_calls_are_answered_one_at_a_time(monkeypatch):
    monkeypatch.setattr(module, "LARGE", 8)
    served: list[list[int]] = []
    run = module.FixedShapes.run

    def watched(shapes, rows, length, num_rows):
        served.append([int(row.tokens[1]) for row in rows])
        return run(shapes, rows, length, num_rows)

    monkeypatch.setattr(module.FixedShapes, "run", watched)
    with scheduling() as scheduler:

        def large(token: int) -> Callable[[], tuple[int, ...]]:
            def work() -> tuple[int, ...]:
                tokens = torch.full((70, 9), token)
                mask = torch.ones_like(tokens, dtype=torch.bool)
                return scheduler.engine.network(tokens, mask, torch.zeros(70, dtype=torch.float64), mask).shape

            return work

        found = results(scheduler.submit([large(40), large(41), text(scheduler, 0)]))
    assert found[:2] == [(630, len(trained().engine.statistics.allowed))] * 2
    owners = [{40, 41}.intersection(tokens) for tokens in served]
    assert all(len(one) <= 1 for one in owners)
    flat = [one for some in owners for one in some]
    assert flat == sorted(flat)
    assert len(served[0]) > 1


def test_closing_finishes_what_was_accepted():
    with scheduling() as scheduler:
        works = scheduler.submit([text(scheduler, seed) for seed in range(4)])
    assert all(work.future.done() and not work.future.exception() for work in works)
    with pytest.raises(QueueFullError):
        scheduler.submit([lambda: 1])
