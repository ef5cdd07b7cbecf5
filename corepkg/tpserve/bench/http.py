"""HTTP as cheap as a client can have it, a connection for each request.

A bench often shares its machine with the server that it measures, and a general client takes ten times the CPU time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from urllib.parse import urlsplit

import httptools
import msgspec

from tpserve.errors import LaunchError, TpserveError

__all__ = ["BrokenOff", "Origin", "no_address", "read_origin", "send"]

TIMEOUT = 3600.0
"""Seconds after which a response is given up."""


class BrokenOff(TpserveError):
    """There was no connection, or no whole response on it."""


class Origin(msgspec.Struct, frozen=True):
    """Where a server is.

    Attributes:
        host: its name or address.
        port: its TCP port.
        is_secure: it speaks TLS.
        name: what requests call it.
        prefix: what stands before every path.
    """

    host: str
    port: int
    is_secure: bool
    name: str
    prefix: str


def read_origin(url: str) -> Origin:
    """Read an address such as ``http://127.0.0.1:8000`` or ``https://host/v1``.

    Raises:
        LaunchError: it is none.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
        (parts.hostname or "").encode("idna")  # as every client does
    except ValueError:
        raise no_address(url) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not _is_plain(url):
        raise no_address(url)
    is_secure = parts.scheme == "https"
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Origin(parts.hostname, port or (443 if is_secure else 80), is_secure, parts.netloc, prefix)


async def send(origin: Origin, method: str, path: str, body: bytes, take: Callable[[bytes], None]) -> int:
    """Send a request and read its response.

    Args:
        origin: where to.
        method: GET or POST.
        path: behind the prefix.
        body: JSON; may be empty.
        take: gets the response's body, piece by piece, the moment that each comes; raises nothing.

    Returns:
        The response's status, after its end.

    Raises:
        BrokenOff: the response did not come, or not to its end.
    """
    head = (
        f"{method} {origin.prefix}{path} HTTP/1.1\r\nHost: {origin.name}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    response = _Response(take, loop.create_future())
    try:
        async with asyncio.timeout(TIMEOUT):
            connect = loop.create_connection(lambda: response, origin.host, origin.port, ssl=origin.is_secure or None)
            transport, _ = await connect
            try:
                transport.write(head.encode() + body)
                return await response.status
            finally:
                transport.abort()
    except TimeoutError:
        raise BrokenOff(f"no end within {TIMEOUT:g} s") from None
    except ConnectionRefusedError as error:
        raise BrokenOff("the connection was refused") from error
    except OSError as error:
        raise BrokenOff(error.strerror or str(error)) from error


def _is_plain(url: str) -> bool:
    return url.isprintable() and not any(map(str.isspace, url))


class _Response(asyncio.Protocol):
    """One response as it comes; its methods named on_… are called by the parser.

    Args:
        take: gets the body.
        status: of the response, once it is whole.
    """

    def __init__(self, take: Callable[[bytes], None], status: asyncio.Future[int]) -> None:
        self.on_body = take
        self.status = status
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"this is not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection broke: {exc}" if exc else "the connection was closed")

    def on_message_complete(self) -> None:
        if not self.status.done():
            self.status.set_result(self._parser.get_status_code())

    def _fail(self, reason: str) -> None:
        if not self.status.done():
            self.status.set_exception(BrokenOff(reason))


def no_address(url: str) -> LaunchError:
    """The error of an address that is none."""
    shown = url if _is_plain(url) else repr(url)
    return LaunchError(f"{shown} is no address of a server", "Give one like http://127.0.0.1:8000")
