"""Damaged files, backups, full disks and many runs: a node answers as before, or refuses."""

import json
import random
import re
import resource
import sqlite3
import stat
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
from click.testing import CliRunner
from test_coordinator import NOISE, Killed, dying, rehearsal

from hushrec.cli import main
from hushrec.deployment.coordinator.roster import read_roster
from hushrec.deployment.make import (
    FederationSpec,
    back_up_folder,
    make_federation,
    restore_folder,
)
from hushrec.deployment.node.database import NodeDatabase
from hushrec.deployment.node.runs import NodeRuns
from hushrec.deployment.node.tables import DamagedError
from hushrec.deployment.node.training import recommend
from hushrec.deployment.node.worker import Worker
from hushrec.errors import DiskError, RunError
from hushrec.federation.requests import Invitation, Refusal, TrainRequest, software
from hushrec.io.codec import kind_of
from hushrec.testing import taste_world

USERS = ("user-00", "user-08")
FEW, MANY = 150, 1000
AIMS = ("interactions", "users", "private", "model", "reply", "ledger", "facts", "anywhere")


@dataclass
class Sample:
    """A node with a finished run and one in its second round, and what it answers."""

    content: bytes
    """Of the file."""
    requests: list
    """Of the first round, which it has answered, and of the second, which it has not."""
    places: dict
    """Offsets in the file of the values of each part."""
    recommended: list
    answers: list


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flips")
    begin, lossy = rehearsal(folder / "f", taste_world(), "pfedrec", NOISE, rounds=2, nodes=2)
    begin().train(lossy.link())
    with pytest.raises(Killed):
        begin().train(dying(lossy, len(lossy.said) // 2 + 4 + 1))
    path = lossy.paths["node-1"]
    places = {}
    with NodeDatabase.open(path) as store:
        store.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        content = path.read_bytes()
        values = {
            "interactions": "SELECT item FROM interactions",
            "users": "SELECT name FROM users",
            "private": "SELECT arrays FROM private",
            "model": "SELECT model FROM models",
            "reply": "SELECT reply FROM replies",
            "ledger": "SELECT run FROM ledger",
            "facts": "SELECT value FROM facts WHERE name != 'contract'",
        }
        for part, query in values.items():
            found = {row[0] if isinstance(row[0], bytes) else str(row[0]).encode()
                     for row in store.rows(query)}  # fmt: skip
            # A long value continues on other pages, so look for pieces of it.
            pieces = {value[k : k + 48] for value in found for k in range(0, len(value), 480)}
            places[part] = [
                at.start() + k
                for piece in pieces
                for at in re.finditer(re.escape(piece), content)
                for k in range(-6, len(piece))  # the row's header and numbers lie before it
            ]
        places["anywhere"] = range(len(content))
    first = last_request(path, lossy.said[::2])
    second = replace(first, shared=replace(first.download, round=2).to_bytes())
    at = folder / "sound.node"
    write(at, content)
    requests = [first.to_bytes(), second.to_bytes()]
    made = Sample(content, requests, places, *ask(at, requests))
    assert Refusal.kind not in [kind_of(answer) for answer in made.answers]
    return made


def last_request(path, said):
    """Return the request of the last round that a node did."""
    found = [TrainRequest.from_bytes(m) for m in said if kind_of(m) == TrainRequest.kind]
    with NodeDatabase.open(path) as store:
        runs = NodeRuns(store)
        run = runs.get(found[-1].assignment.run)
    assert run.round == 1, "of two"
    return next(each for each in found if each.assignment.digest == run.terms)


def write(path, content):
    for end in ("", "-wal", "-shm"):
        path.with_name(f"{path.name}{end}").unlink(missing_ok=True)
    path.write_bytes(content)
    path.chmod(0o600)


def ask(path, requests):
    """Return what a node recommends, and its answers to rounds."""
    with NodeDatabase.open(path) as store:
        recommended = [recommend(store, user, 5) for user in USERS]
        answers = [Worker(store).answer(request) for request in requests]
    return recommended, answers


def flipped(sample, aim, rng):
    content = bytearray(sample.content)
    content[rng.choice(sample.places[aim])] ^= 1 << rng.randrange(8)
    return bytes(content)


def check_flips(sample, path, count, seed):
    rng, outcomes = random.Random(seed), {}
    for number in range(count):
        aim = AIMS[number % len(AIMS)]
        write(path, flipped(sample, aim, rng))
        try:
            recommended, answers = ask(path, sample.requests)
        except RunError as error:  # exit code 2
            assert str(path) in str(error)
            outcomes[aim, "refused"] = outcomes.get((aim, "refused"), 0) + 1
            continue
        assert recommended == sample.recommended, (aim, number)
        kind = "same"
        for answer, sound in zip(answers, sample.answers, strict=True):
            if answer != sound:
                assert kind_of(answer) == Refusal.kind, (aim, number)
                kind = "declined"
        outcomes[aim, kind] = outcomes.get((aim, kind), 0) + 1
    return outcomes


def test_a_flipped_bit_is_the_same_answer_or_a_refusal(sample, tmp_path):
    outcomes = check_flips(sample, tmp_path / "a.node", FEW, 0)
    for aim in AIMS[:-1]:
        assert outcomes.get((aim, "refused"), 0) + outcomes.get((aim, "declined"), 0) > 0, aim


@pytest.mark.slow
def test_many_flipped_bits(sample, tmp_path):
    outcomes = check_flips(sample, tmp_path / "a.node", MANY, 1)
    print(outcomes)
    assert sum(outcomes.values()) == MANY


# ---------------------------------------------------------------------------------- parts

CHANGES = {
    "UPDATE interactions SET item = 'item-01' WHERE id = 3": "interactions",
    "UPDATE interactions SET value = 'much' WHERE id = 3": "interactions",
    "UPDATE interactions SET user = 1 WHERE id = 60": "interactions",
    "DELETE FROM interactions WHERE id = 3": "interactions",
    "UPDATE users SET silo = 7 WHERE id = 1": "users",
    "DELETE FROM private WHERE client = 2": "private",
    "UPDATE private SET arrays = zeroblob(10) WHERE client = 2": "private",
    "UPDATE private SET client = 999 WHERE client = 2": "private",
    "UPDATE ledger SET uploads = 0": "ledger",
    "UPDATE runs SET round = 0": "runs",
    "UPDATE members SET client = 9 WHERE place = 2": "members",
    "UPDATE models SET model = zeroblob(9)": "models",
    "UPDATE replies SET reply = zeroblob(9)": "replies",
    "UPDATE facts SET value = 'x' WHERE name = 'noise_key'": "facts",
    "DELETE FROM facts WHERE name = 'has_time'": "facts",
    "INSERT INTO closed VALUES ('run')": "closed",
    "DELETE FROM seals WHERE part = 'users'": "users",
}


def change(path, statement):
    """Change a file as an accident would: without its digests."""
    connection = sqlite3.connect(path)
    connection.execute(statement)
    connection.commit()
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


@pytest.mark.parametrize("statement", CHANGES)
def test_a_check_names_the_damaged_part(sample, tmp_path, statement):
    path = tmp_path / "a.node"
    write(path, sample.content)
    sound = CliRunner().invoke(main, ["node", "check", str(path), "--json"])
    assert sound.exit_code == 0
    assert {part["part"]: part["rows"] for part in json.loads(sound.stdout)["parts"]}["users"] == 30
    change(path, statement)
    result = CliRunner().invoke(main, ["node", "check", str(path), "--json"])
    assert result.exit_code == 2
    found = json.loads(result.stdout)
    assert not found["sound"]
    assert CHANGES[statement] in [part["part"] for part in found["parts"] if part["damage"]]
    assert "hushrec node restore" in result.stderr


def test_other_declarations_are_refused(sample, tmp_path):
    path = tmp_path / "a.node"
    write(path, sample.content)
    change(path, "CREATE INDEX another ON runs (round)")
    with pytest.raises(DamagedError, match="declarations of its tables"):
        NodeDatabase.open(path)


def test_writing_beside_damage_does_not_hide_it(sample, tmp_path):
    path = tmp_path / "a.node"
    write(path, sample.content)
    change(path, "UPDATE ledger SET uploads = 0 WHERE user = 2")
    with NodeDatabase.open(path) as store:
        answer = Worker(store).answer(sample.requests[1])
        assert kind_of(answer) != Refusal.kind, "it reads no ledger, and charges all users"
        damage = {part.part for part in store.connection.check() if part.damage}
    assert damage == {"ledger"}


def test_damaged_rows_of_a_user_go_with_the_user(sample, tmp_path):
    path = tmp_path / "a.node"
    write(path, sample.content)
    change(path, "UPDATE interactions SET item = 'item-01' WHERE user = 1")
    with NodeDatabase.open(path) as store:
        with pytest.raises(DamagedError, match=r"of 1 users .*user-00.*hushrec node forget"):
            recommend(store, "user-08", 5)
        store.forget("user-00")
        assert all(part.damage is None for part in store.connection.check())
        assert recommend(store, "user-08", 5) == sample.recommended[1]


# ---------------------------------------------------------------------------------- backups


def run_cli(*words, code=0):
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result


def test_a_backup_brings_a_node_back_and_the_federation_goes_on(tmp_path):
    begin, lossy = rehearsal(tmp_path / "f", taste_world(), "pfedrec", rounds=1, nodes=2)
    begin().train(lossy.link())
    path, backup = lossy.paths["node-1"], tmp_path / "node-1.backup"
    with NodeDatabase.open(path) as running:
        run_cli("node", "backup", path, backup)
        assert running.name == "node-1", "others may use the file meanwhile"
        before = recommend(running, "user-00", 5)
    assert stat.S_IMODE(backup.stat().st_mode) == 0o600
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f", "node-1.backup"], "one file"
    run_cli("node", "backup", path, backup, code=2)
    run_cli("node", "status", backup, code=2)
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 4096] = bytes(4096)
    path.write_bytes(content)
    run_cli("node", "check", path, code=2)
    run_cli("node", "restore", backup, path, code=2)
    run_cli("node", "restore", backup, path, "--overwrite")
    with NodeDatabase.open(path) as again:
        assert recommend(again, "user-00", 5) == before
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    begin().train(lossy.link())
    with NodeDatabase.open(path) as again:
        assert NodeRuns(again).status()["finished"], "the restored node was in the second run"


def restored(sample, tmp_path):
    path, backup, new = (tmp_path / name for name in ("a.node", "a.backup", "b.node"))
    write(path, sample.content)
    with NodeDatabase.open(path) as store:
        key, reply = store.noise_key, store.one("SELECT reply FROM replies")
        store.backup(backup)
    trace = reply[700:740]
    assert trace in path.read_bytes() and trace not in backup.read_bytes(), "no kept answer"
    NodeDatabase.restore(backup, new)
    return key, new


def test_a_restored_node_uses_no_noise_twice(sample, tmp_path):
    """It may have answered more rounds than its backup knows of."""
    key, path = restored(sample, tmp_path)
    first, second = (TrainRequest.from_bytes(request) for request in sample.requests)
    with NodeDatabase.open(path) as store:
        assert store.noise_key != key
        assert [recommend(store, user, 5) for user in USERS] == sample.recommended
        worker = Worker(store)

        def answer(message):
            reply = worker.answer(message.to_bytes())
            return Refusal.from_bytes(reply).why if kind_of(reply) == Refusal.kind else None

        contract = store.contract
        agreed = contract.settings_digest, contract.catalogue.digest, software()
        for message in (Invitation(first.assignment.run, *agreed), first, second):
            assert "is over" in answer(message)
        assert answer(Invitation("unknown", *agreed)) is None
        unknown = replace(first.assignment, run="unknown")
        late = replace(second, assignment=unknown)
        assert "restored from a backup" in answer(late), "it may have been in it before"
        assert answer(replace(first, assignment=unknown)) is None
        assert answer(late) is None, "from its first round on"
        finished = NodeRuns(store).get("unknown")
        NodeRuns(store).keep_model(finished, NodeRuns(store).newest_model()[1])
        assert answer(Invitation("next", *agreed)) is None
        assert answer(replace(second, assignment=replace(unknown, run="next"))) is None


def test_a_damaged_backup_replaces_nothing(sample, tmp_path):
    path, backup = tmp_path / "a.node", tmp_path / "a.backup"
    write(path, sample.content)
    with NodeDatabase.open(path) as store:
        store.backup(backup)
    content, before = bytearray(backup.read_bytes()), path.read_bytes()
    content[content.index(b"item-0") + 5] ^= 1
    backup.write_bytes(content)
    with pytest.raises(RunError, match="is damaged"):
        NodeDatabase.restore(backup, path, overwrite=True)
    assert path.read_bytes() == before
    with pytest.raises(RunError, match="no backup"):
        NodeDatabase.restore(path, tmp_path / "b.node")
    with pytest.raises(RunError, match="no such backup"):
        NodeDatabase.restore(tmp_path / "nothing", tmp_path / "b.node")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.backup", "a.node"]


HOLDER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
connection.execute("SELECT COUNT(*) FROM users").fetchone()
print("open", flush=True)
sys.stdin.read()
"""


def test_a_node_that_runs_is_not_replaced(sample, tmp_path):
    path, backup = tmp_path / "a.node", tmp_path / "a.backup"
    write(path, sample.content)
    with NodeDatabase.open(path) as store:
        store.backup(backup)
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"open\n"
        with pytest.raises(RunError, match="in use"):
            NodeDatabase.restore(backup, path, overwrite=True)
        holder.stdin.close()
    NodeDatabase.restore(backup, path, overwrite=True)


def tree(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_folders_come_back_from_one_file(sample, tmp_path):
    with NodeDatabase.create(tmp_path / "x.node", "x", _contract(sample, tmp_path)) as store:
        contract = store.contract
    make_federation(tmp_path / "f", FederationSpec("f", contract, ("a", "b"), data=taste_world()))
    server, node = tmp_path / "f" / "server", tmp_path / "f" / "nodes" / "a"
    for name in ("runs/run-0001/summary.json", "runs/run-0002/config.toml", "run/log"):
        (server / name).parent.mkdir(parents=True, exist_ok=True)
        (server / name).write_text("{}")
    for folder in (server, node):
        backup = tmp_path / f"{folder.name}.backup"
        facts = back_up_folder(folder, backup)
        assert stat.S_IMODE(backup.stat().st_mode) == 0o600
        with pytest.raises(RunError, match="exists already"):
            restore_folder(backup, folder)
        before = tree(folder)
        restore_folder(backup, folder, overwrite=True)
        after = tree(folder)
        left_out = {"runs/run-0002/config.toml", "run/log"} if folder == server else set()
        assert after.keys() == before.keys() - left_out
        same = after.keys() - {"data.node"}
        assert all(after[name] == before[name] for name in same)
        assert facts.files == len(after)
        assert all(
            stat.S_IMODE(p.stat().st_mode) == 0o600 for p in folder.rglob("*") if p.is_file()
        )
        content = bytearray(backup.read_bytes())
        content[content.index(b"-----BEGIN") + 60] ^= 1
        backup.write_bytes(content)
        with pytest.raises(RunError, match="is damaged"):
            restore_folder(backup, folder, overwrite=True)
        assert tree(folder) == after, "nothing was replaced"
    with NodeDatabase.open(node / "data.node") as store:
        assert store.counts()["users"] == 30
    hidden = [path.name for path in tmp_path.rglob(".*")]
    assert not hidden, "nothing is left over"


def _contract(sample, tmp_path):
    path = tmp_path / "sample.node"
    write(path, sample.content)
    with NodeDatabase.open(path) as store:
        return store.contract


# ---------------------------------------------------------------------------------- disk


@contextmanager
def largest_file(size):
    """As on a full disk: no file can grow beyond this size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_loses_nothing(sample, tmp_path):
    path = tmp_path / "a.node"
    write(path, sample.content)
    with NodeDatabase.open(path) as store:
        told = []
        worker = Worker(store, tell=told.append)
        with largest_file(40_000):
            assert all(part.damage is None for part in store.connection.check())
            with pytest.raises(DiskError, match="cannot write"):
                store.backup(tmp_path / "a.backup")
            answer = worker.answer(sample.requests[1])
            assert kind_of(answer) == Refusal.kind
            assert "cannot write" in told[-1]
        assert not (tmp_path / "a.backup").exists()
        assert [worker.answer(request) for request in sample.requests] == sample.answers
        assert all(part.damage is None for part in store.connection.check())


def folder_bytes(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_ten_runs_take_the_disk_of_a_few(tmp_path):
    begin, lossy = rehearsal(tmp_path / "f", taste_world(), "pfedrec", NOISE, rounds=1, nodes=2)
    lossy.kept = {}
    nodes, runs = [], []
    for _ in range(10):
        begin().train(lossy.link())
        nodes.append([folder_bytes_of(path) for path in lossy.paths.values()])
        runs.append(folder_bytes(tmp_path / "f" / "runs"))
    for before, after in zip(nodes[2], nodes[-1], strict=True):
        assert after <= 1.05 * before, nodes
    # Of a run that is older than the newest three, results of some kB stay.
    kept = folder_bytes(tmp_path / "f" / "runs" / "run-0001")
    assert kept < 30_000
    assert runs[-1] - runs[3] <= 6 * 1.2 * kept, runs
    models = [path.parts[-3] for path in (tmp_path / "f" / "runs").glob("*/checkpoint/final")]
    assert sorted(models) == ["run-0007", "run-0008", "run-0009", "run-0010"]


def folder_bytes_of(path):
    """Bytes of a node's file and of SQLite's files beside it."""
    return sum(each.stat().st_size for each in path.parent.glob(f"{path.name}*"))


def test_a_flipped_bit_of_a_roster_is_refused(tmp_path):
    begin, lossy = rehearsal(tmp_path / "f", taste_world(), "fednext", nodes=2)
    with pytest.raises(Killed):
        begin().train(dying(lossy, 3))
    file, rng = tmp_path / "f" / "runs" / "run-0001" / "roster.json", random.Random(0)
    sound = file.read_bytes()
    for _ in range(100):
        content = bytearray(sound)
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(content)
        with pytest.raises(RunError, match=r"roster\.json"):
            read_roster(file)
    file.write_bytes(sound)
    begin(resume=True).train(lossy.link())
