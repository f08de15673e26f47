"""Linear layers in integers: close to plain ones, the same in any company, and float32 with gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from backbones import backbone_of, mixed_canvas, tokenizer_allowed
from torch import nn

from diffusionbert.networks import int8
from diffusionbert.networks.int8 import int8_copy, leave_int8, use_int8
from diffusionbert.networks.masked import Denoiser
from diffusionbert.networks.time_conditioning import TimeAgnostic, TimeEmbedding


@pytest.fixture
def layers() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    plain = nn.Linear(48, 20)
    made = copy.deepcopy(plain)
    use_int8(made)
    return plain, made


@torch.no_grad()
def test_each_row_is_rounded_by_its_own_scale(layers):
    plain, made = layers
    rows = torch.randn(3, 5, 48) * torch.tensor([1e-3, 1.0, 1e4])[:, None, None]
    for given, found, expected in zip(rows, made(rows), plain(rows), strict=True):
        error = (found - expected).norm() / (expected - plain.bias).norm()
        assert 0 < float(error) < 0.02
        assert torch.equal(found, made(given))  # alone, to the last bit
    assert torch.equal(made(torch.zeros(1, 48))[0], plain.bias)
    assert made(torch.zeros(1, 0, 48)).shape == (1, 0, 20)


def test_gradients_and_changed_weights_are_those_of_the_parameters(layers):
    plain, made = layers
    rows = torch.randn(4, 48)
    assert torch.equal(plain(rows), made(rows))
    assert set(made.state_dict()) == {"weight", "bias"}
    with torch.no_grad():
        before = made(rows)
        made.weight.mul_(2)
        torch.testing.assert_close(made(rows) - made.bias, 2 * (before - made.bias))


@torch.no_grad()
@pytest.mark.parametrize("change", ["data", "parameter", "precision"])
def test_replaced_weights_are_rounded_anew(layers, change):
    """None of these counts as a change of the tensor, and the memory of the old one may be used again."""
    _, made = layers
    use_int8(twin := nn.Linear(48, 20))
    rows = torch.randn(4, 48)
    for _ in range(20):
        made.weight = nn.Parameter(torch.randn(20, 48))
        made(rows)
        if change == "data":
            made.weight.data = torch.randn(20, 48)
        elif change == "parameter":
            made.weight = nn.Parameter(torch.randn(20, 48))
        else:
            made.bfloat16().float()
        twin.load_state_dict(made.state_dict())
        assert torch.equal(made(rows), twin(rows))


@torch.no_grad()
def test_layers_can_leave_integers_again(layers):
    plain, made = layers
    leave_int8(made)
    rows = torch.randn(4, 48)
    assert torch.equal(made(rows), plain(rows))
    assert type(made) is nn.Linear
    assert set(vars(made)) == set(vars(plain))
    assert not set(made.buffers())


@pytest.mark.skipif(not int8._can_pack(), reason="torch has no exact integer kernels of oneDNN here")
@pytest.mark.parametrize("shape", [(0, 48, 20), (1, 48, 20), (26, 512, 1536), (130, 1344, 512), (7, 513, 33)])
def test_packed_weights_give_the_same_numbers_to_the_last_bit(shape):
    num_rows, width, num_outputs = shape
    torch.manual_seed(0)
    rows, rounded = (torch.randint(-127, 128, (number, width), dtype=torch.int8) for number in (num_rows, num_outputs))
    rows[:1], rounded[0] = 127, 127
    expected = (rows.double() @ rounded.double().t()).float()
    assert torch.equal(int8._Unpacked(rounded).products(rows), expected)
    assert torch.equal(int8._Packed(rounded).products(rows.clone()), expected)


@torch.no_grad()
@pytest.mark.parametrize("reason", ["missing", "inexact", "no dot products"])
def test_layers_do_without_packed_weights(layers, reason, monkeypatch):
    plain, made = layers
    rows = torch.randn(4, 48)
    expected, random_state = made(rows), torch.get_rng_state()
    if reason == "missing":
        monkeypatch.setattr(int8._Packed, "__init__", lambda *_: torch.ops.onednn.no_such_kernel)
    elif reason == "inexact":
        monkeypatch.setattr(int8._Packed, "products", lambda self, rows: torch.zeros(len(rows), 32))
    else:
        monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    int8._can_pack.cache_clear()
    use_int8(plain)
    assert isinstance(plain.integers, int8._Unpacked)
    assert torch.equal(plain(rows), expected)
    assert torch.equal(torch.get_rng_state(), random_state)  # looking for kernels draws nothing
    int8._can_pack.cache_clear()


@torch.no_grad()
def test_a_network_in_integers_is_close_to_itself():
    network = Denoiser(backbone_of("bert"), TimeAgnostic(), tokenizer_allowed()).eval()
    canvas = mixed_canvas(network.backbone)
    query = canvas.tokens, canvas.attention_mask, torch.ones(len(canvas.tokens), dtype=torch.float64), canvas.editable
    expected = network(*query)
    use_int8(network.backbone)
    found = network(*query)
    assert not torch.equal(found, expected)
    divergence = torch.where(expected.isinf(), 0.0, expected.exp() * (expected - found)).sum(dim=-1)
    assert float(divergence.max()) < 1e-2


@torch.no_grad()
@pytest.mark.parametrize("time", [TimeEmbedding.NONE, TimeEmbedding.PREFIX, TimeEmbedding.LAYERS_RANDOM])
def test_a_copy_in_integers_shares_the_parameters_and_leaves_the_network_as_it_was(time):
    backbone = backbone_of("modernbert")
    network = Denoiser(backbone, time.conditioning(backbone, 8), tokenizer_allowed()).eval()
    canvas = mixed_canvas(network.backbone)
    query = canvas.tokens, canvas.attention_mask, torch.ones(len(canvas.tokens), dtype=torch.float64), canvas.editable
    expected, made = network(*query), int8_copy(network)
    assert [one.data_ptr() for one in made.parameters()] == [one.data_ptr() for one in network.parameters()]
    found = made(*query)
    assert not torch.equal(found, expected)
    assert torch.equal(network(*query), expected)
    use_int8(network.backbone)
    assert torch.equal(network(*query), found)
    assert torch.equal(copy.deepcopy(network)(*query), found)


@pytest.mark.parametrize(
    ("width", "capabilities", "expected"),
    [(512, {"avx512_vnni": True}, True), (32, {"avx512_vnni": True}, False), (512, {"avx512_vnni": False}, False)],
)
def test_integers_pay_for_wide_networks_on_cpus_made_for_them(width, capabilities, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    backbone = backbone_of("bert")
    monkeypatch.setattr(backbone.config, "hidden_size", width)
    assert int8.pays(backbone) is expected
