from __future__ import annotations

from tpserve.launch.protocol import Failed
from tpserve.launch.trouble import Trouble


def test_a_headline_quotes_nothing() -> None:
    failure = Failed("FrameError: found b'\\xff' at ipc:///run/x", "Traceback …\nFrameError: found b'\\xff'\n")
    trouble = Trouble(f"rank0 failed: {failure.error}", failure)

    assert trouble.headline == "rank0 failed"
    assert trouble.report == "rank0 failed\nTraceback …\nFrameError: found b'\\xff'"
    assert Trouble("rank1 ended with signal SIGKILL", None, 0).headline == "rank1 ended with signal SIGKILL"
