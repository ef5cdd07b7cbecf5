"""Leader and followers: equal decisions from the same messages, however these were batched, and a stop where not."""

import math
import random
import threading
from pathlib import Path
from queue import Queue

import pytest

from tpserve.api import (
    Announcement,
    Divergence,
    FanoutReceiver,
    FanoutSender,
    NoOptions,
    PipeReceiver,
    Plan,
    Sync,
    SyncContext,
)
from tpserve.envelope import Sealer
from tpserve.messages import Abort, Generate, RankMessage, SamplingParams, Shutdown, StepOutput, encode
from tpserve.policies.fcfs import FcfsPolicy
from tpserve.scheduler.digest import DecisionLog
from tpserve.scheduler.replies import LocalReplies, NullReplies
from tpserve.scheduler.round import Caps, FollowerSource, LeaderSource
from tpserve.scheduler.scheduler import Scheduler
from tpserve.testing.fake_engine import SMALL_LIMITS, FakeEngine, continuation
from tpserve.tokens import pack_ids, unpack_ids

PATIENCE = 60.0


class Intake(PipeReceiver):
    """Gives out the frames in batches of random size, the last one when there is nothing else to do."""

    def __init__(self, messages: list[RankMessage], seed: int) -> None:
        sealer = Sealer(1)
        self._frames = [sealer.seal(encode(message)) for message in messages]
        self._random = random.Random(seed)

    def recv_many(self, max_frames: int, max_bytes: int, deadline: float) -> list[bytes]:
        is_idle = deadline > 0
        count = min(self._random.randint(is_idle, 4), len(self._frames) - 1) or int(is_idle)
        taken, self._frames = self._frames[:count], self._frames[count:]
        return taken

    def close(self) -> None: ...


class Wire(FanoutSender, FanoutReceiver, Sync):
    """All links from the leader to one follower, in one object."""

    def __init__(self) -> None:
        self.context = SyncContext(0, 2, Path(), "wire", self)
        self._frames: Queue[bytes] = Queue()
        self._announcements: Queue[Announcement] = Queue()

    def connect(self, deadline: float) -> None: ...

    def send_many(self, frames, deadline: float) -> None:
        for frame in frames:
            self._frames.put(frame)

    def recv_many(self, count: int, deadline: float) -> list[bytes]:
        return [self._frames.get(timeout=PATIENCE) for _ in range(count)]

    def announce(self, announcement: Announcement, deadline: float) -> None:
        self._announcements.put(announcement)

    def receive(self, deadline: float) -> Announcement:
        return self._announcements.get(timeout=PATIENCE)

    def barrier(self, deadline: float) -> None: ...

    def close(self) -> None: ...


class Backwards(FcfsPolicy):
    """Admits two prompts in the wrong order."""

    def plan(self, view):
        plan = super().plan(view)
        return Plan(plan.prefill[::-1], plan.decode)


def messages(seed: int) -> list[RankMessage]:
    draw = random.Random(seed)
    stream: list[RankMessage] = []
    for uid in range(40):
        params = SamplingParams(max_tokens=draw.randint(1, 15), seed=uid, ignore_eos=draw.random() < 0.5)
        stream.append(Generate(uid, pack_ids(draw.randrange(50) for _ in range(draw.randint(1, 20))), params))
        if draw.random() < 0.3:
            stream.append(Abort(draw.randrange(uid + 2)))
    return stream


def scheduler(source, replies, log, policy=FcfsPolicy) -> Scheduler:
    engine = FakeEngine(SMALL_LIMITS)
    return Scheduler(source, replies, engine, policy(NoOptions()), log, max_running=6, max_step_tokens=40)


def serve(stream: list[RankMessage], seed: int, policy=FcfsPolicy):
    """Run a leader and a follower with ``policy`` to their end; outputs, digests, and the follower's error."""
    outputs: list[StepOutput] = []
    wire, logs, errors = Wire(), [DecisionLog(0), DecisionLog(1)], []
    follower = scheduler(FollowerSource(wire, wire, logs[1], PATIENCE, rank=1), NullReplies(), logs[1], policy)

    def follow() -> None:
        try:
            follower.run()
        except Divergence as error:
            errors.append(error)

    thread = threading.Thread(target=follow)
    thread.start()
    source = LeaderSource(Intake([*stream, Shutdown()], seed), wire, wire, logs[0], Caps(), math.inf, PATIENCE)
    scheduler(source, LocalReplies(outputs.append), logs[0]).run()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    return outputs, [log.latest for log in logs], errors


@pytest.mark.parametrize("seed", range(10))
def test_a_follower_decides_what_the_leader_decides(seed):
    outputs, digests, errors = serve(messages(seed), seed)
    assert not errors
    assert digests[0] == digests[1] != (-1, 0)
    assert sum(len([reason for reason in output.finished if reason]) for output in outputs) == 40


def test_what_is_said_does_not_depend_on_how_messages_are_batched():
    def tokens(seed: int) -> dict[int, list[int]]:
        said: dict[int, list[int]] = {}
        for output in serve(stream, seed)[0]:
            for uid, token in zip(output.uids, output.tokens, strict=True):
                said.setdefault(uid, []).append(token)
        return said

    stream = [message for message in messages(3) if isinstance(message, Generate)]
    first = tokens(1)
    assert first == tokens(2)
    whole = next(message for message in stream if message.params.ignore_eos and message.params.max_tokens > 5)
    assert first[whole.uid][:5] == continuation(unpack_ids(whole.prompt_ids), whole.params, 5)


def test_a_follower_that_decides_otherwise_stops():
    _, digests, errors = serve(messages(1), 1, Backwards)
    assert digests[0] != digests[1]
    assert "rank 1" in str(errors[0])
