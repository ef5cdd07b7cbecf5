import pytest

from tpserve.api import Plan, PolicySpec, Prefill
from tpserve.plugins.builtin import tpserve_policies
from tpserve.policies.fcfs import FcfsPolicy
from tpserve.policies.options import BatchingOptions
from tpserve.testing.policy import PolicyContract
from tpserve.testing.queues import CountingView


class TestFcfs(PolicyContract):
    @pytest.fixture
    def spec(self) -> PolicySpec:
        return next(spec for spec in tpserve_policies() if spec.name == "fcfs")


@pytest.mark.parametrize("order", ["prefill", "decode"])
class TestOrders(TestFcfs):
    @pytest.fixture
    def options(self, order: str) -> BatchingOptions:
        return BatchingOptions(order=order, reserve=0.0)


def test_the_queue_goes_by_arrival_whatever_else_differs(state, waits):
    waiting = [waits(5, priority=-3), waits(6, cached=90), waits(7, priority=9)]
    made = FcfsPolicy(BatchingOptions()).plan(CountingView(state(waiting)))
    assert made == Plan((Prefill(5, 10), Prefill(6, 10), Prefill(7, 10)))
