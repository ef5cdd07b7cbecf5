"""What a batch asks of the engine, tells the clients and leaves in the digest."""

from tpserve.messages import Generate, SamplingParams, Started, StepOutput
from tpserve.scheduler.batch import Batch
from tpserve.scheduler.digest import RoundDecisions
from tpserve.scheduler.queues import Request
from tpserve.step import PageWrite, Sequence, SlotParams, Step, TokenWrite
from tpserve.testing.fake_engine import SMALL_LIMITS
from tpserve.tokens import pack_ids, unpack_ids


def admitted(uid: int, slot: int, pages: list[int], length: int = 0) -> Request:
    params = SamplingParams(temperature=0.5, top_k=4, top_p=0.9, min_p=0.1, max_tokens=5, seed=77)
    request = Request.of(Generate(uid, pack_ids([7, 8, 9]), params), 0, SMALL_LIMITS)
    request.slot, request.pages, request.length = slot, pages, length
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
    batch.prefill(request, 3, [10, 11])
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
    request.tokens.append(5)
    batch.prefill(request, 3, [10, 11])
    assert batch.step().tokens[0].tokens.tolist() == [7, 8, 9]


def test_prompts_come_first_and_part_of_one_draws_nothing():
    batch = Batch(3)
    part, whole, old = admitted(1, 0, [1]), admitted(2, 1, [2], length=1), admitted(3, 2, [3], length=3)
    batch.end(9, "abort")
    batch.start(part)
    batch.prefill(part, 2, [1])
    batch.prefill(whole, 2, [])
    batch.decode([old])
    assert batch.step().sequences == [Sequence(0, 0, 2, False), Sequence(1, 1, 3, True), Sequence(2, 3, 4, True)]
    tokens = batch.align([40, 41])
    assert tokens == [-1, 40, 41]
    decisions = batch.decisions(tokens, [None, None, "stop"])
    assert decisions == RoundDecisions(
        uids=[9, 1, 2, 3],
        pages=[[], [1], [], []],
        lengths=[0, 2, 3, 4],
        tokens=[-1, -1, 40, 41],
        finished=["abort", None, None, "stop"],
    )
    assert batch.output(decisions) == StepOutput(
        3, [9, 2, 3], [-1, 40, 41], ["abort", None, "stop"], [Started(1, 3, 0)]
    )


def test_a_round_that_only_goes_on_with_a_prompt_is_not_told():
    batch, part = Batch(3), admitted(1, 0, [1])
    batch.prefill(part, 2, [])
    assert batch.output(batch.decisions([-1], [None])) is None
