"""The official OpenAI client against a real server."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from tiny_models import trained

from diffusionbert.inference.generate import generate
from diffusionbert.inference.tasks import Task
from diffusionbert.model import sampling_request


@pytest.fixture(scope="module")
def client(served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served[0]}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


@pytest.fixture(scope="module")
def name(client) -> str:
    [card] = client.models.list()
    assert client.models.retrieve(card.id) == card
    return card.id


def test_a_completion_is_the_models_text(client, name):
    found = client.completions.create(model=name, prompt="the king", max_tokens=6, n=2, seed=1, temperature=0.8)
    expected = trained().generate("the king", max_new_tokens=6, num_return_sequences=2, seed=1, temperature=0.8)
    assert [f"the king{choice.text}" for choice in found.choices] == expected
    assert {choice.finish_reason for choice in found.choices} == {"length"}
    assert found.usage.prompt_tokens == 2
    assert found.usage.completion_tokens == 12
    again = client.completions.create(model=name, prompt="the king", max_tokens=6, n=2, seed=1, temperature=0.8)
    assert [choice.text for choice in again.choices] == [choice.text for choice in found.choices]


def test_a_seed_is_drawn_and_returned(client, name):
    found = client.completions.create(model=name, prompt="the king", max_tokens=6)
    again = client.completions.create(model=name, prompt="the king", max_tokens=6, seed=found.model_extra["seed"])
    assert found.choices[0].text == again.choices[0].text


def test_several_prompts_have_n_texts_each(client, name):
    found = client.completions.create(model=name, prompt=["the king", "a queen"], max_tokens=4, n=2, seed=0, echo=True)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert [choice.text.split()[1] for choice in found.choices] == ["king", "king", "queen", "queen"]


@pytest.mark.parametrize("sampler", [None, "confidence", "ancestral", "remasking:eta=0.3"])
def test_a_stream_concatenates_to_the_whole_text(client, name, sampler):
    asked = {"model": name, "prompt": ["the king", "a queen"], "max_tokens": 8, "seed": 2, "n": 2}
    asked["extra_body"] = {"sampler": sampler, "steps": 16}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    texts = ["", "", "", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    ends = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert ends == ["length"] * 4
    assert chunks[-1].usage == whole.usage


def test_a_suffix_is_infilling(client, name):
    asked = {"model": name, "prompt": "the king saw", "max_tokens": 2, "temperature": 0}
    found = client.completions.create(**asked, suffix=" river .")
    request = sampling_request(None, 128, 1.0, 1, None, None)
    task = Task(prompt="the king saw", suffix=" river .", max_new_tokens=2, seed=found.model_extra["seed"])
    assert f"the king saw{found.choices[0].text} river ." == next(generate(trained().engine, task, request)).text
    assert found.usage.prompt_tokens == 5


def test_a_stop_ends_the_text(client, name):
    asked = {"model": name, "prompt": "the king", "max_tokens": 12, "seed": 0}
    text = client.completions.create(**asked).choices[0].text
    stop = text[4:7]
    choice = client.completions.create(**asked, stop=[stop, "never"]).choices[0]
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop"
    chunks = list(client.completions.create(**asked, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_log_probabilities_are_those_of_each_token_when_it_was_unmasked(client, name):
    asked = {"model": name, "prompt": "The king", "max_tokens": 5, "seed": 0, "logprobs": 2}
    choice = client.completions.create(**asked).choices[0]
    found = choice.logprobs
    assert "".join(found.tokens) == choice.text
    assert all(value <= 0 for value in found.token_logprobs)
    assert [len(one) for one in found.top_logprobs] == [2] * len(found.tokens)
    best = client.completions.create(**asked | {"temperature": 0}).choices[0].logprobs
    for token, value, top in zip(best.tokens, best.token_logprobs, best.top_logprobs, strict=True):
        assert max(top, key=top.get) == token  # spelled as in the text
        assert top[token] == value
    assert [choice.text[start:].startswith(token) for start, token in zip(found.text_offset, found.tokens, strict=True)]
    echoed = client.completions.create(**asked, echo=True).choices[0]
    assert echoed.text == f"The king{choice.text}"
    assert "".join(echoed.logprobs.tokens) == echoed.text
    assert echoed.logprobs.token_logprobs[:2] == [None, None]
    assert echoed.logprobs.token_logprobs[2:] == found.token_logprobs


def test_every_state_can_be_streamed_with_its_step_map(client, name):
    asked = {"model": name, "prompt": "the king", "max_tokens": 5, "seed": 0}
    extra = {"diffusing": True, "alternatives": 2}
    chunks = list(client.completions.create(**asked, stream=True, extra_body=extra))
    states = [chunk.choices[0].state for chunk in chunks if chunk.choices[0].state]
    assert [state["step"] for state in states] == list(range(len(states)))
    assert states[0]["text"] == "the king" + " [MASK]" * 5
    assert states[-1]["time"] == 0
    for token in states[-1]["tokens"][2:]:
        assert 1 <= token["step"] < len(states)
        assert states[token["step"] - 1]["tokens"][states[-1]["tokens"].index(token)]["id"] is None
        assert len(token["alternatives"]) == 2
    assert states[-1]["text"] == "the king" + "".join(chunk.choices[0].text for chunk in chunks)
    whole = client.completions.create(**asked, extra_body=extra)
    assert whole.choices[0].states == states


def test_embeddings_are_the_models(client, name):
    found = client.embeddings.create(
        model=name, input=["the king", "a queen saw the sea"]
    )  # the client asks for base64
    expected = trained().embed(["the king", "a queen saw the sea"])
    for one, other in zip(found.data, expected.tolist(), strict=True):
        assert one.embedding == pytest.approx(other, abs=1e-5)
    assert found.usage.prompt_tokens == 7
    plain = client.embeddings.create(model=name, input="the king", encoding_format="float")
    assert plain.data[0].embedding == pytest.approx(found.data[0].embedding)


@pytest.mark.parametrize(
    ("asked", "error", "param"),
    [
        ({"best_of": 3}, openai.BadRequestError, "best_of"),
        ({"frequency_penalty": 0.5}, openai.BadRequestError, "frequency_penalty"),
        ({"logit_bias": {"50256": -100}}, openai.BadRequestError, "logit_bias"),
        ({"user": "me"}, openai.BadRequestError, "user"),
        ({"extra_body": {"min_p": 0.1}}, openai.BadRequestError, "min_p"),
        ({"model": "gpt"}, openai.NotFoundError, "model"),
        ({"n": 9}, openai.UnprocessableEntityError, "texts"),
        ({"n": 0}, openai.UnprocessableEntityError, "n"),
        ({"extra_body": {"min-p": None}}, openai.BadRequestError, "min-p"),
        ({"prompt": [1, 2]}, openai.UnprocessableEntityError, "prompt.0"),
        ({"prompt": []}, openai.UnprocessableEntityError, "prompt"),
        ({"stop": ["a", "b", "c", "d", "e"]}, openai.UnprocessableEntityError, "stop"),
        ({"stop": ["a", ""]}, openai.UnprocessableEntityError, "stop.1"),
        ({"temperature": -1}, openai.UnprocessableEntityError, "temperature"),
        ({"max_tokens": 100}, openai.UnprocessableEntityError, None),
        ({"prompt": "the [MASK]"}, openai.UnprocessableEntityError, None),
        ({"prompt": "a" * 3000}, openai.UnprocessableEntityError, "characters"),
        ({"extra_body": {"sampler": "nope"}}, openai.UnprocessableEntityError, None),
        ({"extra_body": {"steps": 129}}, openai.UnprocessableEntityError, "steps"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_supported_is_refused_by_name(client, name, asked, error, param, stream):
    with pytest.raises(error) as refused:
        client.completions.create(**{"model": name, "prompt": "the king", "stream": stream} | asked)
    assert refused.value.param == param
    assert refused.value.type
    assert refused.value.code
    assert len(str(refused.value).splitlines()) == 1


def test_neutral_values_of_unsupported_parameters_are_accepted(client, name):
    found = client.completions.create(
        model=name, prompt="the king", max_tokens=2, best_of=1, frequency_penalty=0, presence_penalty=0, user=None
    )
    assert found.choices[0].text


def test_null_is_the_default(client, name):
    nullable = ("prompt", "suffix", "max_tokens", "n", "temperature", "top_p", "stop", "logprobs", "echo", "best_of")
    found = client.completions.create(model=name, seed=3, **dict.fromkeys(nullable))
    assert found.choices[0].text == client.completions.create(model=name, prompt="", seed=3).choices[0].text
    assert found.usage.completion_tokens == 16
