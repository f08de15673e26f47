"""Batches of sentences, and lengths drawn from a histogram."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from vocabularies import SENTENCE, wordpiece

from diffusionbert.data.canvas import Sentences, batch_of, drawn_lengths
from diffusionbert.data.tokenizer import Vocabulary
from diffusionbert.diffusion.shapes import Batch


@pytest.fixture
def words() -> Vocabulary:
    return wordpiece()


def is_framed(vocabulary: Vocabulary, canvas: Batch) -> bool:
    """Whether each sequence begins and ends with a special token, and only positions between them are editable."""
    last = canvas.attention_mask.sum(dim=1) - 1
    sequence = torch.arange(len(last))
    ends = torch.stack([canvas.tokens[:, 0], canvas.tokens[sequence, last]])
    return bool(
        vocabulary.special[ends].all()
        and not canvas.editable[:, 0].any()
        and not canvas.editable[sequence, last].any()
        and (canvas.tokens[~canvas.attention_mask] == vocabulary.pad_id).all()
        and not (canvas.editable & ~canvas.attention_mask).any()
    )


# ---- sentences, batches, lengths ------------------------------------------------------------------------------------


def test_batches_of_sentences_are_selected_by_index(words):
    sentences = Sentences(words, ("the king .", SENTENCE, "nobody"))
    assert sentences.lengths.tolist() == [5, 12, 3]
    batch = sentences.batch([2, 0])
    assert batch.example.tolist() == [2, 0]
    assert batch.editable.sum(dim=1).tolist() == [1, 3]
    assert words.decode(batch.tokens[1]) == "the king."
    assert is_framed(words, batch)


def test_an_unknown_character_is_an_editable_token(words):
    batch = Sentences(words, ("the 🙂 .",)).batch([0])
    assert int(batch.editable.sum()) == 3


def test_a_batch_of_no_sequences_is_empty(words):
    assert batch_of(words, []).tokens.shape == (0, 0)


def frequencies(lengths: list[int], size: int) -> Tensor:
    return torch.tensor(lengths).bincount(minlength=size).double() / len(lengths)


def test_lengths_follow_the_histogram():
    histogram = torch.tensor([7, 0, 10, 30, 0, 60])  # length 0 is never drawn
    drawn = frequencies(drawn_lengths(histogram, 20_000, seed=0), 6)
    assert float((drawn - torch.tensor([0, 0, 0.1, 0.3, 0, 0.6])).abs().max()) < 0.015


def test_lengths_have_a_minimum():
    drawn = frequencies(drawn_lengths(torch.tensor([0, 50, 10, 30, 10]), 20_000, seed=1, shortest=2), 5)
    assert float((drawn - torch.tensor([0, 0, 0.2, 0.6, 0.2])).abs().max()) < 0.015
    with pytest.raises(ValueError, match=r"^the training corpus has no sequence of 5 or more tokens; give `length`$"):
        drawn_lengths(torch.tensor([0, 50, 10, 30, 10]), 3, seed=0, shortest=5)


def test_each_length_depends_on_the_seed_and_the_index_alone():
    histogram = torch.ones(50)
    assert drawn_lengths(histogram, 7, seed=3)[:4] == drawn_lengths(histogram, 4, seed=3)
    assert drawn_lengths(histogram, 7, seed=3) != drawn_lengths(histogram, 7, seed=4)
    assert set(drawn_lengths(histogram, 5000, seed=0)) == set(range(1, 50))
