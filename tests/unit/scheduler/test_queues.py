"""Where requests stand, in which order they wait, and how long an early abort is remembered."""

import random

import pytest
from tests.unit.scheduler.sample import make

from tpserve.messages import Generate, SamplingParams
from tpserve.scheduler.queues import Queues, Request, Tombstones
from tpserve.testing.fake_engine import SMALL_LIMITS
from tpserve.tokens import pack_ids


def uids(requests) -> list[int]:
    return [request.uid for request in requests]


def priorities(queues) -> list[int]:
    return [level.priority for level in queues.levels]


def test_a_request_knows_its_limits():
    request = make(1, prompt=3, max_tokens=5, outputs=2, priority=4)
    assert (request.tokens.tolist(), request.prompt_tokens, request.limit) == ([9, 9, 9, 8, 8], 3, 8)
    assert (request.arrival, request.since, request.priority) == (101, 7, 4)
    assert (request.reserve, request.stops) == (7, (1, 2))
    assert make(1, max_tokens=1000, ignore_eos=True).limit == SMALL_LIMITS.max_context
    assert make(1, ignore_eos=True).stops == ()


def test_what_is_pending_is_what_was_known_at_the_admission():
    request = make(1, prompt=3)
    assert request.pending == 0
    request.known, request.length = 3, 1
    assert request.pending == 2
    request.tokens.append(5)
    request.length = 4
    assert request.pending == 0


def test_requests_do_not_share_their_message():
    message = Generate(1, pack_ids([9]), SamplingParams(max_tokens=5, seed=0))
    request = Request.of(message, 0, 0, SMALL_LIMITS)
    request.tokens.append(7)
    assert message.prompt_ids == pack_ids([9])


def test_a_request_stands_in_one_place():
    queues, request = Queues(), make(1)
    queues.enqueue(request)
    assert (uids(queues.waiting()), list(queues.running), len(queues)) == ([1], [], 1)
    assert queues.get(1) is queues.get_waiting(1) is request
    queues.admit(request)
    assert (uids(queues.waiting()), list(queues.running), len(queues)) == ([], [1], 1)
    assert queues.get_waiting(1) is None
    queues.decoding[1] = request
    assert queues.get(1) is request
    queues.retract(request)
    assert (uids(queues.waiting()), list(queues.running), list(queues.decoding)) == ([1], [], [])
    assert queues.get(1) is queues.get_waiting(1) is request
    assert list(queues) == [request]
    queues.admit(request)
    queues.decoding[1] = request
    queues.remove(request)
    assert not queues
    assert not queues.decoding
    assert queues.get(1) is None


@pytest.mark.parametrize("retracts", [False, True])
def test_a_waiting_request_can_be_removed_from_the_middle(retracts):
    queues, requests = Queues(), [make(uid) for uid in range(3)]
    for request in requests:
        queues.enqueue(request)
    if retracts:
        queues.admit(requests[1])
        queues.retract(requests[1])
    assert uids(queues.waiting()) == [0, 1, 2]
    queues.remove(requests[1])
    assert uids(queues.waiting()) == [0, 2]
    assert len(queues) == queues.num_waiting == 2


def test_those_that_were_retracted_wait_by_their_arrival_again():
    queues, requests = Queues(), [make(uid) for uid in range(6)]
    for request in requests:
        queues.enqueue(request)
    for uid in (4, 0, 2):
        queues.admit(requests[uid])
    for uid in (2, 4, 0):
        queues.retract(requests[uid])
    assert uids(queues.waiting()) == [0, 1, 2, 3, 4, 5]
    assert len(queues) == queues.num_waiting == 6


def test_each_priority_waits_apart():
    queues = Queues()
    requests = [make(uid, priority=priority) for uid, priority in enumerate([0, 5, -1, 5, 0])]
    for request in requests:
        queues.enqueue(request)
    assert priorities(queues) == [5, 0, -1]
    assert [uids(queues.waiting(level)) for level in (5, 0, -1, 3)] == [[1, 3], [0, 4], [2], []]
    queues.admit(requests[2])
    queues.admit(requests[1])
    assert priorities(queues) == [5, 0]
    queues.retract(requests[2])
    queues.retract(requests[1])
    assert priorities(queues) == [5, 0, -1]
    assert uids(queues.waiting(5)) == [1, 3]
    queues.remove(requests[2])
    assert priorities(queues) == [5, 0]


def test_the_waiting_are_read_one_by_one():
    queues, requests = Queues(), [make(uid) for uid in range(10)]
    for request in requests:
        queues.enqueue(request)
    assert next(queues.waiting()) is requests[0]
    queues.admit(requests[1])
    queues.retract(requests[1])
    waiting = queues.waiting()
    assert [next(waiting), next(waiting)] == requests[:2]


class Counted:
    """A request that counts how often it is looked at."""

    looks = 0

    def __init__(self, request):
        self._request = request

    def __getattr__(self, name):
        Counted.looks += 1
        return getattr(self._request, name)


def test_many_that_were_retracted_cost_no_more_than_few(monkeypatch):
    costs = {}
    for number in (64, 4096):
        queues, requests = Queues(), [Counted(make(uid, priority=uid % 3)) for uid in range(number)]
        for request in requests:
            queues.enqueue(request)
            queues.admit(request)
        for request in requests[::2] + requests[1::2]:
            queues.retract(request)
        monkeypatch.setattr(Counted, "looks", 0)
        assert priorities(queues) == [2, 1, 0]
        assert queues.num_waiting == number
        assert [next(queues.waiting()), next(queues.waiting(2))] == [requests[0], requests[2]]
        assert queues.get(40) is queues.get_waiting(40) is requests[40]
        queues.admit(requests[40])
        queues.remove(requests[41])
        queues.retract(requests[40])
        costs[number] = Counted.looks
    assert costs[4096] < 2 * costs[64]


def test_a_long_life_in_random_order():
    """Every view of the queues is what plain lists say."""
    draw, queues = random.Random(3), Queues()
    waiting: list[Request] = []
    running: list[Request] = []
    for uid in range(2000):
        request = make(uid, priority=draw.choice([0, 0, 1, -2]))
        queues.enqueue(request)
        waiting.append(request)
        for _ in range(draw.randint(0, 3)):
            move = draw.choice([queues.admit, queues.retract, queues.remove])
            source = running if move == queues.retract else waiting
            if move == queues.remove and draw.random() < 0.5:
                source = running
            if source:
                chosen = source.pop(draw.randrange(len(source)))
                move(chosen)
                if move != queues.remove:
                    (waiting if source is running else running).append(chosen)
        waiting.sort(key=lambda each: each.arrival)
        assert list(queues.waiting()) == waiting
        assert list(queues.running.values()) == running
        assert priorities(queues) == sorted({each.priority for each in waiting}, reverse=True)
        level = draw.choice([0, 1, -2])
        assert list(queues.waiting(level)) == [each for each in waiting if each.priority == level]
        assert sorted(uids(queues)) == sorted(uids(waiting + running))


def test_tombstones_are_taken_once():
    stones = Tombstones()
    stones.add(5)
    stones.add(5)
    assert stones.take(5)
    assert not stones.take(5)
    assert not stones.take(0)


def test_tombstones_are_bounded_and_the_oldest_goes_first():
    stones = Tombstones()
    for uid in range(Tombstones.CAPACITY + 2):
        stones.add(uid)
    assert len(stones) == Tombstones.CAPACITY
    assert not stones.take(1)
    assert stones.take(2)
