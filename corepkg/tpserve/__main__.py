"""The command line, as ``tpserve`` and as ``python -m tpserve``."""

from __future__ import annotations

import signal

__all__ = ["main"]


def main() -> None:
    """Run it. Ctrl-C while it is still being imported ends it without a word, as it does later."""
    try:
        from tpserve.cli.main import main as run

        run()
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None


if __name__ == "__main__":
    main()
