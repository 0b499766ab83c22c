"""What a server shows to others: a TLS reverse proxy in front of the SuperLink, and metrics.

Flower's SuperLink serves two interfaces at one port: the Fleet API, for nodes with a registered
key, and the Control and Runtime APIs, with which anybody may register keys, start runs and read
results. The SuperLink therefore listens on the loopback address only. This proxy terminates TLS for
the network and forwards requests to the Fleet API alone, of nodes whose keys are registered.

`h11` parses each request and writes the one that is forwarded. A connection carries one request
with a known, bounded length. A request that h11 would not write with the same lines is refused, so
that no header is read differently on the two sides.

Prometheus metrics of the newest run are served on the loopback address.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus

import h11
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hushrec.deployment.coordinator.run import EVENT_COUNTERS, Status
from hushrec.deployment.flower.gate import KEY_HEADER
from hushrec.errors import RunError

FLEET_API = re.compile(rb"/v1/fleet/[a-z-]+")
HEADER_NAME = re.compile(rb"[A-Za-z0-9-]+")
MAX_HEAD_BYTES = 2**15
MAX_BODY_BYTES = 2**26
"""Flower sends arrays in pieces of 5 MB."""
HEAD_SECONDS = 20.0
REQUEST_SECONDS = 300.0
MAX_CONNECTIONS = 1_000
CHUNK_BYTES = 2**16
_NOT_FORWARDED = {b"connection", b"keep-alive", b"proxy-connection", b"te", b"upgrade", b"expect"}


@dataclass(frozen=True)
class ProxySettings:
    """Where the proxy listens, and which SuperLink it forwards to."""

    host: str
    port: int
    upstream_port: int
    """Port of the SuperLink on the loopback address."""
    server_tls: ssl.SSLContext
    """Presents the server's certificate to nodes."""
    upstream_tls: ssl.SSLContext
    """Trusts the federation's certificate authority only."""
    keys: Mapping[bytes, str]
    """Names of the nodes that may connect, by public key, as their requests show it."""
    ready: Callable[[], bool] = lambda: True
    """Whether the SuperLink knows the nodes; until then they are told to try again."""


@dataclass
class Traffic:
    """Bytes of forwarded requests and responses, without TLS."""

    up: int = 0
    down: int = 0
    seen: dict[str, float] = field(default_factory=dict)
    """When a node's last request was forwarded, by the node's name."""


class _RefusedError(Exception):
    """A request that is not forwarded, and the status that is sent back."""

    def __init__(self, status: int) -> None:
        self.status = HTTPStatus(status)


@contextmanager
def reverse_proxy(settings: ProxySettings) -> Iterator[Traffic]:
    """Forward requests of nodes, in a thread, until the context is left."""
    loop, traffic = asyncio.new_event_loop(), Traffic()
    try:
        server = loop.run_until_complete(_listen(settings, traffic))
    except OSError as error:
        loop.close()
        raise RunError(
            f"cannot listen at {settings.host}:{settings.port}: {error.strerror}; choose another "
            "port or address in config.toml"
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


async def _listen(settings: ProxySettings, traffic: Traffic) -> asyncio.Server:
    slots = asyncio.Semaphore(MAX_CONNECTIONS)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with slots, asyncio.timeout(REQUEST_SECONDS):
                up, down, name = await _serve_one(settings, reader, writer)
                traffic.up, traffic.down = traffic.up + up, traffic.down + down
                if name is not None:
                    traffic.seen[name] = time.monotonic()
        except (OSError, EOFError, TimeoutError):
            pass  # the client or the SuperLink went away, or was too slow
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    return await asyncio.start_server(
        serve,
        settings.host,
        settings.port,
        ssl=settings.server_tls,
        limit=MAX_HEAD_BYTES,
        ssl_handshake_timeout=20,
    )


async def _close(server: asyncio.Server) -> None:
    server.close()
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


async def _serve_one(
    settings: ProxySettings, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> tuple[int, int, str | None]:
    """Forward one request or refuse it; return the bytes forwarded each way, and whose it was."""
    try:
        async with asyncio.timeout(HEAD_SECONDS):
            received = await reader.readuntil(b"\r\n\r\n")
        head, length, key = forwarded_head(received)
        name = settings.keys.get(key)
        if name is None:
            raise _RefusedError(403)
        if not settings.ready():
            raise _RefusedError(503)
    except (_RefusedError, asyncio.LimitOverrunError) as error:
        status = error.status if isinstance(error, _RefusedError) else HTTPStatus(431)
        line = f"HTTP/1.1 {status.value} {status.phrase}"
        writer.write(f"{line}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        return 0, 0, None
    upstream_reader, upstream_writer = await asyncio.open_connection(
        "127.0.0.1", settings.upstream_port, ssl=settings.upstream_tls, server_hostname="127.0.0.1"
    )
    try:
        upstream_writer.write(head)
        up = await _copy(reader, upstream_writer, length)
        return len(head) + up, await _copy(upstream_reader, writer, None), name
    finally:
        upstream_writer.close()
        with suppress(OSError):
            await upstream_writer.wait_closed()


def forwarded_head(head: bytes) -> tuple[bytes, int, bytes]:
    """Return the head of the forwarded request, the length of the body that follows, and the public
    key that the request shows."""
    parser = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
    try:
        parser.receive_data(head)
        request = parser.next_event()
    except h11.RemoteProtocolError as error:
        raise _RefusedError(error.error_status_hint) from None
    if (
        not isinstance(request, h11.Request)
        or (request.method, request.http_version) != (b"POST", b"1.1")
        or not FLEET_API.fullmatch(request.target)
    ):
        raise _RefusedError(403)
    headers = request.headers.raw_items()
    # Folded lines, bare line ends, repeated or listed lengths: h11 reads them, others differently.
    # The same holds for names with an underscore, which some servers take for a hyphen.
    as_written = sorted(_written(request, headers).split(b"\r\n")) == sorted(head.split(b"\r\n"))
    if not as_written or not all(HEADER_NAME.fullmatch(name) for name, _ in headers):
        raise _RefusedError(400)
    values = dict(request.headers)
    if b"transfer-encoding" in values or b"content-length" not in values:
        raise _RefusedError(411)
    length = int(values[b"content-length"])
    if length > MAX_BODY_BYTES:
        raise _RefusedError(413)
    kept = [(name, value) for name, value in headers if name.lower() not in _NOT_FORWARDED]
    forwarded = _written(request, [*kept, (b"Connection", b"close")])
    return forwarded, length, values.get(KEY_HEADER, b"")


def _written(request: h11.Request, headers: list[tuple[bytes, bytes]]) -> bytes:
    message = h11.Request(method=request.method, target=request.target, headers=headers)
    return h11.Connection(h11.CLIENT).send(message) or b""


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, length: int | None
) -> int:
    """Copy ``length`` bytes, or all until the end, in chunks; return how many were copied."""
    copied = 0
    while copied != length:
        left = CHUNK_BYTES if length is None else length - copied
        chunk = await reader.read(min(CHUNK_BYTES, left))
        if not chunk and length is None:
            break
        if not chunk:
            raise EOFError
        writer.write(chunk)
        await writer.drain()
        copied += len(chunk)
    return copied


PREFIX = "hushrec_federation"


class StatusCollector(Collector):
    """Reads the status of the newest run whenever Prometheus asks."""

    def __init__(self, newest: Callable[[], Status | None]) -> None:
        """``newest`` returns the status of the newest run; None before the first one."""
        self.newest = newest

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the newest run."""
        status = self.newest()
        if status is None:
            return
        gauges: dict[str, tuple[str, float | None]] = {
            "round": ("Rounds done", status.round),
            "rounds": ("Rounds of the run", status.rounds),
            "training": ("Whether the run is training", status.stage == "training"),
            "epsilon_spent": ("Epsilon spent so far", status.epsilon),
            "lost_rounds": ("Rounds whose secure sum could not be opened", status.lost_rounds),
        }
        for name, (about, value) in gauges.items():
            if value is not None:
                yield GaugeMetricFamily(f"{PREFIX}_{name}", about, value)
        about, name = "Bytes of messages", f"{PREFIX}_message_bytes"
        sent = CounterMetricFamily(name, about, labels=["direction"])
        sent.add_metric(["up"], status.up_bytes)
        sent.add_metric(["down"], status.down_bytes)
        yield sent
        for name in EVENT_COUNTERS.values():
            about = f"Requests or rounds of a node: {name.replace('_', ' ')}"
            counter = CounterMetricFamily(f"{PREFIX}_node_{name}", about, labels=["node"])
            for node, of in status.nodes.items():
                counter.add_metric([node], getattr(of, name))
            yield counter
        name, about = f"{PREFIX}_node_excluded", "Whether a node is excluded"
        excluded = GaugeMetricFamily(name, about, labels=["node"])
        for node, of in status.nodes.items():
            excluded.add_metric([node], of.excluded)
        yield excluded


@contextmanager
def metrics_served(port: int | None, newest: Callable[[], Status | None]) -> Iterator[None]:
    """Serve the metrics to this machine until the context is left; without a port, do nothing."""
    if port is None:
        yield
        return
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(newest))
    try:
        server, thread = start_http_server(port, "127.0.0.1", registry)
    except OSError as error:
        raise RunError(
            f"cannot serve metrics at 127.0.0.1:{port}: {error.strerror}; choose another "
            "metrics_port in config.toml"
        ) from None
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
