"""Flower's SuperLink and SuperNode as a federation runs them, and the processes that they are.

TLS and node authentication are on, telemetry is off. A server is a SuperLink behind the TLS reverse
proxy (`gateway`); the SuperLink keeps messages in memory, so that no upload is written to a disk. A
node is a SuperNode. Neither starts a Flower app: each hands its tasks to the process that knows the
secret of its folder, which is hushrec's own (`transport`), so no code that a server sends is
executed. Logs and the secret are in the folder ``run`` beside the keys.

`RunningServer.watch` and `run_node` are supervisors. They start a SuperLink or SuperNode anew that
ended, or that answers no question for `SILENT_SECONDS` (what Flower does in failures is in the
docstring of `transport`).
"""

from __future__ import annotations

import fcntl
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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import tomli_w

from hushrec.deployment.flower.gate import Gate, Refused, shown_key
from hushrec.deployment.flower.gateway import ProxySettings, Traffic, reverse_proxy
from hushrec.deployment.flower.processes import POLL_SECONDS, Processes, Program, free_port
from hushrec.deployment.flower.transport import (
    SILENT_SECONDS,
    RuntimeEndpoint,
    answer_messages,
    take_task,
)
from hushrec.deployment.provisioning import NodeFolder, ServerFolder, read_secret
from hushrec.errors import MissingExtraError, RunError, StartingError
from hushrec.io.files import write_bytes, write_text
from hushrec.runs.folder import is_held

START_SECONDS = COMMAND_SECONDS = 90.0
CONNECTION = "hushrec"
"""Name of the server in the configuration of Flower's commands."""
WATCH_SECONDS = 2.0
TASK_SECONDS = 60.0
"""Seconds that the SuperLink may take to hand out the task of a new run."""
LAST_CONNECTION_SECONDS = 90.0
"""Flower counts a node as connected for 60 s after its last heartbeat."""
LONGEST_RETRY = 10.0
REASONS = {
    "certificate": "its certificate is not signed by the federation's authority, or is not for "
    "this name",
    "unknown key": "the server does not know this node's key",
    "clock": "the clocks of server and node differ too much; set this machine's clock",
}
"""Reasons that trying again does not help against."""
APP = """
project = {name = "hushrec", version = "1.0.0", dependencies = []}
[tool.flwr.app]
publisher = "hushrec"
components = {serverapp = "nothing:app", clientapp = "nothing:app"}
"""
"""pyproject.toml of the app that Flower wants with every run; no process executes it."""
TASK_KEY = "secret"
"""File with the secret that gives access to tasks."""
NODE_IDS = "node-ids.json"
"""File with Flower's id of each node, by the node's name."""
PARALLEL_COMMANDS = 4
"""Nodes that are registered at the same time; each registration is a command that takes seconds."""


@dataclass
class RunningServer:
    """A SuperLink that runs behind its proxy."""

    folder: ServerFolder
    processes: Processes
    port: int
    """Of the SuperLink, on the loopback address."""
    superlink: Program = field(init=False)
    node_ids: dict[str, str] = field(default_factory=dict, init=False)
    """Flower's id of each node, by the node's name; none before all are registered."""
    traffic: Traffic = field(default_factory=Traffic, init=False)

    def start(self) -> None:
        """Start the SuperLink, and register all nodes of the folder."""
        work, authority = self.folder.path / "run", self.folder.authority
        self.node_ids = {}
        (work / NODE_IDS).unlink(missing_ok=True)  # until it is there, no run can begin
        secret = _new_secret(work)
        self.superlink = self.processes.start("superlink", _superlink(self.folder, self.port))
        address = f"127.0.0.1:{self.port}"
        self.endpoint = RuntimeEndpoint(address, secret, authority.read_bytes())
        self.superlink.wait_until(self.endpoint.responds, START_SECONDS)
        connection = {"address": address, "root-certificates": str(authority.resolve())}
        config = {"superlink": {"default": CONNECTION, CONNECTION: connection}}
        write_text(work / "flwr" / "config.toml", tomli_w.dumps(config))
        self.node_ids = _register(self.folder, self.processes.environment)
        write_text(work / NODE_IDS, json.dumps(self.node_ids))

    def watch(self, tell: Callable[[str], None], tick: Callable[[], None]) -> NoReturn:
        """Start the SuperLink anew whenever it ended or does nothing; call ``tick`` often."""
        heard = time.monotonic()
        while True:
            time.sleep(WATCH_SECONDS)
            self.superlink.rotate_log()
            if self.superlink.alive and self.endpoint.responds():
                heard = time.monotonic()
                tick()
            elif not self.superlink.alive or time.monotonic() - heard > SILENT_SECONDS:
                what = "does not answer" if self.superlink.alive else "ended"
                tell(f"the SuperLink {what}: starting it anew; a run goes on by itself")
                self.processes.stop()
                self.start()
                tell("the SuperLink runs again")
                heard = time.monotonic()


def begin_run(folder: ServerFolder) -> tuple[str, RuntimeEndpoint, dict[str, str]]:
    """Start a Flower run on the running server of this folder; return the token of the run's task,
    the endpoint for it, and Flower's id of each node by the node's name. A server that is starting
    is waited for."""
    work, deadline = folder.path / "run", time.monotonic() + START_SECONDS
    while True:
        if not is_held(work / "lock"):
            start = f"start it with 'hushrec federate server {folder.path}'"
            raise RunError(f"{folder.path} is not running: {start}")
        try:
            config = tomllib.loads((work / "flwr" / "config.toml").read_text("utf-8"))
            address = str(config["superlink"][CONNECTION]["address"])
            secret = read_secret(work / TASK_KEY)
            node_ids = json.loads((work / NODE_IDS).read_text("utf-8"))
            break
        except (OSError, KeyError, TypeError, ValueError):
            if time.monotonic() > deadline:
                waited = f"still starting after {START_SECONDS:g} s, or damaged"
                raise StartingError(f"{folder.path} is {waited}: see the server's log") from None
            time.sleep(POLL_SECONDS)
    app = work / "app"
    app.mkdir(exist_ok=True)
    write_text(app / "pyproject.toml", APP)
    write_text(app / "nothing.py", "app = None\n")
    endpoint = RuntimeEndpoint(address, secret, folder.authority.read_bytes())
    with (work / "beginning").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # who waits for a task takes those of others too
        started = flwr({**os.environ, **_environment(work)}, "run", str(app.resolve()), CONNECTION)
        token = take_task(endpoint, int(started["run-id"]), TASK_SECONDS)
    return token, endpoint, node_ids


def wait_for_restart(endpoint: RuntimeEndpoint, folder: ServerFolder) -> bool:
    """Wait until the supervisor of a server that was lost has started it anew; return whether it
    has. A server is another one when it has another secret."""
    work, deadline = folder.path / "run", time.monotonic() + START_SECONDS + SILENT_SECONDS
    while is_held(work / "lock") and time.monotonic() < deadline:
        with suppress(OSError):
            if (work / NODE_IDS).exists() and (work / TASK_KEY).read_bytes() != endpoint.secret:
                return True
        time.sleep(WATCH_SECONDS)
    return False


@contextmanager
def server_running(folder: ServerFolder) -> Iterator[RunningServer]:
    """Run the server, with all nodes of its folder registered, until the context is left."""
    work = folder.path / "run"
    with _only_one(work), Processes(work, _environment(work)) as processes:
        server = RunningServer(folder, processes, _same_port(work))
        server.start()
        inner = ssl.create_default_context(cafile=folder.authority)
        outer = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        outer.minimum_version = ssl.TLSVersion.TLSv1_2
        outer.load_cert_chain(folder.certificate, folder.key)
        listen, outer_port = folder.config.listen, folder.config.port
        keys = {shown_key(file.read_bytes()): name for name, file in folder.public_keys.items()}
        proxy = ProxySettings(
            listen, outer_port, server.port, outer, inner, keys, lambda: bool(server.node_ids)
        )
        with reverse_proxy(proxy) as server.traffic:
            yield server


def _same_port(work: Path) -> int:
    """Return the port of the last start, if it is free; else another one."""
    file, port = work / "port", 0
    with suppress(OSError, ValueError):
        port = int(file.read_text("ascii"))
    try:
        with socket.create_server(("127.0.0.1", port)) as probe:
            port = int(probe.getsockname()[1])
    except (OSError, OverflowError):
        port = free_port()
    write_text(file, str(port))
    return port


@contextmanager
def supernode_running(folder: NodeFolder) -> Iterator[tuple[Program, RuntimeEndpoint]]:
    """Run a node's SuperNode until the context is left; give it, and its endpoint."""
    work = folder.path / "run"
    (work / "flwr").mkdir(parents=True, exist_ok=True, mode=0o700)
    with Processes(work, _environment(work)) as processes:
        port, secret = free_port(), _new_secret(work)
        supernode = processes.start("supernode", _supernode(folder, port))
        endpoint = RuntimeEndpoint(f"127.0.0.1:{port}", secret)
        supernode.wait_until(endpoint.responds, START_SECONDS)
        yield supernode, endpoint


def run_node(
    folder: NodeFolder, answer: Callable[[bytes], bytes], tell: Callable[[str], None]
) -> NoReturn:
    """Run a node forever. Its SuperNode is started anew whenever it ended, does nothing, or did not
    take a reply. ``answer`` maps a request to a reply."""
    program("flower-supernode")  # before the server is asked
    gate = Gate(folder.config.server, folder.authority, read_secret(folder.key))
    work = folder.path / "run"
    with _only_one(work):
        with Processes(work, {}):
            pass  # what a killed supervisor left would keep the server's gate closed
        while True:
            _get_in(folder, gate, tell)
            with supernode_running(folder) as (supernode, endpoint):

                def goes_on(supernode: Program = supernode) -> bool:
                    supernode.rotate_log()
                    return supernode.alive

                what = answer_messages(endpoint, answer, goes_on)
            tell(f"the SuperNode {what}: connecting again to {folder.config.server}")
            time.sleep(WATCH_SECONDS)


def _get_in(folder: NodeFolder, gate: Gate, tell: Callable[[str], None]) -> None:
    """Wait until the server lets this node in; raise if it will not."""
    server, file, told = folder.config.server, folder.path / "run" / "connection.json", ""
    deadline, wait = time.monotonic() + LAST_CONNECTION_SECONDS, POLL_SECONDS
    with suppress(OSError, ValueError, KeyError, TypeError):
        last = json.loads(file.read_text("utf-8"))
        if last["place"] == _place(file.parent):
            gate.leave(int(last["node"]))  # this very folder had it, and it is over
    while True:
        found = gate.try_key()
        if not isinstance(found, Refused):
            write_text(file, json.dumps({"node": found, "place": _place(file.parent)}))
            return
        detail = f" ({found.detail})" if found.detail else ""
        if found.reason in REASONS:
            reason = REASONS[found.reason]
            raise RunError(f"{server} did not accept this node: {reason}{detail}")
        if found.reason == "connected":
            if time.monotonic() > deadline:
                raise RunError(
                    f"{server} did not accept this node: another process uses its key; run it once"
                )
            sentence = (
                f"the server still counts this node's last connection, or another process uses its "
                f"key; trying again, up to {LAST_CONNECTION_SECONDS:.0f} s"
            )
        else:
            deadline = time.monotonic() + LAST_CONNECTION_SECONDS
            sentence = f"cannot reach {server}{detail}; trying again until it is there"
        if sentence != told:
            tell(sentence)
            told = sentence
        time.sleep(wait)
        wait = min(2 * wait, LONGEST_RETRY)


def _place(work: Path) -> list[str | int]:
    """Identify a folder on a machine: a copy of it is another one."""
    about = work.stat()
    return [socket.gethostname(), about.st_dev, about.st_ino]


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
    secret = str(work.resolve() / TASK_KEY)
    return ["--isolation", "process", "--superexec-auth-secret-file", secret]


def _new_secret(work: Path) -> bytes:
    """Draw a secret anew at every start."""
    secret = secrets.token_bytes(32)
    write_bytes(work / TASK_KEY, secret, secret=True)
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
