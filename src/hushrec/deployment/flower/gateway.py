"""The only door to the server that the network sees.

Flower's SuperLink answers everybody at one port: nodes, who show a registered key, and whoever
registers keys, starts runs and reads results, who has to show nothing. So it listens to its own
machine only, and this stands before it: it speaks TLS, lets requests of nodes through and nothing
else. A connection carries one request, whose length is known and bounded, so that nothing can hide
behind it.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from hushrec.errors import RunError

ALLOWED = re.compile(rb"POST (/v1/fleet/[a-z-]+) HTTP/1\.1")
LONGEST_HEAD = 2**15
LARGEST_BODY = 2**26
"""Flower sends arrays in pieces of 5 MB."""
HEAD_SECONDS = 20.0
REQUEST_SECONDS = 300.0
MOST_CONNECTIONS = 1_000
PIECE = 2**16
_HOP_BY_HOP = {b"connection", b"keep-alive", b"proxy-connection", b"te", b"upgrade", b"expect"}


@dataclass(frozen=True)
class Door:
    """Where the gateway listens, and to whom it passes on."""

    host: str
    port: int
    inside: int
    """Port of the SuperLink on this machine."""
    outer: ssl.SSLContext
    """Shows the server's certificate."""
    inner: ssl.SSLContext
    """Believes in nobody but the federation's authority."""


@dataclass
class Traffic:
    """Bytes of requests and answers that were let through, TLS left out."""

    up: int = 0
    down: int = 0


class _RefusedError(Exception):
    """A request that is not let through; the status says why."""


@contextmanager
def open_gateway(door: Door) -> Iterator[Traffic]:
    """Let nodes through, from a thread of its own, until the context is left."""
    loop, traffic = asyncio.new_event_loop(), Traffic()
    try:
        server = loop.run_until_complete(_listen(door, traffic))
    except OSError as error:
        loop.close()
        raise RunError(
            f"cannot listen at {door.host}:{door.port}: {error.strerror}; choose another port or "
            "address in config.toml"
        ) from None
    thread = threading.Thread(target=loop.run_forever, name="gateway", daemon=True)
    thread.start()
    try:
        yield traffic
    finally:
        asyncio.run_coroutine_threadsafe(_close(server), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def _listen(door: Door, traffic: Traffic) -> asyncio.Server:
    places = asyncio.Semaphore(MOST_CONNECTIONS)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with places:
                passed = await asyncio.wait_for(_answer(door, reader, writer), REQUEST_SECONDS)
                traffic.up, traffic.down = traffic.up + passed[0], traffic.down + passed[1]
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
            pass  # whoever was there is gone, or too slow
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    return await asyncio.start_server(
        serve, door.host, door.port, ssl=door.outer, limit=LONGEST_HEAD, ssl_handshake_timeout=20
    )


async def _close(server: asyncio.Server) -> None:
    server.close()
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


async def _answer(
    door: Door, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> tuple[int, int]:
    """Answer one request; return how many bytes went in and out."""
    try:
        head, length = await asyncio.wait_for(_read_head(reader), HEAD_SECONDS)
    except _RefusedError as refused:
        writer.write(
            f"HTTP/1.1 {refused}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
        )
        await writer.drain()
        return 0, 0
    from_inside, to_inside = await asyncio.open_connection(
        "127.0.0.1", door.inside, ssl=door.inner, server_hostname="127.0.0.1"
    )
    try:
        to_inside.write(head)
        up = await _pass_on(reader, to_inside, length)
        return len(head) + up, await _pass_on(from_inside, writer, None)
    finally:
        to_inside.close()
        with suppress(OSError):
            await to_inside.wait_closed()


async def _read_head(reader: asyncio.StreamReader) -> tuple[bytes, int]:
    """Return the head to pass on and the length of the body that follows."""
    try:
        text = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise _RefusedError("431 Request Header Fields Too Large") from None
    first, *lines = text[:-4].split(b"\r\n")
    asked = ALLOWED.fullmatch(first)
    if asked is None:
        raise _RefusedError("403 Forbidden")
    kept, length = [b"POST " + asked[1] + b" HTTP/1.1"], None
    for line in lines:
        name, colon, value = line.partition(b":")
        lower = name.lower()
        if not colon or not re.fullmatch(rb"[a-z0-9-]+", lower) or b"\n" in value or b"\r" in value:
            raise _RefusedError("400 Bad Request")
        if lower == b"content-length":
            # Twice, or anything but digits, and the two sides might count differently.
            if length is not None or not re.fullmatch(rb" *[0-9]{1,12}", value):
                raise _RefusedError("400 Bad Request")
            length = int(value)
        elif lower == b"transfer-encoding":
            raise _RefusedError("411 Length Required")
        elif lower not in _HOP_BY_HOP:
            kept.append(line)
    if length is None:
        raise _RefusedError("411 Length Required")
    if length > LARGEST_BODY:
        raise _RefusedError("413 Content Too Large")
    kept += [b"Content-Length: %d" % length, b"Connection: close"]
    return b"\r\n".join(kept) + b"\r\n\r\n", length


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, length: int | None
) -> int:
    """Copy so many bytes, or all there are; in pieces, so that little is in memory."""
    copied = 0
    while copied != length:
        piece = await reader.read(PIECE if length is None else min(PIECE, length - copied))
        if not piece and length is None:
            break
        if not piece:
            raise EOFError
        writer.write(piece)
        await writer.drain()
        copied += len(piece)
    return copied
