"""Recording what a rank decides, and deciding it again."""

import os
import random
import re
from pathlib import Path

import msgspec
import pytest
import xxhash

from tpserve.api import Plan
from tpserve.messages import Abort, Generate, SamplingParams, Shutdown
from tpserve.policies.fcfs import FcfsPolicy
from tpserve.policies.lpm import LpmPolicy
from tpserve.policies.options import BatchingOptions, LpmOptions
from tpserve.scheduler.digest import DecisionLog, RoundDecisions
from tpserve.scheduler.recording import (
    CLAIM,
    MAGIC,
    PREFIX_SIZE,
    Header,
    RecordedRound,
    Recorder,
    Recording,
    RecordingError,
    _prefix,
)
from tpserve.scheduler.replay import replay
from tpserve.scheduler.replies import NullReplies
from tpserve.scheduler.round import Round, RoundSource
from tpserve.scheduler.scheduler import Budget, Scheduler
from tpserve.testing.fake_engine import SMALL_LIMITS, FakeEngine
from tpserve.tokens import pack_ids

END = PREFIX_SIZE
"""Bytes of a recording's last record."""

FCFS = FcfsPolicy(BatchingOptions(reserve=0.0))


class Killed(Exception):
    pass


class Traffic(RoundSource):
    """Thirty requests, some aborted, at random; then a Shutdown, or a kill in the middle of things."""

    def __init__(self, seed: int, killed_in: int = -1) -> None:
        self.draw = random.Random(seed)
        self.killed_in = killed_in
        self.asked = 0
        self.number = -1

    def receive(self, block: bool) -> Round:
        self.number += 1
        if self.number == self.killed_in:
            raise Killed
        messages = [self.request() for _ in range(self.draw.choice([0, 0, 1, 3]) + block) if self.asked < 30]
        if self.draw.random() < 0.2:
            messages.append(Abort(self.draw.randrange(31)))
        return Round(self.number, messages if self.asked < 30 or not block else [Shutdown()])

    def request(self) -> Generate:
        uid, self.asked = self.asked, self.asked + 1
        draw = self.draw
        prompt = [uid % 3] * draw.choice([0, 8, 12]) + [draw.randrange(50) for _ in range(draw.randint(1, 9))]
        params = SamplingParams(max_tokens=draw.randint(1, 30), seed=uid, ignore_eos=draw.random() < 0.5)
        return Generate(uid, pack_ids(prompt), params, priority=uid % 2)

    def close(self) -> None: ...


def record(path, seed=0, killed_in=-1, disk=None, closed=False, **budget):
    """Run a rank and record it; its decisions."""
    log = DecisionLog(0)
    header = Header(
        version="1",
        model="none",
        shape={},
        limits=SMALL_LIMITS,
        budget=Budget(running=6, step_tokens=40, **budget),
        policy="fcfs",
        options={"reserve": 0.0},
        provider="tpserve 1",
        tokenizers=1,
    )
    recorder = Recorder(path, header, log)
    recorder._file = disk or recorder._file
    traffic, engine = Traffic(seed, killed_in), FakeEngine(SMALL_LIMITS)
    scheduler = Scheduler(traffic, NullReplies(), engine, FCFS, log, header.budget, observe=recorder.add)
    try:
        scheduler.run()
        recorder.close()
    except Killed:
        if closed:
            recorder.close()
    return log


@pytest.fixture
def path(tmp_path):
    return tmp_path / "recording"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_a_replay_decides_the_same(path, seed, overlap):
    log = record(path, seed, overlap=overlap, cache=seed % 2 == 0, chunk=seed % 3)
    recording = Recording(path)
    assert (recording.header.policy, recording.header.limits) == ("fcfs", SMALL_LIMITS)
    done = replay(recording, FCFS)
    assert done.difference == ""
    assert (done.rounds, recording.is_cut_off) == (log.latest[0] + 1, False)
    assert done.requests == 30
    assert done.tokens > 100


def test_a_recording_ends_with_the_digest_of_the_rank(path):
    log = record(path)
    assert list(Recording(path).rounds())[-1].digest == log.latest[1]


@pytest.mark.parametrize("overlap", [False, True])
def test_what_a_killed_rank_had_finished_is_there(path, overlap):
    log = record(path, killed_in=25, overlap=overlap)
    assert log.latest[0] + 1 in (24, 25)
    recording = Recording(path)
    done = replay(recording, FCFS)
    assert (done.rounds, done.difference, recording.is_cut_off) == (log.latest[0] + 1, "", True)


def test_a_cut_off_record_is_told_and_no_error(path):
    record(path)
    content = path.read_bytes()
    rounds = replay(Recording(path), FCFS).rounds
    for cut in (1, 7, 12, END, END + 1, END + 30):
        path.write_bytes(content[:-cut])
        recording = Recording(path)
        done = replay(recording, FCFS)
        assert (done.rounds, done.difference, recording.is_cut_off) == (rounds - (cut > END), "", True)


def first_record(content):
    """Where the first record ends."""
    return len(MAGIC) + PREFIX_SIZE + CLAIM.unpack_from(content, len(MAGIC))[0]


def claiming(content, length):
    """The recording with another length in its first record, and the hash that goes with it."""
    return content[: len(MAGIC)] + _prefix(length, 0, 0) + content[len(MAGIC) + PREFIX_SIZE :]


def outcome(path):
    """What a replay comes to: rounds and whether the recording is cut off; None if it is refused."""
    try:
        recording = Recording(path)
        done = replay(recording, FCFS)
    except RecordingError:
        return None
    assert done.difference == ""
    return done.rounds, recording.is_cut_off


def flip(path, place):
    """Put another byte there; once more puts it back."""
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ random.Random(place).randrange(1, 256)]))


def outcomes_of_flips(path, places):
    for place in places:
        flip(path, place)
        yield outcome(path)
        flip(path, place)


def test_no_byte_that_changes_goes_unnoticed(path):
    record(path, killed_in=4, closed=True)
    assert outcome(path) == (4, False)
    assert set(outcomes_of_flips(path, range(path.stat().st_size))) == {None}
    assert outcome(path) == (4, False)


def test_a_recording_that_is_cut_off_is_read_to_its_last_whole_round(path):
    record(path, killed_in=4, closed=True)
    content, found = path.read_bytes(), {}
    for length in reversed(range(len(content))):
        os.truncate(path, length)
        found[length] = outcome(path)
    assert list(dict.fromkeys(found.values())) == [(4, True), (3, True), (2, True), (1, True), None]
    last = min(length for length, each in found.items() if each == (3, True))
    path.write_bytes(content[: -END - 2])
    assert set(outcomes_of_flips(path, range(last, len(content) - END - 2))) == {None, (3, True)}


@pytest.mark.parametrize("more", [lambda content: b"x", lambda content: content, lambda content: content[-END:]])
def test_nothing_comes_behind_the_end(path, more):
    record(path)
    path.write_bytes(path.read_bytes() + more(path.read_bytes()))
    with pytest.raises(RecordingError, match="goes on behind its end"):
        replay(Recording(path), FCFS)


def test_rounds_behind_the_end_are_a_difference(path):
    log = record(path)
    end = log.latest[0] + 1
    records = end + 1
    payload = msgspec.msgpack.encode(RecordedRound(end, [], RoundDecisions(), 0))
    digest = xxhash.xxh3_64_intdigest(payload, records)
    path.write_bytes(path.read_bytes()[:-END] + _prefix(len(payload), digest, records) + payload)
    done = replay(Recording(path), FCFS)
    assert (done.rounds, done.difference) == (end, f"round {end}: it is recorded, and the replay has ended before")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:-10] + b"\xff" + content[-9:], "record [0-9]+ is damaged"),
        (lambda content: b"", "is no recording"),
        (lambda content: b"TPSVREC0" + content[8:], "is a recording of another version"),
        (lambda content: content[:40], "ends in its first record"),
        (lambda content: content[: first_record(content)], "ends before the first round is whole"),
        (lambda content: content[: first_record(content) + 30], "ends before the first round is whole"),
        (lambda content: claiming(content, 1 << 31), "record 0 is damaged"),
    ],
)
def test_a_file_that_cannot_be_read_is_told(path, change, message):
    record(path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(RecordingError, match=message):
        replay(Recording(path), FCFS)


def test_a_missing_file_is_told(path):
    with pytest.raises(RecordingError, match="cannot be read: No such file"):
        Recording(path)
    with pytest.raises(RecordingError, match="cannot be written: No such file"):
        record(path / "deeper")


def test_another_policy_is_stopped_where_it_first_decides_otherwise(path):
    record(path)

    class Later(FcfsPolicy):
        def plan(self, view):
            plan = super().plan(view)
            return Plan(plan.prefill[::-1], plan.decode) if view.round > 9 else plan

    done = replay(Recording(path), Later(FCFS.options))
    number = int(done.difference.split()[1].rstrip(":"))
    assert number == done.rounds > 9
    assert re.match(rf"round {number}: uids\[\d+\] differs: recorded is ", done.difference)


def test_the_built_in_policies_differ_on_shared_prefixes(path):
    record(path)
    assert replay(Recording(path), LpmPolicy(LpmOptions(reserve=0.0, ageing=1))).difference


def test_a_policy_that_cannot_decide_is_told(path):
    class Greedy(FcfsPolicy):
        def plan(self, view):
            return Plan(super().plan(view).prefill * 2)

    record(path)
    assert (
        "the replay stops: rank 0, round 0: expected policy" in replay(Recording(path), Greedy(FCFS.options)).difference
    )


def test_a_full_disk_ends_the_recording_and_nothing_else(path, caplog):
    with Path("/dev/full").open("wb", buffering=0) as disk:
        log = record(path, disk=disk)
    assert log.latest[0] > 30
    assert [entry.message for entry in caplog.records] == [f"the recording {path} ends here: No space left on device"]


def test_a_record_that_is_too_long_ends_the_recording_and_nothing_else(path, caplog, monkeypatch):
    monkeypatch.setattr("tpserve.scheduler.recording.LONGEST", 500)
    log = record(path, seed=2)
    recording = Recording(path)
    assert 0 < replay(recording, FCFS).rounds < log.latest[0]
    assert recording.is_cut_off
    (entry,) = caplog.records
    assert f"the recording {path} ends here: a record would have " in entry.message


def forge(path, change):
    """Change the records of a recording, each as builtins, and give them the hashes that go with that."""
    content, place, records = path.read_bytes(), len(MAGIC), []
    while place < len(content):
        length, _ = CLAIM.unpack_from(content, place)
        place += PREFIX_SIZE + length
        records.append(content[place - length : place])
    values = [msgspec.msgpack.decode(record) for record in records[:-1]]
    change(values)
    payloads = [*[msgspec.msgpack.encode(value) for value in values], b""]
    parts = [
        _prefix(len(payload), xxhash.xxh3_64_intdigest(payload, number), number) + payload
        for number, payload in enumerate(payloads)
    ]
    path.write_bytes(MAGIC + b"".join(parts))


def places(value, so_far=()):
    """Where the numbers and bytes of a record stand."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*so_far, key))
    elif isinstance(value, int | float | bytes) and not isinstance(value, bool):
        yield so_far


def put(value, place, new):
    for key in place[:-1]:
        value = value[key]
    value[place[-1]] = new


def all_places(path):
    found = []
    forge(path, lambda records: found.extend(places(records)))
    return found


ODD = [-1, 0, 1, 3, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1, 0.5, None, b"\0\0\0"]


def test_a_forged_number_is_refused_or_a_difference_and_never_anything_else(path):
    record(path, killed_in=12, closed=True)
    content, found = path.read_bytes(), set()
    where = all_places(path)
    header = [place for place in where if place[0] == 0]
    rest = random.Random(3).sample([place for place in where if place[0]], 40)
    for place in [*header, *rest]:
        for odd in ODD:
            path.write_bytes(content)
            forge(path, lambda records, place=place, odd=odd: put(records, place, odd))
            try:
                found.add(bool(replay(Recording(path), FCFS).difference))
            except RecordingError:
                found.add(None)
    assert found == {None, True, False}


@pytest.mark.parametrize(
    ("place", "odd", "says"),
    [
        ((0, "limits", "pages"), -1, "record 0 is of another version, or forged: Expected `int` >= 1 - at `.+pages`"),
        ((0, "limits", "pages"), 1 << 40, "record 0 is of another version, or forged: Expected `int` <= "),
        ((0, "limits", "slots"), 0, "record 0 is of another version, or forged: Expected `int` >= 1"),
        ((0, "budget", "step_tokens"), 0, "record 0 is of another version, or forged: Expected `int` >= 1"),
        (
            (0, "shape", "x"),
            msgspec.Raw(5000 * b"\x91" + b"\xc0"),
            "record 0 is of another version, or forged: maximum",
        ),
        ((0, "tokenizers"), 0, "record 0 is of another version, or forged: Expected `int` >= 1"),
        ((2, "number"), 7, "record 2 is none that a rank writes: round 7 stands in the place of round 1"),
        (
            (1, "messages", 0, "prompt_ids"),
            b"\0\0\0",
            "record 1 is none that a rank writes: request 0 has half a token",
        ),
        ((1, "messages", 0, "params", "seed"), None, "record 1 is none that a rank writes: request 0 has no seed"),
    ],
)
def test_what_sizes_something_is_checked_when_it_is_read(path, place, odd, says):
    record(path)
    forge(path, lambda records: put(records, place, odd))
    with pytest.raises(RecordingError, match=says):
        replay(Recording(path), FCFS)
