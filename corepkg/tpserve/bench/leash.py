"""``tpserve`` on a leash: ``python -m tpserve.bench.leash PID ARGUMENTS…`` stops, as on SIGTERM, when PID has gone.

PID starts it; should its thread that did so end before, that counts as well.
"""

from __future__ import annotations

import os
import signal
import sys

from tpserve.cli.main import main
from tpserve.launch.child import die_with_parent


def run() -> None:
    """Become ``tpserve ARGUMENTS…``."""
    starter = int(sys.argv.pop(1))
    die_with_parent(signal.SIGTERM)
    if os.getppid() == starter:
        main()


if __name__ == "__main__":
    run()
