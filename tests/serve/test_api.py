"""The server's own endpoints, its operation, and what it refuses."""

from __future__ import annotations

import inspect
import json
import logging
import socket
import threading
import time

import httpx
import pytest
from serving import serving
from tiny_models import model_of, plain_roberta, trained

from diffusionbert.model import Model, load
from diffusionbert.serve import answers, scheduler, schema
from diffusionbert.serve.gate import access
from diffusionbert.serve.settings import Limits, ServerSettings

KEY = "a key of sixteen characters or more"


def post(client, path: str, **body):
    found = client.post(f"/v1/{path}", json=body)
    assert found.status_code == 200, found.text
    return found.json()


def events(client, path: str, **body) -> list[dict]:
    found = client.post(f"/v1/{path}", json=body | {"stream": True})
    assert found.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in found.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def eventually(condition) -> None:
    """Waits until something that another thread does is done."""
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it did not happen")


# ---- texts ----------------------------------------------------------------------------------------------------------


def test_blanks_are_filled_jointly_and_ranked(client):
    text = "the [MASK] saw [BLANK] ."
    found = post(client, "fill", text=[text, "a [MASK] ."], num_alternatives=2, max_blank_tokens=2, probabilities=3)
    expected = trained().fill(text, num_alternatives=2, max_blank_tokens=2)
    [first, second] = found["data"]
    assert [one["text"] for one in first["fillings"]] == [one.text for one in expected]
    assert [one["nats"] for one in first["fillings"]] == pytest.approx([one.nats for one in expected])
    assert first["fillings"][0]["conditional_on"] == "context"
    assert [len(some) for some in first["probabilities"]] == [3, 3]
    assert second["index"] == 1


def test_a_text_is_rewritten_as_the_model_does(client):
    text = "The  King saw a river ."
    found = post(client, "rewrite", text=text, strength=0.5, n=2, seed=1)
    assert [one["text"] for one in found["data"]] == trained().rewrite(text, 0.5, num_return_sequences=2, seed=1)
    spans = post(client, "rewrite", text=text, spans=[[10, 13]], n=3, seed=1)
    for one in spans["data"]:
        assert one["text"].startswith("The  King ")
        assert one["text"].endswith(" a river .")
    assert len({one["text"] for one in spans["data"]}) > 1
    shown = events(client, "rewrite", text=text, spans=[[10, 13]], n=3, seed=1, diffusing=True)
    last = {one["data"][0]["index"]: one["data"][0] for one in shown}
    assert [last[index]["text"] for index in range(3)] == [one["text"] for one in spans["data"]]
    assert all(one["done"] for one in last.values())
    long = " ".join(["the king saw a river ."] * 8)
    assert post(client, "rewrite", text=long, seed=1)["data"][0]["text"] == trained().rewrite(long, seed=1)
    assert client.post("/v1/rewrite", json={"text": long, "diffusing": True}).status_code == 422
    for wrong in ([], [[8, 4]], [[3, 5]], [[90, 95]]):
        refused = client.post("/v1/rewrite", json={"text": text, "spans": wrong})
        assert refused.status_code == 422
        assert "no word is in `spans`" in refused.json()["error"]["message"]
    assert client.post("/v1/rewrite", json={"text": text, "spans": [[-1, 3]]}).status_code == 422


def test_a_canvas_goes_on_from_any_state_with_locked_and_masked_tokens(client):
    masked = [{"state": "masked"}] * 6
    shown = events(client, "canvas", tokens=masked, seed=1, diffusing=True, alternatives=2)
    assert [one["state"]["step"] for one in shown] == list(range(len(shown)))
    assert [one["done"] for one in shown] == [False] * (len(shown) - 1) + [True]
    assert post(client, "canvas", tokens=masked, seed=1)["state"]["text"] == shown[-1]["state"]["text"]
    tokens = [{"id": one["id"], "state": "locked"} for one in shown[-1]["state"]["tokens"]]
    tokens[2] = {"state": "masked"}
    again = post(client, "canvas", tokens=tokens, seed=2, diffusing=True)
    kept = [one["id"] for one in again["state"]["tokens"]]
    assert kept[:2] + kept[3:] == [one["id"] for one in tokens[:2] + tokens[3:]]
    assert [one["given"] for one in again["state"]["tokens"]] == [True, True, False, True, True, True]
    assert again["states"][-1] == again["state"]
    [only] = events(client, "canvas", tokens=tokens, seed=2)
    assert only["state"] == again["state"]
    middle = [{"id": one["id"], "state": "masked" if one["id"] is None else "free"}
              for one in shown[2]["state"]["tokens"]]  # fmt: skip
    assert "[MASK]" not in post(client, "canvas", tokens=middle, seed=3)["state"]["text"]
    assert client.post("/v1/canvas", json={"tokens": [{"state": "free"}]}).status_code == 422


def test_tokens_have_their_characters(client):
    text = "The king [MASK]s ."
    found = post(client, "tokenize", text=text)
    assert found["max_length"] == trained().max_length
    assert [text[one["start"] : one["end"]] for one in found["tokens"]][:3] == ["The", "king", "[MASK]"]
    assert found["tokens"][2]["id"] is None
    assert found["tokens"][3]["text"].startswith("##")
    given = [{"id": one["id"], "state": "masked" if one["id"] is None else "locked"} for one in found["tokens"]]
    assert post(client, "canvas", tokens=given, seed=0)["state"]["text"].startswith("The king")
    plain = post(client, "tokenize", text="The  King .")["tokens"]
    kept = [{"id": one["id"], "state": "locked"} for one in plain[:2]] + [{"state": "masked"}]
    assert post(client, "canvas", tokens=kept, text="The  King .", seed=0)["state"]["text"].startswith("The  King ")
    assert client.post("/v1/tokenize", json={"text": "a [BLANK]"}).status_code == 422


def test_scores_have_kind_and_interval(client):
    text = "The king saw a river ."
    [found] = post(client, "score", text=text, tokens=True)["data"]
    expected = trained().score(text, tokens=True)
    assert (found["kind"], found["quantity"]) == ("bound", expected.quantity)
    assert found["nats"] == pytest.approx(expected.nats)
    assert sum(one["nats"] for one in found["tokens"]) == pytest.approx(found["nats"])
    assert [text[one["start"] : one["end"]].lower() for one in found["tokens"]] == [one for one, _ in expected.tokens]
    exact = post(client, "score", text=[text, "a queen ."], order="left-to-right", paired=True)["data"]
    assert [one["index"] for one in exact] == [0, 1]
    assert {one["kind"] for one in exact} == {"exact"}
    assert exact[1]["difference"]["nats"] == pytest.approx(exact[1]["nats"] - exact[0]["nats"])


def test_scored_tokens_of_bytes_have_their_characters_at_the_end_too():
    engine, text = load(plain_roberta(), device="cpu").engine, "the king saw a river "
    [found] = answers.score_work(engine, schema.ScoreRequest(text=text, tokens=True), [text])()
    assert [(one.start, one.end) for one in found.tokens][-1][1] == len(text)
    assert len(found.tokens) == len(engine.vocabulary.own([text])[0])


@pytest.mark.parametrize(
    ("body", "param"),
    [({"text": "a", "steps": "x"}, "steps"), ({"text": ["a", ""]}, "text.1"), ({"text": []}, "text"), ({}, "text")],
)
def test_a_wrong_value_is_named(client, body, param):
    found = client.post("/v1/score", json=body)
    assert (found.status_code, found.json()["error"]["param"]) == (422, param)


def test_options_are_weighed_jointly(client):
    found = post(client, "choose", text="the [BLANK] saw a river .", options=["king", "old king"])
    expected = trained().choose("the [BLANK] saw a river .", ["king", "old king"])
    assert [one["probability"] for one in found["options"]] == pytest.approx(
        [one.probability for one in expected.options]
    )
    assert found["best"] == expected.best


def test_the_middle_is_filled_as_mistral_has_it(client):
    asked = {"prompt": "the king saw", "suffix": " river .", "max_tokens": 2, "random_seed": 0}
    found = post(client, "fim/completions", **asked)
    assert found["object"] == "chat.completion"
    [choice] = found["choices"]
    assert choice["finish_reason"] == "length"
    chunks = events(client, "fim/completions", **asked)
    assert "".join(one["choices"][0]["delta"]["content"] for one in chunks) == choice["message"]["content"]
    assert client.post("/v1/fim/completions", json=asked | {"min_tokens": 1}).json()["error"]["param"] == "min_tokens"


def test_the_server_says_what_it_can_do(client):
    found = client.get("/v1/info").json()
    assert set(found["tasks"]) == {"generate", "infill", "fill", "rewrite", "canvas", "score", "choose", "embed"}
    assert found["limits"]["tokens"] == trained().max_length
    usual = {name: one.default for name, one in inspect.signature(Model.generate).parameters.items()}
    for name in ("steps", "temperature", "top_k", "top_p"):
        assert found["defaults"][name] == usual[name]
    by_name = {one["name"]: one for one in found["samplers"]}
    assert by_name["remasking"]["settings"][0] == {"name": "eta", "default": 0.1}
    assert "left-to-right" not in by_name
    with serving(model=model_of("decoder")) as (address, _):
        other = httpx.get(f"{address}/v1/info").json()
        assert set(other["tasks"]) == {"generate", "score"}
        assert other["defaults"]["sampler"] == "left-to-right"
        text = httpx.post(f"{address}/v1/completions", json={"prompt": "the king", "max_tokens": 4, "seed": 0}).json()
        [expected] = model_of("decoder").generate("the king", max_new_tokens=4, seed=0)
        assert f"the king{text['choices'][0]['text']}" == expected
        refused = httpx.post(f"{address}/v1/fill", json={"text": "the [MASK] ."})
        assert refused.status_code == 422


# ---- operation ------------------------------------------------------------------------------------------------------


def test_health_readiness_metrics_description_and_page(client, served, monkeypatch):
    assert client.get("/health").json() == {"status": "ok"}
    eventually(lambda: client.get("/ready").json() == {"status": "ready"})
    for part, name, value, status in (
        (served[1], "is_draining", True, "draining"),
        (served[1].scheduler, "is_warm", False, "starting"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(part, name, value)
            assert client.get("/ready").json() == {"status": status}
            assert client.get("/ready").status_code == 503
            assert client.get("/health").status_code == 200
    post(client, "completions", prompt="the king", max_tokens=3)
    metrics = client.get("/metrics").text
    assert 'diffusionbert_requests_total{endpoint="/v1/completions",status="200"}' in metrics
    assert "diffusionbert_forward_passes_total" in metrics
    assert "diffusionbert_running_sequences 0.0" in metrics
    assert "diffusionbert_waiting_sequences 0.0" in metrics
    described = client.get("/docs")
    assert "/v1/completions" in described.text
    assert "://" not in described.text  # works without a network
    assert "text/html" in client.get("/").headers["content-type"]
    assert client.get("/nope").json()["error"]["code"] == "not_found"
    assert client.get("/v1/completions").status_code == 405


def test_logs_have_no_texts(client):
    lines: list[dict] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.msg)  # type: ignore[method-assign]
    access.addHandler(handler)
    access.setLevel(logging.INFO)
    try:
        post(client, "completions", prompt="the king", max_tokens=3)
        client.get("/v1/models/secret")
    finally:
        access.removeHandler(handler)
        access.setLevel(logging.NOTSET)
    assert [line["status"] for line in lines] == [200, 404]
    assert not [line for line in lines if "king" in str(line) or "secret" in str(line)]


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (b"{", {}, 400, "invalid_json"),
        (b"[" * 50_000, {}, 400, None),
        (b"[]", {}, 422, "invalid_value"),
        (b"null", {}, 422, "invalid_value"),
        (b'{"text": "\\ud800"}', {}, 422, "invalid_value"),
        (b'{"text": "a [MASK]", "temperature": NaN}', {}, 422, "invalid_value"),
        (b"{}", {"content-type": "text/plain"}, 415, "not_json"),
        (b"x" * 200_000, {}, 413, "too_large"),
        (b"{}", {"host": "evil.example"}, 400, "wrong_host"),
    ],
)
def test_bad_requests_are_refused(client, body, headers, status, code):
    found = client.post("/v1/fill", content=body, headers={"content-type": "application/json"} | headers)
    assert found.status_code == status
    assert found.json()["error"]["code"] == code


def test_a_body_of_unknown_size_is_limited_too(client):
    found = client.post(
        "/v1/fill", content=(b"x" * 10_000 for _ in range(20)), headers={"content-type": "application/json"}
    )
    assert found.status_code == 413


def test_a_key_is_needed_where_there_is_one():
    with serving(ServerSettings(api_key=KEY)) as (address, _), httpx.Client(base_url=address) as client:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": KEY}):
            for path in ("/v1/models", "/v1/info", "/metrics"):
                assert client.get(path, headers=headers).status_code == 401
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models", headers={"authorization": f"Bearer {KEY}"}).status_code == 200
        assert "access-control-allow-origin" not in client.get("/health", headers={"origin": "https://x.org"}).headers


def test_another_address_needs_a_key_or_consent():
    with pytest.raises(ValueError, match="can be reached from other machines"):
        ServerSettings(host="0.0.0.0")
    assert ServerSettings(host="0.0.0.0", api_key=KEY).hosts is None
    assert ServerSettings(host="0.0.0.0", insecure=True).hosts is None
    assert ServerSettings(host="::1").is_local
    assert KEY not in repr(ServerSettings(api_key=KEY))
    for wrong in ({"api_key": "short"}, {"port": 70_000}):
        with pytest.raises(ValueError, match="must"):
            ServerSettings(**wrong)
    with pytest.raises(ValueError, match="would never be accepted"):
        Limits(texts=100, running=1, waiting=1)


def test_pages_of_other_origins_need_consent():
    settings = ServerSettings(cors_origins=("https://x.org",))
    with serving(settings) as (address, _):
        found = httpx.get(f"{address}/health", headers={"origin": "https://x.org"})
        assert found.headers["access-control-allow-origin"] == "https://x.org"
        assert "access-control-allow-origin" not in httpx.get(
            f"{address}/health", headers={"origin": "https://y.org"}
        ).headers  # fmt: skip


def test_a_page_of_another_origin_can_send_a_key():
    settings = ServerSettings(cors_origins=("https://x.org",), api_key=KEY)
    with serving(settings) as (address, _), httpx.Client(base_url=address) as client:
        wanted = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        for origin, status in (("https://x.org", 200), ("https://y.org", 400)):
            asked_first = client.options("/v1/completions", headers=wanted | {"origin": origin})
            assert asked_first.status_code == status
        refused = client.get("/v1/models", headers={"origin": "https://x.org"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://x.org"


def asked(address: str, **body) -> socket.socket:
    """A connection on which a completion was asked for."""
    sent = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", int(address.rsplit(":", 1)[1])))
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(sent) + sent
    )
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("diffusing", [False, True])
def test_waiting_work_is_dropped_when_the_client_goes_away(stream, diffusing):
    with serving() as (address, server):
        reached, go_on = threading.Event(), threading.Event()

        def block() -> None:
            reached.set()
            go_on.wait()

        [blocking] = server.scheduler.submit([block])  # so that the request waits
        reached.wait()
        with asked(address, prompt="the king", max_tokens=12, stream=stream, diffusing=diffusing):
            eventually(lambda: server.scheduler._waiting)
            [work] = server.scheduler._waiting
        eventually(lambda: work.is_cancelled)
        go_on.set()
        blocking.future.result(timeout=60)
        eventually(lambda: server.metrics.registry.get_sample_value(
            "diffusionbert_requests_total", {"endpoint": "/v1/completions", "status": "499"}
        ))  # fmt: skip
        assert server.metrics.registry.get_sample_value("diffusionbert_forward_passes_total") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_running_work_stops_when_the_client_goes_away(stream, monkeypatch):
    reached, go_on, states = threading.Event(), threading.Event(), list[None]()

    def pause() -> None:  # is called after each state
        states.append(None)
        if len(states) == 3:
            reached.set()
            go_on.wait()
        scheduler.pause()

    works: list[scheduler.Work] = []
    submit = scheduler.Scheduler.submit
    monkeypatch.setattr(scheduler.Scheduler, "submit", lambda *given: works.extend(found := submit(*given)) or found)
    monkeypatch.setattr("diffusionbert.serve.answers.pause", pause)
    with serving() as (address, server):
        with asked(address, prompt="the king", max_tokens=12, stream=stream, diffusing=True) as connection:
            assert reached.wait(60)
            if stream:
                assert connection.recv(4096).startswith(b"HTTP/1.1 200")
            [work] = works
        eventually(lambda: work.is_cancelled)
        go_on.set()
        assert isinstance(work.future.exception(timeout=60), scheduler.CancelledWorkError)
        assert server.metrics.registry.get_sample_value("diffusionbert_cancelled_sequences_total") == 1
        assert len(states) == 3


def test_a_full_queue_answers_429_with_a_time():
    with serving(ServerSettings(limits=Limits(running=1, waiting=0, texts=1))) as (address, server):
        reached, go_on = threading.Event(), threading.Event()

        def block() -> None:
            reached.set()
            go_on.wait()

        [blocking] = server.scheduler.submit([block])
        reached.wait()
        with server.scheduler._changed:
            server.scheduler._waiting.append(blocking)
        assert server.metrics.registry.get_sample_value("diffusionbert_waiting_sequences") == 1
        for body in ({"prompt": "x"}, {"prompt": "x", "stream": True}):
            found = httpx.post(f"{address}/v1/completions", json=body)
            assert found.status_code == 429
            assert int(found.headers["retry-after"]) >= 1
            assert found.json()["error"]["code"] == "queue_full"
        with server.scheduler._changed:
            server.scheduler._waiting.clear()
        go_on.set()
        blocking.future.result(timeout=60)


def test_more_open_requests_than_there_may_be_answer_429():
    with serving(ServerSettings(limits=Limits(requests=1))) as (address, server):
        reached, go_on = threading.Event(), threading.Event()

        def block() -> None:
            reached.set()
            go_on.wait()

        [blocking] = server.scheduler.submit([block])
        reached.wait()
        with asked(address, prompt="the king", max_tokens=2) as connection:
            eventually(lambda: server.scheduler._waiting)
            found = httpx.get(f"{address}/v1/models")
            assert (found.status_code, found.headers["retry-after"]) == (429, "1")
            assert httpx.get(f"{address}/health").status_code == 200
            go_on.set()
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        blocking.future.result(timeout=60)
        eventually(lambda: httpx.get(f"{address}/v1/models").status_code == 200)


def test_an_unexpected_error_is_a_500_without_details(client, monkeypatch, caplog):
    def fail(*_: object) -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr("diffusionbert.serve.answers.trace.trace_task", fail)
    for body in ({"prompt": "x"}, {"prompt": "x", "stream": True}):
        found = client.post("/v1/completions", json=body)
        assert found.status_code == 500
        assert found.json()["error"]["code"] == "internal_error"
        assert "secret" not in found.text
    assert "a secret" in caplog.text
