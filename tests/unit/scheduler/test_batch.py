"""What a batch asks of the engine, tells the clients and leaves in the digest."""

from tpserve.kv.pool import Holding
from tpserve.kv.radix import RadixTree
from tpserve.messages import Generate, SamplingParams, Started, StepOutput
from tpserve.scheduler.batch import Batch
from tpserve.scheduler.digest import RoundDecisions
from tpserve.scheduler.queues import Request
from tpserve.step import PageWrite, Sequence, SlotParams, Step, TokenWrite
from tpserve.testing.fake_engine import SMALL_LIMITS
from tpserve.tokens import pack_ids, unpack_ids


def admitted(uid: int, slot: int, pages: list[int], length: int = 0, outputs: tuple[int, ...] = ()) -> Request:
    params = SamplingParams(temperature=0.5, top_k=4, top_p=0.9, min_p=0.1, max_tokens=5, seed=77)
    request = Request.of(Generate(uid, pack_ids([7, 8, 9]), params, pack_ids(outputs)), 0, 0, SMALL_LIMITS)
    request.slot, request.length, request.known = slot, length, 3 + len(outputs)
    request.holding = Holding(pages, 0, RadixTree(4).root)
    return request


def test_an_empty_batch_asks_and_says_nothing():
    batch = Batch(3)
    decisions = batch.decisions([], [])
    assert batch.step() is None
    assert decisions == RoundDecisions()
    assert batch.output(decisions) is None


def test_an_admitted_request_brings_its_row_with_it():
    batch, request = Batch(3), admitted(1, 4, [10, 11])
    batch.start(request)
    batch.prefill(request, 3)
    assert batch.step() == Step(
        [Sequence(4, 0, 3, True)],
        [TokenWrite(4, 0, unpack_ids(pack_ids([7, 8, 9])))],
        [PageWrite(4, 0, [10, 11])],
        [SlotParams(4, 0.5, 4, 0.9, 0.1, 77)],
    )
    assert request.length == 3
    assert batch.align([5]) == [5]


def test_a_step_does_not_change_when_the_request_goes_on():
    batch, request = Batch(3), admitted(1, 4, [10, 11])
    batch.start(request)
    batch.prefill(request, 3)
    request.tokens.append(5)
    request.holding.pages[0] = 99
    request.holding.pages.append(12)
    assert batch.step().tokens[0].tokens.tolist() == [7, 8, 9]
    assert batch.step().pages == [PageWrite(4, 0, [10, 11])]


def test_pages_are_given_in_the_order_of_the_calls():
    batch, one, other = Batch(3), admitted(1, 4, [10]), admitted(2, 5, [20])
    batch.start(one)
    batch.give(other, 1, [21])
    batch.give(one, 0, [30, 31])
    batch.prefill(one, 3)
    batch.decode([other])
    assert batch.step().pages == [PageWrite(4, 0, [10]), PageWrite(5, 1, [21]), PageWrite(4, 0, [30, 31])]
    assert batch.decisions([5, 6], [None, None]).pages == [[10, 30, 31], [21]]
    assert (one.holding.pages, other.holding.pages) == ([10], [20])


def test_a_start_is_told_once_with_what_was_found_of_the_prompt():
    batch, request = Batch(3), admitted(1, 4, [10, 11], length=4, outputs=(5, 6))
    batch.start(request)
    batch.prefill(request, 1)
    assert batch.output(batch.decisions([7], [None])).started == [Started(1, 3, 3, [5, 6])]
    again = Batch(4)
    request.length = 0
    again.start(request)
    again.prefill(request, 5)
    assert again.output(again.decisions([7], [None])).started == []


def test_prompts_come_first_and_part_of_one_draws_nothing():
    batch = Batch(3)
    part, whole, old = admitted(1, 0, [1]), admitted(2, 1, [2], length=1), admitted(3, 2, [3], length=3)
    batch.end(9, "abort")
    batch.start(part)
    batch.prefill(part, 2)
    batch.prefill(whole, 2)
    batch.decode([old])
    assert batch.step().sequences == [Sequence(0, 0, 2, False), Sequence(1, 1, 3, True), Sequence(2, 3, 4, True)]
    tokens = batch.align([40, 41])
    assert tokens == [-1, 40, 41]
    batch.retracted.append(8)
    decisions = batch.decisions(tokens, [None, None, "stop"])
    assert decisions == RoundDecisions(
        uids=[9, 1, 2, 3],
        pages=[[], [1], [], []],
        lengths=[0, 2, 3, 4],
        tokens=[-1, -1, 40, 41],
        finished=["abort", None, None, "stop"],
        retracted=[8],
    )
    assert batch.output(decisions) == StepOutput(
        3, [9, 2, 3], [-1, 40, 41], ["abort", None, "stop"], [Started(1, 3, 0)]
    )


def test_a_round_that_only_goes_on_with_a_prompt_is_not_told():
    batch, part = Batch(3), admitted(1, 0, [1])
    batch.prefill(part, 2)
    assert batch.output(batch.decisions([-1], [None])) is None


def test_a_token_that_was_struck_out_is_not_told():
    batch, gone, there = Batch(3), admitted(1, 0, [1], length=3), admitted(2, 1, [2], length=3)
    batch.decode([gone, there])
    decisions = batch.decisions([-1, 6], [None, None])
    assert decisions.lengths == [4, 4]
    assert batch.output(decisions) == StepOutput(3, [2], [6], [None])
