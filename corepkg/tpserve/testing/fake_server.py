"""A server without a model: the real HTTP front end, tokenizers and detokenizers around a scripted rank.

Everything runs in threads of this process, over in-process pipes. For tests of the front end, and of what talks to it.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from queue import SimpleQueue
from threading import Event, Thread
from types import TracebackType
from typing import Self, TypeVar

from tpserve.api import NoOptions, PipeReceiver, PipeSender
from tpserve.config import ServeConfig
from tpserve.envelope import Opener, Sealer
from tpserve.errors import Closed, PeerLost
from tpserve.frontend.control import ControlEvent, DownEvent, Links, PingEvent, ServeEvent, StopEvent
from tpserve.frontend.detokenizer_worker import run_detokenizer
from tpserve.frontend.server import serve
from tpserve.frontend.text import TextCodec
from tpserve.frontend.tokenizer_worker import run_tokenizer
from tpserve.messages import FinishReason, Generate, RankMessage, Shutdown, Started, StepOutput, decode_rank, encode
from tpserve.step import EngineLimits
from tpserve.testing.models import VOCAB_SIZE
from tpserve.tokens import unpack_ids
from tpserve.transports.inproc import InprocTransport

__all__ = ["LIMITS", "FakeRank", "FakeServer", "Script", "echo", "make_pipe"]

Script = Callable[[Generate], Iterator[int]]
"""The tokens that answer a request; at their end follows the end-of-text token."""

LIMITS = EngineLimits(pages=32, page_size=16, slots=64, max_context=400, vocab_size=VOCAB_SIZE, eos_ids=(2,))
"""Fit the tokenizer of :func:`tpserve.testing.models.make_tokenizer`."""

End = TypeVar("End", PipeSender, PipeReceiver)

HANG = 60.0
"""Seconds after which something that should happen at once is taken to hang."""


def echo(request: Generate) -> Iterator[int]:
    """Answer with the prompt."""
    yield from unpack_ids(request.prompt_ids)


def make_pipe() -> tuple[PipeSender, PipeReceiver]:
    """Make both ends of a pipe between threads."""
    transport = InprocTransport(NoOptions())
    return transport.pipe_sender("ipc:///pipe"), transport.pipe_receiver("ipc:///pipe")


class FakeRank:
    """Answers requests by a script, one token of each a round; one that is resumed, from where it was.

    Args:
        intake: from the tokenizers.
        replies: one pipe to each detokenizer.
        script: what to answer.
        eos: the end-of-text token.
        go: rounds happen while this is set; messages are always taken.
        seen: gets every message.
        shutdowns: how many Shutdown messages end it.
    """

    def __init__(
        self,
        intake: PipeReceiver,
        replies: Sequence[PipeSender],
        script: Script,
        eos: int,
        go: Event,
        seen: list[RankMessage],
        shutdowns: int,
    ) -> None:
        self._intake = intake
        self._replies = [(pipe, Sealer(1000)) for pipe in replies]
        self._script = script
        self._eos = eos
        self._go = go
        self._seen = seen
        self._shutdowns = shutdowns
        self._running: dict[int, tuple[Generate, Iterator[int]]] = {}
        self._started: list[Started] = []
        self._lengths: dict[int, int] = {}
        self._round = 0

    def run(self) -> None:
        """Serve until every tokenizer has sent a Shutdown."""
        opener = Opener()
        while self._shutdowns:
            for frame in self._intake.recv_many(256, 1 << 20, math.inf if not self._running else 0.0):
                self._accept(decode_rank(opener.open(frame)))
            if self._go.is_set():
                self._step()
            else:
                time.sleep(0.001)
        for pipe, sealer in self._replies:
            pipe.send(sealer.seal(encode(Shutdown())), math.inf)

    def _accept(self, message: RankMessage) -> None:
        self._seen.append(message)
        if isinstance(message, Generate):
            said = unpack_ids(message.output_ids).tolist()
            self._running[message.uid] = (message, islice(self._script(message), len(said), None))
            self._lengths[message.uid] = len(said)
            self._started.append(Started(message.uid, len(unpack_ids(message.prompt_ids)), 0, said))
        elif isinstance(message, Shutdown):
            self._shutdowns -= 1
        elif self._running.pop(message.uid, None):
            self._reply([(message.uid, -1, "abort")])

    def _step(self) -> None:
        rows: list[tuple[int, int, FinishReason | None]] = []
        for uid, (request, script) in list(self._running.items()):
            token = next(script, self._eos)
            self._lengths[uid] += 1
            finished: FinishReason | None = None
            if token == self._eos:
                finished = "stop"
            elif self._lengths[uid] == request.params.max_tokens:
                finished = "length"
            if finished:
                del self._running[uid]
            rows.append((uid, token, finished))
        if rows:
            self._reply(rows)

    def _reply(self, rows: list[tuple[int, int, FinishReason | None]]) -> None:
        self._round += 1
        started, self._started = self._started, []
        count = len(self._replies)
        for index, (pipe, sealer) in enumerate(self._replies):
            mine = [row for row in rows if row[0] % count == index]
            output = StepOutput(
                self._round,
                [uid for uid, _, _ in mine],
                [token for _, token, _ in mine],
                [finished for _, _, finished in mine],
                [entry for entry in started if entry.uid % count == index],
            )
            pipe.send(sealer.seal(encode(output)), math.inf)


class FakeServer:
    """The front end around scripted ranks, on a free port of the loopback interface.

    Args:
        codec: the tokenizer of the model that is not there.
        script: what to answer.
        config: settings; tokenizers and detokenizers may be several.
        limits: what the engine that is not there has.
        name: the model's name.

    Attributes:
        url: where it listens, without a slash at the end.
        go: clear it to stop all ranks where they are.
        seen: every message that came to a rank, over all generations.
        reports: ``serving``, and ``failed: …``, as they came.
    """

    def __init__(
        self,
        codec: TextCodec,
        script: Script = echo,
        config: ServeConfig | None = None,
        limits: EngineLimits = LIMITS,
        name: str = "fake",
    ) -> None:
        self.go = Event()
        self.go.set()
        self.seen: list[RankMessage] = []
        self.reports: SimpleQueue[str] = SimpleQueue()
        self._codec = codec
        self._script = script
        self._config = config or ServeConfig(drain_timeout=1.0)
        self._limits = limits
        self._events: SimpleQueue[ControlEvent] = SimpleQueue()
        self._generation = 0
        self._transport = InprocTransport(NoOptions())
        self._group: list[PipeSender | PipeReceiver] = []
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._sock.getsockname()[1]}"
        self._threads: list[Thread] = []
        self._start(serve, self._sock, self._config, name, self._open_links, self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> Self:
        """Start a generation and wait until it serves."""
        self._generation += 1
        self._events.put(ServeEvent(self._generation, self._limits))
        report = self.reports.get(timeout=HANG)
        assert report == "serving", report
        return self

    def go_down(self, reason: str) -> None:
        """Let all tokenizers, ranks and detokenizers die."""
        self._events.put(DownEvent(reason))
        self._kill_group()

    def send_to_api(self, frame: bytes) -> None:
        """Send the api process something that no tokenizer or detokenizer would."""
        self._transport.pipe_sender("ipc:///api").send(frame, math.inf)

    def ping(self) -> str:
        """Ask the api process whether it is alive; what it says."""
        self._events.put(PingEvent())
        return self.reports.get(timeout=HANG)

    def request_stop(self) -> None:
        """Tell the api process to stop, and return at once."""
        self._events.put(StopEvent())

    def stop(self) -> None:
        """Stop, and wait for all threads."""
        self.request_stop()
        for thread in self._threads:
            thread.join(HANG)
            assert not thread.is_alive(), f"{thread.name} hangs"
        self._events.put(StopEvent())  # for the thread that listens, which learns by it that nobody else does

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until something is so that should be so soon."""
        deadline = time.monotonic() + HANG
        while not condition():
            assert time.monotonic() < deadline, "it does not come about"
            time.sleep(0.002)

    def receive(self) -> ControlEvent:
        """As a Control."""
        return self._events.get()

    def alive(self) -> None:
        """As a Control."""
        self.reports.put("alive")

    def serving(self) -> None:
        """As a Control."""
        self.reports.put("serving")

    def failed(self, reason: str) -> None:
        """As a Control."""
        self.reports.put(f"failed: {reason}")

    def _open_links(self, generation: int) -> Links:
        self._kill_group()
        config = self._config
        transport = self._transport = InprocTransport(NoOptions())
        to_api = transport.pipe_receiver("ipc:///api")
        to_rank = self._join(transport.pipe_receiver("ipc:///rank"))
        tokenizers = [f"ipc:///tokenizer{index}" for index in range(config.tokenizers)]
        detokenizers = [f"ipc:///detokenizer{index}" for index in range(config.detokenizers)]
        for index, name in enumerate(tokenizers):
            inbox = self._join(transport.pipe_receiver(name))
            ends = self._join(transport.pipe_sender("ipc:///rank")), self._join(transport.pipe_sender("ipc:///api"))
            self._start(run_tokenizer, inbox, *ends, self._codec, self._limits, 1 + index)
        for index, name in enumerate(detokenizers):
            inbox = self._join(transport.pipe_receiver(name))
            self._start(
                run_detokenizer, inbox, self._join(transport.pipe_sender("ipc:///api")), self._codec, 2000 + index
            )
        replies = [self._join(transport.pipe_sender(name)) for name in detokenizers]
        eos = self._limits.eos_ids[0]
        rank = FakeRank(to_rank, replies, self._script, eos, self.go, self.seen, config.tokenizers)
        self._start(rank.run)
        return Links(to_api, [transport.pipe_sender(name) for name in tokenizers])

    def _join(self, end: End) -> End:
        self._group.append(end)
        return end

    def _kill_group(self) -> None:
        for end in self._group:
            end.close()
        self._group.clear()

    def _start(self, target: Callable[..., None], *args: object) -> None:
        def run() -> None:
            with suppress(Closed, PeerLost):  # as when a group is killed
                target(*args)

        thread = Thread(target=run, name=getattr(target, "__qualname__", "thread"), daemon=True)
        thread.start()
        self._threads.append(thread)
