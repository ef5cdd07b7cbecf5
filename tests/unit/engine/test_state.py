from __future__ import annotations

from array import array
from random import Random

import torch

from tpserve.engine.inputs import make_inputs
from tpserve.engine.state import DeviceState, upload
from tpserve.step import EngineLimits, PageWrite, Sequence, SlotParams, Step, TokenWrite

LIMITS = EngineLimits(pages=40, page_size=4, slots=5, max_context=30, vocab_size=100, eos_ids=())


def state_of(step: Step) -> DeviceState:
    state = DeviceState(LIMITS, "cpu")
    state.apply(step)
    return state


def test_upload_splits_what_it_packed() -> None:
    first, second, third = upload("cpu", [1, 2, 3], [], (n * n for n in range(3)))
    assert (first.tolist(), second.tolist(), third.tolist()) == ([1, 2, 3], [], [0, 1, 4])
    assert first.dtype == torch.int64


def test_tables_have_room_for_the_last_token() -> None:
    state = DeviceState(LIMITS, "cpu")
    assert state.tokens.shape == (5 + 1, 31)
    assert state.pages.shape == (5 + 1, 8)


def test_the_spare_row_has_the_page_behind_the_pool() -> None:
    state = DeviceState(LIMITS, "cpu")
    assert state.spare == 5
    assert state.pages[state.spare].tolist() == [40] * 8
    assert not state.pages[:5].any()


def test_writes_land_in_their_rows_and_later_ones_win() -> None:
    tokens = [TokenWrite(2, 0, [7, 8, 9]), TokenWrite(4, 29, [5, 6]), TokenWrite(2, 1, [1])]
    state = state_of(Step([], tokens, [PageWrite(0, 2, [30, 31]), PageWrite(3, 0, [4])]))
    assert state.tokens[2, :4].tolist() == [7, 1, 9, 0]
    assert state.tokens[4, 29:].tolist() == [5, 6]
    assert int(state.tokens.count_nonzero()) == 5
    assert state.pages[0, :5].tolist() == [0, 0, 30, 31, 0]
    assert state.pages[3, 0] == 4


def test_many_writes_are_as_if_made_one_by_one() -> None:
    draw = Random(7)
    for _ in range(50):
        expected = torch.zeros(LIMITS.slots + 1, LIMITS.max_context + 1, dtype=torch.int32)
        writes = []
        for _ in range(draw.randint(1, 6)):
            start = draw.randint(0, LIMITS.max_context)
            tokens = [draw.randrange(1, 100) for _ in range(draw.randint(0, LIMITS.max_context + 1 - start))]
            writes.append(TokenWrite(draw.randrange(LIMITS.slots), start, draw.choice([tokens, array("i", tokens)])))
            expected[writes[-1].slot, start : start + len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        assert torch.equal(state_of(Step([], writes)).tokens, expected)


def test_sampling_parameters_follow_their_slots() -> None:
    params = [
        SlotParams(slot=3, temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, seed=2**64 - 5),
        SlotParams(slot=1, temperature=2.0, top_k=0, top_p=1.0, min_p=0.0, seed=2**63),
        SlotParams(slot=1, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=11),
    ]
    state = state_of(Step([], params=params))
    slots = torch.tensor([1, 3, 0])
    batch = state.sampling(slots, torch.tensor([4, 5, 6]), all_greedy=False, any_filter=True)
    assert batch.temperature.tolist() == [1.0, 0.5, 0.0]
    assert batch.top_k.tolist() == [0, 7, 0]
    assert batch.top_p.tolist() == [1.0, torch.tensor(0.9).item(), 0.0]
    assert batch.seed.tolist() == [11, -5, 0]
    assert batch.position.tolist() == [4, 5, 6]
    assert (batch.all_greedy, batch.any_filter) == (False, True)
    assert [state.is_filtered(some) for some in ([1, 3, 0], [1, 0], [])] == [True, False, False]
    assert [state.is_greedy(some) for some in ([1, 3, 0], [0, 2], [])] == [False, True, True]


def test_inputs_of_a_mixed_step() -> None:
    writes = Step(
        [],
        tokens=[TokenWrite(2, 0, list(range(10, 20))), TokenWrite(0, 0, list(range(50, 56)))],
        pages=[PageWrite(2, 0, [9, 5, 7]), PageWrite(0, 0, [3, 1])],
    )
    step = Step([Sequence(2, 3, 7, sample=False), Sequence(0, 5, 6, sample=True)])
    inputs = make_inputs(step, state_of(writes), LIMITS.page_size)
    assert inputs.tokens.tolist() == [13, 14, 15, 16, 55]
    assert inputs.positions.tolist() == [3, 4, 5, 6, 5]
    assert inputs.cache_slots.tolist() == [9 * 4 + 3, 5 * 4, 5 * 4 + 1, 5 * 4 + 2, 1 * 4 + 1]
    assert (inputs.attention.query_lens, inputs.attention.kv_lens) == ([4, 1], [7, 6])
    assert inputs.attention.query_starts.tolist() == [0, 4, 5]
    assert inputs.attention.kv_lens_tensor.tolist() == [7, 6]
    assert inputs.attention.slots_tensor.tolist() == inputs.attention.slots == [2, 0]
    assert inputs.attention.query_starts.dtype == inputs.attention.kv_lens_tensor.dtype == torch.int32
    assert inputs.draws is not None
    assert inputs.draws.rows is not None
    assert inputs.draws.rows.tolist() == [4]
    assert (inputs.draws.slots.tolist(), inputs.draws.ends.tolist()) == ([0], [6])


def test_inputs_of_decoding_draw_from_every_row() -> None:
    state = state_of(Step([], pages=[PageWrite(1, 0, [6]), PageWrite(4, 0, [2, 8])]))
    inputs = make_inputs(Step([Sequence(4, 5, 6, sample=True), Sequence(1, 0, 1, sample=True)]), state, 4)
    assert inputs.positions.tolist() == [5, 0]
    assert inputs.cache_slots.tolist() == [8 * 4 + 1, 6 * 4]
    assert inputs.draws is not None
    assert inputs.draws.rows is None
    assert inputs.draws.sampling.position.tolist() == inputs.draws.ends.tolist() == [6, 1]


def test_inputs_without_a_draw() -> None:
    state = state_of(Step([], pages=[PageWrite(1, 0, [6])]))
    assert make_inputs(Step([Sequence(1, 0, 3, sample=False)]), state, 4).draws is None
