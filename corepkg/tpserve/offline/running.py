"""A running engine: rank 0 on a thread of this process, the other ranks in processes of their own."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from msgspec.structs import replace

from tpserve.api import NoOptions
from tpserve.config import ServeConfig
from tpserve.envelope import Sealer
from tpserve.errors import Closed, TransportError, UserError
from tpserve.frontend.text import TextCodec
from tpserve.launch.group import RankGroup
from tpserve.launch.plan import Plan
from tpserve.launch.post import Post
from tpserve.launch.rank import Intake, Rank, compose_rank
from tpserve.messages import RankMessage, StepOutput, encode
from tpserve.offline.local_rank import Feed, LocalRank
from tpserve.scheduler.replies import ReplySink
from tpserve.scheduler.round import OfflineSource
from tpserve.transports.inproc import InprocTransport

__all__ = ["RunningEngine", "plan_engine", "start_engine"]

PRODUCER = 1
ADDRESS = "ipc:///rank0"
CLOSE_SECONDS = 30.0
LEAVE_SECONDS = 5.0

Loading = Callable[[int, int], None]

logger = logging.getLogger(__name__)


def plan_engine(config: ServeConfig) -> Plan:
    """Decide what an engine is made of.

    Raises:
        UserError: it cannot be made.
    """
    # Requests come from this process alone, in the place of one tokenizer.
    plan = Plan.make(replace(config, tokenizers=1), logger.info, offline=True)
    if config.max_context > plan.model.max_context:
        logger.warning(
            "the context is the model's %d tokens, below the %d asked for", plan.model.max_context, config.max_context
        )
    return plan


def start_engine(config: ServeConfig, loading: Loading | None = None) -> RunningEngine:
    """Start an engine and wait until it is ready.

    Args:
        config: its settings.
        loading: called while rank 0's weights are loaded with the bytes done and their total.

    Raises:
        UserError: it cannot be started, and the person who tried can mend it.
    """
    plan = plan_engine(config)
    codec = TextCodec.from_folder(plan.folder.path, or_bytes=config.load_format == "dummy")
    return RunningEngine(plan, codec, loading)


class RunningEngine:
    """All ranks of an engine, and the model's tokenizer.

    Args:
        plan: what was decided about it.
        codec: the model's tokenizer.
        loading: called while rank 0's weights are loaded.

    Attributes:
        codec: the model's tokenizer.
        limits: what the engine has.
    """

    def __init__(self, plan: Plan, codec: TextCodec, loading: Loading | None) -> None:
        self.codec = codec
        self._rank = LocalRank()
        self._group = RankGroup(plan, on_failure=self._rank.fail, leave_decisions=self._rank.leave_decisions)
        try:
            self._rank.start(*_rank0(plan.post(self._group.layout), loading))
            with self._cause_first():
                self.limits = self._rank.wait_ready()
        except BaseException:
            self._group.close(patience=0.0)
            raise

    def put(self, messages: Sequence[RankMessage]) -> None:
        """Send messages to the ranks; they are dropped if rank 0 has ended."""
        self._rank.put(messages)

    def next(self) -> StepOutput:
        """Wait for the next output.

        Raises:
            Closed: after :meth:`close`.
            Exception: what ended rank 0, or another rank before it.
        """
        with self._cause_first():
            return self._rank.next()

    def close(self) -> None:
        """Stop all ranks. May be called twice."""
        in_order = self._rank.close(CLOSE_SECONDS)
        self._group.close(LEAVE_SECONDS if in_order else 0.0)

    @contextmanager
    def _cause_first(self) -> Iterator[None]:
        """When rank 0 has failed, raise what happened to another rank if that was the cause."""
        try:
            yield
        except (Closed, UserError):
            raise
        except Exception as error:
            failure = self._group.failure()
            if failure is None or failure is error:
                raise
            raise failure from error


def _rank0(post: Post, loading: Loading | None) -> tuple[Callable[[ReplySink], Rank], Feed]:
    """How to compose rank 0, and how to send it messages."""
    intake, feed = _links(post.config)
    cpus = post.composition.places[0].cpus

    def compose(replies: ReplySink) -> Rank:
        if cpus:
            os.sched_setaffinity(0, cpus)  # of this thread, and of those that it starts
        return compose_rank(post, intake=intake, replies=replies, progress=loading)

    return compose, feed


def _links(config: ServeConfig) -> tuple[Intake, Feed]:
    if config.tp == 1:
        source = OfflineSource(config.max_messages_per_round)
        return source, source.put
    pipes = InprocTransport(NoOptions())
    intake, sender, sealer = pipes.pipe_receiver(ADDRESS), pipes.pipe_sender(ADDRESS), Sealer(PRODUCER)
    sender.connect(math.inf)

    def feed(messages: Sequence[RankMessage]) -> None:
        with suppress(TransportError):  # the rank has just ended: whoever asks for its next output hears why
            for message in messages:
                sender.send(sealer.seal(encode(message)), math.inf)

    return intake, feed
