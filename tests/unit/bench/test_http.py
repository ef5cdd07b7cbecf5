from __future__ import annotations

import asyncio

import pytest
from tests.unit.bench.answering import answering

from tpserve.bench.http import BrokenOff, Origin, read_origin, send
from tpserve.errors import LaunchError


def fetch(*pieces: bytes) -> tuple[int, list[bytes]]:
    """The status and the pieces of the body, of a server that answers with these bytes."""
    taken: list[bytes] = []

    async def run() -> int:
        async with answering(*pieces) as origin:
            return await send(origin, "POST", "/x", b"{}", taken.append)

    return asyncio.run(run()), taken


def test_pieces_of_a_body_are_taken_as_they_come() -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"

    assert fetch(head, b"1\r\na\r\n", b"2\r\nbc\r\n", b"0\r\n\r\n") == (200, [b"a", b"bc"])
    assert fetch(b"HTTP/1.1 404 No\r\ncontent-length: 3\r\n\r\nab", b"c") == (404, [b"ab", b"c"])


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nab", "the connection was closed"),
        (b"", "the connection was closed"),
        (b"nonsense\r\n\r\n", "this is not HTTP"),
    ],
)
def test_a_response_that_breaks_off_is_told(answer: bytes, says: str) -> None:
    with pytest.raises(BrokenOff, match=says):
        fetch(answer)


def test_nobody_listening_is_told() -> None:
    with pytest.raises(BrokenOff, match="refused"):
        asyncio.run(send(read_origin("http://127.0.0.1:1"), "GET", "/", b"", lambda _: None))


def test_addresses_are_read() -> None:
    assert read_origin("http://127.0.0.1:8000/v1/") == Origin("127.0.0.1", 8000, False, "127.0.0.1:8000", "")
    assert read_origin("http://[::1]:80") == Origin("::1", 80, False, "[::1]:80", "")
    assert read_origin("https://host/base/v1") == Origin("host", 443, True, "host", "/base")


@pytest.mark.parametrize(
    "url",
    [
        *("nonsense", "ftp://host", "http://a:b", "http://", "http://[::1", "http://127.0.0.1:99999"),
        *("http://a b", "http://x\n", "http://a..com", "http://\udcff", "http://127.0.0.1/a\x7f"),
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(LaunchError, match="is no address of a server"):
        read_origin(url)
