"""Asking a part whether it works here, in a process of its own: it may import anything, crash or hang.

``python -m tpserve.plugins.probe package.module:function PID`` calls the function and writes its answer as JSON, unless
PID, which starts it, ends before that.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile

from tpserve.parent import die_with_parent

__all__ = ["run_probe"]


def run_probe(probe: str, limit: float) -> str | None:
    """Call ``package.module:function`` in a child process.

    Args:
        probe: what to call.
        limit: seconds after which the child, with whatever it started, is killed.

    Returns:
        None if the function returned None, otherwise why the part cannot be used, in one line.
    """
    command = [sys.executable, "-P", "-m", "tpserve.plugins.probe", probe, str(os.getpid())]
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
        try:
            output, _ = child.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return f"its probe did not answer within {limit:g} s"
        finally:
            if child.returncode is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        errors.seek(0)
        complaint = errors.read().decode(errors="replace").strip()
    return _reason(output, child.returncode, complaint.splitlines()[-1] if complaint else "")


def answer(probe: str) -> dict[str, str | None]:
    """Call the probe in this process and put its answer, or its failure, into a dictionary."""
    module, _, function = probe.partition(":")
    try:
        reason = getattr(importlib.import_module(module), function)()
    except Exception as error:  # noqa: BLE001 - a probe may fail in any way, which is an answer too
        return {"reason": f"its probe failed: {type(error).__name__}: {error}"}
    return {"reason": None if reason is None else str(reason)}


def main() -> None:
    """The child: whatever the libraries print goes to stderr, so that stdout holds the answer alone."""
    _, probe, starter = sys.argv
    die_with_parent(signal.SIGKILL)
    if os.getppid() != int(starter):
        return
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        out.write(json.dumps(answer(probe)))
    os._exit(0)  # the answer is out; a library's threads and exit handlers must not hold it back


def _reason(output: bytes, exit_code: int, complaint: str) -> str | None:
    try:
        reason = json.loads(output)["reason"]
    except (ValueError, KeyError, TypeError):
        how = f"signal {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"
        return f"its probe ended with {how}" + (f": {complaint}" if complaint else "")
    return None if reason is None else " ".join(str(reason).split()) or "its probe gave no reason"


if __name__ == "__main__":
    main()
