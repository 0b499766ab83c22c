"""Flower's programs as a federation needs them: TLS and authentication on, telemetry off.

A server is a SuperLink behind a gateway; it keeps its messages in memory, so that no upload rests
on a disk. A node is a SuperNode. Neither starts any app: they hand tasks to whoever knows the
secret of their folder, which is our own process (`backends.flower`), so that no code a server sends
is ever run. Whatever they write goes to the folder ``run`` beside their keys.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import secrets
import ssl
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import tomli_w

from hushrec.deployment.flower.gateway import Door, Traffic, open_gateway
from hushrec.deployment.flower.processes import Processes, Program, free_port
from hushrec.deployment.provisioning.folders import NodeFolder, ServerFolder
from hushrec.deployment.provisioning.keys import read_secret
from hushrec.errors import MissingExtraError, RunError
from hushrec.io.files import write_bytes, write_text
from hushrec.runs.folder import is_held

START_SECONDS = 90.0
COMMAND_SECONDS = 90.0
CONNECTION = "hushrec"
"""What Flower's own commands call the server."""
WATCH_SECONDS = 2.0
REASONS = {
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not signed by the federation's authority, or "
    "is not for this name",
    "Failed to activate SuperNode": "the server does not know this node's key",
}
"""What Flower says, and what it means."""
APP = {
    "project": {"name": "hushrec", "version": "1.0.0", "dependencies": []},
    "tool": {
        "flwr": {
            "app": {
                "publisher": "hushrec",
                "components": {"serverapp": "nothing:app", "clientapp": "nothing:app"},
            }
        }
    },
}
"""What Flower is told that a run executes: nothing, for nobody executes it."""
NODE_IDS = "node-ids.json"
"""File with what the transport calls each node."""
AT_ONCE = 4
"""Nodes that are registered at the same time; each is a command that takes seconds."""


@dataclass(frozen=True)
class Tasks:
    """Where a SuperLink or SuperNode hands out what is to be done."""

    address: str
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class Server:
    """A server that runs."""

    folder: ServerFolder
    superlink: Program
    environment: Mapping[str, str]
    node_ids: Mapping[str, str]
    """What the transport calls each node, by our name for it."""
    traffic: Traffic

    def watch(self) -> NoReturn:
        """Wait for good; that the SuperLink ends by itself is an error."""
        while True:
            self.superlink.require_alive()
            time.sleep(WATCH_SECONDS)

    def flwr(self, *words: str) -> dict[str, Any]:
        """Run one of Flower's own commands that answers in JSON."""
        return _flwr(self.environment, *words)

    def connected(self) -> dict[str, bool]:
        """Say of each node whether it is there now."""
        listed = self.flwr("supernode", "list", CONNECTION)["nodes"]
        online = {each["node-id"] for each in listed if each["status"] == "online"}
        return {name: number in online for name, number in self.node_ids.items()}


@dataclass(frozen=True)
class Begun:
    """A run of Flower's that was begun."""

    number: int
    tasks: Tasks
    node_ids: Mapping[str, str]
    """What the transport calls each node, by our name for it."""


def begin_run(folder: ServerFolder) -> Begun:
    """Begin a run of Flower's on the server that runs in this folder.

    Flower wants an app with every run. Ours is a name and nothing else: no node looks at it.
    """
    work = folder.path / "run"
    if not is_held(work / "lock"):
        raise RunError(
            f"{folder.path} is not running: start it with 'hushrec federate server {folder.path}'"
        )
    try:
        said = tomllib.loads((work / "flwr" / "config.toml").read_text("utf-8"))
        address = str(said["superlink"][CONNECTION]["address"])
        secret = read_secret(_secret_in(work))
        node_ids = json.loads((work / NODE_IDS).read_text("utf-8"))
    except (OSError, KeyError, TypeError, ValueError):
        raise RunError(f"{folder.path} is starting, or damaged: try again in a moment") from None
    app = work / "app"
    app.mkdir(exist_ok=True)
    write_text(app / "pyproject.toml", tomli_w.dumps(APP))
    write_text(app / "nothing.py", "app = None\n")
    begun = _flwr({**os.environ, **_environment(work)}, "run", str(app.resolve()), CONNECTION)
    return Begun(int(begun["run-id"]), Tasks(address, secret), node_ids)


@contextmanager
def server_running(folder: ServerFolder) -> Iterator[Server]:
    """Run the server, every node of its folder registered, until the context is left."""
    work = folder.path / "run"
    with _only_one(work), Processes(work, _environment(work)) as processes:
        inside = free_port()
        _new_secret(work)
        superlink = processes.start("superlink", _superlink(folder, inside))
        inner = ssl.create_default_context(cafile=folder.authority)
        superlink.wait_until(lambda: _answers(inside, inner), START_SECONDS)
        _write_connection(work, folder, inside)
        node_ids = _register(folder, processes.environment)
        write_text(work / NODE_IDS, json.dumps(node_ids))
        with open_gateway(_door(folder, inside, inner)) as traffic:
            yield Server(folder, superlink, processes.environment, node_ids, traffic)


@dataclass(frozen=True)
class Node:
    """A node that runs."""

    supernode: Program
    port: int
    """Where the SuperNode listens to its own machine as long as it is well."""
    tasks: Tasks

    @property
    def was_connected(self) -> bool:
        """Whether the server has let it in."""
        return "SuperNode ID:" in self.supernode.said()

    @property
    def ended(self) -> bool:
        """Whether it gave up; its process may linger even then."""
        return not self.supernode.alive or not _listens(self.port)

    def why(self) -> str:
        """Say why it gave up."""
        said = self.supernode.said()
        known = [sentence for words, sentence in REASONS.items() if words in said]
        return known[0] if known else f"the end of {self.supernode.log}:\n{self.supernode.tail()}"


@contextmanager
def node_running(folder: NodeFolder) -> Iterator[Node]:
    """Run a node until the context is left; it looks for the server as long as it takes."""
    work = folder.path / "run"
    with _only_one(work), Processes(work, _environment(work)) as processes:
        port, secret = free_port(), _new_secret(work)
        supernode = processes.start("supernode", _supernode(folder, port))
        supernode.wait_until(lambda: _listens(port), START_SECONDS)
        yield Node(supernode, port, Tasks(f"127.0.0.1:{port}", secret))


def keep_node(
    folder: NodeFolder,
    serve: Callable[[Tasks, Callable[[], bool]], None],
    tell: Callable[[str], None],
) -> NoReturn:
    """Run a node for good: whenever the server was away, connect again.

    ``serve`` does the tasks as long as it is told to go on. A node that the server never let in is
    an error.
    """
    while True:
        with node_running(folder) as node:
            serve(node.tasks, _every(WATCH_SECONDS, lambda: not node.ended))
            if not node.was_connected:
                raise RunError(f"{folder.config.server} did not let this node in: {node.why()}")
        tell(f"lost {folder.config.server}; connecting again")
        time.sleep(WATCH_SECONDS)


def program(name: str) -> str:
    """Return the path of one of Flower's programs, beside the Python that runs us."""
    path = Path(sys.executable).parent / name
    if not path.is_file():
        raise MissingExtraError("a federation on several machines", "flower")
    return str(path)


def _superlink(folder: ServerFolder, port: int) -> list[str]:
    return [
        program("flower-superlink"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--ssl-ca-certfile", str(folder.authority.resolve())),
        *("--ssl-certfile", str(folder.certificate.resolve())),
        *("--ssl-keyfile", str(folder.key.resolve())),
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
        *_handing_out(folder.path / "run"),
    ]


def _supernode(folder: NodeFolder, port: int) -> list[str]:
    return [
        program("flower-supernode"),
        *("--superlink", folder.config.server),
        *("--root-certificates", str(folder.authority.resolve())),
        *("--auth-supernode-private-key", str(folder.key.resolve())),
        *("--host", "127.0.0.1", "--port", str(port)),
        *_handing_out(folder.path / "run"),
    ]


def _handing_out(work: Path) -> list[str]:
    """Start no app; hand tasks to whoever knows the secret."""
    return ["--isolation", "process", "--superexec-auth-secret-file", str(_secret_in(work))]


def _secret_in(work: Path) -> Path:
    return work.resolve() / "secret"


def _new_secret(work: Path) -> bytes:
    """Draw the secret of whoever may do tasks, new at every start."""
    secret, path = secrets.token_bytes(32), _secret_in(work)
    write_bytes(path, secret, secret=True)
    return secret


def _environment(work: Path) -> dict[str, str]:
    home = work / "flwr"
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    excepted = [os.environ.get("NO_PROXY", ""), "localhost,127.0.0.1"]
    return {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_HOME": str(home.resolve()),
        # Flower's programs find each other by name.
        "PATH": beside,
        "NO_PROXY": ",".join(filter(None, excepted)),
    }


def _every(seconds: float, holds: Callable[[], bool]) -> Callable[[], bool]:
    """Ask something that is not free to ask once in so many seconds."""
    asked, answer = time.monotonic(), True

    def said() -> bool:
        nonlocal asked, answer
        if time.monotonic() - asked >= seconds:
            asked, answer = time.monotonic(), holds()
        return answer

    return said


@contextmanager
def _only_one(work: Path) -> Iterator[None]:
    """Refuse to run the same folder twice at a time."""
    (work / "flwr").mkdir(parents=True, exist_ok=True, mode=0o700)
    work.chmod(0o700)
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"{work.parent} is running already") from None
        yield


def _answers(port: int, context: ssl.SSLContext) -> bool:
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=5, context=context)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _listens(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.connect()
    except OSError:
        return False
    finally:
        connection.close()
    return True


def _door(folder: ServerFolder, inside: int, inner: ssl.SSLContext) -> Door:
    outer = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    outer.minimum_version = ssl.TLSVersion.TLSv1_2
    outer.load_cert_chain(folder.certificate, folder.key)
    return Door(folder.config.listen, folder.config.port, inside, outer, inner)


def _write_connection(work: Path, folder: ServerFolder, port: int) -> None:
    connection = {
        "address": f"127.0.0.1:{port}",
        "root-certificates": str(folder.authority.resolve()),
    }
    said = {"superlink": {"default": CONNECTION, CONNECTION: connection}}
    write_text(work / "flwr" / "config.toml", tomli_w.dumps(said))


def _register(folder: ServerFolder, environment: Mapping[str, str]) -> dict[str, str]:
    def register(named: tuple[str, Path]) -> tuple[str, str]:
        name, key = named
        words = ("supernode", "register", str(key.resolve()), CONNECTION, "--name", name)
        return name, str(_flwr(environment, *words)["node-id"])

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(pool.map(register, folder.public_keys.items()))


def _flwr(environment: Mapping[str, str], *words: str) -> dict[str, Any]:
    command = [program("flwr"), *words, "--format", "json"]
    try:
        done = subprocess.run(  # noqa: S603 - a list of words, the program's path first
            command,
            capture_output=True,
            check=False,
            text=True,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            timeout=COMMAND_SECONDS,
        )
        said: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise RunError(f"'flwr {words[0]} {words[1]}' took more than {COMMAND_SECONDS:g} s") from (
            None
        )
    except ValueError:
        raise RunError(f"'flwr {words[0]} {words[1]}' failed: {done.stderr.strip()}") from None
    if not said.get("success"):
        raise RunError(f"'flwr {words[0]} {words[1]}' failed: {said.get('error-message')}")
    return said
