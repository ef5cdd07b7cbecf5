"""Where requests stand, what a policy sees of them, and how long an early abort is remembered."""

from tpserve.api import Limits, RunningRequest, WaitingRequest
from tpserve.messages import Generate, SamplingParams
from tpserve.scheduler.queues import Queues, Request, Tombstones, View
from tpserve.testing.fake_engine import SMALL_LIMITS
from tpserve.tokens import pack_ids

LIMITS = Limits(tokens=10, running=4, free_pages=5, page_size=4)


def make(uid: int, prompt: int = 3, max_tokens: int = 5, outputs: int = 0, **params) -> Request:
    message = Generate(
        uid, pack_ids([9] * prompt), SamplingParams(max_tokens=max_tokens, seed=0, **params), pack_ids([8] * outputs)
    )
    return Request.of(message, arrival=100 + uid, limits=SMALL_LIMITS)


def test_a_request_knows_its_limits():
    request = make(1, prompt=3, max_tokens=5, outputs=2)
    assert (request.tokens.tolist(), request.prompt_tokens, request.known, request.limit) == ([9, 9, 9, 8, 8], 3, 5, 8)
    assert (request.pending, request.reserve, request.stops) == (5, 7, (1, 2))
    assert make(1, max_tokens=1000, ignore_eos=True).limit == SMALL_LIMITS.max_context
    assert make(1, ignore_eos=True).stops == ()


def test_requests_do_not_share_their_message():
    message = Generate(1, pack_ids([9]), SamplingParams(max_tokens=5, seed=0))
    request = Request.of(message, 0, SMALL_LIMITS)
    request.tokens.append(7)
    assert message.prompt_ids == pack_ids([9])


def test_a_request_stands_in_one_place():
    queues, request = Queues(), make(1)
    queues.enqueue(request)
    assert (list(queues.waiting), list(queues.running)) == ([1], [])
    queues.admit(request)
    assert (list(queues.waiting), list(queues.running)) == ([], [1])
    queues.decoding[1] = request
    assert queues.get(1) is request
    assert list(queues) == [request]
    queues.remove(request)
    assert not queues
    assert not queues.decoding
    assert queues.get(1) is None


def test_a_waiting_request_can_be_removed_from_the_middle():
    queues, requests = Queues(), [make(uid) for uid in range(3)]
    for request in requests:
        queues.enqueue(request)
    queues.remove(requests[1])
    assert list(queues.waiting) == [0, 2]
    assert len(queues) == 2


def test_the_view_shows_what_a_policy_needs():
    queues, requests = Queues(), [make(uid, outputs=uid) for uid in range(4)]
    for request in requests:
        queues.enqueue(request)
    queues.admit(requests[2])
    queues.admit(requests[1])
    requests[1].length = 1
    requests[2].length = 6
    queues.decoding[2] = requests[2]
    view = View(queues, LIMITS)
    assert view.limits is LIMITS
    assert (view.num_waiting, view.num_running, view.num_decoding) == (2, 2, 1)
    assert list(view.waiting()) == [WaitingRequest(0, 100, 3, 7, 0), WaitingRequest(3, 103, 6, 7, 0)]
    assert list(view.running()) == [RunningRequest(1, 101, 1, 3, 7, 0), RunningRequest(2, 102, 6, 0, 7, 0)]


def test_the_waiting_are_read_one_by_one():
    queues = Queues()
    for uid in range(3):
        queues.enqueue(make(uid))
    queues.waiting[1] = None  # whoever reads this far fails
    assert next(View(queues, LIMITS).waiting()).uid == 0


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
