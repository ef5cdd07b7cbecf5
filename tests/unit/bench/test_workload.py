"""Workloads follow from their seed alone, and have the shape that they promise."""

import pytest

from tpserve.bench.workload import fixed, mixed, shared_prefix


def test_fixed_prompts_have_one_length_and_differ_by_seed():
    prompts = fixed(3, 20, seed=1)
    assert [len(prompt) for prompt in prompts] == [20] * 3
    assert all(100 <= token <= 40000 for prompt in prompts for token in prompt)
    assert prompts == fixed(3, 20, seed=1) != fixed(3, 20, seed=2)
    few = [token for (token,) in fixed(50, 1, vocab_size=90)]
    assert 45 <= min(few) < max(few) <= 90


def test_mixed_lengths_are_those_of_other_engines_benchmarks():
    work = mixed(256)
    assert (sum(map(len, work.prompts)), sum(work.outputs)) == (142_949, 145_184)
    assert work == mixed(256) != mixed(256, seed=1)
    assert {len(prompt) for prompt in work.prompts} | set(work.outputs) <= set(range(100, 1025))


def test_groups_begin_alike_and_take_turns():
    work = shared_prefix(requests=12, groups=3, shared=16, own=5, output=7, seed=9)
    assert len(work.prompts) == 12
    assert work.outputs == [7] * 12
    assert {len(prompt) for prompt in work.prompts} == {21}
    assert len({tuple(prompt[:16]) for prompt in work.prompts[:3]}) == 3
    assert all(prompt[:16] == work.prompts[index % 3][:16] for index, prompt in enumerate(work.prompts))
    assert len({tuple(prompt[16:]) for prompt in work.prompts}) == 12


@pytest.mark.parametrize(("requests", "groups"), [(1, 1), (2, 1), (5, 2), (8, 4), (9, 4), (16, 8), (17, 8), (256, 8)])
def test_as_many_share_as_are_asked_for_and_none_is_alone(requests, groups):
    work = shared_prefix(requests, groups=8, shared=16, own=5, output=7)
    assert len(work.prompts) == len(work.outputs) == requests
    assert len({tuple(prompt[:16]) for prompt in work.prompts}) == groups
