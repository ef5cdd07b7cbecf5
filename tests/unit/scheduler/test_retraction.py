"""Who gives pages up when the pool runs dry."""

import msgspec
import pytest
from tests.unit.scheduler.served import request, run

from tpserve.policies.fcfs import FcfsPolicy
from tpserve.policies.filling import fill
from tpserve.policies.options import PriorityOptions
from tpserve.policies.priority import PriorityPolicy
from tpserve.testing.fake_engine import SMALL_LIMITS


def test_the_oldest_is_never_retracted():
    limits = msgspec.structs.replace(SMALL_LIMITS, pages=10)
    messages = [request(uid, [uid] * 8, max_tokens=20) for uid in range(5)]
    answers, log, _ = run([messages], limits, reserve=0.0)
    assert log.retracted
    assert not any(0 in decisions.retracted for decisions in log.rounds)
    assert list(answers.finished) == [0, 1, 2, 3, 4]
    assert answers.started == [0, 1, 2, 3, 4]


class LastFirst(FcfsPolicy):
    """Last come, first served."""

    def plan(self, view):
        return fill(view, reversed(list(view.waiting())), self.options, self.retraction_order)


def test_whoever_came_last_is_retracted_also_if_it_was_admitted_first():
    limits = msgspec.structs.replace(SMALL_LIMITS, pages=10)
    messages = [request(uid, [uid] * 8, max_tokens=20) for uid in range(2)]
    answers, log, _ = run([messages], limits, LastFirst, reserve=0.0)
    assert answers.started == [1, 0]
    assert [decisions.retracted for decisions in log.rounds if decisions.retracted] == [[1]]


@pytest.mark.parametrize("overlap", [False, True])
def test_the_policy_says_who_is_retracted(overlap):
    """By priority the youngest keeps its pages if it is the most urgent."""
    limits = msgspec.structs.replace(SMALL_LIMITS, pages=10)
    messages = [request(uid, [uid + 5] * 8, max_tokens=20, priority=uid) for uid in range(4)]
    options = PriorityOptions(reserve=0.0)
    answers, log, _ = run([messages], limits, lambda _: PriorityPolicy(options), overlap=overlap)
    retracted = [uid for decisions in log.rounds for uid in decisions.retracted]
    assert retracted[0] == 0
    assert 3 not in retracted
    assert list(answers.finished) == [3, 2, 1, 0]


def test_nobody_is_retracted_where_all_that_was_promised_is_kept_back():
    limits = msgspec.structs.replace(SMALL_LIMITS, pages=10)
    answers, log, _ = run([[request(uid, [uid] * 8, max_tokens=20) for uid in range(5)]], limits, reserve=1.0)
    assert not log.retracted
    assert len(answers.finished) == 5


@pytest.mark.parametrize("overlap", [False, True])
def test_nobody_is_retracted_for_a_page_that_comes_free_with_the_next_token(overlap):
    """The second request is about to end when the first needs a page and there is none."""
    limits = msgspec.structs.replace(SMALL_LIMITS, pages=10)
    requests = [request(0, [4] * 8, max_tokens=16), request(1, [5] * 21, max_tokens=5)]
    answers, log, _ = run([requests], limits, reserve=0.0, overlap=overlap, cache=False)
    assert {uid: len(tokens) for uid, tokens in answers.tokens.items()} == {0: 16, 1: 5}
    assert not log.retracted
