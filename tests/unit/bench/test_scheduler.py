"""The benchmark runs, and its rounds are of the kind that it says."""

import pytest

from tpserve.bench import scheduler
from tpserve.bench.scheduler import Case, measure


@pytest.fixture
def seen(monkeypatch):
    """How many wait, run and decode, and the priorities of those that wait, in each round that is planned."""
    seen, view = [], scheduler.Scheduler._ask

    def ask(self, round, growing):
        plan = view(self, round, growing)
        queues = self.queues
        seen.append((queues.num_waiting, len(queues.running), len(queues.decoding), len(queues.levels)))
        return plan

    monkeypatch.setattr(scheduler.Scheduler, "_ask", ask)
    return seen


def test_every_quantile_is_told():
    result = measure(Case(policy="fcfs", running=3, waiting=5), rounds=10)
    assert 0 < result["p50"] <= result["p90"] <= result["p99"]


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
@pytest.mark.parametrize("shared", [0, 256])
def test_where_rows_are_free_all_the_same_nobody_is_admitted(seen, policy, shared):
    measure(Case(policy=policy, running=8, waiting=70, levels=7, free=4, shared=shared, ageing=1), rounds=10)
    assert seen[-12:-1] == [(70, 8, 8, 7)] * 11


def test_where_some_end_as_many_follow(seen):
    measure(Case(policy="lpm", running=8, waiting=70, ending=2, shared=256), rounds=10)
    assert [(waiting, running) for waiting, running, *_ in seen[-10:-1]] == [
        (waiting, 6) for waiting in range(70, 52, -2)
    ]


def test_all_rows_are_taken_where_none_is_to_be_free(seen):
    measure(Case(policy="lpm", running=40, waiting=3), rounds=3)
    assert seen[-2][:3] == (3, 40, 40)
