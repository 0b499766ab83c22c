"""The studio's server: who may ask, what may be asked, and what a browser may do with the answer.

It answers this machine. A page from elsewhere that a browser here shows cannot make it answer
either: names other than this machine's are refused (so that nobody's domain can come to lead
here), and so are orders that another page sent. Told to listen elsewhere, it asks for a token that
only its address carries; the browser keeps it as a cookie that scripts cannot read.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from socket import AF_INET6, gethostname
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from hushrec.errors import HushrecError, RunError
from hushrec.studio.pages import Studio

LONGEST_ADDRESS = 4_000
MOST_FIELDS = 20
LARGEST_ORDER = 1_000
"""Bytes that come with an order; nothing is read from them."""
TOKEN = "token"  # noqa: S105 - the name of it
COOKIE = "hushrec_studio"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
REPORT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
"""A report is a file that anybody may have written: it may look as it likes, and do nothing."""
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - only compared with
HTML, CSS, SCRIPT = "text/html", "text/css", "text/javascript"


class _RefusedError(Exception):
    """A request that gets no answer but why."""

    def __init__(self, status: HTTPStatus, words: str) -> None:
        super().__init__(words)
        self.status = status


@dataclass(frozen=True)
class Answer:
    """What is sent back."""

    body: str = ""
    kind: str = HTML
    status: HTTPStatus = HTTPStatus.OK
    policy: str = POLICY
    more: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Place:
    """Where it listens."""

    host: str
    port: int
    token: str | None
    """None on this machine alone."""

    @property
    def address(self) -> str:
        """What a browser is told; with the token, where there is one."""
        host = gethostname() if self.host in EVERYWHERE else self.host
        host = f"[{host}]" if ":" in host else host
        ask = f"?{urlencode({TOKEN: self.token})}" if self.token else ""
        return f"http://{host}:{self.port}/{ask}"


def is_loopback(host: str) -> bool:
    """Say whether an address is this machine's alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextmanager
def serving(
    folder: Path, host: str, port: int, keep: Callable[[Exception], str]
) -> Iterator[tuple[ThreadingHTTPServer, Place]]:
    """Open the studio over a folder; ``keep`` writes a fault of ours down and says where.

    It answers once ``serve_forever`` of what is given is called.
    """
    studio = Studio(folder)

    class Handler(_Handler):
        pass

    class Server(ThreadingHTTPServer):
        address_family = AF_INET6 if ":" in host else ThreadingHTTPServer.address_family

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Say nothing of a browser that went away before it had its answer."""
            error = sys.exception()
            if isinstance(error, Exception) and not isinstance(error, OSError):
                keep(error)

    try:
        server = Server((host, port), Handler)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RunError(
            f"cannot listen at {host}:{port}: {reason}; choose another --port or --host"
        ) from None
    token = None if is_loopback(host) else secrets.token_urlsafe(24)
    Handler.studio, Handler.keep = studio, staticmethod(keep)
    Handler.place = Place(host, server.server_address[1], token)
    try:
        yield server, Handler.place
    finally:
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """Checks who asks, finds the page, sends it."""

    studio: Studio
    place: Place
    keep: Callable[[Exception], str]
    timeout = 20
    server_version, sys_version = "hushrec", ""

    def do_GET(self) -> None:
        """Show a page."""
        self._send(self._tried(self._shown))

    def do_HEAD(self) -> None:
        """Say that there is a page."""
        self._send(self._tried(self._shown))

    def do_POST(self) -> None:
        """Take an order, and show the page that it changes."""
        self._send(self._tried(self._ordered))

    def log_message(self, format: str, *words: object) -> None:
        """Say nothing: addresses carry names of users, and the token."""

    # ------------------------------------------------------------ what is asked

    def _tried(self, act: Callable[[str, Mapping[str, str]], Answer]) -> Answer:
        try:
            if len(self.path) > LONGEST_ADDRESS:
                raise _RefusedError(HTTPStatus.REQUEST_URI_TOO_LONG, "the address is too long")
            asked = urlsplit(self.path)
            try:
                pairs = parse_qsl(asked.query, max_num_fields=MOST_FIELDS, errors="strict")
            except ValueError:
                raise _RefusedError(HTTPStatus.BAD_REQUEST, "the address is no good") from None
            given = dict(pairs)
            return self._let_in(asked.path, given) or act(asked.path, given)
        except _RefusedError as refused:
            return self._refusal(refused.status, str(refused))
        except HushrecError as error:
            gone = isinstance(error, RunError)
            status = HTTPStatus.NOT_FOUND if gone else HTTPStatus.BAD_REQUEST
            return self._refusal(status, str(error))
        except Exception as error:
            words = f"This is a fault of hushrec: {type(error).__name__}. See {self.keep(error)}."
            return self._refusal(HTTPStatus.INTERNAL_SERVER_ERROR, words)

    def _refusal(self, status: HTTPStatus, words: str) -> Answer:
        return Answer(self.studio.refusal(status, words), status=status)

    def _let_in(self, path: str, given: Mapping[str, str]) -> Answer | None:
        """Refuse who must not ask; a token in the address becomes a cookie."""
        token = self.place.token
        if token is None:
            name = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
            if not is_loopback(name):
                raise _RefusedError(HTTPStatus.FORBIDDEN, "this page answers to this machine only")
            return None
        if TOKEN in given and hmac.compare_digest(given[TOKEN].encode(), token.encode()):
            rest = urlencode({key: value for key, value in given.items() if key != TOKEN})
            cookie = f"{COOKIE}={token}; HttpOnly; SameSite=Strict; Path=/"
            where = f"/{path.strip('/')}" + (f"?{rest}" if rest else "")
            return Answer(
                status=HTTPStatus.SEE_OTHER, more=(("Set-Cookie", cookie), ("Location", where))
            )
        try:
            kept = SimpleCookie(self.headers.get("Cookie", "")).get(COOKIE)
        except CookieError:
            kept = None
        if kept is None or not hmac.compare_digest(kept.value.encode(), token.encode()):
            raise _RefusedError(
                HTTPStatus.FORBIDDEN, "open the address that hushrec studio printed, token included"
            )
        return None

    def _shown(self, path: str, given: Mapping[str, str]) -> Answer:
        name = path.removeprefix("/") or "runs"
        if name == "studio.css":
            return Answer(self.studio.style(), CSS)
        if name == "studio.js":
            return Answer((resources.files("hushrec.studio") / name).read_text("utf-8"), SCRIPT)
        if name == "report":
            return Answer(self.studio.report(given), policy=REPORT_POLICY)
        page = self.studio.page(name, given)
        if page is None:
            raise _RefusedError(HTTPStatus.NOT_FOUND, "there is no such page")
        return Answer(page)

    def _ordered(self, path: str, given: Mapping[str, str]) -> Answer:
        size = self.headers.get("Content-Length", "0")
        if not size.isdigit() or int(size) > LARGEST_ORDER:
            raise _RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "too much was sent")
        self.rfile.read(int(size))
        origin = self.headers.get("Origin")
        ours = origin is None or urlsplit(origin).netloc == self.headers.get("Host")
        if not ours or self.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
            raise _RefusedError(HTTPStatus.FORBIDDEN, "another page sent this")
        if path != "/leak":
            raise _RefusedError(HTTPStatus.NOT_FOUND, "there is nothing to be ordered here")
        self.studio.start_leak()
        return Answer(status=HTTPStatus.SEE_OTHER, more=(("Location", "/leak"),))

    # ------------------------------------------------------------ what is sent

    def _send(self, answer: Answer) -> None:
        body = answer.body.encode("utf-8", "replace")
        headers = {
            "Content-Type": f"{answer.kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": answer.policy,
            **HEADERS,
        }
        self.send_response(answer.status)
        for name, value in (*headers.items(), *answer.more):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
