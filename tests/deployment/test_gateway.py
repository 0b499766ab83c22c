"""The TLS reverse proxy forwards requests of nodes, body unchanged, and refuses all others."""

import re
import socket
import ssl
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hushrec.deployment.flower import gateway
from hushrec.deployment.flower.gateway import ProxySettings, forwarded_head, reverse_proxy
from hushrec.deployment.flower.processes import free_port
from hushrec.deployment.provisioning import Authority
from hushrec.errors import RunError
from hushrec.io.files import write_bytes

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\ndone"


class Inside(threading.Thread):
    """Answers everything, as the server within does to whoever asks, and remembers it."""

    def __init__(self, context):
        super().__init__(daemon=True)
        self.asked = []
        self.context = context
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.start()

    def run(self):
        while True:
            plain, _ = self.listener.accept()
            threading.Thread(target=self.answer, args=(plain,), daemon=True).start()

    def answer(self, plain):
        with self.context.wrap_socket(plain, server_side=True) as connection:
            connection.settimeout(5)
            text = b""
            while b"\r\n\r\n" not in text:
                text += connection.recv(2**16)
            head, _, body = text.partition(b"\r\n\r\n")
            lengths = [
                int(line.split(b":")[1])
                for line in head.lower().split(b"\r\n")
                if line.startswith(b"content-length:")
            ]
            while len(body) < (lengths[0] if lengths else 0):
                body += connection.recv(2**16)
            self.asked.append((head, body))
            connection.sendall(OK)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("proxy")
    authority = Authority.generate("test")
    certificate, key = authority.server(["localhost"])
    (folder / "ca.crt").write_bytes(authority.pem)
    (folder / "server.crt").write_bytes(certificate)
    write_bytes(folder / "server.key", key, secret=True)
    shown = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    shown.load_cert_chain(folder / "server.crt", folder / "server.key")
    trusting = ssl.create_default_context(cafile=folder / "ca.crt")
    inside = Inside(shown)
    proxy = ProxySettings("127.0.0.1", free_port(), inside.port, shown, trusting, {b"": "ada"})
    with reverse_proxy(proxy):
        yield proxy, inside, trusting


def send(port, context, text, seconds=5):
    with (
        socket.create_connection(("127.0.0.1", port), timeout=seconds) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        connection.sendall(text)
        answer = b""
        while piece := connection.recv(2**16):
            answer += piece
        return answer


def post(path, body=b"", *headers):
    lines = [b"POST " + path + b" HTTP/1.1", b"Host: x", *headers]
    if not any(line.lower().startswith((b"content-length", b"transfer")) for line in headers):
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def test_a_request_of_a_node_passes(world):
    proxy, inside, context = world
    inside.asked.clear()
    body = bytes(range(256)) * 2_000
    headers = (b"Signature: abc", b"Connection: keep-alive", b"Content-Type: application/protobuf")
    assert send(proxy.port, context, post(b"/v1/fleet/push-object", body, *headers)) == OK
    [(head, arrived)] = inside.asked
    assert arrived == body
    assert b"Signature: abc" in head
    assert b"Connection: close" in head
    assert b"keep-alive" not in head


BODY = b"x" * 10
NEXT = post(b"/v1/control/start-run", b"evil")
ATTACKS = {
    "register a key": (post(b"/v1/control/register-node", BODY), b"403"),
    "start a run": (post(b"/v1/control/start-run", BODY), b"403"),
    "read results": (post(b"/v1/runtime/pull-task-input", BODY), b"403"),
    "health": (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"403"),
    "climb out": (post(b"/v1/fleet/../control/start-run", BODY), b"403"),
    "climb out, coded": (post(b"/v1/fleet/%2e%2e/control/start-run", BODY), b"403"),
    "two slashes": (post(b"//v1/control/start-run", BODY), b"403"),
    "whole address": (post(b"https://x/v1/control/start-run", BODY), b"403"),
    "a question": (post(b"/v1/fleet/get-run?x=/v1/control/", BODY), b"403"),
    "older protocol": (post(b"/v1/fleet/get-run").replace(b"1.1", b"1.0", 1), b"403"),
    "two lengths": (
        post(b"/v1/fleet/get-run", NEXT, b"Content-Length: 0", b"Content-Length: 9"),
        b"400",
    ),
    "length with a sign": (post(b"/v1/fleet/get-run", NEXT, b"Content-Length: +0"), b"400"),
    "length in pieces": (
        post(b"/v1/fleet/get-run", b"0\r\n\r\n" + NEXT, b"Transfer-Encoding: chunked"),
        b"411",
    ),
    "the same length twice": (
        post(b"/v1/fleet/get-run", BODY, b"Content-Length: 10", b"Content-Length: 10"),
        b"400",
    ),
    "lengths in a list": (post(b"/v1/fleet/get-run", BODY, b"Content-Length: 10, 10"), b"400"),
    "length of 5,000 digits": (
        post(b"/v1/fleet/get-run", b"", b"Content-Length: " + b"1" * 5_000),
        b"400",
    ),
    "underscore for a hyphen": (post(b"/v1/fleet/get-run", BODY, b"Content_Length: 0"), b"400"),
    "two hosts": (post(b"/v1/fleet/get-run", BODY, b"Host: y"), b"400"),
    "no host": (post(b"/v1/fleet/get-run", BODY).replace(b"Host: x\r\n", b""), b"400"),
    "empty first line": (b"\r\n" + post(b"/v1/fleet/get-run", BODY), b"400"),
    "control character": (post(b"/v1/fleet/get-run", BODY, b"A: b\x00c"), b"400"),
    "folded header": (post(b"/v1/fleet/get-run", BODY, b"A: b", b" Content-Length: 0"), b"400"),
    "bare line end": (post(b"/v1/fleet/get-run", BODY, b"A: b\nContent-Length: 0"), b"400"),
    "space before colon": (post(b"/v1/fleet/get-run", BODY, b"Content-Length : 0"), b"400"),
    "no length": (b"POST /v1/fleet/get-run HTTP/1.1\r\nHost: x\r\n\r\n", b"411"),
    "too long": (post(b"/v1/fleet/push-object", b"", b"Content-Length: 500000000"), b"413"),
    "endless head": (post(b"/v1/fleet/get-run", b"", b"A: " + b"a" * 2**17), b"431"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_whatever_else_is_asked_for_is_refused(world, name):
    proxy, inside, context = world
    text, status = ATTACKS[name]
    inside.asked.clear()
    try:
        answer = send(proxy.port, context, text)
    except (ConnectionError, ssl.SSLError) as error:
        # Closed while we were still writing: the answer may be lost, the refusal is not.
        assert name == "endless head", error
        answer = b"HTTP/1.1 431"
    assert answer.startswith(b"HTTP/1.1 " + status), answer
    assert not inside.asked


@given(
    st.lists(
        st.sampled_from(
            [
                *(b"\r\n", b"\n", b"\r", b" ", b"\t", b":", b",", b"0", b"\x0b", b"\x00"),
                *(b"Content-Length: 3", b"content-length:3", b"Transfer-Encoding: chunked"),
                *(b"A: b", b"Host: x", b"_", b"."),
            ]
        ),
        max_size=8,
    ).map(b"".join)
)
def test_what_is_forwarded_has_one_reading(noise):
    """Whatever stands between the headers: it is refused, or forwarded in the strictest form."""
    text = b"POST /v1/fleet/get-run HTTP/1.1\r\nHost: x\r\nContent-Length: 7\r\n" + noise
    head = (text + b"\r\n\r\n").partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    try:
        written, length, _ = forwarded_head(head)
    except gateway._RefusedError:
        return
    first, *lines = written.removesuffix(b"\r\n\r\n").split(b"\r\n")
    assert first == b"POST /v1/fleet/get-run HTTP/1.1"
    assert all(re.fullmatch(rb"[A-Za-z0-9-]+: [\t -~]*", line) for line in lines)
    names = [line.split(b":")[0].lower() for line in lines]
    assert names.count(b"content-length") == names.count(b"host") == names.count(b"connection") == 1
    assert b"transfer-encoding" not in names and length == 7


@pytest.mark.parametrize("name", ["register a key", "start a run", "read results"])
def test_within_the_same_is_answered(world, name):
    """The control: without the proxy, whoever asks is served."""
    _, inside, context = world
    assert send(inside.port, context, ATTACKS[name][0]) == OK


def test_nothing_hides_behind_a_request(world):
    proxy, inside, context = world
    inside.asked.clear()
    answer = send(proxy.port, context, post(b"/v1/fleet/get-run", BODY) + NEXT)
    assert answer == OK
    assert [body for _, body in inside.asked] == [BODY]


def test_plain_text_is_not_heard(world):
    proxy, inside, _ = world
    inside.asked.clear()
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as plain:
        plain.sendall(post(b"/v1/fleet/get-run"))
        try:
            answer = plain.recv(100)
        except ConnectionError:
            answer = b""
    assert not answer.startswith(b"HTTP")
    assert not inside.asked


def test_who_believes_another_authority_does_not_connect(world, tmp_path):
    proxy, _, _ = world
    (tmp_path / "ca.crt").write_bytes(Authority.generate("other").pem)
    other = ssl.create_default_context(cafile=tmp_path / "ca.crt")
    with pytest.raises(ssl.SSLCertVerificationError):
        send(proxy.port, other, post(b"/v1/fleet/get-run"))


def test_a_body_that_ends_early_is_dropped(world, monkeypatch):
    proxy, inside, context = world
    inside.asked.clear()
    with (
        socket.create_connection(("127.0.0.1", proxy.port), timeout=5) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        connection.sendall(post(b"/v1/fleet/get-run", b"half", b"Content-Length: 100"))
    time.sleep(0.3)
    assert not inside.asked
    assert send(proxy.port, context, post(b"/v1/fleet/get-run", BODY)) == OK


def test_who_says_nothing_is_sent_away(world, monkeypatch):
    proxy, _, context = world
    monkeypatch.setattr(gateway, "HEAD_SECONDS", 0.2)
    begun = time.monotonic()
    assert send(proxy.port, context, b"POST /v1/fl") == b""
    assert time.monotonic() - begun < 4


def test_a_port_that_is_taken_is_a_sentence(world):
    proxy, _, _ = world
    match = f"cannot listen at 127.0.0.1:{proxy.port}.*another port"
    with pytest.raises(RunError, match=match), reverse_proxy(proxy):
        pass
