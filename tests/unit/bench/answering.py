"""A server that says the same to everybody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tpserve.bench.http import Origin, read_origin

__all__ = ["answering"]


@asynccontextmanager
async def answering(*pieces: bytes) -> AsyncIterator[Origin]:
    """Answer each request with these bytes, piece by piece, and close the connection."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield read_origin(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base/v1")
