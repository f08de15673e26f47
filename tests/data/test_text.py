"""Edited text: what is not generated is copied byte for byte, with every kind of tokenizer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import SENTENCE, VOCABULARIES, byte_pairs, wordpiece

from diffusionbert.data.files import Pair
from diffusionbert.data.text import EditedText, require_no_blanks
from diffusionbert.data.tokenizer import Vocabulary

NASTY = [
    "Die Straße in München ist schön 🍕 .",
    "  The OLD  king\t(saw)\n\nthe city; it's U.S.-born…  ",
    "e\u0301cole cafe\u0301s ﬁn ½ №5 ｆｕｌｌ",
    "我们看到国王 the king 王 король βασιλιάς ملك",
    "👩‍👩‍👧‍👦x🙂king🙂 \u200bzero\u200dwidth\ufeff soft\xadhyphen",
    "[UNK] [SEP] <s> </s> ##ing Ġking ▁king",
    "a\x00b\x07c\r\nd\u2028e\u00a0f",
]
TEXTS = st.one_of(
    st.sampled_from(NASTY),
    st.lists(
        st.sampled_from(["king", "The", " ", "  ", "\n", "🙂", "é", "e\u0301", "王", ".", "'s", "(", "-", "x", "7"])
    ).map("".join),
    st.text(max_size=30).filter(lambda text: not any("\ud800" <= one <= "\udfff" for one in text)),
)
KINDS = st.sampled_from(sorted(VOCABULARIES))


def word_token(vocabulary: Vocabulary) -> int:
    """A token that is a whole word."""
    tokens = torch.arange(vocabulary.size)[vocabulary.allowed & ~vocabulary.continuation & ~vocabulary.forbidden]
    return next(token for token in tokens.tolist() if len(vocabulary.decode([token]).strip()) > 1)


def rewritten(text: EditedText, editable: list[bool], token: int) -> str:
    tokens = [token if free else old for old, free in zip(text.tokens, editable, strict=True)]
    return text.render(tokens, editable, capitalize=False)


def is_subsequence(parts: list[str], text: str) -> bool:
    at = 0
    for part in parts:
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


# ---- prompts --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(TEXTS, KINDS)
@settings(deadline=None, max_examples=60, derandomize=True)
def test_a_prompt_is_kept_byte_for_byte(prompt, kind):
    vocabulary = VOCABULARIES[kind]()
    text = EditedText.of(vocabulary, prompt).continued(3)
    assert len(text.tokens) == len(text.spans)
    tokens = torch.tensor(text.tokens)
    editable = tokens == vocabulary.mask_id
    assert int(editable.sum()) == 3
    tokens[editable] = word_token(vocabulary)
    rendered = text.render(tokens, editable, capitalize=True)
    assert rendered.startswith(prompt)
    assert len(rendered) > len(prompt)
    assert "[UNK]" not in rendered[len(prompt) :]
    shown = text.render(text.tokens, editable, capitalize=False)
    assert shown == prompt + ("" if not prompt or prompt[-1].isspace() else " ") + "[MASK] [MASK] [MASK]"


def test_the_decoder_decides_about_white_space_after_a_prompt():
    vocabulary = wordpiece()
    for prompt, end in [("The king", "."), ("The king ", "."), ("it '", "s"), ("the king", "saw")]:
        text = EditedText.of(vocabulary, prompt).continued(1)
        editable = [token == vocabulary.mask_id for token in text.tokens]
        rendered = rewritten(text, editable, vocabulary.pieces(end)[0])
        assert rendered in (prompt + end, f"{prompt} {end}")
        assert (rendered == f"{prompt} {end}") == (end == "saw")


def test_a_source_is_no_part_of_the_text():
    vocabulary = wordpiece()
    text = EditedText.of(vocabulary, "The", source="A Queen").continued(2)
    [pair] = vocabulary.encode_pairs([Pair("A Queen", "The")])
    assert list(text.tokens) == [*pair[:-1], vocabulary.mask_id, vocabulary.mask_id, pair[-1]]
    assert len(text.own) == 3
    assert text.render(text.tokens, [False] * len(text.tokens), capitalize=True) == "The"


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_blanks_in_a_prompt_are_rejected(kind):
    vocabulary = VOCABULARIES[kind]()
    for mark in ("[MASK]", "[BLANK]", vocabulary.tokenizer.mask_token):
        with pytest.raises(ValueError, match=r"^a prompt must not contain .*, got 'the .* king'; use `fill` to fill"):
            require_no_blanks(vocabulary, f"the {mark} king", "a prompt")
    require_no_blanks(vocabulary, "the mask, [mask] or MASK", "a prompt")


# ---- rewriting ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(TEXTS, KINDS, st.integers(0, 3), st.sampled_from([0.2, 0.5, 1.0]))
@settings(deadline=None, max_examples=120, derandomize=True)
def test_what_is_not_rewritten_is_kept_byte_for_byte(string, kind, seed, strength):
    vocabulary = VOCABULARIES[kind]()
    text = EditedText.of(vocabulary, string)
    assert text.render(text.tokens, [False] * len(text.tokens), capitalize=True) == string
    if not text.words:
        with pytest.raises(ValueError, match=r"^nothing to rewrite in "):
            text.rewriting(strength, 1, seed)
        return
    editable = text.rewriting(strength, 1, seed).editable[0].tolist()
    spans = [text.spans[position] for position, free in enumerate(editable) if free]
    covered = {index for start, end in spans for index in range(start, end)}
    kept = "".join("\0" if index in covered else character for index, character in enumerate(string)).split("\0")
    river = word_token(vocabulary)
    rendered = rewritten(text, editable, river)
    assert is_subsequence([part for part in kept if part], rendered)
    assert rendered.startswith(kept[0])
    assert rendered.endswith(kept[-1])
    # White space stays, and unknown characters are never in a rewritten part.
    assert not any(string[index].isspace() and string[index - 1 : index] in kept for index in covered)
    assert all(token != vocabulary.unk_id for token, free in zip(text.tokens, editable, strict=True) if free)
    # The same tokens again are the same string, in its own case.
    assert text.render(text.tokens, editable, capitalize=False) == string
    assert "[UNK]" not in rendered or "[UNK]" in string


@pytest.mark.parametrize(("strength", "num_masked"), [(0.01, 1), (0.3, 3), (0.4, 4), (0.5, 5), (1.0, 10)])
def test_rewriting_masks_the_given_fraction_of_the_tokens(strength, num_masked):
    text = EditedText.of(wordpiece(), SENTENCE)
    canvas = text.rewriting(strength, 4, seed=0)
    assert canvas.editable.sum(dim=1).tolist() == [num_masked] * 4
    assert canvas.tokens[:, 1:-1].tolist() == wordpiece().own([SENTENCE]) * 4
    assert not canvas.editable[:, [0, -1]].any()


def test_sequences_mask_different_words_determined_by_the_seed():
    text = EditedText.of(wordpiece(), SENTENCE)
    first, again, other = (text.rewriting(0.4, 8, seed).editable for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len({tuple(editable) for editable in first.tolist()}) > 1
    assert torch.equal(first[:3], text.rewriting(0.4, 3, seed=0).editable)
    fraction = text.rewriting(0.4, 2000, seed=0).editable.double().mean(dim=0)[1:-1]
    assert float((fraction - 0.4).abs().max()) < 0.05


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_whole_words_are_masked(kind):
    text = EditedText.of(VOCABULARIES[kind](), "the kingxyz painted unbelievable (museums), twice")
    words = [{text.text[slice(*text.spans[position])] for position in word} for word in text.words]
    assert sum(len(word) > 1 for word in words) >= 3
    for seed in range(8):
        editable = text.rewriting(0.5, 4, seed).editable
        assert bool((editable.sum(dim=1) <= round(0.5 * len(text.own))).all())
        for word in text.words:
            assert set(editable[:, list(word)].sum(dim=1).tolist()) <= {0, len(word)}


def test_no_kept_word_is_continued():
    vocabulary = wordpiece()
    text = EditedText.of(vocabulary, "the kingx saw")
    continues = vocabulary.continuation[torch.tensor(text.tokens)].tolist()
    assert text.word_starts[0].tolist() == [
        not flag and span is not None for flag, span in zip(continues, text.spans, strict=True)
    ]
    assert any(continues)
    # A word after a bracket has no space in it, so nothing is known of its first token.
    bracket = EditedText.of(byte_pairs(), "a (king")
    assert not bracket.word_starts[0, bracket.own[-1]]


def test_rewriting_always_masks_unwanted_words():
    text = EditedText.of(wordpiece(), SENTENCE)
    for strength, number in ((0.1, 3), (0.6, 6)):
        editable = text.rewriting(strength, 20, seed=0, unwanted=["Paris", "old king"]).editable
        assert editable.sum(dim=1).tolist() == [number] * 20
    positions = [SENTENCE.split().index(word) + 1 for word in ("paris", "old", "king")]
    assert bool(text.rewriting(0.1, 20, seed=0, unwanted=["Paris", "old king"]).editable[:, positions].all())
    assert text.rewriting(0.1, 1, seed=0, unwanted=["kin"]).editable.sum() == 1
    with pytest.raises(ValueError, match="'🙂' cannot be replaced: the vocabulary does not know it"):
        EditedText.of(wordpiece(), "the 🙂 king").rewriting(0.5, 1, seed=0, unwanted=["🙂"])


@pytest.mark.parametrize("strength", [0.0, -0.1, 1.01, float("nan")])
def test_a_strength_outside_0_and_1_is_rejected(strength):
    with pytest.raises(ValueError, match=r"^`strength` must be in \(0, 1\], got .*; 0\.4 masks 40 %"):
        EditedText.of(wordpiece(), SENTENCE).rewriting(strength, 1, seed=0)


def test_a_text_without_known_words_cannot_be_rewritten():
    for text in ("", "   ", "\x00"):
        with pytest.raises(ValueError, match=r"^nothing to rewrite in '.*'; give a sentence$"):
            EditedText.of(wordpiece(), text).rewriting(0.4, 1, seed=0)
    emoji = EditedText.of(wordpiece(), "🙂 🍕")
    assert emoji.unknown == ("🙂", "🍕")
    with pytest.raises(
        ValueError, match=r"^nothing to rewrite in '🙂 🍕'; the vocabulary knows none of its characters$"
    ):
        emoji.rewriting(0.4, 1, seed=0)


@pytest.mark.parametrize(
    ("string", "replaced", "token", "expected"),
    [
        ("It's", "It", "that", "that's"),
        ("the U.S. king", "S", "a", "the U.a. king"),
        ("saw (Kings)", "Kings", "queen", "saw (queen)"),
        ("The king.", ".", "saw", "The king saw"),
        ("The king.", ".", "!", "The king!"),
        ("The king, who", ",", "and", "The king and who"),
        ("king  \n saw", "king", "queen", "queen  \n saw"),
        ("saw a king-like", "king", "queen", "saw a queen-like"),
    ],
)
def test_white_space_at_the_borders_is_the_users_or_else_the_decoders(string, replaced, token, expected):
    vocabulary = wordpiece()
    text = EditedText.of(vocabulary, string)
    start = string.index(replaced)
    inside = [span is not None and start <= span[0] < start + len(replaced) for span in text.spans]
    pieces = iter(vocabulary.pieces(token) + [vocabulary.pieces(token)[-1]] * 9)
    assert sum(inside) >= 1
    if sum(inside) == 1 == len(vocabulary.pieces(token)):
        assert rewritten(text, inside, next(pieces)) == expected


def test_only_the_generated_part_is_capitalized_and_only_if_the_tokenizer_lowers():
    for vocabulary, expected in ((wordpiece(), "king saw. He"), (byte_pairs(), "king saw. he")):
        text = EditedText.of(vocabulary, "king saw.").continued(len(vocabulary.pieces("he")))
        editable = [token == vocabulary.mask_id for token in text.tokens]
        pieces = iter(vocabulary.pieces("he"))
        tokens = [next(pieces) if free else token for token, free in zip(text.tokens, editable, strict=True)]
        assert text.render(tokens, editable, capitalize=True) == expected
        assert text.render(tokens, editable, capitalize=False) == "king saw. he"
