"""Supervisors of Flower's programs: who gets in, what is started anew, and what stays on a disk."""

import os
import shutil
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse

from hushrec.cli.federate import ExperimentOptions, make_rehearsal
from hushrec.deployment import provisioning
from hushrec.deployment.flower import gate, processes, programs, transport
from hushrec.deployment.flower.gate import Gate, Refused
from hushrec.deployment.flower.processes import Processes, free_port
from hushrec.deployment.make import renew_server
from hushrec.deployment.provisioning import NodeFolder, ServerFolder
from hushrec.errors import RunError


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    top = tmp_path_factory.mktemp("supervised") / "f"
    make_rehearsal(top, "demo", 2, ExperimentOptions("popularity", None, 1, 0, ()))
    return top


class Door:
    """A server's gate that says one thing after the other; the last one for ever."""

    def __init__(self, *says):
        self.says, self.left = list(says), []

    def try_key(self):
        return self.says.pop(0) if len(self.says) > 1 else self.says[0]

    def leave(self, node):
        self.left.append(node)


def enter(folder, *says):
    """Let a node try to get in; return what it was told, and which connections it ended."""
    told, door = [], Door(*says)
    (folder.path / "run").mkdir(exist_ok=True)
    programs._get_in(folder, door, told.append)
    return told, door.left


CONNECTED, AWAY = Refused("connected"), Refused("unreachable", "refused")


def test_a_node_waits_while_the_server_counts_its_last_connection(made, monkeypatch):
    monkeypatch.setattr(programs.time, "sleep", lambda seconds: None)
    folder = NodeFolder.open(made / "nodes" / "node-1")
    told, left = enter(folder, CONNECTED, CONNECTED, 7)
    assert len(told) == 1 and "still counts this node's last connection" in told[0]
    assert "trying again, up to 90 s" in told[0] and left == []
    assert enter(folder, 7) == ([], [7]), "it knows its last connection, and ends it"
    told, _ = enter(folder, AWAY, AWAY, CONNECTED, 7)
    assert told[0].startswith("cannot reach localhost")
    assert len(told) == 2


def test_a_copy_of_a_node_does_not_end_the_connection_of_the_first(made, tmp_path, monkeypatch):
    monkeypatch.setattr(programs.time, "sleep", lambda seconds: None)
    enter(NodeFolder.open(made / "nodes" / "node-1"), 7)
    shutil.copytree(made / "nodes" / "node-1", tmp_path / "twin")
    monkeypatch.setattr(programs, "LAST_CONNECTION_SECONDS", 0.0)
    twin, told, door = NodeFolder.open(tmp_path / "twin"), [], Door(CONNECTED)
    with pytest.raises(RunError, match="another process uses its key; run it once"):
        programs._get_in(twin, door, told.append)
    assert door.left == []


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        (Refused("unknown key"), "the server does not know this node's key"),
        (Refused("certificate"), "its certificate is not signed by the federation's authority"),
        (Refused("clock", "+1200 s"), r"the clocks .* differ too much; .*\(\+1200 s\)"),
    ],
)
def test_what_waiting_does_not_help_against_is_said_at_once(made, refused, why):
    folder, began = NodeFolder.open(made / "nodes" / "node-2"), time.monotonic()
    with pytest.raises(RunError, match=f"did not accept this node: {why}"):
        enter(folder, refused)
    assert time.monotonic() - began < 5


def test_refusals_are_told_apart_by_their_status():
    def refused(status, **headers):
        return gate._refused(SimpleNamespace(status_code=status, headers=headers)).reason

    assert [refused(code) for code in (403, 412, 401, 503)] == [
        *("unknown key", "connected", "clock", "other")
    ]
    ahead = gate._refused(
        SimpleNamespace(status_code=401, headers={"date": "Thu, 01 Jan 2026 00:00:00 GMT"})
    )
    assert ahead.reason == "clock" and ahead.detail.endswith(" s")


def test_a_server_that_is_not_there_is_unreachable(made):
    folder = NodeFolder.open(made / "nodes" / "node-1")
    door = Gate(f"localhost:{free_port()}", folder.authority, folder.key.read_bytes())
    assert door.try_key().reason == "unreachable"


COUNTS_TERMS = """
import signal, sys, time
count = []
def on_term(number, frame):
    count.append(1)
    print(f"TERM {len(count)}", flush=True)
signal.signal(signal.SIGTERM, on_term)
print("ready", flush=True)
end = time.monotonic() + 600
while time.monotonic() < end and not count:
    time.sleep(0.05)
time.sleep(1.0)
print("said goodbye", flush=True)
"""


def test_a_program_gets_one_term_and_says_goodbye(tmp_path):
    """Flower's programs restore the default at the first TERM: a second one kills them."""
    with Processes(tmp_path, {}) as started:
        program = started.start("polite", [sys.executable, "-c", COUNTS_TERMS])
        program.wait_until(lambda: "ready" in program.output(), 20)
    assert program.output().split("\n") == ["ready", "TERM 1", "said goodbye", ""]


def test_a_term_that_comes_while_a_program_is_stopped_is_not_lost(tmp_path):
    """A supervisor that starts its program anew has to end when it is told to meanwhile."""
    with pytest.raises(KeyboardInterrupt), Processes(tmp_path, {}) as started:
        program = started.start("polite", [sys.executable, "-c", COUNTS_TERMS])
        program.wait_until(lambda: "ready" in program.output(), 20)
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        started.stop()
        raise AssertionError("it went on")
    assert "said goodbye" in program.output(), "and the program ended as it should"


def test_a_long_log_is_moved_aside(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "LOG_BYTES", 1000)
    words = "import sys\nwhile True:\n    print('x' * 99, flush=True)\n    sys.stdin.read(1)"
    with Processes(tmp_path, {}) as started:
        program = started.start("chatty", [sys.executable, "-c", words])
        for _ in range(5):
            program.wait_until(lambda: program.log.stat().st_size > 1000, 20)
            program.rotate_log()
        assert program.tail() is not None
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["chatty.log", "chatty.log.1"]
    assert (tmp_path / "chatty.log.1").stat().st_mode & 0o077 == 0


def test_a_server_keeps_its_port_if_it_can(tmp_path):
    port = programs._same_port(tmp_path)
    assert programs._same_port(tmp_path) == port
    with programs.socket.create_server(("127.0.0.1", port)):
        assert programs._same_port(tmp_path) != port
    (tmp_path / "port").write_text("rubbish")
    assert programs._same_port(tmp_path) > 0


def test_the_end_of_a_certificate_is_said_a_month_before(made, monkeypatch):
    server = ServerFolder.open(made / "server")
    assert server.expiring == [] and NodeFolder.open(made / "nodes" / "node-1").expiring == []
    monkeypatch.setattr(provisioning, "SERVER_DAYS", 20)
    until = renew_server(made)
    (said,) = server.expiring
    assert f"server.crt ends on {until:%Y-%m-%d}" in said and "federate renew" in said


class Announced:
    """A SuperNode that made a task of a message, and has given the message up."""

    def PullMessages(self, request):
        return PullAppMessagesResponse(message_object_trees=[ObjectTree(object_id="a" * 64)])

    def PullObject(self, request):
        return PullObjectResponse(object_found=True, object_available=False)


def test_a_message_that_a_supernode_gave_up_is_given_up_for_the_next(monkeypatch):
    context, tasks = SimpleNamespace(node_id=1, run_id=2), [None, None, ("token", 3)]
    found = transport._pull_message(Announced(), context, lambda: tasks.pop(0))
    assert found == (None, ("token", 3))
    monkeypatch.setattr(transport, "STALLED_SECONDS", 0.5)
    with pytest.raises(transport._StuckError, match="announced a message that did not come"):
        transport._pull_message(Announced(), context, lambda: None)
