from __future__ import annotations

import re
import subprocess
import sys

SCRIPT = """
import logging, warnings
from tpserve.launch.logging import rank_place, set_up_logging
set_up_logging(rank_place(1), {level!r})
logging.getLogger("tpserve.x").info("hello")
logging.getLogger("tpserve.x").debug("detail")
logging.getLogger("httpx").info("noise")
warnings.warn("careful")
"""


def log(level: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(level=level)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == ""
    return done.stderr


def test_lines_have_time_level_and_place() -> None:
    first, *rest = log("info").splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO    \[DP0 PP0 TP1\] hello", first)
    assert "careful" in rest[0]
    assert not any("noise" in line or "detail" in line for line in rest)


def test_levels() -> None:
    assert "detail" in log("debug")
    assert "hello" not in log("warning")
