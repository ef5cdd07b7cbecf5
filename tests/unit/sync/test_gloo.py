import subprocess
import sys
import time

import pytest

from tpserve.api import SyncSpec
from tpserve.plugins.builtin import tpserve_syncs
from tpserve.sync.gloo import _remaining
from tpserve.testing.sync import SyncContract


class TestGloo(SyncContract):
    @pytest.fixture
    def spec(self) -> SyncSpec:
        return next(spec for spec in tpserve_syncs() if spec.name == "gloo")


@pytest.mark.parametrize("wait", [0.0, 0.0001, 0.0509, 0.0999999, 1.2345])
def test_gloo_waits_no_shorter_than_the_deadline(wait):
    """It counts whole milliseconds: giving up a moment early would look like a lost peer."""
    deadline = time.monotonic() + wait
    begin = time.monotonic()
    milliseconds = int(1000 * _remaining(deadline))
    assert milliseconds >= 1
    assert begin + milliseconds / 1000 >= deadline


def test_gloo_can_count_the_longest_wait():
    assert 0 < _remaining(float("inf")) < 1 << 31


def test_no_deadline_pays_for_importing_torch():
    code = """if True:
        import sys
        from tpserve.sync.gloo import GlooSync
        GlooSync(None, None)
        print("torch.distributed" in sys.modules)
    """
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "True\n"
