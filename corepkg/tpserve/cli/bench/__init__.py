"""``tpserve bench``: measure one choice against another on this machine."""

from __future__ import annotations

from tpserve.cli.bench.offline import offline
from tpserve.cli.bench.serve import serve
from tpserve.cli.bench.transport import transport
from tpserve.cli.common import command_app

app = command_app()
app.command()(transport)
app.command()(serve)
app.command()(offline)


@app.callback(no_args_is_help=True)
def bench() -> None:
    """Measure one choice against another on this machine."""
