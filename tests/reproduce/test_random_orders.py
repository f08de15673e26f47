"""The looseness of a bound, measured with mixtures of random orders."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from claims import percent
from random_orders import measure
from report import report
from tiny_models import toy_sentences, trained_run

from diffusionbert.evaluation.dataset import open_evaluation_set
from diffusionbert.inference.engine import load_engine
from diffusionbert.inference.score import ScoreSettings, score
from diffusionbert.likelihood.orders import Order, RandomOrders
from diffusionbert.storage.files import read_json


@pytest.mark.slow
def test_mixtures_lie_below_the_bound_and_are_those_of_score(tmp_path):
    text = tmp_path / "toy.txt"
    text.write_text("\n".join(toy_sentences(40)) + "\n", encoding="utf-8")
    measure(tmp_path / "random_orders.json", (text,), str(trained_run()), sentences=4, orders=64)
    [row] = read_json(tmp_path / "random_orders.json")["rows"]
    found = row["quantities"]
    mixtures = [found[name]["perplexity"] for name in ("bound", *(f"random-{2**power}" for power in range(1, 7)))]
    # The mean over groups of orders never rises with their size, whatever the network.
    assert all(fewer >= more for fewer, more in pairwise(mixtures))
    assert mixtures[0] > 1.001 * mixtures[-1]
    assert found["random-64"]["ci95"][1] < 0
    engine = load_engine(str(trained_run()), dtype=torch.int8)
    texts = open_evaluation_set(engine, str(text), sentences=4).scored
    for order in (RandomOrders(64), Order.LEFT_TO_RIGHT, Order.ENTROPY):
        nats = [one.nats for one in score(engine, texts, ScoreSettings(order=order)) if one is not None]
        words = sum(len(one.split()) for one in texts)
        assert torch.tensor(sum(nats) / words).exp() == pytest.approx(found[order.value]["perplexity"], rel=1e-4)
    report(tmp_path, tmp_path / "tables")
    heading, _, shown = (tmp_path / "tables" / "random-orders.md").read_text(encoding="utf-8").splitlines()
    assert heading.startswith("| perplexity per word, 4 sentences | bound | one of 4 orders |")
    assert shown.startswith(f"| `toy` | {found['bound']['perplexity']:.1f} | {found['random-4']['perplexity']:.1f}, ")
    assert f", {percent(found['random-64']['change'])} [" in shown
