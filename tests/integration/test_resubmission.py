"""A rank is killed in the middle of many answers: all of them end as if nothing had happened."""

from __future__ import annotations

import json
import re
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
from tests.integration.launched import HANG, Launched, wait_for

from tpserve.testing.models import make_model

TOKENS = 200
STREAMS = 8
WHOLE = 2
KV_TOKENS = "2048"
"""Not enough for all at once: some wait."""


def counted(usage: dict[str, Any]) -> dict[str, Any]:
    """Token counts, without that of cached ones, which depends on who came before."""
    return {name: count for name, count in usage.items() if name != "prompt_tokens_details"}


class Reader:
    """One client; sets ``under_way`` when it has got an eighth of a streamed answer."""

    def __init__(self, url: str, index: int, under_way: Event) -> None:
        self._under_way = under_way
        self._url = f"{url}/v1/completions"
        self._index = index

    def stream(self) -> tuple[str, list[int], Any]:
        """The text, the tokens and the token counts of a streamed answer."""
        text, usage, finish = "", None, None
        tokens: list[int] = []
        asked = {**self._body(), "stream": True, "stream_options": {"include_usage": True}}
        with httpx.stream("POST", self._url, json=asked, timeout=HANG, trust_env=False) as response:
            lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
            for line in iter(lambda: next(lines), "[DONE]"):
                event = json.loads(line)
                usage = event["usage"] or usage
                for choice in event["choices"]:
                    text += choice["text"]
                    finish = choice["finish_reason"] or finish
                    tokens += choice.get("token_ids", [])
                if len(tokens) >= TOKENS // 8:
                    self._under_way.set()
        assert finish == "length"
        return text, tokens, counted(usage)

    def whole(self) -> tuple[str, list[int], Any]:
        """The same of an answer in one piece."""
        response = httpx.post(self._url, json=self._body(), timeout=HANG, trust_env=False)
        assert response.status_code == 200, response.text
        found = response.json()
        return found["choices"][0]["text"], found["choices"][0]["token_ids"], counted(found["usage"])

    def _body(self) -> dict[str, Any]:
        return {
            "prompt": [5 + (7 * self._index + 3 * place) % 300 for place in range(5 + 3 * self._index)],
            "max_tokens": TOKENS,
            "temperature": 0.0 if self._index % 2 else 1.0,
            "top_p": 0.9,
            "seed": self._index,
            "ignore_eos": True,
            "return_token_ids": True,
        }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "small", "qwen3")


@pytest.fixture
def server(model: Path, request: pytest.FixtureRequest) -> Iterator[Launched]:
    with tempfile.TemporaryDirectory(prefix="tp") as runtime:
        server = Launched(
            Path(runtime), str(model), "--kv-tokens", KV_TOKENS, "--dtype", "float32", "--threads", "1", *request.param
        )
        yield server
        server.kill()


def ask(server: Launched, pool: ThreadPoolExecutor) -> tuple[Event, list[Future[Any]]]:
    """All answers, and what is set when the first of them is under way; some then still wait for room."""
    under_way = Event()
    readers = [Reader(server.url, index, under_way) for index in range(STREAMS + WHOLE)]
    streams = [pool.submit(reader.stream) for reader in readers[:STREAMS]]
    return under_way, streams + [pool.submit(reader.whole) for reader in readers[STREAMS:]]


def admitted(server: Launched) -> int:
    """How many requests the server has taken so far; during a pause it takes none."""
    series = httpx.get(f"{server.url}/metrics", trust_env=False).text
    counts = re.findall(r"^tpserve_(?:num_requests_(?:running|waiting)|requests_total\S*) (\d+)", series, re.MULTILINE)
    return sum(map(int, counts))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "victim"), [([], "rank0"), (["--tp", "2"], "rank1")], indirect=["server"], ids=["tp1-rank0", "tp2-rank1"]
)
def test_a_killed_rank_costs_a_pause_and_nothing_else(server: Launched, victim: str) -> None:
    server.await_ready()
    with ThreadPoolExecutor(STREAMS + WHOLE) as pool:
        undisturbed = [answer.result(HANG) for answer in ask(server, pool)[1]]
        process = server.children()[victim]
        under_way, answers = ask(server, pool)
        assert under_way.wait(HANG)
        wait_for(lambda: admitted(server) == 2 * len(answers))
        process.kill()
        wait_for(lambda: server.health() == 503)
        found = [answer.result(HANG) for answer in answers]
    assert re.search(r"sending [1-9]\d* requests? again", server.text)
    assert [len(tokens) for _, tokens, _ in found] == [TOKENS] * len(answers)
    assert found == undisturbed
    assert server.health() == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == 0
    assert server.left() == []


@pytest.mark.slow
@pytest.mark.parametrize("server", [["--max-restarts", "0"]], indirect=True)
def test_when_the_server_gives_up_the_clients_hear_of_it(server: Launched) -> None:
    server.await_ready()
    with ThreadPoolExecutor(2) as pool:
        url = f"{server.url}/v1/completions"
        body = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True}
        whole = pool.submit(httpx.post, url, json=body, timeout=HANG)
        stream = pool.submit(httpx.post, url, json={**body, "stream": True}, timeout=HANG)
        wait_for(lambda: server.children()["rank0"].cpu_percent(0.2) > 20)
        server.children()["rank0"].kill()
        assert server.end() == 1
        assert (whole.result().status_code, stream.result().status_code) == (503, 200)
    for text in (whole.result().text, stream.result().text.split("\n\n")[-2].removeprefix("data: ")):
        assert json.loads(text)["error"]["message"] == "the server is stopping"
    assert server.left() == []
