"""The round: the same messages in the same rounds on every rank, or an error that says what was expected and found."""

import random
import threading
import time
from queue import Empty, Queue

import msgspec
import pytest

from tpserve.api import (
    Announcement,
    Closed,
    DeadlineExceeded,
    Divergence,
    FanoutReceiver,
    FanoutSender,
    NoOptions,
    RankError,
    Sync,
    SyncContext,
)
from tpserve.api.sync import HEARTBEAT
from tpserve.envelope import Sealer
from tpserve.messages import Abort, Generate, SamplingParams, Shutdown, encode
from tpserve.scheduler.digest import DecisionLog, RoundDecisions
from tpserve.scheduler.round import Caps, FollowerSource, LeaderSource, OfflineSource, SingleSource
from tpserve.testing.lab import Task, soon
from tpserve.tokens import pack_ids
from tpserve.transports.inproc import InprocTransport

WATCHDOG = 30.0
RANKS = 3


class FakeSync(Sync):
    """Announcements over one queue for each follower."""

    def __init__(self, fanout: FanoutSender | FanoutReceiver, queues: list[Queue[Announcement]], rank: int) -> None:
        super().__init__(NoOptions(), SyncContext(rank, len(queues) + 1, None, "", fanout))
        self.queues = queues
        self.said: list[Announcement] = []

    def connect(self, deadline: float) -> None: ...

    def announce(self, announcement: Announcement, deadline: float) -> None:
        self.said.append(announcement)
        for queue in self.queues:
            queue.put(announcement)

    def receive(self, deadline: float) -> Announcement:
        try:
            return self.queues[self.context.rank - 1].get(timeout=max(0, deadline - time.monotonic()))
        except Empty:
            raise DeadlineExceeded("the leader is silent") from None

    def barrier(self, deadline: float) -> None: ...

    def close(self) -> None: ...


class Meddler(FanoutSender):
    """A fan-out that does something to the frames."""

    def __init__(self, sender: FanoutSender, meddle) -> None:
        self.sender = sender
        self.meddle = meddle

    def connect(self, deadline: float) -> None:
        self.sender.connect(deadline)

    def send_many(self, frames, deadline: float) -> None:
        self.sender.send_many(self.meddle(list(frames)), deadline)

    def close(self) -> None:
        self.sender.close()


class Cluster:
    """A leader and two followers in threads, and a tokenizer's end of the pipe."""

    def __init__(self, *, caps=None, heartbeat=WATCHDOG, watchdog=WATCHDOG, meddle=lambda frames: frames) -> None:
        self.transport = InprocTransport(NoOptions())
        intake = self.transport.pipe_receiver("ipc:///intake")
        self.tokenizers = [self.transport.pipe_sender("ipc:///intake") for _ in range(2)]
        self.sealers = [Sealer(1), Sealer(2)]
        leader = self.transport.fanout_sender("ipc:///fanout", RANKS - 1)
        ends = [self.transport.fanout_receiver("ipc:///fanout", index, RANKS - 1) for index in range(RANKS - 1)]
        joining = [Task(end.connect, soon()) for end in ends]
        leader.connect(soon())
        for task in joining:
            task.result()
        fanout = Meddler(leader, meddle)
        queues: list[Queue[Announcement]] = [Queue() for _ in ends]
        self.sync = FakeSync(fanout, queues, 0)
        self.logs = [DecisionLog(rank) for rank in range(RANKS)]
        self.leader = LeaderSource(intake, fanout, self.sync, self.logs[0], caps or Caps(), heartbeat, watchdog)
        self.followers = [
            FollowerSource(end, FakeSync(end, queues, rank), self.logs[rank], watchdog, rank)
            for rank, end in enumerate(ends, start=1)
        ]

    def say(self, *messages, tokenizer=0) -> None:
        for message in messages:
            self.tokenizers[tokenizer].send(self.sealers[tokenizer].seal(encode(message)), soon())

    def round(self, block=True):
        """One round on every rank; the leader's, after the followers were seen to have the same."""
        following = [Task(follower.receive, block) for follower in self.followers]
        led = self.leader.receive(block)
        assert [task.result() for task in following] == [led] * len(following)
        return led


def run(source, log, end) -> list:
    """Take rounds until one holds ``end``; the first blocks and others do not, as if there was work."""
    rounds = [source.receive(block=True)]
    log.fold(0, RoundDecisions())
    while end not in rounds[-1].messages:
        rounds.append(source.receive(block=False))
        log.fold(rounds[-1].number, RoundDecisions())
    return rounds


def generate(uid: int, tokens: int = 5) -> Generate:
    return Generate(uid, pack_ids(range(tokens)), SamplingParams(max_tokens=1, seed=uid))


@pytest.mark.parametrize("seed", range(3))
def test_all_ranks_take_the_same_messages_in_the_same_rounds(seed):
    cluster = Cluster(caps=Caps(messages=7))
    draw = random.Random(seed)
    following = [Task(run, *both, Shutdown()) for both in zip(cluster.followers, cluster.logs[1:], strict=True)]
    leading = Task(run, cluster.leader, cluster.logs[0], Shutdown())
    for uid in range(200):
        cluster.say(generate(uid, draw.randrange(1, 50)), Abort(uid), tokenizer=draw.randrange(2))
        if draw.random() < 0.1:
            time.sleep(0.005)
    cluster.say(Shutdown())
    rounds = leading.result()
    assert [task.result() for task in following] == [rounds, rounds]
    assert [one.number for one in rounds] == list(range(len(rounds)))
    assert max(len(one.messages) for one in rounds) <= 7
    uids = [message.uid for one in rounds for message in one.messages if isinstance(message, Generate)]
    assert sorted(uids) == list(range(200))
    assert len({log.latest for log in cluster.logs}) == 1


def test_a_round_takes_what_is_there_up_to_its_caps():
    cluster = Cluster(caps=Caps(messages=3, bytes=10_000))
    cluster.say(*(generate(uid) for uid in range(4)))
    assert [message.uid for message in cluster.round().messages] == [0, 1, 2]
    assert [message.uid for message in cluster.round(block=False).messages] == [3]
    assert cluster.round(block=False).messages == []
    cluster.say(generate(4, 20_000), generate(5))
    assert [message.uid for message in cluster.round().messages] == [4]
    assert [message.uid for message in cluster.round().messages] == [5]


def test_announcements_count_rounds_and_frames():
    cluster = Cluster()
    cluster.say(generate(0), generate(1))
    cluster.round()
    cluster.logs[0].fold(0, RoundDecisions(uids=[1]))
    cluster.round(block=False)
    cluster.say(Shutdown())
    cluster.round()
    digest = cluster.logs[0].latest
    assert cluster.sync.said == [
        Announcement(0, 0, 2, -1, 0),
        Announcement(1, 2, 0, *digest),
        Announcement(2, 2, 1, *digest),
    ]


def test_an_idle_leader_shows_life_that_is_no_round():
    cluster = Cluster(heartbeat=0.05, watchdog=0.5)
    following = [Task(follower.receive, True) for follower in cluster.followers]
    leading = Task(cluster.leader.receive, True)
    time.sleep(1)
    cluster.say(generate(0))
    assert leading.result().number == 0
    assert [task.result().number for task in following] == [0, 0]
    *heartbeats, first = cluster.sync.said
    assert len(heartbeats) >= 2
    assert set(heartbeats) == {Announcement(-1, 0, HEARTBEAT, -1, 0)}
    assert first == Announcement(0, 0, 1, -1, 0)


def test_a_silent_leader_is_an_error_that_names_rank_and_round():
    cluster = Cluster(watchdog=0.2)
    cluster.say(generate(0))
    cluster.round()
    with pytest.raises(RankError, match=r"rank 2, round 1: expected an announcement or a heartbeat within 0\.2 s") as e:
        cluster.followers[1].receive(block=True)
    assert (e.value.rank, e.value.round) == (2, 1)


def corrupt(frames):
    return [frame[:-1] + bytes([frame[-1] ^ 1]) for frame in frames]


def break_on(number: int, meddle):
    """Meddle with the frames of one round only."""
    rounds = iter(range(1000))
    return lambda frames: meddle(frames) if next(rounds) == number else frames


@pytest.mark.parametrize(
    ("meddle", "found"),
    [
        (corrupt, "expected hash"),
        (lambda frames: [frames[0], frames[0], *frames[2:]], "expected frame 1, found frame 0"),
        (lambda frames: [frames[1], frames[0], *frames[2:]], "expected frame 0, found frame 1"),
        (lambda frames: [frame[:10] for frame in frames], "shorter than an envelope"),
        (lambda frames: [b"", *frames[1:]], "shorter than an envelope"),
        (lambda frames: frames[1:], "2 of 3 frames came"),
    ],
    ids=["corrupted", "duplicated", "swapped", "cut", "emptied", "dropped"],
)
def test_a_frame_that_is_not_the_next_is_an_error_on_every_follower(meddle, found):
    cluster = Cluster(watchdog=0.3, meddle=break_on(0, meddle))
    cluster.say(generate(0), generate(1), generate(2))
    following = [Task(follower.receive, True) for follower in cluster.followers]
    cluster.leader.receive(block=True)
    for rank, task in enumerate(following, start=1):
        with pytest.raises(RankError, match=found) as caught:
            task.result()
        assert (caught.value.rank, caught.value.round) == (rank, 0)


def test_a_dropped_frame_is_noticed_in_the_next_round_at_the_latest():
    cluster = Cluster(meddle=break_on(0, lambda frames: [*frames[:-1], Sealer(9).seal(encode(Abort(1)))]))
    cluster.say(generate(0), generate(1))
    following = [Task(follower.receive, True) for follower in cluster.followers]
    cluster.leader.receive(block=True)
    for task in following:
        assert task.result().messages != [generate(0), generate(1)]
    cluster.say(generate(2))
    following = [Task(follower.receive, True) for follower in cluster.followers]
    cluster.leader.receive(block=True)
    for task in following:
        with pytest.raises(RankError, match="expected frame 1, found frame 2"):
            task.result()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first_frame": 5}, "expected a round that begins at frame 1, found one that begins at frame 5"),
        ({"round": 2}, "expected round 1 announced, found round 2"),
        ({"round": 0}, "expected round 1 announced, found round 0"),
        ({"count": -2}, "expected a count of frames, found -2"),
        ({"round": 1, "count": HEARTBEAT}, "expected round 0 announced, found round 1"),
    ],
)
def test_an_announcement_that_contradicts_the_one_before_is_an_error(change, message):
    cluster = Cluster()
    cluster.say(generate(0))
    cluster.round()
    wrong = msgspec.structs.replace(Announcement(1, 1, 1, -1, 0), **change)
    cluster.sync.announce(wrong, soon())
    for rank, follower in enumerate(cluster.followers, start=1):
        with pytest.raises(RankError, match=f"rank {rank}, round 1: {message}"):
            follower.receive(block=True)


def test_a_message_that_nobody_understands_is_an_error_on_all_ranks():
    cluster = Cluster()
    cluster.tokenizers[0].send(cluster.sealers[0].seal(b"\x81\xa4type\xa3odd"), soon())
    following = [Task(follower.receive, True) for follower in cluster.followers]
    for receive in (lambda: cluster.leader.receive(True), *(task.result for task in following)):
        with pytest.raises(RankError, match=r"round 0: .*a message that no rank understands"):
            receive()


def test_a_follower_that_decides_otherwise_is_found_a_round_later():
    cluster = Cluster()
    cluster.say(generate(0))
    cluster.round()
    for rank, log in enumerate(cluster.logs):
        log.fold(0, RoundDecisions(uids=[0], pages=[[1]], lengths=[5], tokens=[7 if rank == 2 else 6], finished=[None]))
    following = [Task(follower.receive, False) for follower in cluster.followers]
    cluster.leader.receive(block=False)
    following[0].result()
    with pytest.raises(Divergence, match="rank 2, round 0"):
        following[1].result()


def test_a_heartbeat_finds_a_divergence_too():
    cluster = Cluster(heartbeat=0.05)
    cluster.say(generate(0))
    cluster.round()
    for rank, log in enumerate(cluster.logs):
        log.fold(0, RoundDecisions(uids=[rank]))
    leading = Task(cluster.leader.receive, True)
    for follower in cluster.followers:
        with pytest.raises(Divergence):
            follower.receive(block=True)
    cluster.leader.close()
    with pytest.raises(Closed):
        leading.result()


def test_a_follower_that_has_gone_stops_the_leader():
    cluster = Cluster()
    cluster.followers[1].close()
    cluster.say(generate(0))
    with pytest.raises(RankError, match="rank 0, round 0: expected followers that read"):
        cluster.leader.receive(block=True)


def single(caps=None) -> tuple:
    transport = InprocTransport(NoOptions())
    return (
        SingleSource(transport.pipe_receiver("ipc:///in"), caps or Caps()),
        transport.pipe_sender("ipc:///in"),
        Sealer(1),
    )


def test_a_single_rank_takes_rounds_alone():
    source, sender, sealer = single(Caps(messages=2))
    for uid in range(3):
        sender.send(sealer.seal(encode(generate(uid))), soon())
    rounds = [source.receive(block=True), source.receive(block=False), source.receive(block=False)]
    assert [(one.number, len(one.messages)) for one in rounds] == [(0, 2), (1, 1), (2, 0)]


def test_a_single_rank_checks_frames():
    source, sender, sealer = single()
    sealer.seal(b"lost")
    sender.send(sealer.seal(encode(generate(0))), soon())
    with pytest.raises(RankError, match=r"rank 0, round 0: .*expected frame 0, found frame 1"):
        source.receive(block=True)


@pytest.mark.parametrize("make", [lambda: single()[0], OfflineSource])
def test_closing_wakes_a_source_that_waits(make):
    source = make()
    waiting = Task(source.receive, True)
    source.close()
    source.close()
    with pytest.raises(Closed):
        waiting.result()


def test_an_offline_source_waits_for_the_first_message_and_keeps_its_cap():
    source = OfflineSource(messages=2)
    waiting = Task(source.receive, True)
    assert source.receive(block=False).messages == []
    threading.Timer(0.05, source.put, [[generate(uid) for uid in range(5)]]).start()
    first = waiting.result()
    rest = [source.receive(block=False) for _ in range(3)]
    assert [message.uid for one in (first, *rest) for message in one.messages] == list(range(5))
    assert max(len(one.messages) for one in (first, *rest)) == 2
