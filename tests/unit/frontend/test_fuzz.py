"""Whatever a client sends, the answer is no 500, and the next request is served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tpserve.frontend.schema import NEUTRAL, ChatRequest, CompletionRequest
from tpserve.frontend.text import TextCodec
from tpserve.testing.fake_server import FakeServer

FIELDS = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, *NEUTRAL, "user", "unheard_of"})

texts = st.text(st.characters(codec=None, exclude_categories=[]), max_size=12) | st.sampled_from(
    ["", "fake", "text", "user", "<|im_end|>", "\ud800", "{{ 1 }}"]
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 400)
    | st.integers()
    | st.floats()
    | st.sampled_from([10**30, -(10**30), 1e308, -0.0])
    | texts
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
parts = st.fixed_dictionaries({}, optional={"type": st.just("text") | values, "text": texts | values})
messages = st.lists(
    st.fixed_dictionaries(
        {}, optional={"role": texts | values, "content": texts | st.lists(parts, max_size=3) | values, "name": values}
    )
    | values,
    max_size=4,
)
bodies = (
    st.fixed_dictionaries(
        {},
        optional={
            **dict.fromkeys(FIELDS, values),
            "prompt": texts | st.lists(st.integers(-1, 330), max_size=20) | values,
            "messages": messages | values,
            "max_tokens": st.integers(-1, 420) | values,
            "stream": st.booleans() | values,
            "stop": texts | st.lists(texts, max_size=18) | values,
            "chat_template_kwargs": st.dictionaries(st.sampled_from(["messages", "self", "tools", "x"]), values)
            | values,
        },
    )
    | values
)


@pytest.fixture(scope="module")
def client(codec: TextCodec) -> Iterator[httpx.Client]:
    with FakeServer(codec) as server, httpx.Client(base_url=server.start().url, timeout=60.0) as client:
        yield client


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(path=st.sampled_from(["/v1/completions", "/v1/chat/completions"]), body=bodies)
@example(path="/v1/chat/completions", body={"messages": [{"role": "user", "content": "x", "a": {"\ud800": 1}}]})
@example(path="/v1/completions", body={"prompt": "x", "\ud800": 1})
@example(path="/v1/completions", body={"prompt": "x", "model": "\ud800"})
def test_any_json(client: httpx.Client, path: str, body: Any) -> None:
    send(client, path, json.dumps(body).encode(errors="surrogatepass"))


@settings(max_examples=50, deadline=None)
@given(path=st.sampled_from(["/v1/completions", "/v1/chat/completions"]), content=st.binary(max_size=60))
@example(path="/v1/completions", content=b'{"prompt": "\xed\xa0\x80"}')
@example(path="/v1/completions", content=b'{"prompt": "x", "prompt": ["x"]}')
@example(path="/v1/completions", content=b"[" * 100_000)
@example(path="/v1/completions", content=b'{"prompt":' * 990 + b"1" + b"}" * 990)
def test_any_bytes(client: httpx.Client, path: str, content: bytes) -> None:
    send(client, path, content)


@settings(max_examples=50, deadline=None)
@given(nesting=st.integers(1, 3000), key=st.sampled_from(["prompt", "messages", "chat_template_kwargs", "stop", "odd"]))
def test_any_depth(client: httpx.Client, nesting: int, key: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], key: 1}
    send(client, "/v1/chat/completions", json.dumps(body).replace("1", "[" * nesting + "]" * nesting).encode())


def send(client: httpx.Client, path: str, content: bytes) -> None:
    response = client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code in (200, 400, 404)
    if response.status_code != 200:
        assert isinstance(response.json()["error"]["message"], str)
    good = client.post("/v1/completions", json={"prompt": "next", "max_tokens": 100})
    assert good.json()["choices"][0]["text"] == "next"
