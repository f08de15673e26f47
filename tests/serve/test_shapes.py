"""Passes of fixed shapes: the same bits whatever the company, and only shapes that give them."""

from __future__ import annotations

import pytest
import torch
from tiny_models import model_of, trained

from diffusionbert.serve.shapes import TARGETS, FixedShapes, Row, _agreeing


def shapes_of(kind: str) -> FixedShapes:
    engine = (trained() if kind == "trained" else model_of(kind)).engine
    return FixedShapes(engine.masked_network, engine.vocabulary.pad_id)


def row_of(shapes: FixedShapes, length: int, seed: int, num_targets: int = 2) -> Row:
    generator = torch.Generator().manual_seed(seed)
    allowed = shapes.network.allowed.nonzero()[:, 0]
    tokens = allowed[torch.randint(len(allowed), (length,), generator=generator)]
    targets = torch.arange(length) < num_targets
    return Row(tokens, torch.rand((), dtype=torch.float64, generator=generator), targets, shapes)


@pytest.mark.parametrize("kind", ["trained", "layers", "prefix"])
def test_a_sequence_has_the_same_bits_in_every_usable_shape_and_company(kind):
    shapes = shapes_of(kind)
    row, length = row_of(shapes, 9, 0), shapes.length_of(9)
    [expected] = shapes.run([row], length, shapes.usable_rows(length)[-1])
    for size in shapes.usable_rows(length):
        for index in {0, size // 2, size - 1}:
            company = [row_of(shapes, 3 + seed % 12, seed, 1 + seed % 3) for seed in range(1, size + 1)]
            company[index] = row
            answers = shapes.run(company, length, size)
            assert torch.equal(answers[index], expected)
            assert [len(answer) for answer in answers] == [int(one.targets.sum()) for one in company]


def test_the_numbers_are_those_of_the_network():
    shapes = shapes_of("trained")
    row = row_of(shapes, 9, 0)
    with torch.no_grad():
        expected = shapes.network(row.tokens[None], torch.ones(1, 9, dtype=torch.bool), row.t[None], row.targets[None])
        hidden = shapes.network.hidden_states(row.tokens[None], torch.ones(1, 9, dtype=torch.bool))[0]
    [found] = shapes.run([row], 16, 4)
    torch.testing.assert_close(found, expected)
    [states] = shapes.run([Row(row.tokens, row.t, None, shapes)], 16, 2)
    torch.testing.assert_close(states, hidden)


def test_many_targets_are_computed_in_parts():
    shapes = shapes_of("trained")
    rows = [row_of(shapes, 12, seed, 12) for seed in range(8)]
    assert TARGETS[-1] < 8 * 12
    for row, found in zip(rows, shapes.run(rows, 16, 8), strict=True):
        assert torch.equal(found, shapes.run([row], 16, 8)[0])


def test_a_shape_that_gives_other_bits_is_not_used():
    values = torch.rand(8, 3)
    assert _agreeing([1, 2, 4, 8], lambda size: values[:size]) == [1, 2, 4, 8]
    assert _agreeing([1, 2, 4, 8], lambda size: values[:size] + (1e-7 if size == 2 else 0)) == [1, 4, 8]
    assert _agreeing([1, 2, 4, 8], lambda size: values[:size] * size) == [8]


def test_lengths_and_numbers_of_sequences_waste_little():
    shapes = shapes_of("trained")
    lengths = [shapes.length_of(number) for number in range(1, 25)]
    assert sorted(set(lengths)) == [16, 24]
    assert all(length >= number for number, length in enumerate(lengths, start=1))
    shapes._rows[16] = (1, 2, 4, 8, 16, 32)
    for waiting in range(1, 40):
        size = shapes.rows_for(16, waiting)
        assert size <= max(1, waiting * 4 / 3)
    assert [shapes.rows_for(16, waiting) for waiting in (1, 3, 5, 6, 17, 24, 32, 99)] == [1, 4, 4, 8, 16, 32, 32, 32]
    shapes._rows[16] = (32,)
    assert shapes.rows_for(16, 1) == 32
