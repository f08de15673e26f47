"""Linear layers in integers: close to plain ones, the same in any company, and float32 with gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from backbones import backbone_of, mixed_canvas, tokenizer_allowed
from torch import nn

from diffusionbert.networks import int8
from diffusionbert.networks.int8 import int8_copy, use_int8
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


@pytest.mark.parametrize(
    ("width", "capabilities", "expected"),
    [(512, {"avx512_vnni": True}, True), (32, {"avx512_vnni": True}, False), (512, {"avx512_vnni": False}, False)],
)
def test_integers_pay_for_wide_networks_on_cpus_made_for_them(width, capabilities, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    backbone = backbone_of("bert")
    monkeypatch.setattr(backbone.config, "hidden_size", width)
    assert int8.pays(backbone) is expected
