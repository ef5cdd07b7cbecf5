"""One server, from its settings to its end."""

from __future__ import annotations

import errno
import logging
import os
import socket
from contextlib import closing
from pathlib import Path

from tpserve.config import ServeConfig
from tpserve.errors import LaunchError
from tpserve.launch.banner import Banner, describe
from tpserve.launch.layout import Layout
from tpserve.launch.logging import set_up_logging
from tpserve.launch.plan import Plan, rank_start, worker_start
from tpserve.launch.post import ApiPost
from tpserve.launch.process import Start
from tpserve.launch.rundir import RunDir
from tpserve.launch.supervisor import Patience, Supervisor

__all__ = ["launch"]

BACKLOG = 2048

logger = logging.getLogger(__name__)


def launch(config: ServeConfig) -> int:
    """Serve until told to stop.

    Returns:
        The exit code; see :meth:`Supervisor.run`.

    Raises:
        UserError: the server could not be started, and the person who tried can mend it.
    """
    set_up_logging("launch", config.log_level)
    with closing(listen(config.host, config.port)) as sock:
        plan = Plan.make(config, logger.info)
        with closing(Banner(_url(config.host, sock))) as banner, RunDir.create() as run_dir:
            banner.composition(describe(plan))
            patience = Patience(
                startup=config.startup_timeout,
                drain=config.drain_timeout,
                restarts=config.max_restarts,
                watchdog=config.watchdog,
            )
            return Supervisor(ServerCast(plan, run_dir.path, sock), run_dir.path, patience, banner).run()


class ServerCast:
    """The processes of a server.

    Args:
        plan: what was decided.
        run_dir: the server's run directory.
        sock: what the api process serves on.
    """

    def __init__(self, plan: Plan, run_dir: Path, sock: socket.socket) -> None:
        self._plan = plan
        self._run_dir = run_dir
        self._socket = sock

    def api(self) -> Start:
        """The process that serves HTTP."""
        plan, descriptor = self._plan, self._socket.fileno()
        name = plan.config.served_model_name or plan.folder.name
        own = ApiPost(plan.post(Layout(self._run_dir, 0)), name, descriptor)
        return worker_start("api", "api", own, plan.config.log_level, descriptor)

    def group(self, layout: Layout) -> list[Start]:
        """All others; ranks first, as they take longest."""
        config = self._plan.config
        return [
            *(rank_start(self._plan.post(layout, index)) for index in range(config.tp)),
            *(self._worker("tokenizer", layout, index) for index in range(config.tokenizers)),
            *(self._worker("detokenizer", layout, index) for index in range(config.detokenizers)),
        ]

    def _worker(self, role: str, layout: Layout, index: int) -> Start:
        return worker_start(role, f"{role}{index}", self._plan.post(layout, index), self._plan.config.log_level)


def listen(host: str, port: int) -> socket.socket:
    """Bind and listen, so that a port which is taken is noticed before anything loads.

    Raises:
        LaunchError: the port is taken or not allowed, or the address is not one of this machine.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:  # the latter of names that cannot be written in a query
        raise LaunchError(f"--host {host} is no address: {getattr(error, 'strerror', error)}") from None
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise _refused(host, port, error) from None
    return sock


def _refused(host: str, port: int, error: OSError) -> LaunchError:
    if error.errno == errno.EADDRINUSE:
        return LaunchError(f"port {port} on {host} is already in use", "Choose another with --port; 0 takes a free one")
    return LaunchError(f"cannot listen on {host} port {port}: {os.strerror(error.errno or 0)}")


def _url(host: str, sock: socket.socket) -> str:
    shown = f"[{host}]" if sock.family == socket.AF_INET6 else host
    return f"http://{shown}:{sock.getsockname()[1]}"
