"""Flower's SuperLink and SuperNode as a federation runs them.

TLS and node authentication are on, telemetry is off. A server is a SuperLink behind the TLS reverse
proxy (`gateway`); the SuperLink keeps messages in memory, so that no upload is written to a disk. A
node is a SuperNode. Neither starts a Flower app: each hands its tasks to the process that knows the
secret of its folder, which is hushrec's own (`transport`), so no code that a server sends is
executed. Logs and the secret are in the folder ``run`` beside the keys.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import secrets
import socket
import ssl
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import tomli_w

from hushrec.deployment.flower.gateway import ProxySettings, Traffic, reverse_proxy
from hushrec.deployment.flower.processes import Processes, Program, free_port
from hushrec.deployment.flower.transport import RuntimeEndpoint, answer_messages
from hushrec.deployment.provisioning import NodeFolder, ServerFolder, read_secret
from hushrec.errors import MissingExtraError, RunError
from hushrec.io.files import write_bytes, write_text
from hushrec.runs.folder import is_held

START_SECONDS = 90.0
COMMAND_SECONDS = 90.0
CONNECTION = "hushrec"
"""Name of the server in the configuration of Flower's commands."""
WATCH_SECONDS = 2.0
REASONS = {
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not signed by the federation's authority, or "
    "is not for this name",
    "Failed to activate SuperNode": "the server does not know this node's key",
}
"""Messages in Flower's log, and the reasons they stand for."""
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
"""The app that Flower wants with every run; no process executes it."""
NODE_IDS = "node-ids.json"
"""File with Flower's id of each node, by the node's name."""
PARALLEL_COMMANDS = 4
"""Nodes that are registered at the same time; each registration is a command that takes seconds."""


@dataclass(frozen=True)
class RunningServer:
    """A SuperLink that runs behind its proxy."""

    folder: ServerFolder
    superlink: Program
    node_ids: Mapping[str, str]
    """Flower's id of each node, by the node's name."""
    traffic: Traffic

    def watch(self) -> NoReturn:
        """Wait forever; raise if the SuperLink ends."""
        while True:
            self.superlink.require_alive()
            time.sleep(WATCH_SECONDS)


@dataclass(frozen=True)
class FlowerRun:
    """A run that was started on the SuperLink."""

    number: int
    endpoint: RuntimeEndpoint
    node_ids: Mapping[str, str]
    """Flower's id of each node, by the node's name."""


def begin_run(folder: ServerFolder) -> FlowerRun:
    """Start a Flower run on the server that runs in this folder.

    Flower wants an app with every run. This one is a name without code: no node reads it.
    """
    work = folder.path / "run"
    if not is_held(work / "lock"):
        raise RunError(
            f"{folder.path} is not running: start it with 'hushrec federate server {folder.path}'"
        )
    try:
        config = tomllib.loads((work / "flwr" / "config.toml").read_text("utf-8"))
        address = str(config["superlink"][CONNECTION]["address"])
        secret = read_secret(_secret_in(work))
        node_ids = json.loads((work / NODE_IDS).read_text("utf-8"))
    except (OSError, KeyError, TypeError, ValueError):
        raise RunError(f"{folder.path} is starting, or damaged: try again in a moment") from None
    app = work / "app"
    app.mkdir(exist_ok=True)
    write_text(app / "pyproject.toml", tomli_w.dumps(APP))
    write_text(app / "nothing.py", "app = None\n")
    started = flwr({**os.environ, **_environment(work)}, "run", str(app.resolve()), CONNECTION)
    endpoint = RuntimeEndpoint(address, secret, folder.authority.read_bytes())
    return FlowerRun(int(started["run-id"]), endpoint, node_ids)


@contextmanager
def server_running(folder: ServerFolder) -> Iterator[RunningServer]:
    """Run the server, with all nodes of its folder registered, until the context is left."""
    work, port = folder.path / "run", free_port()
    with _only_one(work), Processes(work, _environment(work)) as processes:
        _new_secret(work)
        superlink = processes.start("superlink", _superlink(folder, port))
        tls = ssl.create_default_context(cafile=folder.authority)
        superlink.wait_until(lambda: _is_healthy(port, tls), START_SECONDS)
        authority = str(folder.authority.resolve())
        connection = {"address": f"127.0.0.1:{port}", "root-certificates": authority}
        config = {"superlink": {"default": CONNECTION, CONNECTION: connection}}
        write_text(work / "flwr" / "config.toml", tomli_w.dumps(config))
        node_ids = _register(folder, processes.environment)
        write_text(work / NODE_IDS, json.dumps(node_ids))
        with reverse_proxy(_proxy(folder, port, tls)) as traffic:
            yield RunningServer(folder, superlink, node_ids, traffic)


@dataclass(frozen=True)
class RunningNode:
    """A SuperNode that runs."""

    supernode: Program
    port: int
    """Port of the loopback address at which the SuperNode listens until it gives up."""
    endpoint: RuntimeEndpoint

    @property
    def ended(self) -> bool:
        """Whether it gave up; its process may still exist then."""
        return not self.supernode.alive or not _listens(self.port)


@contextmanager
def node_running(folder: NodeFolder) -> Iterator[RunningNode]:
    """Run a node until the context is left; it tries to reach the server as long as it takes."""
    work = folder.path / "run"
    with _only_one(work), Processes(work, _environment(work)) as processes:
        port, secret = free_port(), _new_secret(work)
        supernode = processes.start("supernode", _supernode(folder, port))
        supernode.wait_until(lambda: _listens(port), START_SECONDS)
        yield RunningNode(supernode, port, RuntimeEndpoint(f"127.0.0.1:{port}", secret))


def run_node(
    folder: NodeFolder, answer: Callable[[bytes], bytes], tell: Callable[[str], None]
) -> NoReturn:
    """Run a node forever, and connect again whenever the connection was lost.

    ``answer`` maps a request to a reply. A node that the server never accepted is an error.
    """
    while True:
        with node_running(folder) as node:
            answer_messages(node.endpoint, answer, _polled(WATCH_SECONDS, lambda: not node.ended))
            output = node.supernode.output()
            if "SuperNode ID:" not in output:
                known = (reason for message, reason in REASONS.items() if message in output)
                log = f"the end of {node.supernode.log}:\n{node.supernode.tail()}"
                reason = next(known, log)
                raise RunError(f"{folder.config.server} did not accept this node: {reason}")
        tell(f"lost {folder.config.server}; connecting again")
        time.sleep(WATCH_SECONDS)


@contextmanager
def federation_running(folder: Path) -> Iterator[tuple[RunningServer, dict[str, Program]]]:
    """Run the server and all nodes of a federation on this machine, each in its own process."""
    work = folder / "run"
    work.mkdir(mode=0o700, exist_ok=True)
    nodes = sorted(path for path in (folder / "nodes").iterdir() if path.is_dir())
    with ExitStack() as stack:
        server = stack.enter_context(server_running(ServerFolder.open(folder / "server")))
        # A node ends its own child processes; if it is killed first, this context ends them.
        for node in nodes:
            (node / "run").mkdir(mode=0o700, exist_ok=True)
            stack.enter_context(Processes(node / "run", {}))
        programs = stack.enter_context(Processes(work, {}))
        yield server, {node.name: start_node(programs, node) for node in nodes}


def start_node(programs: Processes, node: Path) -> Program:
    """Start a node by its command, ``hushrec federate node``."""
    command = [sys.executable, "-m", "hushrec", "federate", "node", str(node)]
    return programs.start(node.name, command)


def program(name: str) -> str:
    """Return the path of one of Flower's programs, which are beside the Python interpreter."""
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
        *_task_options(folder.path / "run"),
    ]


def _supernode(folder: NodeFolder, port: int) -> list[str]:
    return [
        program("flower-supernode"),
        *("--superlink", folder.config.server),
        *("--root-certificates", str(folder.authority.resolve())),
        *("--auth-supernode-private-key", str(folder.key.resolve())),
        *("--host", "127.0.0.1", "--port", str(port)),
        *_task_options(folder.path / "run"),
    ]


def _task_options(work: Path) -> list[str]:
    """Start no app; hand tasks to the process that knows the secret."""
    return ["--isolation", "process", "--superexec-auth-secret-file", str(_secret_in(work))]


def _secret_in(work: Path) -> Path:
    return work.resolve() / "secret"


def _new_secret(work: Path) -> bytes:
    """Draw the secret that gives access to tasks, anew at every start."""
    secret = secrets.token_bytes(32)
    write_bytes(_secret_in(work), secret, secret=True)
    return secret


def _environment(work: Path) -> dict[str, str]:
    # Flower's programs find each other by name.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    no_proxy = [os.environ.get("NO_PROXY", ""), "localhost,127.0.0.1"]
    return {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_HOME": str((work / "flwr").resolve()),
        "PATH": path,
        "NO_PROXY": ",".join(filter(None, no_proxy)),
    }


def _polled(seconds: float, condition: Callable[[], bool]) -> Callable[[], bool]:
    """Return the condition, evaluated at most once in so many seconds; True before the first."""
    checked, value = time.monotonic(), True

    def latest() -> bool:
        nonlocal checked, value
        if time.monotonic() - checked >= seconds:
            checked, value = time.monotonic(), condition()
        return value

    return latest


@contextmanager
def _only_one(work: Path) -> Iterator[None]:
    """Hold the folder's lock; raise if another process runs it."""
    (work / "flwr").mkdir(parents=True, exist_ok=True, mode=0o700)
    work.chmod(0o700)
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"{work.parent} is running already") from None
        yield


def _is_healthy(port: int, context: ssl.SSLContext) -> bool:
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=5, context=context)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _listens(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            return True
    except OSError:
        return False


def _proxy(folder: ServerFolder, port: int, upstream: ssl.SSLContext) -> ProxySettings:
    outer = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    outer.minimum_version = ssl.TLSVersion.TLSv1_2
    outer.load_cert_chain(folder.certificate, folder.key)
    return ProxySettings(folder.config.listen, folder.config.port, port, outer, upstream)


def _register(folder: ServerFolder, environment: Mapping[str, str]) -> dict[str, str]:
    def register(named: tuple[str, Path]) -> tuple[str, str]:
        name, key = named
        words = ("supernode", "register", str(key.resolve()), CONNECTION, "--name", name)
        return name, str(flwr(environment, *words)["node-id"])

    with ThreadPoolExecutor(PARALLEL_COMMANDS) as pool:
        return dict(pool.map(register, folder.public_keys.items()))


def flwr(environment: Mapping[str, str], *words: str) -> dict[str, Any]:
    """Run one of Flower's commands and return its JSON output."""
    command = [program("flwr"), *words, "--format", "json"]
    shown = f"'flwr {words[0]} {words[1]}'"
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
        result: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise RunError(f"{shown} took more than {COMMAND_SECONDS:g} s") from None
    except ValueError:
        raise RunError(f"{shown} failed: {done.stderr.strip()}") from None
    if not result.get("success"):
        raise RunError(f"{shown} failed: {result.get('error-message')}")
    return result
