"""What each kind of child does; the supervisor names these functions in its specs."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from threading import Thread

import msgspec

from tpserve.api import PipeReceiver, PipeSender, Transport
from tpserve.frontend.control import ControlEvent, Links, ServeEvent
from tpserve.launch.child import Line
from tpserve.launch.compose import Composition, load_part
from tpserve.launch.layout import Layout
from tpserve.launch.post import ApiPost, Post, read_post
from tpserve.launch.protocol import Alive, Progress, Ready, Serving, Stuck
from tpserve.launch.pulse import PulsingReceiver
from tpserve.launch.rank import Rank, compose_rank
from tpserve.scheduler.digest import dump_path
from tpserve.scheduler.replies import PipeReplies

__all__ = ["api", "detokenizer", "rank", "tokenizer"]

TOKENIZER = 1
DETOKENIZER = 2000
"""Numbers of the first tokenizer and detokenizer in envelopes."""


def api(line: Line, payload: msgspec.Raw) -> None:
    """Serve HTTP, over the links of one generation after the other."""
    from tpserve.frontend.server import serve

    line.pulse = None
    own = read_post(payload, ApiPost)
    post = own.post
    transport = _make_pipes(post)

    def open_links(generation: int) -> Links:
        layout = Layout(post.layout.run_dir, generation)
        receiver = transport.pipe_receiver(layout.to_api)
        senders = [transport.pipe_sender(layout.to_tokenizer(index)) for index in range(post.config.tokenizers)]
        return Links(receiver, senders)

    with socket.socket(fileno=own.socket) as sock:
        serve(sock, post.config, own.model_name, open_links, ApiControl(line), _chosen(post.composition))
    transport.close()


class ApiControl:
    """The api process's line to the supervisor; reports carry the generation that they are about."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._generation = 0

    def receive(self) -> ControlEvent:
        """Wait for the next event."""
        event = self._line.receive()
        if isinstance(event, ServeEvent):
            self._generation = event.generation
        return event

    def alive(self) -> None:
        """The event loop turns."""
        self._line.report(Alive())

    def serving(self) -> None:
        """The warm-up has come back."""
        self._line.report(Serving(self._generation))

    def failed(self, reason: str) -> None:
        """A link broke, or the warm-up was refused."""
        self._line.report(Stuck(self._generation, reason))


def tokenizer(line: Line, payload: msgspec.Raw) -> None:
    """Turn requests into tokens until the Shutdown."""
    from tpserve.frontend.text import TextCodec
    from tpserve.frontend.tokenizer_worker import run_tokenizer

    post = read_post(payload, Post)
    transport = _make_pipes(post)
    receiver = _make_inbox(line, transport, post.layout.to_tokenizer(post.index))
    codec = TextCodec.from_folder(post.model.path, or_bytes=post.config.load_format == "dummy")
    to_rank = _connect(post, transport, post.layout.to_rank0)
    line.report(Ready())
    limits = _await_serve(line).limits
    to_api = _connect(post, transport, post.layout.to_api)
    run_tokenizer(receiver, to_rank, to_api, codec, limits, TOKENIZER + post.index)
    transport.close()


def detokenizer(line: Line, payload: msgspec.Raw) -> None:
    """Turn tokens into text until the Shutdown."""
    from tpserve.frontend.detokenizer_worker import run_detokenizer
    from tpserve.frontend.text import TextCodec

    post = read_post(payload, Post)
    transport = _make_pipes(post)
    receiver = _make_inbox(line, transport, post.layout.to_detokenizer(post.index))
    codec = TextCodec.from_folder(post.model.path, or_bytes=post.config.load_format == "dummy")
    line.report(Ready())
    _await_serve(line)
    to_api = _connect(post, transport, post.layout.to_api)
    run_detokenizer(receiver, to_api, codec, DETOKENIZER + post.index)
    transport.close()


def rank(line: Line, payload: msgspec.Raw) -> None:
    """Run one rank until the Shutdown; rank 0 of a server takes messages and replies, all others follow."""
    post = read_post(payload, Post)
    if post.index > 0:
        with compose_rank(post, line.pulse) as follower:
            _run(line, post, follower)
        return
    transport = _make_pipes(post)
    intake = transport.pipe_receiver(post.layout.to_rank0)
    detokenizers = range(post.config.detokenizers)
    pipes = [_connect(post, transport, post.layout.to_detokenizer(index)) for index in detokenizers]

    def show(done: int, total: int) -> None:
        line.report(Progress(done, total))

    replies = PipeReplies(pipes, post.config.watchdog)
    with compose_rank(post, line.pulse, intake=intake, replies=replies, progress=show) as leader:
        _run(line, post, leader)
    transport.close()


def _run(line: Line, post: Post, composed: Rank) -> None:
    """Run a rank; when it is made to stop, leave its last decisions where they can be compared with other ranks'."""
    path = dump_path(post.layout.directory, post.index)

    def stop() -> None:
        try:
            composed.scheduler.dump(path)
        finally:
            os._exit(128 + signal.SIGTERM)

    _on_sigterm(stop)
    line.report(Ready(composed.limits))
    try:
        composed.scheduler.run()
    except Exception:
        composed.scheduler.dump(path)
        raise


def _on_sigterm(stop: Callable[[], None]) -> None:
    """Call a function when SIGTERM comes: on a thread, for the main one may wait for a peer inside a library."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGTERM, lambda signum, frame: None)
    signal.set_wakeup_fd(writer)

    def wait() -> None:
        os.read(reader, 1)
        stop()

    Thread(target=wait, name="sigterm", daemon=True).start()


def _chosen(composition: Composition) -> dict[str, str]:
    """The name of each part, for /metrics."""
    kinds = ("transport", "pipes", "sync", "policy", "attention", "ops", "comm")
    parts = {kind: getattr(composition, kind) for kind in kinds}
    names = {kind: part.name if part else "none" for kind, part in parts.items()}
    if composition.decode_attention:
        names["attention"] += f",{composition.decode_attention.name}"
    return names


def _make_pipes(post: Post) -> Transport:
    assert post.composition.pipes is not None
    transport: Transport = load_part(post.composition.pipes)()
    return transport


def _make_inbox(line: Line, transport: Transport, address: str) -> PipeReceiver:
    assert line.pulse is not None
    return PulsingReceiver(transport.pipe_receiver(address), line.pulse)


def _connect(post: Post, transport: Transport, address: str) -> PipeSender:
    sender = transport.pipe_sender(address)
    sender.connect(time.monotonic() + post.config.startup_timeout)
    return sender


def _await_serve(line: Line) -> ServeEvent:
    event = line.receive()
    assert isinstance(event, ServeEvent), event
    return event
