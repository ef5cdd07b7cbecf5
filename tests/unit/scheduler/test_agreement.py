"""Leader and followers: equal decisions from the same messages, however these were batched, and a stop where not."""

import math
import random
import threading
from pathlib import Path
from queue import Queue

import msgspec
import pytest
from tests.unit.scheduler.sample import Decisions

from tpserve.api import (
    Announcement,
    Divergence,
    FanoutReceiver,
    FanoutSender,
    PipeReceiver,
    Plan,
    Sync,
    SyncContext,
)
from tpserve.envelope import Sealer
from tpserve.messages import Abort, Generate, RankMessage, SamplingParams, Shutdown, StepOutput, encode
from tpserve.policies.fcfs import FcfsPolicy
from tpserve.policies.lpm import LpmPolicy
from tpserve.policies.options import BatchingOptions, LpmOptions, PriorityOptions
from tpserve.policies.priority import PriorityPolicy
from tpserve.scheduler.replies import LocalReplies, NullReplies
from tpserve.scheduler.round import Caps, FollowerSource, LeaderSource
from tpserve.scheduler.scheduler import Budget, Scheduler
from tpserve.testing.fake_engine import SMALL_LIMITS, FakeEngine, continuation
from tpserve.tokens import pack_ids, unpack_ids

PATIENCE = 60.0
LIMITS = msgspec.structs.replace(SMALL_LIMITS, pages=16)
"""A pool that cannot hold six requests to their end."""


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


OPTIONS = {
    FcfsPolicy: BatchingOptions,
    Backwards: BatchingOptions,
    LpmPolicy: LpmOptions,
    PriorityPolicy: PriorityOptions,
}


def messages(seed: int) -> list[RankMessage]:
    draw = random.Random(seed)
    beginnings = [[draw.randrange(50) for _ in range(12)] for _ in range(3)]
    stream: list[RankMessage] = []
    for uid in range(40):
        params = SamplingParams(max_tokens=draw.randint(1, 25), seed=uid, ignore_eos=draw.random() < 0.5)
        prompt = draw.choice(beginnings)[: draw.randint(1, 12)] + [draw.randrange(50) for _ in range(8)]
        stream.append(Generate(uid, pack_ids(prompt), params, priority=draw.choice([0, 0, 5])))
        if draw.random() < 0.3:
            stream.append(Abort(draw.randrange(uid + 2)))
    return stream


def scheduler(source, replies, log, policy=FcfsPolicy, overlap=False) -> Scheduler:
    budget = Budget(running=6, step_tokens=40, chunk=7, cache=True, overlap=overlap)
    options = OPTIONS[policy](reserve=0.0)
    return Scheduler(source, replies, FakeEngine(LIMITS), policy(options), log, budget)


def serve(stream: list[RankMessage], seed: int, policies=(FcfsPolicy, FcfsPolicy), overlap=False):
    """Run a leader and a follower, each with its policy, to their end; outputs, logs, and the follower's error."""
    outputs: list[StepOutput] = []
    wire, logs, errors = Wire(), [Decisions(0), Decisions(1)], []
    following = FollowerSource(wire, wire, logs[1], PATIENCE, rank=1)
    follower = scheduler(following, NullReplies(), logs[1], policies[1], overlap)

    def follow() -> None:
        try:
            follower.run()
        except Divergence as error:
            errors.append(error)

    thread = threading.Thread(target=follow)
    thread.start()
    source = LeaderSource(Intake([*stream, Shutdown()], seed), wire, wire, logs[0], Caps(), math.inf, PATIENCE)
    leader = scheduler(source, LocalReplies(outputs.append), logs[0], policies[0], overlap)
    leader.run()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    leader.check()
    return outputs, logs, errors


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", [FcfsPolicy, LpmPolicy, PriorityPolicy])
def test_a_follower_decides_what_the_leader_decides(policy, overlap):
    retracted = cached = 0
    for seed in range(10):
        outputs, logs, errors = serve(messages(seed), seed, (policy, policy), overlap)
        assert not errors
        assert logs[0].rounds == logs[1].rounds
        assert logs[0].latest == logs[1].latest != (-1, 0)
        assert sum(len([reason for reason in output.finished if reason]) for output in outputs) == 40
        retracted += logs[0].retracted
        cached += sum(started.cached_tokens for output in outputs for started in output.started)
    assert retracted > 20
    assert cached > 500


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_said_does_not_depend_on_how_messages_are_batched(overlap):
    def tokens(seed: int) -> dict[int, list[int]]:
        said: dict[int, list[int]] = {}
        for output in serve(stream, seed, overlap=overlap)[0]:
            for uid, token in zip(output.uids, output.tokens, strict=True):
                said.setdefault(uid, []).append(token)
        return said

    stream = [message for message in messages(3) if isinstance(message, Generate)]
    first = tokens(1)
    assert first == tokens(2)
    whole = next(message for message in stream if message.params.ignore_eos and message.params.max_tokens > 5)
    assert first[whole.uid][:5] == continuation(unpack_ids(whole.prompt_ids), whole.params, 5)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_follower_that_decides_otherwise_stops_within_the_rounds_that_are_under_way(overlap):
    _, logs, errors = serve(messages(1), 1, (FcfsPolicy, Backwards), overlap)
    (error,) = errors
    assert "rank 1" in str(error)
    pairs = zip(logs[0].rounds, logs[1].rounds, strict=False)
    first = next(number for number, (one, other) in enumerate(pairs) if one != other)
    assert f"round {first}" in str(error)
    assert len(logs[1].rounds) <= first + 2 + overlap
