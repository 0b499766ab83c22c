"""Counters of a server for Prometheus, at an address of its own machine only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from hushrec.errors import RunError

TYPE = "text/plain; version=0.0.4; charset=utf-8"


@contextmanager
def serving_counters(port: int | None, counters: Callable[[], str]) -> Iterator[None]:
    """Answer ``GET /metrics`` with what the counters are then; without a port, do nothing."""
    if port is None:
        yield
        return

    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            if self.path != "/metrics":
                self.send_error(404)
                return
            text = counters().encode()
            self.send_response(200)
            self.send_header("Content-Type", TYPE)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *words: object) -> None:
            """Say nothing: whoever asks asks every few seconds."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise RunError(
            f"cannot count at 127.0.0.1:{port}: {error.strerror}; choose another metrics_port in "
            "config.toml"
        ) from None
    thread = threading.Thread(target=server.serve_forever, name="counters", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
