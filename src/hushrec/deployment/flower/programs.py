"""Flower's SuperLink and SuperNode as a federation runs them, and the processes that they are.

TLS and node authentication are on, telemetry is off. A server is a SuperLink behind the TLS reverse
proxy (`gateway`); the SuperLink keeps messages in memory, so that no upload is written to a disk. A
node is a SuperNode. Neither starts a Flower app: each hands its tasks to the process that knows the
secret of its folder, which is hushrec's own (`transport`), so no code that a server sends is
executed. Logs and the secret are in the folder ``run`` beside the keys.

Flower's programs start further processes, some in sessions of their own, which a signal to the
process group does not reach. Every process started here therefore inherits an environment variable,
`MARK`, that holds its working folder. Stopping ends all processes with that mark. Starting does so
too: a supervisor that was killed may have left some behind.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import re
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

import psutil
import tomli_w

from hushrec.deployment.flower.gateway import ProxySettings, Traffic, reverse_proxy
from hushrec.deployment.flower.transport import RuntimeEndpoint, answer_messages
from hushrec.deployment.provisioning import NodeFolder, ServerFolder, read_secret
from hushrec.errors import MissingExtraError, RunError
from hushrec.io.files import write_bytes, write_text
from hushrec.runs.folder import is_held

MARK = "HUSHREC_WORKS_IN"
START_SECONDS = COMMAND_SECONDS = 90.0
END_SECONDS = 10.0
"""Seconds between a TERM and a KILL."""
POLL_SECONDS = 0.1
TAIL_LINES = 15
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
CONNECTION = "hushrec"
"""Name of the server in the configuration of Flower's commands."""
WATCH_SECONDS = 2.0
REASONS = {
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not signed by the federation's authority, or "
    "is not for this name",
    "Failed to activate SuperNode": "the server does not know this node's key",
}
"""Messages in Flower's log, and the reasons they stand for."""
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


@dataclass(frozen=True)
class Program:
    """A program that was started."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    log_offset: int
    """Where its output begins in the log, which earlier programs of that name share."""

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self.process.poll() is None

    def output(self) -> str:
        """Return its whole output."""
        with self.log.open("rb") as file:
            file.seek(self.log_offset)
            return _COLOURS.sub("", file.read().decode("utf-8", "replace"))

    def tail(self) -> str:
        """Return the last lines of its output."""
        return "\n".join(self.output().splitlines()[-TAIL_LINES:])

    def require_alive(self) -> None:
        """Raise if it ended, with the end of its log."""
        if not self.alive:
            raise self._error(f"ended with code {self.process.returncode}")

    def wait_until(self, ready: Callable[[], bool], seconds: float) -> None:
        """Wait until it is ready; raise if it ends or takes too long."""
        deadline = time.monotonic() + seconds
        while not ready():
            self.require_alive()
            if time.monotonic() > deadline:
                raise self._error(f"was not ready after {seconds:g} seconds")
            time.sleep(POLL_SECONDS)

    def _error(self, what: str) -> RunError:
        return RunError(f"{self.name} {what}; the end of {self.log}:\n{self.tail()}")


class Processes:
    """Programs that end together, when the context is left, however it is left."""

    def __init__(self, work: Path, environment: Mapping[str, str]) -> None:
        """``work`` is a folder of its own, for the logs; ``environment`` is added to ours."""
        self.work = work.resolve()
        self.environment = {**os.environ, **environment, MARK: str(self.work)}
        self.programs: list[Program] = []

    def __enter__(self) -> Self:
        self.stop()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self, name: str, command: Sequence[str]) -> Program:
        """Start a program, in its own session so that Ctrl-C reaches this process only."""
        log = self.work / f"{name}.log"
        with os.fdopen(os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600), "ab") as out:
            offset = out.tell()
            process = subprocess.Popen(  # noqa: S603 - a list of words, the program's path first
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )
        program = Program(name, process, log, offset)
        self.programs.append(program)
        return program

    def stop(self) -> None:
        """Send TERM to all processes, then KILL to those that are left; signals are ignored."""
        in_main = threading.current_thread() is threading.main_thread()  # others handle no signals
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if in_main else ()
        with _handling(signals, signal.SIG_IGN):
            self._signal(signal.SIGTERM)
            if not self._wait(END_SECONDS):
                self._signal(signal.SIGKILL)
                self._wait(END_SECONDS)
            self.programs.clear()

    def remaining(self) -> set[int]:
        """Return the ids of all running processes that were started here, descendants included."""
        marked = {process.pid for process in self._marked()}
        return marked | {each.process.pid for each in self.programs if each.alive}

    def _marked(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            # Other users' processes, and those that end meanwhile, do not show their environment.
            with suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == str(self.work):
                    yield process

    def _signal(self, number: int) -> None:
        for program in self.programs:
            if program.alive:
                with suppress(ProcessLookupError):
                    os.killpg(program.process.pid, number)
        for process in self._marked():
            with suppress(psutil.Error):
                process.send_signal(number)

    def _wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.remaining():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True


def free_port() -> int:
    """Return a free port of the loopback address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """End the context quietly on Ctrl-C, on TERM, and when the terminal is closed."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    with suppress(KeyboardInterrupt), _handling((signal.SIGTERM, signal.SIGHUP), stop):
        yield


@contextmanager
def _handling(
    numbers: Sequence[signal.Signals], handler: Callable[[int, object], None] | signal.Handlers
) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


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


def begin_run(folder: ServerFolder) -> tuple[int, RuntimeEndpoint, dict[str, str]]:
    """Start a Flower run on the running server of this folder; return the run's number, the
    endpoint of its task, and Flower's id of each node by the node's name."""
    work = folder.path / "run"
    if not is_held(work / "lock"):
        raise RunError(
            f"{folder.path} is not running: start it with 'hushrec federate server {folder.path}'"
        )
    try:
        config = tomllib.loads((work / "flwr" / "config.toml").read_text("utf-8"))
        address = str(config["superlink"][CONNECTION]["address"])
        secret = read_secret(work / TASK_KEY)
        node_ids = json.loads((work / NODE_IDS).read_text("utf-8"))
    except (OSError, KeyError, TypeError, ValueError):
        raise RunError(f"{folder.path} is starting, or damaged: try again in a moment") from None
    app = work / "app"
    app.mkdir(exist_ok=True)
    write_text(app / "pyproject.toml", APP)
    write_text(app / "nothing.py", "app = None\n")
    started = flwr({**os.environ, **_environment(work)}, "run", str(app.resolve()), CONNECTION)
    endpoint = RuntimeEndpoint(address, secret, folder.authority.read_bytes())
    return int(started["run-id"]), endpoint, node_ids


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
        outer = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        outer.minimum_version = ssl.TLSVersion.TLSv1_2
        outer.load_cert_chain(folder.certificate, folder.key)
        listen, outer_port = folder.config.listen, folder.config.port
        with reverse_proxy(ProxySettings(listen, outer_port, port, outer, tls)) as traffic:
            yield RunningServer(folder, superlink, node_ids, traffic)


@contextmanager
def node_running(folder: NodeFolder) -> Iterator[tuple[Program, int, RuntimeEndpoint]]:
    """Run a node until the context is left; give the SuperNode, its port on the loopback address,
    and its endpoint. It tries to reach the server as long as it takes."""
    work = folder.path / "run"
    with _only_one(work), Processes(work, _environment(work)) as processes:
        port, secret = free_port(), _new_secret(work)
        supernode = processes.start("supernode", _supernode(folder, port))
        supernode.wait_until(lambda: _listens(port), START_SECONDS)
        yield supernode, port, RuntimeEndpoint(f"127.0.0.1:{port}", secret)


def run_node(
    folder: NodeFolder, answer: Callable[[bytes], bytes], tell: Callable[[str], None]
) -> NoReturn:
    """Run a node forever, and connect again whenever the connection was lost; a node that the
    server never accepted is an error. ``answer`` maps a request to a reply."""
    while True:
        with node_running(folder) as (supernode, port, endpoint):
            answer_messages(endpoint, answer, _goes_on(supernode, port))
            output = supernode.output()
            if "SuperNode ID:" not in output:
                known = (reason for message, reason in REASONS.items() if message in output)
                reason = next(known, f"the end of {supernode.log}:\n{supernode.tail()}")
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


def _goes_on(supernode: Program, port: int) -> Callable[[], bool]:
    """Return a function that says whether a SuperNode still listens, as its process may outlive its
    end; the port is tried once in `WATCH_SECONDS` only."""
    checked, value = time.monotonic(), True

    def latest() -> bool:
        nonlocal checked, value
        if time.monotonic() - checked >= WATCH_SECONDS:
            checked, value = time.monotonic(), supernode.alive and _listens(port)
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
    with closing(connection), suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    return False


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False


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
