"""The composition of one rank: the only place where links, scheduler and engine meet."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from tpserve.api import Attention, AttentionShape, Comm, CommContext, FanoutSender, PipeReceiver
from tpserve.launch.compose import Composition, Part, load_part
from tpserve.launch.links import join_fanout, join_sync
from tpserve.launch.post import Post
from tpserve.launch.pulse import Pulse, PulsingSource
from tpserve.launch.recording import header_of, record_path
from tpserve.models.config import ModelConfig
from tpserve.outputs import trace_path
from tpserve.scheduler.digest import DecisionLog, RoundDecisions
from tpserve.scheduler.recording import Recorder, RecordingError
from tpserve.scheduler.replies import NullReplies, ReplySink
from tpserve.scheduler.round import Caps, FollowerSource, LeaderSource, OfflineSource, Round, RoundSource, SingleSource
from tpserve.scheduler.scheduler import Budget, Scheduler
from tpserve.step import Engine, EngineLimits

__all__ = ["Intake", "Rank", "compose_rank"]

logger = logging.getLogger(__name__)

Intake = PipeReceiver | OfflineSource
"""Where the leader's messages come from: the pipe from the tokenizers, or a feed in the same process."""


class Rank:
    """One rank, ready to run; a context manager that closes what was made for it.

    Attributes:
        scheduler: its loop.
        limits: what its engine has; the same on every rank.
    """

    def __init__(self, scheduler: Scheduler, limits: EngineLimits, resources: ExitStack) -> None:
        self.scheduler = scheduler
        self.limits = limits
        self._resources = resources

    def close(self) -> None:
        """Close the links, then the engine. May be called twice."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def compose_rank(
    post: Post,
    pulse: Pulse | None = None,
    *,
    intake: Intake | None = None,
    replies: ReplySink | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Rank:
    """Compose rank ``post.index`` and wait until all ranks have come as far.

    Args:
        post: who this is, and among whom.
        pulse: gets the turns of the rank's loop; None where nobody asks for them.
        intake: the leader's messages; None on followers.
        replies: where the leader's outputs go; None on followers.
        progress: called while weights are loaded with the bytes done and their total.

    Raises:
        ModelError: the weights are damaged or incomplete.
        LaunchError: they do not fit.
        ConfigError: traces cannot be written.
        RecordingError: the recording cannot be written.
        DeadlineExceeded: not all ranks came within ``config.startup_timeout``.
    """
    deadline = time.monotonic() + post.config.startup_timeout
    log = DecisionLog(post.index)
    resources = ExitStack()
    try:
        engine = _build_engine(post, progress)
        resources.callback(engine.close)
        source = _build_source(post, intake, log, resources, deadline)
        resources.callback(source.close)
        if pulse is not None:
            source = PulsingSource(source, pulse)
        budget = Budget(
            running=post.config.max_running_requests,
            step_tokens=post.composition.step_tokens,
            chunk=post.config.chunked_prefill_size,
            cache=post.config.cache == "radix",
            overlap=post.composition.overlap,
        )
        scheduler = Scheduler(
            source,
            replies or NullReplies(),
            engine,
            load_part(post.composition.policy)(),
            log,
            budget,
            post.config.tokenizers,
            _record(post, engine.limits, budget, log, resources),
        )
    except BaseException:
        resources.close()
        raise
    return Rank(scheduler, engine.limits, resources)


def _record(
    post: Post, limits: EngineLimits, budget: Budget, log: DecisionLog, resources: ExitStack
) -> Callable[[Round, RoundDecisions], None] | None:
    path = record_path(post)
    if path is None:
        return None
    try:
        recorder = Recorder(path, header_of(post, limits, budget), log)
    except RecordingError as error:
        if post.layout.generation == 1:
            raise
        logger.warning("nothing is recorded from here on: %s", error)  # a server that has served goes on
        return None
    resources.callback(recorder.close)
    return recorder.add


def _build_engine(post: Post, progress: Callable[[int, int], None] | None) -> Engine:
    import torch

    from tpserve.engine.build import build_engine
    from tpserve.engine.profiled import ProfiledEngine, check_folder

    traces = Path(post.config.profile) if post.config.profile else None
    if traces and post.layout.generation == 1:
        check_folder(traces)
    place, composition = post.composition.places[post.index], post.composition
    torch.set_num_threads(place.threads)
    if composition.device.type == "cuda":
        torch.cuda.set_device(place.device)
    if composition.device.type == "cuda" and post.config.cuda_graph and not composition.cuda_graph:
        logger.warning("decode steps are launched kernel by kernel: %s", composition.cuda_graph_reason)
    decided = {
        "dtype": composition.dtype,
        "max_step_tokens": composition.step_tokens,
        "cuda_graph": composition.cuda_graph,
    }
    engine = build_engine(
        msgspec.structs.replace(post.config, **decided),
        ModelConfig.from_folder(post.model.path),
        post.model.path,
        composition.partitions[post.index],
        place.device,
        _attention(composition),
        load_part(composition.ops)(),
        partial(_join_comm, post, composition.comm) if composition.comm else None,
        progress,
    )
    return ProfiledEngine(engine, trace_path(traces, post.index)) if traces else engine


def _attention(composition: Composition) -> Callable[[AttentionShape], Attention]:
    make: Callable[[AttentionShape], Attention] = load_part(composition.attention)
    if composition.decode_attention is None:
        return make
    from tpserve.attention.pair import PairedAttention

    make_decode = load_part(composition.decode_attention)
    return lambda shape: PairedAttention(shape, make(shape), make_decode(shape))


def _join_comm(post: Post, part: Part) -> Comm:
    context = CommContext(
        rank=post.index,
        size=post.config.tp,
        run_dir=post.layout.directory,
        name=post.layout.name("comm"),
        device=post.composition.places[post.index].device,
        timeout=post.config.watchdog,
        join_timeout=post.config.startup_timeout,
    )
    comm: Comm = load_part(part)(context)
    return comm


def _build_source(
    post: Post, intake: Intake | None, log: DecisionLog, resources: ExitStack, deadline: float
) -> RoundSource:
    if isinstance(intake, OfflineSource):
        return intake
    config = post.config
    caps = Caps(config.max_messages_per_round, config.max_round_bytes)
    if config.tp == 1:
        assert intake is not None
        return SingleSource(intake, caps)
    assert post.composition.transport is not None
    assert post.composition.sync is not None
    fanout = join_fanout(post.composition.transport, post.layout, post.index, config.tp, resources, deadline)
    sync = join_sync(post.composition.sync, post.layout, post.index, config.tp, fanout, deadline)
    if isinstance(fanout, FanoutSender):
        assert intake is not None
        return LeaderSource(intake, fanout, sync, log, caps, config.heartbeat, config.watchdog)
    return FollowerSource(fanout, sync, log, config.watchdog, post.index)
