"""HTTP server of the studio: access checks, routing, and security headers.

By default the server listens on the loopback address and needs no login. Requests whose ``Host`` is
another name are refused (DNS rebinding), and so are posts from pages of another origin (CSRF). On
another address every request needs a token: the printed URL carries it, and the browser keeps it in
an HttpOnly cookie.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
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

MAX_URL_LENGTH = 4_000
MAX_QUERY_FIELDS = 20
MAX_BODY_BYTES = 1_000
"""Bytes of a posted body, which is dropped."""
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
"""A report is a file of unknown origin: it may style itself, and run nothing."""
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
ANY_ADDRESS = ("0.0.0.0", "::")  # noqa: S104 - only compared with
HTML, CSS, SCRIPT = "text/html", "text/css", "text/javascript"


class _RefusedError(Exception):
    """A request that gets an error page: its status and message."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Response:
    """A response, before it is written."""

    body: str = ""
    kind: str = HTML
    status: HTTPStatus = HTTPStatus.OK
    policy: str = POLICY
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StudioAddress:
    """Where the studio listens, and the token that requests need."""

    host: str
    port: int
    token: str | None
    """None on a loopback address."""

    @property
    def url(self) -> str:
        """The URL to open in a browser, with the token if there is one."""
        host = gethostname() if self.host in ANY_ADDRESS else self.host
        host = f"[{host}]" if ":" in host else host
        query = f"?{urlencode({TOKEN: self.token})}" if self.token else ""
        return f"http://{host}:{self.port}/{query}"


def is_loopback(host: str) -> bool:
    """Return whether a name or an address is the loopback one."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextmanager
def studio_server(
    folder: Path, host: str, port: int, log_traceback: Callable[[Exception], str]
) -> Iterator[tuple[ThreadingHTTPServer, StudioAddress]]:
    """Open the studio over a folder of runs; call ``serve_forever`` of the server to answer.

    ``log_traceback`` writes the traceback of an unexpected error to a log and returns where it is.
    """

    studio = Studio(folder)

    def handler(*request: Any) -> _Handler:
        return _Handler(studio, address, log_traceback, *request)

    class _Server(ThreadingHTTPServer):
        address_family = AF_INET6 if ":" in host else ThreadingHTTPServer.address_family

        def handle_error(self, request: Any, client_address: Any) -> None:
            error = sys.exception()
            # An OSError is a browser that closed the connection.
            if isinstance(error, Exception) and not isinstance(error, OSError):
                log_traceback(error)

    try:
        server = _Server((host, port), handler)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RunError(
            f"cannot listen at {host}:{port}: {reason}; choose another --port or --host"
        ) from None
    with server:
        token = None if is_loopback(host) else secrets.token_urlsafe(24)
        address = StudioAddress(host, server.server_address[1], token)
        yield server, address


class _Handler(BaseHTTPRequestHandler):
    """Checks a request, finds the page and sends it."""

    timeout = 20
    server_version, sys_version = "hushrec", ""

    def __init__(
        self,
        studio: Studio,
        address: StudioAddress,
        log_traceback: Callable[[Exception], str],
        *request: Any,
    ) -> None:
        self.studio, self.address, self.log_traceback = studio, address, log_traceback
        super().__init__(*request)  # which answers the request

    def do_GET(self) -> None:
        """Send a page."""
        self._send(self._respond(self._get))

    def do_HEAD(self) -> None:
        """Send the headers of a page."""
        self.do_GET()

    def do_POST(self) -> None:
        """Start something, and redirect to the page that shows it."""
        self._send(self._respond(self._post))

    def log_message(self, format: str, *words: object) -> None:
        """Log nothing: URLs carry ids of users, and the token."""

    # ------------------------------------------------------------ requests

    def _respond(self, act: Callable[[str, Mapping[str, str]], Response]) -> Response:
        try:
            if len(self.path) > MAX_URL_LENGTH:
                raise _RefusedError(HTTPStatus.REQUEST_URI_TOO_LONG, "the address is too long")
            url = urlsplit(self.path)
            try:
                most = MAX_QUERY_FIELDS
                query = dict(parse_qsl(url.query, max_num_fields=most, errors="strict"))
            except ValueError:
                raise _RefusedError(
                    HTTPStatus.BAD_REQUEST, "the query of the address is not valid"
                ) from None
            return self._check_access(url.path, query) or act(url.path, query)
        except _RefusedError as refused:
            status, message = refused.status, str(refused)
        except RunError as error:
            status, message = HTTPStatus.NOT_FOUND, str(error)
        except HushrecError as error:
            status, message = HTTPStatus.BAD_REQUEST, str(error)
        except Exception as error:
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            where = self.log_traceback(error)
            message = f"This is a bug in hushrec: {type(error).__name__}. See {where}."
        return Response(self.studio.error_page(status, message), status=status)

    def _check_access(self, path: str, query: Mapping[str, str]) -> Response | None:
        """Refuse a request without access; exchange a token in the URL for a cookie."""
        token = self.address.token
        if token is None:
            name = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
            if not is_loopback(name):
                raise _RefusedError(HTTPStatus.FORBIDDEN, "this page answers to this machine only")
            return None
        if TOKEN in query and hmac.compare_digest(query[TOKEN].encode(), token.encode()):
            rest = urlencode({key: value for key, value in query.items() if key != TOKEN})
            cookie = f"{COOKIE}={token}; HttpOnly; SameSite=Strict; Path=/"
            target = f"/{path.strip('/')}" + (f"?{rest}" if rest else "")
            return _redirect(target, cookie)
        try:
            kept = SimpleCookie(self.headers.get("Cookie", "")).get(COOKIE)
        except CookieError:
            kept = None
        if kept is None or not hmac.compare_digest(kept.value.encode(), token.encode()):
            raise _RefusedError(
                HTTPStatus.FORBIDDEN, "open the address that hushrec studio printed, token included"
            )
        return None

    def _get(self, path: str, query: Mapping[str, str]) -> Response:
        name = path.removeprefix("/") or "runs"
        if name == "studio.css":
            return Response(self.studio.style(), CSS)
        if name == "studio.js":
            return Response((resources.files("hushrec.studio") / name).read_text("utf-8"), SCRIPT)
        if name == "report":
            return Response(self.studio.report(query), policy=REPORT_POLICY)
        page = self.studio.page(name, query)
        if page is None:
            raise _RefusedError(HTTPStatus.NOT_FOUND, "there is no such page")
        return Response(page)

    def _post(self, path: str, query: Mapping[str, str]) -> Response:
        size = self.headers.get("Content-Length", "0")
        if not size.isdigit() or int(size) > MAX_BODY_BYTES:
            raise _RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the request is too large")
        self.rfile.read(int(size))
        origin = self.headers.get("Origin")
        same = origin is None or urlsplit(origin).netloc == self.headers.get("Host")
        if not same or self.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
            raise _RefusedError(HTTPStatus.FORBIDDEN, "a page of another origin sent this")
        if path != "/leak":
            raise _RefusedError(HTTPStatus.NOT_FOUND, "there is nothing to start here")
        self.studio.leak.start()
        return _redirect("/leak")

    def _send(self, response: Response) -> None:
        body = response.body.encode("utf-8", "replace")
        headers = {
            "Content-Type": f"{response.kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": response.policy,
            **HEADERS,
            **response.headers,
        }
        self.send_response(response.status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _redirect(target: str, cookie: str | None = None) -> Response:
    headers = {"Location": target} | ({} if cookie is None else {"Set-Cookie": cookie})
    return Response(status=HTTPStatus.SEE_OTHER, headers=headers)
