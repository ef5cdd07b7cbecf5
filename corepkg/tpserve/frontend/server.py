"""The api process: HTTP on an inherited socket, driven by the supervisor's events."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Coroutine, Generator, Mapping
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tpserve.config import ServeConfig
from tpserve.errors import RequestError, TransportError
from tpserve.frontend.app import build_app
from tpserve.frontend.control import Control, DownEvent, OpenLinks, PingEvent, ServeEvent, StopEvent
from tpserve.frontend.exchange import Exchange, Unavailable
from tpserve.frontend.links import Connection
from tpserve.frontend.metrics import Metrics
from tpserve.frontend.problems import describe
from tpserve.messages import ApiMessage, Shutdown, encode

__all__ = ["serve"]

KEEP_ALIVE = 65
"""Seconds that an idle HTTP connection is kept."""

FLUSH = 2.0
"""Seconds that a stopping server gives its last messages and responses."""

LEAVE = 8.0
"""Seconds that the other processes have for finishing what is under way and passing the Shutdown on."""

logger = logging.getLogger(__name__)

_Events = asyncio.Queue[ServeEvent | DownEvent | StopEvent]


def serve(
    sock: socket.socket,
    config: ServeConfig,
    model_name: str,
    open_links: OpenLinks,
    control: Control,
    parts: Mapping[str, str] = {},
) -> None:
    """Serve HTTP until a StopEvent has come and what was in flight has been drained.

    Args:
        sock: bound; listens from now on, and is closed at the end.
        config: the server's settings.
        model_name: the name that clients use.
        open_links: makes the links of a generation, in a thread, at its ServeEvent.
        control: the line to the supervisor.
        parts: which plugin was chosen for each kind, for /metrics.
    """
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_ApiProcess(config, open_links, control, Metrics(parts)).run(sock, model_name))


class _ApiProcess:
    """Follows the supervisor's events: all of the api process but HTTP itself."""

    def __init__(self, config: ServeConfig, open_links: OpenLinks, control: Control, metrics: Metrics) -> None:
        self._config = config
        self._open_links = open_links
        self._control = control
        self._metrics = metrics
        running = min(config.max_running_requests, config.max_step_tokens or config.max_running_requests)
        self._exchange = Exchange(config.max_requests, metrics, config.max_queued_requests, running)
        self._connection: Connection | None = None
        self._generation = 0  # whose links are good; 0: nobody's
        self._listens_to = 0  # the generation whose messages are taken

    async def run(self, sock: socket.socket, model_name: str) -> None:
        """Listen until the last event has been followed."""
        http = _HttpServer(_uvicorn_config(build_app(self._exchange, self._metrics, model_name)))
        events = self._listen()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(http.serve(sockets=[sock]))
            while not isinstance(event := await events.get(), StopEvent):
                if isinstance(event, DownEvent):
                    await self._go_down(event.reason)
                elif await self._connect(event.generation):
                    tasks.create_task(self._warm_up(event.generation))
            await self._stop(events)
            http.should_exit = True

    def _listen(self) -> _Events:
        events: _Events = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def forward() -> None:
            with suppress(RuntimeError):  # the loop has been closed: there is nobody to tell any more
                while True:
                    event = self._control.receive()
                    if isinstance(event, PingEvent):
                        loop.call_soon_threadsafe(self._control.alive)
                    else:
                        loop.call_soon_threadsafe(events.put_nowait, event)

        Thread(target=forward, name="control", daemon=True).start()
        return events

    async def _connect(self, generation: int) -> bool:
        """Take up the links of a new generation; whether they could be made."""
        await self._go_down("starting")
        self._generation = generation
        loop = asyncio.get_running_loop()

        def deliver(messages: list[ApiMessage]) -> None:
            loop.call_soon_threadsafe(self._deliver, generation, messages)

        def lose(reason: str) -> None:
            loop.call_soon_threadsafe(self._lose, generation, reason)

        deadline = time.monotonic() + self._config.startup_timeout
        try:
            links = await asyncio.to_thread(self._open_links, generation)
        except TransportError as error:
            self._lose(generation, f"the links cannot be made: {error}")
            return False
        self._listens_to = generation
        self._connection = Connection(links, deadline, deliver, lose)
        self._exchange.attach(self._connection)
        return True

    async def _warm_up(self, generation: int) -> None:
        """Send a request over every link there is, then admit the clients'."""
        try:
            await self._exchange.warm_up(max(self._config.tokenizers, self._config.detokenizers))
        except (Unavailable, RequestError) as error:
            self._lose(generation, f"the warm-up failed: {error}")
            return
        if generation == self._generation:
            self._exchange.open()
            self._control.serving()

    def _deliver(self, generation: int, messages: list[ApiMessage]) -> None:
        """Take messages, unless their generation is gone: what it had still to say, the next one says again."""
        if generation == self._listens_to:
            self._exchange.deliver(messages)

    def _lose(self, generation: int, reason: str) -> None:
        """A link broke, or the warm-up failed. What comes after that, or after the supervisor knows, is no news."""
        if generation == self._generation:
            self._generation = 0
            logger.error("%s", reason)
            self._exchange.suspend(reason.partition(":")[0])  # clients need not hear what an error quotes
            self._control.failed(reason)

    async def _go_down(self, reason: str) -> None:
        self._generation = 0
        self._exchange.suspend(reason)
        await self._disconnect(0.0)

    async def _stop(self, events: _Events) -> None:
        """Let running requests finish, then send Shutdown through all processes, and read on until it is back.

        Whatever the supervisor says meanwhile, such as that a process died, cuts this short.
        """
        is_whole, is_serving = self._generation != 0, not self._exchange.closed
        self._generation = 0
        self._exchange.close("the server is stopping")
        if is_serving and await _is_cut_short(self._exchange.idle(), events, self._config.drain_timeout):
            is_whole = False
        self._exchange.fail("the server is stopping")
        if self._connection is not None:
            self._connection.send_all(encode(Shutdown()))
        if is_whole:
            await _is_cut_short(self._exchange.ended(self._config.detokenizers), events, LEAVE)
        await self._disconnect(FLUSH)

    async def _disconnect(self, flush: float) -> None:
        self._listens_to = 0
        connection, self._connection = self._connection, None
        if connection is not None:
            self._exchange.attach(None)
            await asyncio.to_thread(connection.close, flush)


async def _is_cut_short(work: Coroutine[Any, Any, None], events: _Events, seconds: float) -> bool:
    """Wait until something is done, so long at most; whether an event has ended the waiting."""
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(work), asyncio.create_task(events.get())]
    done, pending = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    return tasks[1] in done


class _HttpServer(uvicorn.Server):
    """Leaves signals to the supervisor."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Capture none."""
        yield


class _HttpProtocol(HttpToolsProtocol):
    """Answers what is no HTTP as every other mistake, and who asks for another protocol in this one."""

    def send_400_response(self, msg: str) -> None:
        """Answer and hang up."""
        body = describe(RequestError("the request is not valid HTTP"))
        headers = {b"content-type": b"application/json", b"content-length": b"%d" % len(body), b"connection": b"close"}
        lines = [b"%s: %s\r\n" % header for header in (*self.server_state.default_headers, *headers.items())]
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n" + b"".join(lines) + b"\r\n" + body)
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: uvicorn's advice is to install something."""


def _uvicorn_config(app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        lifespan="off",
        http=_HttpProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=int(FLUSH),
    )


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Uvloop's, where there is one."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
