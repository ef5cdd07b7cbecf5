from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from http.client import HTTPConnection
from itertools import repeat
from typing import Any

import httpx
import pytest

from tpserve.config import ServeConfig
from tpserve.frontend.body import MAX_BODY
from tpserve.frontend.text import TextCodec
from tpserve.messages import Abort, Generate
from tpserve.testing.fake_server import LIMITS, FakeServer
from tpserve.testing.models import SPECIAL_TOKENS
from tpserve.tokens import unpack_ids

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server(codec: TextCodec) -> Iterator[FakeServer]:
    """One server for all tests of this module: it echoes prompts, and goes on for ever after an exclamation mark."""
    (mark,) = codec.encode("!")

    def script(request: Generate) -> Iterator[int]:
        prompt = unpack_ids(request.prompt_ids)
        yield from prompt
        if prompt[-1] == mark:
            yield from repeat(mark)

    with FakeServer(codec, script, ServeConfig(tokenizers=2, detokenizers=3)) as server:
        yield server.start()


def complete(client: httpx.Client, prompt: Any, **fields: Any) -> Any:
    response = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 100, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def stream(client: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    response = client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def generated(server: FakeServer) -> Generate:
    """The last request that reached the rank."""
    return [message for message in server.seen if isinstance(message, Generate)][-1]


def texts(body: Any) -> list[tuple[int, str, str]]:
    return [(choice["index"], choice["text"], choice["finish_reason"]) for choice in body["choices"]]


def test_a_completion_is_text_with_usage_and_the_reason_why_it_ended(client: httpx.Client) -> None:
    body = complete(client, "größer 😀")
    assert texts(body) == [(0, "größer 😀", "stop")]
    assert body["model"] == "fake"
    tokens = body["usage"]["prompt_tokens"]
    assert body["usage"] == {
        "prompt_tokens": tokens,
        "completion_tokens": tokens + 1,
        "total_tokens": 2 * tokens + 1,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_prompts_of_every_shape_each_get_a_choice(client: httpx.Client, codec: TextCodec) -> None:
    x, y = codec.encode("xy")
    assert texts(complete(client, ["a", "bc"])) == [(0, "a", "stop"), (1, "bc", "stop")]
    assert texts(complete(client, [x, y])) == [(0, "xy", "stop")]
    assert texts(complete(client, [[x], [y]])) == [(0, "x", "stop"), (1, "y", "stop")]


def test_the_output_ends_at_its_limit(client: httpx.Client, server: FakeServer) -> None:
    body = complete(client, "abc!", max_tokens=6)
    assert texts(body) == [(0, "abc!!!", "length")]
    assert body["usage"]["completion_tokens"] == 6


def test_without_a_limit_completions_have_16_tokens_and_chats_fill_the_context(
    client: httpx.Client, server: FakeServer
) -> None:
    body = client.post("/v1/completions", json={"prompt": "!"}).json()
    assert body["usage"]["completion_tokens"] == 16
    client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
    request = generated(server)
    assert request.params.max_tokens == LIMITS.max_context - len(unpack_ids(request.prompt_ids))


def test_parameters_reach_the_rank(client: httpx.Client, server: FakeServer) -> None:
    complete(client, "a", temperature=0, top_k=3, top_p=0.5, min_p=0.25, seed=9, ignore_eos=True, model="fake")
    params = generated(server).params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.0, 3, 0.5, 0.25)
    assert (params.seed, params.ignore_eos, params.max_tokens) == (9, True, 100)


def test_a_priority_reaches_the_rank(client: httpx.Client, server: FakeServer) -> None:
    complete(client, "a", priority=-100)
    assert generated(server).priority == -100
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}
    assert client.post("/v1/chat/completions", json={**chat, "priority": 100}).status_code == 200
    assert generated(server).priority == 100
    complete(client, "a")
    assert generated(server).priority == 0
    for refused in (
        client.post("/v1/chat/completions", json={**chat, "priority": 101}),
        client.post("/v1/completions", json={"prompt": "a", "priority": -101}),
    ):
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "priority")


def test_every_request_without_a_seed_gets_one_of_its_own(client: httpx.Client, server: FakeServer) -> None:
    complete(client, ["a", "a"])
    first, second = [message.params.seed for message in server.seen if isinstance(message, Generate)][-2:]
    assert first is not None
    assert first != second


def test_a_stop_string_ends_the_output_before_it_and_lets_the_rank_know(
    client: httpx.Client, server: FakeServer
) -> None:
    body = complete(client, "one two!", stop=["three", "o!!!"])
    assert texts(body) == [(0, "one tw", "stop")]
    wait_for_abort(server, generated(server).uid)


def test_what_may_begin_a_stop_string_comes_out_if_it_does_not(client: httpx.Client, codec: TextCodec) -> None:
    assert texts(complete(client, "tick toc", stop=["tock"])) == [(0, "tick toc", "stop")]
    limit = len(codec.encode("tick toc!")) + 2
    assert texts(complete(client, "tick toc!", stop="!!!!!", max_tokens=limit)) == [(0, "tick toc!!!", "length")]


def test_a_chat_sees_its_conversation_through_the_template(client: httpx.Client, server: FakeServer) -> None:
    messages = [
        {"role": "system", "content": "Be."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    body = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 100}).json()
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == "system\nBe."  # the echo ends at the end-of-text token
    assert body["object"] == "chat.completion"
    assert body["usage"]["prompt_tokens"] == len(unpack_ids(generated(server).prompt_ids))


def test_a_chat_stream_adds_up(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": "größer 😀"}]
    events = stream(client, "/v1/chat/completions", {"messages": messages, "stream_options": {"include_usage": True}})
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    pieces = [event["choices"][0]["delta"].get("content", "") for event in events[:-1]]
    assert "".join(pieces) == "user\ngrößer 😀"
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["usage"]["completion_tokens"] > 5


def test_a_completion_stream_carries_all_its_choices(client: httpx.Client) -> None:
    events = stream(client, "/v1/completions", {"prompt": ["abc!", "xyz", "!"], "max_tokens": 5})
    found = {index: ["", None] for index in range(3)}
    for event in events:
        assert "usage" not in event
        for choice in event["choices"]:
            found[choice["index"]][0] += choice["text"]
            found[choice["index"]][1] = choice["finish_reason"]
    assert found == {0: ["abc!!", "length"], 1: ["xyz", "stop"], 2: ["!!!!!", "length"]}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_choices_carry_their_tokens_if_asked(client: httpx.Client, codec: TextCodec, path: str) -> None:
    message = {"messages": [{"role": "user", "content": "größer 😀"}]}
    body = {"prompt": "user\ngrößer 😀"} if path == "/v1/completions" else message
    body |= {"max_tokens": 100, "return_token_ids": True}
    expected = codec.encode("user\ngrößer 😀")
    (whole,) = client.post(path, json=body).json()["choices"]
    assert whole["token_ids"][-1] in LIMITS.eos_ids
    assert codec.decode(whole["token_ids"]) == "user\ngrößer 😀"
    assert [token for token in whole["token_ids"] if token >= len(SPECIAL_TOKENS)] == expected
    pieces = [event["choices"][0].get("token_ids") for event in stream(client, path, body)]
    assert [token for piece in pieces for token in piece or []] == whole["token_ids"]
    assert [] not in pieces
    (plain,) = client.post(path, json={**body, "return_token_ids": None}).json()["choices"]
    assert "token_ids" not in plain


def test_a_stop_string_cuts_the_text_and_not_the_tokens(client: httpx.Client, codec: TextCodec) -> None:
    tokens = codec.encode("one two!")
    for body in (
        complete(client, "one two!", stop="o!", return_token_ids=True),
        complete(client, ["one two!"], stop=["two"], return_token_ids=True),
    ):
        (choice,) = body["choices"]
        assert choice["token_ids"] == tokens[: body["usage"]["completion_tokens"]]
        assert len(codec.decode(choice["token_ids"])) > len(choice["text"])


def test_models_are_listed_and_described(client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()
    assert [entry["id"] for entry in listed["data"]] == ["fake"]
    assert client.get("/v1/models/fake").json() == listed["data"][0]
    missing = client.get("/v1/models/some/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_describes_itself(client: httpx.Client) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/").json()["server"] == "tpserve"
    paths = client.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health"} <= set(paths)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [320]}, "prompt"),
        ({"prompt": "x" * 400}, "prompt"),
        ({"prompt": "x", "max_tokens": 400}, "max_tokens"),
        ({"prompt": "x", "temperature": 3}, "temperature"),
        ({"prompt": "x", "stop": ["a", ""]}, "stop[1]"),
        ({"prompt": "x", "n": 2}, "n"),
        ({"prompt": "x", "\ud800": 2}, "?"),
        ({"prompt": ["x"] * 4097}, "prompt"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_wrong_completion_is_a_400_that_names_the_field(
    client: httpx.Client, body: dict[str, Any], param: str, streaming: bool
) -> None:
    content = json.dumps({**body, "stream": streaming})
    response = client.post("/v1/completions", content=content, headers=JSON)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"]
    assert texts(complete(client, "next")) == [(0, "next", "stop")]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant"}]}, "messages"),
        ({"max_completion_tokens": 400}, "max_completion_tokens"),
        ({"max_tokens": 400}, "max_tokens"),
        ({"tools": [{"type": "function"}]}, "tools"),
    ],
)
def test_a_wrong_chat_is_a_400_that_names_the_field(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    response = client.post("/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not valid JSON"),
        (b"", "JSON object"),
        (b"[]", "JSON object"),
        (b"null", "JSON object"),
        (b'"text"', "JSON object"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "the body is not valid JSON: it is nested too deeply"),
        (b'{"prompt": "caf\xe9"}', "the body is not valid JSON: it is not text in UTF-8"),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "not valid JSON: a number has too many digits"),
        (b'{"prompt": "x", "temperature": NaN}', "finite"),
        (b'{"prompt": "x", "top_p": Infinity}', "top_p"),
    ],
)
def test_a_body_that_is_no_request_is_a_400(client: httpx.Client, content: bytes, words: str) -> None:
    response = client.post("/v1/completions", content=content, headers=JSON)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def _answer(client: httpx.Client, request: bytes) -> bytes:
    with socket.create_connection((client.base_url.host, client.base_url.port or 80), timeout=60) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


@pytest.mark.parametrize(
    "request_",
    [
        b"garbage\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nsize\r\n",
    ],
)
def test_what_is_no_http_gets_an_error_of_the_same_shape(client: httpx.Client, request_: bytes) -> None:
    head, _, body = _answer(client, request_).partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"HTTP/1.1 400 Bad Request"
    assert {b"content-type: application/json", b"content-length: %d" % len(body), b"connection: close"} <= set(lines)
    says = "the request is not valid HTTP"
    assert json.loads(body) == {
        "error": {"message": says, "type": "invalid_request_error", "param": None, "code": None}
    }


def test_an_upgrade_is_answered_as_if_none_was_asked_for(
    client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    request = (
        b"GET /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close, Upgrade\r\nUpgrade: websocket\r\n\r\n"
    )
    assert _answer(client, request).startswith(b"HTTP/1.1 405 Method Not Allowed\r\n")
    assert caplog.messages == []


def test_where_several_types_will_do_all_are_named(client: httpx.Client) -> None:
    messages = [{"role": "user", "content": 3}]
    response = client.post("/v1/chat/completions", json={"messages": messages})
    said = response.json()["error"]["message"]
    assert said == "messages[0].content: must be a string or a list of parts of type text"
    response = client.post("/v1/completions", json={"prompt": "x", "stop": 3})
    assert response.json()["error"]["message"] == "stop: must be a string or a list of strings"


@pytest.mark.parametrize("body", [{"prompt": "x", "model": "m" * 100_000}, {"prompt": "x", "f" * 100_000: 1}])
def test_what_an_error_quotes_is_cut(client: httpx.Client, body: dict[str, Any]) -> None:
    error = client.post("/v1/completions", json=body).json()["error"]
    assert error["code"] in ("model_not_found", "unknown_field")
    assert len(error["message"]) < 1100
    assert len(error["param"]) < 1100


def test_json_must_say_that_it_is_json(client: httpx.Client) -> None:
    response = client.post("/v1/completions", content=b'{"prompt": "x"}', headers={"Content-Type": "text/plain"})
    assert response.status_code == 400
    assert "application/json" in response.json()["error"]["message"]


def test_a_client_that_sends_all_of_a_body_that_is_too_long_sees_the_answer(client: httpx.Client) -> None:
    connection = HTTPConnection(client.base_url.host, client.base_url.port or 80)
    connection.request("POST", "/v1/completions", b" " * (3 * MAX_BODY), JSON)
    assert connection.getresponse().status == 413
    connection.close()


def test_a_body_that_is_said_to_be_too_long_is_refused_before_it_comes(client: httpx.Client) -> None:
    connection = HTTPConnection(client.base_url.host, client.base_url.port or 80)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Length", str(MAX_BODY + 1))
    connection.endheaders()
    response = connection.getresponse()
    assert response.status == 413
    assert json.loads(response.read())["error"]["message"] == f"the body is longer than {MAX_BODY} bytes"
    connection.close()


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_long_is_a_413(client: httpx.Client, chunked: bool) -> None:
    piece = b" " * (1 << 20)
    pieces = [piece] * (MAX_BODY // len(piece) + 1)
    response = client.post("/v1/completions", content=iter(pieces) if chunked else b"".join(pieces), headers=JSON)
    assert response.status_code == 413
    assert str(MAX_BODY) in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nothing", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405)]
)
def test_other_errors_have_openais_shape_too(client: httpx.Client, method: str, path: str, status: int) -> None:
    response = client.request(method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_a_request_need_not_name_the_model(client: httpx.Client) -> None:
    for model in ("fake", "", None):
        assert complete(client, "a", model=model)["model"] == "fake"


def test_an_unknown_model_is_a_404(client: httpx.Client) -> None:
    response = client.post("/v1/completions", json={"prompt": "x", "model": "other"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert response.json()["error"]["param"] == "model"


@pytest.mark.parametrize("streaming", [False, True])
def test_a_client_that_goes_away_aborts_its_requests(client: httpx.Client, server: FakeServer, streaming: bool) -> None:
    server.seen.clear()
    server.go.clear()
    try:
        impatient = httpx.Timeout(60.0, read=0.2)
        body = {"prompt": ["a!", "b!"], "stream": streaming, "max_tokens": 300}
        with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=server.url, timeout=impatient) as other:
            other.post("/v1/completions", json=body)
        for uid in [message.uid for message in server.seen if isinstance(message, Generate)]:
            wait_for_abort(server, uid)
    finally:
        server.go.set()


def wait_for_abort(server: FakeServer, uid: int) -> None:
    server.wait(lambda: Abort(uid) in server.seen)


def test_too_many_stops_are_told_in_plain_words(client: httpx.Client) -> None:
    refused = client.post("/v1/completions", json={"model": "", "prompt": "x", "stop": ["a"] * 17})
    assert refused.status_code == 400
    assert "at most 16 items, not 17" in refused.json()["error"]["message"]
