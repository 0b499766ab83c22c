"""Flower's programs for real, on loopback: who may connect does, and nobody else."""

import base64
import http.client
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
)
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

from hushrec.deployment.flower.processes import Processes, free_port
from hushrec.deployment.flower.programs import (
    CONNECTION,
    _environment,
    _supernode,
    flwr,
    program,
    server_running,
    supernode_running,
)
from hushrec.deployment.make import FederationSpec, ServerAddress, make_federation
from hushrec.deployment.provisioning import Authority, NodeFolder, ServerFolder, new_node_key
from hushrec.errors import RunError
from hushrec.federation.contract import Catalogue, Contract
from hushrec.federation.experiment import ExperimentRequest
from hushrec.testing import taste_world

pytestmark = pytest.mark.slow

REGISTERED = ("ada", "ben")
TRUSTING = "dora"
"""A node that is registered as well, and is started as Flower would."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A federation of four, of which the server knows three."""
    folder = tmp_path_factory.mktemp("flower") / "tastes"
    data = taste_world()
    contract = Contract(ExperimentRequest("tastes", "pfedrec").experiment(), Catalogue.of(data))
    place = ServerAddress(port=free_port())
    names = (*REGISTERED, TRUSTING, "cleo")
    make_federation(folder, FederationSpec("tastes", contract, names, place, data))
    (folder / "server" / "nodes" / "cleo.pub").unlink()
    return folder


def command(*words):
    """A foreground command, as a service manager starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", "hushrec", "federate", *map(str, words)],
        stderr=subprocess.PIPE,
        text=True,
    )


EVIL = {
    "pyproject.toml": """
[project]
name = "evil"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "mallory"
[tool.flwr.app.components]
serverapp = "evil.app:server"
clientapp = "evil.app:client"
""",
    "evil/__init__.py": "",
    "evil/app.py": """
import os
from pathlib import Path
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client = ClientApp()
server = ServerApp()

@client.train()
def steal(message, context):
    folder = Path(os.environ["FLWR_HOME"]).parent
    (folder / "stolen").write_text("whatever is in the node's folder")
    return Message(RecordDict({"upload": ConfigRecord({"x": "teal-" * 3})}), reply_to=message)

@server.main()
def ask(grid, context):
    everybody = list(grid.get_node_ids())
    grid.send_and_receive(
        [Message(RecordDict(), message_type=MessageType.TRAIN, dst_node_id=node)
         for node in everybody], timeout=25)
""",
}
"""An app of a server that wants more than it should have."""


@dataclass(frozen=True)
class Running:
    services: list
    refused: dict
    """Commands of nodes that must end by themselves."""
    plaintext: object
    """A program that must get nowhere."""
    trusting: Path
    """Where the trusting node works."""
    processes: Processes


@pytest.fixture(scope="module")
def running(made, tmp_path_factory):
    """The server and its nodes, and those that must not get in, all at once."""
    folder = tmp_path_factory.mktemp("strangers")
    shutil.copytree(made / "nodes" / "ben", folder / "ben")
    (folder / "ben" / "ca.crt").write_bytes(Authority.generate("other").pem)
    (folder / "run").mkdir()
    plain = [
        *(program("flower-supernode"), "--insecure", "--port", str(free_port())),
        *("--superlink", NodeFolder.open(made / "nodes" / "ben").config.server),
    ]
    services = [command("server", made / "server")]
    services += [command("node", made / "nodes" / name) for name in REGISTERED]
    refused = {}
    try:
        with Processes(folder / "run", _environment(folder / "run")) as processes:
            assert "3 nodes may connect" in services[0].stderr.readline()
            plaintext = processes.start("plaintext", plain)
            trusting = _supernode(NodeFolder.open(made / "nodes" / TRUSTING), free_port())
            processes.start(TRUSTING, trusting[: trusting.index("--isolation")])
            refused["unregistered"] = command("node", made / "nodes" / "cleo")
            refused["wrong authority"] = command("node", folder / "ben")
            for name, node in zip(REGISTERED, services[1:], strict=True):
                assert node.stderr.readline().startswith(f"{name} connects to localhost:")
            yield Running(services, refused, plaintext, folder / "run", processes)
    finally:
        for process in [*services, *refused.values()]:
            process.send_signal(signal.SIGTERM)
        for process in [*services, *refused.values()]:
            process.wait(60)


def environment_of(made):
    """What Flower's commands find the server by that another process runs."""
    return {**os.environ, **_environment(made / "server" / "run")}


def online(made, wanted, seconds=60):
    """Wait until so many nodes are connected; return how many are."""
    environment, deadline, count = environment_of(made), time.monotonic() + seconds, 0
    while time.monotonic() < deadline:
        listed = flwr(environment, "supernode", "list", CONNECTION)["nodes"]
        count = sum(each["status"] == "online" for each in listed)
        if count >= wanted:
            break
        time.sleep(0.5)
    return count


def started_in(folder):
    """Flower's programs that work with a folder, by their arguments or their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words, more = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
            flower = b"flower-" in words or b"flwr" in words
            if flower and bytes(folder) + b"/" in words + more:
                found.append(words.replace(b"\0", b" "))
    return found


def key_of(made, name):
    return load_ssh_private_key((made / "nodes" / name / "node.key").read_bytes(), None)


def activate(made, shown, signing):
    """Ask to be let in, as a SuperNode does; return the status."""
    public = shown.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    stamp = datetime.now(UTC).isoformat()
    signature = signing.sign(stamp.encode(), ec.ECDSA(SHA256()))
    headers = {
        "content-type": PROTOBUF_MEDIA_TYPE,
        FLEET_HTTP_PUBLIC_KEY_HEADER: base64.b64encode(public).decode(),
        FLEET_HTTP_SIGNATURE_HEADER: base64.b64encode(signature).decode(),
        TIMESTAMP_HEADER: stamp,
    }
    server = ServerFolder.open(made / "server")
    context = ssl.create_default_context(cafile=server.authority)
    connection = http.client.HTTPSConnection("localhost", server.config.port, context=context)
    body = ActivateNodeRequest(public_key=public, heartbeat_interval=30.0).SerializeToString()
    connection.request("POST", "/v1/fleet/activate-node", body, headers)
    status = connection.getresponse().status
    connection.close()
    return status


def test_registered_nodes_connect(made, running):
    assert online(made, 3) == 3


def test_a_plaintext_node_is_refused(running):
    """It never gives up, so it has to fail several times."""
    stranger, deadline = running.plaintext, time.monotonic() + 60
    while stranger.output().count("Connection attempt failed") < 3:
        assert time.monotonic() < deadline, stranger.tail()
        time.sleep(0.2)
    assert "SuperNode ID:" not in stranger.output()


@pytest.mark.parametrize(
    ("who", "why"),
    [
        ("unregistered", "the server does not know this node's key"),
        ("wrong authority", "its certificate is not signed by the federation's authority"),
    ],
)
def test_a_node_is_refused_and_told_why(running, who, why):
    said = running.refused[who].communicate(timeout=60)[1]
    assert running.refused[who].returncode == 2
    assert f"did not accept this node: {why}" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(("signing", "status"), [("ada", 412), ("cleo", 401)])
def test_another_nodes_key_is_refused(made, running, signing, status):
    """Whoever shows ada's public key must sign with ada's: 401 otherwise, for nobody known.

    The control is known, and is sent away (412) because ada is there already.
    """
    assert online(made, 3) == 3  # or ada may not be there yet
    assert activate(made, key_of(made, "ada"), key_of(made, signing)) == status


def test_the_network_cannot_register_a_key_and_this_machine_can(made, running):
    """Flower asks nobody who registers a key or starts a run to show anything: the door does."""
    environment = environment_of(made)
    stranger = made / "stranger.pub"
    stranger.write_bytes(new_node_key("stranger")[1])
    inside = (made / "server" / "run" / "flwr" / "config.toml").read_text()
    outside = made / "outside"
    outside.mkdir()
    address = f"localhost:{ServerFolder.open(made / 'server').config.port}"
    (outside / "config.toml").write_text(re.sub(r"127\.0\.0\.1:\d+", address, inside))
    through_the_door = {**environment, "FLWR_HOME": str(outside)}
    words = ("supernode", "register", str(stranger), "hushrec")
    with pytest.raises(RunError, match="supernode register' failed"):
        flwr(through_the_door, *words)
    assert flwr(environment, *words)["success"], "without the door it is done"


def test_the_same_folder_does_not_run_twice(made, running):
    folder = ServerFolder.open(made / "server")
    with pytest.raises(RunError, match="is running already"), server_running(folder):
        pass


def test_an_exception_leaves_nothing(made):
    shutil.copytree(made / "nodes" / "cleo", made / "again")
    with pytest.raises(ZeroDivisionError), supernode_running(NodeFolder.open(made / "again")):
        assert started_in(made / "again")
        raise ZeroDivisionError
    assert not started_in(made / "again")


def run_the_servers_code(made, running):
    """Whoever has the server's machine has its secret too, and runs whatever they like there."""
    work = made / "server" / "run"
    inside = re.search(r"127\.0\.0\.1:\d+", (work / "flwr" / "config.toml").read_text())[0]
    superexec = running.processes.start(
        "superexec",
        [
            *(program("flower-superexec"), "--runtime-api-address", inside),
            *("--root-certificates", str(made / "server" / "ca.crt")),
            *("--superexec-auth-secret-file", str(work / "secret")),
        ],
    )
    for name, text in EVIL.items():
        file = made / "app" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    flwr(environment_of(made), "run", str(made / "app"), "hushrec")
    deadline = time.monotonic() + 60
    while not (running.trusting / "stolen").exists():
        assert time.monotonic() < deadline, "the control: a node that Flower starts runs it"
        time.sleep(0.2)
    time.sleep(8)  # the others were asked at the same time
    assert not [path for name in REGISTERED for path in (made / "nodes" / name).rglob("stolen")]
    assert online(made, 3) == 3, "and they are still there"
    os.killpg(superexec.process.pid, signal.SIGKILL)
    superexec.process.wait(20)


def test_a_server_cannot_run_its_code_on_a_node_and_a_term_ends_everything(made, running):
    """Comes last, as it ends what the others use; of the messages before it none is left."""
    assert online(made, 3) == 3
    run_the_servers_code(made, running)
    folders = [made / "server", *(made / "nodes" / name for name in REGISTERED)]
    assert all(map(started_in, folders))
    for process in running.services:
        process.send_signal(signal.SIGTERM)
    for process in running.services:
        assert process.communicate(timeout=60)[1].splitlines()[-1] == "stopped"
        assert process.returncode == 0
    assert not [each for folder in folders for each in started_in(folder)]
    work = made / "server" / "run"
    assert "Push replies from node_id" in (work / "superlink.log").read_text()
    kept = {path: path.read_bytes() for path in work.rglob("*") if path.is_file()}
    assert work / "superlink.log" in kept
    assert not [path for path, text in kept.items() if b"teal-teal-teal-" in text]
