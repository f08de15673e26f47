"""Captured calls equal plain ones, whatever is padded and whichever graph is used; on a CPU a "graph" is a function."""

from __future__ import annotations

import pytest
import torch
from backbones import MASK, backbone_of, mixed_canvas, timed_bert, tokenizer_allowed
from drawing import drawing
from torch import Tensor

from diffusionbert.diffusion.absorbing import Absorbing
from diffusionbert.diffusion.schedules import Linear
from diffusionbert.diffusion.shapes import Batch, Targets
from diffusionbert.diffusion.tokens import LogitsWarper
from diffusionbert.networks import captured
from diffusionbert.networks.base import AnswersAt, Network, copy_sharing_parameters
from diffusionbert.networks.captured import Captured, Size, compile_layers
from diffusionbert.networks.masked import Denoiser
from diffusionbert.networks.time_conditioning import PrefixTime, TimeAgnostic
from diffusionbert.samplers.base import last_state
from diffusionbert.samplers.first_hitting import FirstHitting

NETWORKS = {
    "time-agnostic": lambda: Denoiser(backbone_of("bert"), TimeAgnostic(), tokenizer_allowed()).eval(),
    "prefix": lambda: Denoiser(backbone_of("bert"), PrefixTime(backbone_of("bert"), 8), tokenizer_allowed()).eval(),
    "layers": timed_bert,
}


class Recorder:
    """Stands in for CUDA graphs: replays a function by calling it, into the same tensor."""

    def __init__(self) -> None:
        self.num_captured = self.num_replayed = 0

    def __call__(self, function):
        self.num_captured += 1
        with torch.no_grad():
            result: Tensor = function().clone()

        def replay() -> None:
            self.num_replayed += 1
            result.copy_(function())

        return replay, result


def calls(batch: Batch, number: int) -> list[tuple[Tensor, Tensor | None, Tensor, Tensor]]:
    """Queries about ever fewer sequences and other targets."""
    generator = torch.Generator().manual_seed(number)
    found = []
    for size in (len(batch.tokens), 3, 1, 2, len(batch.tokens)):
        part = batch.select(torch.arange(size))
        masked = (torch.rand(part.tokens.shape, generator=generator) < 0.4) & part.attention_mask
        masked[0, 1] = True
        t = torch.rand(size, generator=generator, dtype=torch.float64)
        found.append((part.tokens, part.attention_mask, t, masked))
    return found


@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
def test_captured_calls_equal_plain_ones(make):
    network, recorder = make(), Recorder()
    graphed = Captured(network, recorder)
    assert isinstance(graphed, AnswersAt)
    assert isinstance(graphed, Network)
    batch = mixed_canvas(network.backbone)
    with torch.no_grad():
        for number in range(5):
            for query in calls(batch, number):
                torch.testing.assert_close(graphed(*query), network(*query))
            tokens, _, t, _ = query
            positions = torch.tensor([1, 3])
            torch.testing.assert_close(
                graphed.log_probs_at(tokens, None, t, positions), network.log_probs_at(tokens, None, t, positions)
            )
    assert 0 < recorder.num_captured < recorder.num_replayed


def test_a_graph_serves_any_number_of_targets():
    network, recorder = NETWORKS["time-agnostic"](), Recorder()
    graphed = Captured(network, recorder)
    tokens, t = torch.arange(5, 21).view(2, 8), torch.ones(2, dtype=torch.float64)
    with torch.no_grad():
        for count in (1, 2, 3, 5, 9, 14):
            query = tokens, None, t, torch.arange(count)
            torch.testing.assert_close(graphed.log_probs_at(*query), network.log_probs_at(*query))
    assert recorder.num_captured == 1


def test_an_answer_is_not_overwritten_by_the_next_call():
    network = NETWORKS["time-agnostic"]()
    graphed = Captured(network, Recorder())
    tokens = torch.full((2, 8), 7)
    t, positions = torch.ones(2, dtype=torch.float64), torch.tensor([1])
    answers = [graphed.log_probs_at(tokens + number, None, t, positions) for number in range(5)]
    for number, answer in enumerate(answers):
        torch.testing.assert_close(answer, network.log_probs_at(tokens + number, None, t, positions).detach())


def wrong(function):
    result = function().clone()
    return lambda: None, result  # never reads its inputs again


def failing(function):
    raise RuntimeError("operation not permitted when stream is capturing\nmore lines")


@pytest.mark.parametrize("capture", [wrong, failing])
def test_graphs_that_err_are_not_used_and_that_is_said_once(capture, caplog):
    network, t, positions = NETWORKS["time-agnostic"](), torch.ones(2, dtype=torch.float64), torch.tensor([1])
    graphed = Captured(network, capture)
    with caplog.at_level("WARNING", logger="diffusionbert"), torch.no_grad():
        for number in range(8):
            query = torch.full((2, 8 + 8 * (number % 2)), number), None, t, positions
            torch.testing.assert_close(graphed.log_probs_at(*query), network.log_probs_at(*query))
    assert [message.partition(" (")[0] for message in caplog.messages] == [
        "generating without CUDA graphs, which do not work here"
    ]


def test_a_graph_is_captured_once_its_size_has_come_up_often_enough():
    recorder = Recorder()
    graphed = Captured(NETWORKS["time-agnostic"](), recorder)

    def call(sequences: int, times: int) -> tuple[int, int]:
        tokens = torch.full((sequences, 8), 7)
        for _ in range(times):
            graphed.log_probs_at(tokens, None, torch.ones(sequences, dtype=torch.float64), torch.arange(sequences))
        return recorder.num_captured, recorder.num_replayed

    assert call(8, captured.WARM_UPS) == (0, 0)
    assert call(8, 1) == (1, 2)  # once to be compared with a plain call
    assert call(5, 3) == (1, 5)  # padded to 8
    assert call(2, captured.WARM_UPS) == (1, 5)
    assert call(2, 1) == (2, 7)


def test_the_size_of_a_call_depends_on_nothing_called_before():
    """Else its rounding, and with it a text, would depend on the calls before it."""
    network, seen = NETWORKS["time-agnostic"](), []
    hidden_at, log_probs, compared = network.hidden_at, network.log_probs, captured.COMPARED

    def seen_hidden_at(tokens, *inputs):
        seen.append(tuple(tokens.shape))
        return hidden_at(tokens, *inputs)

    def seen_log_probs(hidden):
        seen.append(len(hidden))
        return log_probs(hidden)

    network.hidden_at, network.log_probs = seen_hidden_at, seen_log_probs  # type: ignore[method-assign]
    graphed = Captured(network, Recorder())
    for sequences in (3, 8, 3, 3, 3, 3):
        tokens = torch.full((sequences, 7), 7)
        graphed.log_probs_at(tokens, None, torch.ones(sequences, dtype=torch.float64), torch.arange(sequences))
    assert set(seen) == {(4, 8), 4, (8, 8), 8, min(compared, 4 * 8)}


@pytest.mark.parametrize(
    ("call", "padded"),
    [
        ((1, 64, 1), (1, 64, 1)),
        ((5, 64, 2), (8, 64, 8)),
        ((32, 64, 33), (32, 64, 64)),
        ((200, 64, 300), (224, 64, 320)),
    ],
)
def test_a_busy_gpu_is_not_given_twice_the_work(call, padded):
    assert Size(*call, is_padded=False).rounded() == (*padded, False)


def test_targets_may_be_given_by_their_positions():
    network = NETWORKS["prefix"]()
    for tokens, attention_mask, t, masked in calls(mixed_canvas(network.backbone), 0):
        assert attention_mask is not None
        by_mask = network(tokens, attention_mask, t, masked)
        assert torch.equal(by_mask, network.log_probs_at(tokens, attention_mask, t, Targets.of(masked).positions))
    alone, t = mixed_canvas(network.backbone).select(torch.tensor([1])), torch.ones(1, dtype=torch.float64)
    seen = network(alone.tokens, alone.attention_mask, t, alone.editable)  # nothing is padding
    assert torch.equal(seen, network.log_probs_at(alone.tokens, None, t, Targets.of(alone.editable).positions))


class Compiler:
    """Stands in for a compiler: counts what it is given, and runs it as it is."""

    def __init__(self) -> None:
        self.num_compiled = 0

    def __call__(self, graph, inputs):
        self.num_compiled += 1
        return graph.forward


def compiled(network: Denoiser, compiler) -> Denoiser:
    copy = copy_sharing_parameters(network)
    compile_layers(copy, compiler)
    return copy


@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
def test_a_layer_is_compiled_once_for_all_layers_and_sizes(make):
    torch._dynamo.reset()
    network, compiler = make(), Compiler()
    graphed, batch = Captured(compiled(network, compiler), Recorder(), compiled=True), mixed_canvas(network.backbone)
    with torch.no_grad():
        for number in range(3):
            for query in calls(batch, number):
                torch.testing.assert_close(graphed(*query), network(*query))
    # The embeddings, and a layer; one more where the time is not yet or no longer in the inputs.
    assert 2 <= compiler.num_compiled <= 3
    own = {id(parameter) for parameter in network.parameters()}
    assert all(id(parameter) in own for parameter in graphed.network.parameters())
    assert not any("forward" in vars(module) for module in network.modules())


def test_a_network_that_cannot_be_compiled_is_used_as_it_is_and_that_is_said_once(caplog):
    torch._dynamo.reset()
    network, t, positions = NETWORKS["time-agnostic"](), torch.ones(2, dtype=torch.float64), torch.tensor([1])

    def compiler(graph, inputs):
        raise RuntimeError("no compiler")

    graphed = Captured(compiled(network, compiler), Recorder(), compiled=True)
    with caplog.at_level("WARNING", logger="diffusionbert"), torch.no_grad():
        for number in range(5):
            query = torch.full((2, 8), number), None, t, positions
            torch.testing.assert_close(graphed.log_probs_at(*query), network.log_probs_at(*query))
    assert [message.partition(" (")[0] for message in caplog.messages] == [
        "generating without compilation, which does not work here"
    ]


def test_a_call_that_does_not_fit_says_nothing_of_compilation(caplog):
    network = NETWORKS["time-agnostic"]()

    def hidden_at(*inputs):
        raise torch.OutOfMemoryError("out of memory")

    network.hidden_at = hidden_at  # type: ignore[method-assign]
    graphed = Captured(network, Recorder(), compiled=True)
    with caplog.at_level("WARNING", logger="diffusionbert"), pytest.raises(torch.OutOfMemoryError):
        graphed.log_probs_at(torch.full((2, 8), 7), None, torch.ones(2, dtype=torch.float64), torch.tensor([1]))
    assert not caplog.messages
    assert graphed._is_compiled


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [("bert", []), ("electra", ["generating without compilation: transformers does not name the layers of"])],
)
def test_a_network_whose_layers_have_no_name_is_not_compiled_and_that_is_said(architecture, expected, caplog):
    network = Denoiser(backbone_of(architecture), TimeAgnostic(), tokenizer_allowed())
    with caplog.at_level("WARNING", logger="diffusionbert"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured, "find_spec", lambda name: name)
        assert captured.can_compile(network) is not bool(expected)
    assert [message.rpartition(" ")[0] for message in caplog.messages] == expected


@pytest.mark.parametrize(
    ("sequences", "length", "is_padded", "expected"),
    [(1, 10, False, (1, 16, True)), (64, 10, False, (64, 10, False)), (64, 10, True, (64, 16, True))],
)
def test_a_large_call_without_padding_keeps_its_length(sequences, length, is_padded, expected):
    network = NETWORKS["time-agnostic"]()
    size = Captured(network, Recorder())._size(sequences, length, sequences, is_padded=is_padded)
    assert (size.sequences, size.length, size.is_padded) == expected
    other = Captured(network, Recorder(), compiled=True)._size(sequences, length, sequences, is_padded=is_padded)
    assert other.sequences == max(2, sequences)  # a compiler would make another program for one


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
def test_cuda_graphs_equal_plain_calls(make):
    network = make().cuda()
    graphed, batch = Captured(network), mixed_canvas(network.backbone)
    with torch.no_grad():
        for number in range(4):
            for query in calls(batch, number):
                on_gpu = [part if part is None else part.cuda() for part in query]
                torch.testing.assert_close(graphed(*on_gpu), network(*on_gpu), atol=1e-4, rtol=1e-4)
    assert graphed._graphs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_first_hitting_does_not_wait_for_the_gpu_before_its_last_token():
    network = NETWORKS["time-agnostic"]().cuda()
    graphed, canvas = Captured(network), mixed_canvas(network.backbone).to("cuda")
    process = Absorbing(Linear(), MASK).to("cuda")
    sampler = drawing(FirstHitting(), process, steps=9, warper=LogitsWarper(0.9, top_k=5, forbidden=(9,)))
    for _ in range(4):  # the graphs are captured
        expected = last_state(sampler.sample(graphed, canvas, seed=0)).tokens
    assert torch.equal(expected, last_state(sampler.sample(network, canvas, seed=0)).tokens)
    with torch.no_grad():
        state = sampler.sampler.start(sampler.context, canvas, 0)
        torch.cuda.set_sync_debug_mode("error")
        try:
            while state.number < len(state.plan) - 1:
                state = sampler.sampler.update(state, sampler.sampler.query(state).run(graphed))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        state = sampler.sampler.update(state, sampler.sampler.query(state).run(graphed))
    assert torch.equal(state.tokens, expected)
