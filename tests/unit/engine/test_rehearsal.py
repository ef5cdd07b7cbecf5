from __future__ import annotations

from itertools import pairwise

import pytest
from msgspec.structs import replace

from tpserve.engine.graphs import LARGEST, ladder
from tpserve.engine.rehearsal import FEW, ROUNDS, rehearsal, rehearsal_pages
from tpserve.step import EngineLimits, Step
from tpserve.testing.fake_engine import FakeEngine

LIMITS = EngineLimits(pages=0, page_size=4, slots=6, max_context=40, vocab_size=50, eos_ids=())


@pytest.mark.parametrize("running", [1, 2, 3, 8, 100, 256, 300, 512])
def test_a_ladder_ends_with_the_largest_batch(running: int) -> None:
    sizes = ladder(running)
    assert sizes[-1] == running
    assert sizes == sorted(set(sizes))
    assert max((b - a for a, b in pairwise(sizes)), default=0) <= 32


def test_a_ladder_does_not_grow_without_end() -> None:
    assert ladder(5000) == ladder(LARGEST)


@pytest.mark.parametrize("slots", [1, 6])
@pytest.mark.parametrize("tokens", [1, 5, 6, 60, 4000])
def test_what_is_rehearsed_can_be_computed(slots: int, tokens: int) -> None:
    limits = replace(LIMITS, slots=slots)
    limits = replace(limits, pages=rehearsal_pages(limits, tokens))
    engine = FakeEngine(limits)
    sizes = []
    for step in rehearsal(limits, tokens):
        engine.launch(step).tokens()
        sizes.append(_tokens(step))
    assert max(sizes) == sizes[0] == min(tokens // min(slots, tokens), 40 - ROUNDS) * min(slots, tokens)


def test_a_rehearsal_draws_in_every_way() -> None:
    limits = replace(LIMITS, pages=rehearsal_pages(LIMITS, 60))
    first, second, third, *few = rehearsal(limits, 60)
    assert [len(step.sequences) for step in few] == [1, 2, 2, 4]
    assert not any(each.temperature for each in first.params)
    assert all(each.temperature and not each.top_k for each in second.params)
    assert all(each.top_k and each.top_p < 1 and each.min_p for each in third.params)


@pytest.mark.parametrize("slots", [1, 6, 40])
def test_steps_of_few_tokens_are_rehearsed_however_few_requests_may_run(slots: int) -> None:
    limits = replace(LIMITS, slots=slots)
    limits = replace(limits, pages=rehearsal_pages(limits, 80))
    assert [_tokens(step) for step in rehearsal(limits, 80)[3:]] == [
        few for few in FEW if few <= 40 - ROUNDS or (slots > 1 and few < 80)
    ]


def _tokens(step: Step) -> int:
    return sum(sequence.end - sequence.start for sequence in step.sequences)
