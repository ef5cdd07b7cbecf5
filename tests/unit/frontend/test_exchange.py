"""What an exchange keeps of its requests when the processes behind it die, and what it tells the next ones."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from tpserve.errors import RequestError
from tpserve.frontend.exchange import Call, Exchange, GivenUp, QueueFull, Unavailable
from tpserve.frontend.flights import MAX_RESENDS
from tpserve.frontend.links import Connection
from tpserve.frontend.metrics import Metrics
from tpserve.messages import (
    Abort,
    ChatPrompt,
    FinishReason,
    Rejected,
    SamplingParams,
    Started,
    TextOutput,
    Tokenize,
    TokenizerMessage,
    decode_tokenizer,
)


class Wire:
    """In place of the links of one generation: keeps what is sent."""

    backlog = 0

    def __init__(self) -> None:
        self.sent: list[TokenizerMessage] = []

    def send(self, uid: int, payload: bytes) -> None:
        self.sent.append(decode_tokenizer(payload))

    @property
    def output_ids(self) -> dict[int, list[int]]:
        """What each request that was sent brought with it."""
        return {message.uid: message.output_ids for message in self.sent if isinstance(message, Tokenize)}


class Scene:
    """An exchange and the requests of one call, over one generation after the other."""

    def __init__(
        self,
        prompts: int = 1,
        is_streaming: bool = False,
        max_queued: int = 0,
        max_running: int = 0,
        priority: int = 0,
        **params: object,
    ) -> None:
        self.exchange = Exchange(10, Metrics(), max_queued, max_running)
        self.wake = asyncio.Event()
        self.start()
        prompt = [str(index) for index in range(prompts)]
        call = Call(list(prompt), SamplingParams(**params), is_streaming, priority)  # type: ignore[arg-type]
        self.answers = self.exchange.submit(call, self.wake)

    def start(self) -> None:
        self.wire = Wire()
        self.exchange.attach(cast("Connection", self.wire))
        self.exchange.open()

    def die(self, reason: str = "rank 0 died") -> None:
        self.exchange.suspend(reason)
        self.exchange.attach(None)

    def deliver(self, uid: int, token: int, text: str, finish: FinishReason | None = None) -> None:
        self.exchange.deliver([TextOutput([uid], [token], [text], [finish])])

    def started(self, uid: int, prompt_tokens: int, cached_tokens: int) -> None:
        self.exchange.deliver([TextOutput([], [], [], [], [Started(uid, prompt_tokens, cached_tokens)])])


def test_a_request_is_sent_again_with_its_output_and_is_otherwise_the_same() -> None:
    scene = Scene(temperature=0.5, max_tokens=9, priority=-7)
    (first,) = scene.wire.sent
    assert isinstance(first, Tokenize)
    assert first.params.seed is not None
    assert first.priority == -7
    scene.deliver(0, 7, "a")
    scene.deliver(0, 8, "b")
    scene.die()
    scene.start()
    assert scene.wire.sent == [Tokenize(first.uid, first.prompt, first.params, [7, 8], priority=-7)]
    scene.deliver(0, 9, "c", "length")
    (answer,) = scene.answers
    assert (answer.read(), answer.tokens, answer.finish, len(scene.exchange)) == ("abc", [7, 8, 9], "length", 0)


def test_a_conversation_keeps_its_time() -> None:
    scene = Scene(prompts=0)
    scene.exchange.submit(Call([ChatPrompt([{"role": "user", "content": "x"}])], SamplingParams()), scene.wake)
    (first,) = scene.wire.sent
    scene.die()
    scene.start()
    assert scene.wire.sent == [first]
    assert isinstance(first, Tokenize)
    assert isinstance(first.prompt, ChatPrompt)
    assert first.prompt.time is not None


def test_every_state_is_sent_again_in_the_order_of_admission_and_nothing_that_is_over() -> None:
    scene = Scene(prompts=5, stop=("x",))
    scene.deliver(4, 7, "a")
    scene.deliver(0, 7, "a", "length")
    scene.deliver(1, 7, "ax")  # a stop string
    scene.exchange.deliver([Rejected(2, "too long")])
    scene.die()
    scene.start()
    assert list(scene.wire.output_ids.items()) == [(3, []), (4, [7])]


def test_while_it_waits_nothing_else_is_admitted_and_it_counts() -> None:
    scene = Scene(prompts=8)
    scene.die()
    with pytest.raises(Unavailable, match="rank 0 died"):
        scene.exchange.submit(Call(["late"], SamplingParams()), scene.wake)
    scene.start()
    with pytest.raises(Unavailable, match="in flight"):
        scene.exchange.submit(Call(["a", "b", "c"], SamplingParams()), scene.wake)
    assert len(scene.wire.sent) == 8


def test_a_request_that_is_aborted_meanwhile_stays_behind() -> None:
    scene = Scene(prompts=2)
    scene.deliver(0, 7, "a")
    scene.die()
    scene.exchange.abort(scene.answers[0])
    scene.start()
    assert list(scene.wire.output_ids) == [1]
    assert not any(isinstance(message, Abort) for message in scene.wire.sent)


def test_the_prompt_is_counted_once() -> None:
    scene = Scene()
    scene.started(0, 10, 4)
    scene.die()
    scene.start()
    scene.started(0, 10, 8)
    (answer,) = scene.answers
    assert (answer.prompt_tokens, answer.cached_tokens) == (10, 4)


def test_half_a_stop_string_is_remembered() -> None:
    scene = Scene(stop=("end",))
    scene.deliver(0, 7, "the e")
    scene.die()
    scene.start()
    scene.deliver(0, 8, "nd")
    (answer,) = scene.answers
    assert (answer.read(), answer.finish) == ("the ", "stop")
    assert scene.wire.sent[-1] == Abort(0)


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_request_that_was_there_at_every_death_is_given_up(is_streaming: bool) -> None:
    scene = Scene(is_streaming=is_streaming)
    old = scene.answers[0]
    for _ in range(MAX_RESENDS):
        scene.die()
        scene.start()
        assert old.error is None
    call = Call(["innocent"], SamplingParams(), is_streaming)
    (new,) = scene.exchange.submit(call, scene.wake)
    scene.die("rank 1 died")
    assert isinstance(old.error, GivenUp)
    assert "failed 3 times with this request in flight" in str(old.error)
    assert "rank 1 died" in str(old.error)
    scene.start()
    assert new.error is None
    assert list(scene.wire.output_ids) == [new.uid]


def test_a_death_before_it_was_sent_again_is_not_its_fault() -> None:
    scene = Scene()
    for _ in range(3):
        for _ in range(5):
            scene.die()
        if scene.answers[0].error is None:
            scene.start()
    assert isinstance(scene.answers[0].error, GivenUp)
    scene = Scene()
    for _ in range(20):
        scene.die()
    scene.start()
    assert list(scene.wire.output_ids) == [0]


def test_a_warm_up_is_not_sent_again() -> None:
    async def body() -> None:
        scene = Scene()
        scene.exchange.close("starting")
        warm_up = asyncio.create_task(scene.exchange.warm_up(2))
        await asyncio.sleep(0)
        scene.die()
        with pytest.raises(Unavailable):
            await warm_up
        scene.start()
        assert list(scene.wire.output_ids) == [0]

    asyncio.run(asyncio.wait_for(body(), 60))


def ask(scene: Scene, prompts: int = 1) -> None:
    scene.exchange.submit(Call(["more"] * prompts, SamplingParams()), scene.wake)


def test_only_so_many_may_wait_behind_those_that_run() -> None:
    scene = Scene(prompts=4, max_queued=2, max_running=2)
    with pytest.raises(QueueFull, match="those that run: 2"):
        ask(scene)
    scene.exchange.deliver([Rejected(2, "too long")])
    with pytest.raises(QueueFull):
        ask(scene, prompts=2)
    ask(scene)
    scene.started(0, 10, 4)
    with pytest.raises(QueueFull):
        ask(scene)
    scene.deliver(0, 7, "a", "length")
    ask(scene)
    assert len(scene.wire.output_ids) == 6


def test_one_call_with_more_prompts_than_may_run_and_wait_is_wrong() -> None:
    scene = Scene(max_queued=1, max_running=2)
    with pytest.raises(RequestError, match="at most 3 prompts"):
        ask(scene, prompts=4)


def test_without_a_queue_of_its_own_only_all_requests_count() -> None:
    scene = Scene(max_running=2)
    ask(scene, prompts=9)
    with pytest.raises(Unavailable):
        ask(scene)


def test_without_a_limit_as_many_may_wait_as_are_in_flight() -> None:
    scene = Scene(prompts=10)
    with pytest.raises(Unavailable, match="10 requests are in flight") as caught:
        ask(scene)
    assert not isinstance(caught.value, QueueFull)


def test_when_there_is_no_next_generation_all_that_waits_fails() -> None:
    scene = Scene(prompts=2)
    scene.die()
    scene.exchange.fail("the server is stopping")
    assert [str(answer.error) for answer in scene.answers] == ["the server is stopping"] * 2
    assert len(scene.exchange) == 0
