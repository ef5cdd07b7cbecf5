"""The fake engine draws what a row's content says, and refuses steps that a real engine would silently get wrong."""

import pytest

from tpserve.messages import SamplingParams
from tpserve.step import PageWrite, Sequence, SlotParams, Step, TokenWrite
from tpserve.testing.fake_engine import SMALL_LIMITS, FakeEngine, continuation

PROMPT = [5, 6, 7, 8, 9]
GREEDY = SamplingParams(temperature=0.0)


def params(slot: int = 0, temperature: float = 0.0, seed: int = 0) -> SlotParams:
    return SlotParams(slot, temperature, top_k=0, top_p=1.0, min_p=0.0, seed=seed)


def start(slot: int = 0, pages=(0, 1, 2), tokens=PROMPT, upto: int | None = None, **sampling) -> Step:
    end = len(tokens) if upto is None else upto
    return Step(
        [Sequence(slot, 0, end, end == len(tokens))],
        [TokenWrite(slot, 0, list(tokens))],
        [PageWrite(slot, 0, list(pages))],
        [params(slot, **sampling)],
    )


def step(slot: int, begin: int, end: int, sample: bool = True) -> Step:
    return Step([Sequence(slot, begin, end, sample)])


def test_decoding_goes_on_as_the_continuation_says():
    engine = FakeEngine()
    drawn = engine.launch(start()).tokens()
    for position in range(5, 11):
        drawn += engine.launch(step(0, position, position + 1)).tokens()
    assert drawn == continuation(PROMPT, GREEDY, 7)


@pytest.mark.parametrize("cut", [1, 4])
def test_a_prompt_in_pieces_draws_the_same(cut):
    engine = FakeEngine()
    assert engine.launch(start(upto=cut)).tokens() == []
    assert engine.launch(step(0, cut, 5)).tokens() == continuation(PROMPT, GREEDY, 1)


def test_sampling_depends_on_seed_and_position_and_greedy_does_not():
    def draw(temperature: float, seed: int) -> list[int]:
        return continuation(PROMPT, SamplingParams(temperature=temperature, seed=seed), 20)

    assert draw(1.0, 1) != draw(1.0, 2)
    assert draw(0.0, 1) == draw(0.0, 2)
    assert continuation(PROMPT + draw(1.0, 1)[:7], SamplingParams(seed=1), 13) == draw(1.0, 1)[7:]


def test_a_row_may_be_filled_anew():
    engine = FakeEngine()
    engine.launch(start())
    assert engine.launch(start(tokens=[3, 4])).tokens() == continuation([3, 4], GREEDY, 1)


def test_a_row_may_begin_behind_pages_that_hold_its_prefix():
    engine = FakeEngine()
    engine.launch(start())
    shared = Step(
        [Sequence(1, 4, 5, True)], [TokenWrite(1, 0, PROMPT)], [PageWrite(1, 0, [0]), PageWrite(1, 1, [9])], [params(1)]
    )
    assert engine.launch(shared).tokens() == continuation(PROMPT, GREEDY, 1)
    assert engine.launch(step(0, 5, 6)).tokens() == continuation(PROMPT, GREEDY, 2)[1:]


def test_a_row_may_share_what_another_computes_before_it_in_the_same_step():
    first, second = start(), start(1, pages=(0, 3))
    sequences = [*first.sequences, Sequence(1, 4, 5, True)]
    writes = first.tokens + second.tokens, first.pages + second.pages, first.params + second.params
    assert FakeEngine().launch(Step(sequences, *writes)).tokens() == 2 * continuation(PROMPT, GREEDY, 1)
    with pytest.raises(AssertionError, match="page 0 does not hold"):
        FakeEngine().launch(Step(sequences[::-1], *writes))


def test_a_row_may_jump_ahead_over_pages_that_others_have_computed():
    engine, tokens = FakeEngine(), PROMPT + PROMPT
    engine.launch(start(0, tokens=tokens))
    engine.launch(start(1, pages=(3, 4, 5), tokens=tokens, upto=2))
    jump = Step([Sequence(1, 8, 10, True)], pages=[PageWrite(1, 0, [0, 1])])
    assert engine.launch(jump).tokens() == continuation(tokens, GREEDY, 1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Step([]), "computes nothing"),
        (step(3, 0, 1), "row 3 was never written"),
        (step(0, 6, 7), "only 6 tokens are known"),
        (step(0, 4, 6), "5 are computed"),
        (step(0, 5, 5), "nothing to compute"),
        (step(0, 5, 7), "only 6 tokens are known"),
        (step(0, 5, 6, sample=False), "sample is False"),
        (Step([Sequence(0, 5, 6, True)] * 2), "occurs twice"),
        (start(1, upto=4, pages=(4,), tokens=[77]), "not a token"),
        (start(1, pages=(4,)), "only 1 pages"),
        (start(1, pages=(4, 64)), "page 64 of 64"),
        (start(1, pages=(4, 4)), "a page twice in"),
        (Step([Sequence(0, 5, 6, True)], [TokenWrite(0, 2, [1])]), "tokens written at 2"),
        (Step([Sequence(0, 5, 6, True)], pages=[PageWrite(0, 7, [9])]), "a gap before page 7"),
        (start(9), "row 9 of 8"),
    ],
)
def test_wrong_steps_are_refused(wrong, message):
    engine = FakeEngine()
    engine.launch(start())
    with pytest.raises(AssertionError, match=message):
        engine.launch(wrong)


def test_a_page_lent_to_two_rows_is_found_by_the_next_step_of_the_first():
    engine = FakeEngine()
    engine.launch(start(0, pages=(0, 1)))
    engine.launch(start(1, pages=(2, 1), tokens=[3] * 5))
    with pytest.raises(AssertionError, match="page 1 does not hold"):
        engine.launch(step(0, 5, 6))
    engine.launch(start(2, pages=(4, 0), tokens=[3]))
    with pytest.raises(AssertionError, match=r"does not hold|belongs to another row"):
        engine.launch(step(0, 5, 6))


def test_a_cached_prefix_that_is_not_the_rows_own_is_found():
    engine = FakeEngine()
    engine.launch(start())
    other = Step([Sequence(1, 4, 5, True)], [TokenWrite(1, 0, [9] * 5)], [PageWrite(1, 0, [0, 9])], [params(1)])
    with pytest.raises(AssertionError, match="page 0 does not hold"):
        engine.launch(other)


def test_nothing_runs_past_the_context_or_after_close():
    engine = FakeEngine()
    with pytest.raises(AssertionError, match="65 tokens"):
        engine.launch(start(pages=range(17), tokens=[3] * 65))
    with pytest.raises(AssertionError, match="no room"):
        engine.launch(start(1, pages=range(20, 36), tokens=[3] * SMALL_LIMITS.max_context))
    engine.close()
    with pytest.raises(AssertionError, match="closed"):
        engine.launch(step(0, 5, 6))


def test_a_page_that_a_row_was_not_told_of_is_found():
    """What a scheduler does that lets a row skip positions and forgets to write the page that holds them."""
    engine = FakeEngine()
    engine.launch(start(0, upto=2))
    engine.launch(start(1, pages=(4, 5)))
    with pytest.raises(AssertionError, match="page 0 does not hold"):
        engine.launch(step(0, 4, 5))


def test_an_overwritten_page_is_found_however_little_of_it_was():
    engine = FakeEngine()
    engine.launch(start(0, pages=(0, 1)))
    engine.launch(step(0, 5, 6))
    engine.launch(start(1, pages=(0,), tokens=[3]))
    with pytest.raises(AssertionError, match="page 0 does not hold"):
        engine.launch(step(0, 6, 7))


def test_a_step_that_is_too_large_is_refused():
    FakeEngine(step_tokens=5, chunk=5).launch(start())
    with pytest.raises(AssertionError, match="a step of 5 tokens, not 4"):
        FakeEngine(step_tokens=4).launch(start())
    with pytest.raises(AssertionError, match="5 tokens of one row, not 4"):
        FakeEngine(chunk=4).launch(start())
