"""``tpserve`` on a leash: ``python -m tpserve.bench.leash PID ARGUMENTS…`` stops, as on SIGTERM, when PID has gone.

PID starts it; should its thread that did so end before, that counts as well.
"""

from __future__ import annotations

import os
import signal
import sys

from tpserve.parent import die_with_parent


def run() -> None:
    """Become ``tpserve ARGUMENTS…``; what the kernel sends at the parent's death outlives that."""
    starter, *arguments = sys.argv[1:]
    die_with_parent(signal.SIGTERM)
    if os.getppid() == int(starter):
        os.execv(sys.executable, [sys.executable, "-P", "-m", "tpserve.cli.main", *arguments])  # noqa: S606 a shell would be in the way


if __name__ == "__main__":
    run()
