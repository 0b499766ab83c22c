"""A node's file: what goes in comes out, a round is whole or not there, who leaves is gone."""

import os
import sqlite3
import stat
from dataclasses import replace

import numpy as np
import pytest

from hushrec.aggregation import ClientRows
from hushrec.data.interactions import Categorical, Interactions, MultiCategorical
from hushrec.deployment.node import schema
from hushrec.deployment.node.database import NodeDatabase
from hushrec.deployment.node.runs import FinishedRound, NodeRuns
from hushrec.deployment.node.tables import APPLICATION
from hushrec.errors import ConfigError, DataError, MessageError, RunError
from hushrec.federation.contract import Catalogue, Contract
from hushrec.federation.experiment import ExperimentRequest
from hushrec.private import PerClient, PerClientRows, PerClientTable, PrivateStore
from hushrec.testing import taste_world

FIELDS = {
    "vector": PerClient(np.arange(3, dtype=np.float32)),
    "table": PerClientTable(np.zeros((5, 2), np.float32)),
    "rows": PerClientRows(np.full(60, 4), 2),
}


def described(world):
    """Add every kind of feature there is."""
    weather = Categorical(np.arange(len(world), dtype=np.int32) % 3 - 1, np.array(["wet", "dry"]))
    flags = np.arange(world.n_users * 2).reshape(-1, 2) % 3 == 0
    languages = MultiCategorical(flags, np.array(["en", "fr"]))
    return replace(
        world,
        context={"weather": weather},
        user_features={**world.user_features, "languages": languages},
    )


def contract(world=None, method="pfedrec", **settings) -> Contract:
    return Contract(
        ExperimentRequest("tastes", method, settings=settings).experiment(),
        Catalogue.of(world or taste_world()),
    )


@pytest.fixture
def node(tmp_path):
    with NodeDatabase.create(tmp_path / "a.node", "a", contract()) as made:
        yield made


def everybody(store: NodeDatabase) -> Interactions:
    people = {
        user: place for place, (user,) in enumerate(store.rows("SELECT id FROM users ORDER BY id"))
    }
    return store.interactions(people, 10**9)


def filled(clients=4, seed=0) -> PrivateStore:
    private, rng = PrivateStore(FIELDS, 60), np.random.default_rng(seed)
    numbers = np.arange(clients)
    ids = np.tile(np.arange(2, dtype=np.int32), clients)
    rows = ClientRows(
        np.arange(clients + 1) * 2, ids, rng.normal(size=(len(ids), 2)).astype(np.float32)
    )
    private.write(
        numbers,
        {
            "vector": rng.normal(size=(clients, 3)).astype(np.float32),
            "table": rng.normal(size=(clients, 5, 2)).astype(np.float32),
            "rows": rows,
        },
    )
    return private


def done(number, selected=0, seed=0, clients=4, charged=True) -> FinishedRound:
    reply = b"reply %d" % number
    who = {client: client for client in range(clients)}
    return FinishedRound(number, selected, f"asked {number}", reply, filled(4, seed), who, charged)


def loaded(runs, run, client, selected=False) -> np.ndarray:
    into = PrivateStore(FIELDS, 60)
    runs.load(run, {client: client}, into, selected=selected)
    return np.concatenate(
        [
            np.asarray(into.read(np.array([client]))["vector"]).ravel(),
            np.asarray(into.read(np.array([client]))["table"]).ravel(),
            into.read(np.array([client]))["rows"].rows.ravel(),
        ]
    )


def test_what_goes_in_comes_out(tmp_path):
    world = described(taste_world())
    with NodeDatabase.create(tmp_path / "a.node", "a", contract(world)) as node:
        taken = node.add_interactions(world)
        assert (taken.rows, taken.users, taken.unknown_items) == (len(world), 60, 0)
        back = everybody(node)
        for part in ("user", "item", "value", "time", "users", "items"):
            assert np.array_equal(getattr(back, part), getattr(world, part)), part
        for ours, theirs in (
            (back.user_features, world.user_features),
            (back.item_features, world.item_features),
            (back.context, world.context),
        ):
            assert {n: c.tobytes() for n, c in ours.items()} == {
                n: c.tobytes() for n, c in theirs.items()
            }


def test_only_the_owner_may_read_it(node):
    node.add_interactions(taste_world())
    for file in node.path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    node.path.chmod(0o640)
    with pytest.raises(RunError, match="chmod 600"):
        NodeDatabase.open(node.path)


def test_unknown_items_stay_and_are_counted(node):
    world = taste_world()
    strange = replace(world, items=np.array([f"strange-{k}" for k in range(60)]))
    node.add_interactions(world.select(np.arange(50)))
    assert node.add_interactions(strange.select(np.arange(30))).unknown_items == 30
    counts = node.counts()
    assert counts["interactions"] == 80
    assert counts["interactions_with_unknown_items"] == 30
    assert counts["unknown_items"] == len(np.unique(strange.item[:30]))
    assert len(everybody(node)) == 50, "they take no part"


def test_order_of_arrival_is_the_time_where_there_is_none(node):
    world = replace(taste_world(), has_time=False)
    one = world.select(world.user == 0)
    node.add_interactions(one)
    node.add_interactions(one)
    node.add("user-00", "item-03", 1.0, None)
    times = everybody(node).time
    assert (np.diff(times) > 0).sum() == len(times) - 1, "later files come later"
    with pytest.raises(DataError, match="have no times and the new ones have some"):
        node.add_interactions(replace(one, has_time=True))
    with pytest.raises(DataError, match="--time"):
        node.add("user-00", "item-03", 1.0, 7)


def test_an_interrupted_import_leaves_nothing(node, monkeypatch):
    world = taste_world()

    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(node, "keep_fact", stop)
    with pytest.raises(KeyboardInterrupt):
        node.add_interactions(world)
    assert node.counts()["interactions"] == node.counts()["users"] == 0


def test_a_full_disk_is_a_sentence_and_changes_nothing(node):
    node.add_interactions(taste_world().select(np.arange(20)))
    pages = node.one("PRAGMA page_count")
    node.connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(RunError, match="nothing was changed"):
        node.add_interactions(taste_world())
    assert node.counts()["interactions"] == 20


def test_a_round_is_written_whole_and_read_back(node):
    node.add_interactions(taste_world())
    runs = NodeRuns(node)
    run = runs.begin("run-1")
    assert runs.begin("run-1") == run, "asked again, it says the same"
    assert runs.finish_round(run, done(1))
    run = runs.get("run-1")
    assert (run.round, run.request, runs.reply(run)) == (1, "asked 1", b"reply 1")
    assert np.array_equal(loaded(runs, run, 2), _plain(filled(), 2))
    assert runs.uploads("run-1") == {f"user-{k:02d}": 1 for k in range(4)}
    assert np.array_equal(loaded(runs, run, 9)[:3], FIELDS["vector"].initial), "never trained"


def _plain(private, client):
    kept = private.read(np.array([client]))
    return np.concatenate([np.asarray(kept["vector"]).ravel(), np.asarray(kept["table"]).ravel(),
                           kept["rows"].rows.ravel()])  # fmt: skip


def test_selected_parameters_are_those_of_the_selected_round(node):
    node.add_interactions(taste_world())
    runs = NodeRuns(node)
    run = runs.begin("run")
    # 1 is selected, then 3 is; client 3 sits out round 3.
    for number, selected, clients in ((1, 0, 4), (2, 1, 4), (3, 1, 3), (4, 3, 4), (5, 3, 4)):
        run = runs.get("run")
        assert runs.finish_round(run, done(number, selected, number, clients))
    run = runs.get("run")
    assert np.array_equal(loaded(runs, run, 1, selected=True), _plain(filled(seed=3), 1))
    assert np.array_equal(loaded(runs, run, 3, selected=True), _plain(filled(seed=2), 3))
    assert np.array_equal(loaded(runs, run, 3), _plain(filled(seed=5), 3))
    assert node.one("SELECT MAX(n) FROM (SELECT COUNT(*) AS n FROM private GROUP BY client)") == 2
    run = runs.select(run, 5)
    assert np.array_equal(loaded(runs, run, 1, selected=True), _plain(filled(seed=5), 1))


@pytest.mark.parametrize("where", ["private", "ledger"])
def test_a_round_that_dies_in_its_transaction_is_not_there(node, monkeypatch, where):
    node.add_interactions(taste_world())
    runs = NodeRuns(node)
    run = runs.begin("run")
    runs.finish_round(run, done(1))
    before, run = dump(node), runs.get("run")
    write = getattr(runs, "_write_private" if where == "private" else "_charge")
    calls = []

    def die(*args):
        calls.append(write(*args))
        if where == "ledger" or len(calls) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(runs, "_write_private" if where == "private" else "_charge", die)
    with pytest.raises(KeyboardInterrupt):
        runs.finish_round(run, done(2, seed=1))
    assert dump(node) == before
    monkeypatch.undo()
    assert runs.finish_round(run, done(2, seed=1)), "and can be done again"


def largest_page_chain(store: NodeDatabase, table: str) -> int:
    """Bytes of a table's largest row, which a reader of any of its columns may have to read."""
    names = [column[1] for column in store.rows(f"PRAGMA table_info({table})")]
    size = " + ".join(f"COALESCE(LENGTH(CAST({name} AS BLOB)), 0)" for name in names)
    return store.one(f"SELECT MAX({size}) FROM {table}") or 0


def test_what_a_foreign_key_reads_is_small(node):
    """Every write of a client looks up its run: an answer of 100 MB must not be in that row."""
    node.add_interactions(taste_world())
    runs = NodeRuns(node)
    large = bytes(2**20)
    runs.finish_round(runs.begin("run"), replace(done(1), reply=large))
    assert runs.reply(runs.get("run")) == large
    runs.keep_model(runs.get("run"), large)
    page = node.one("PRAGMA page_size")
    tables = [name for (name,) in node.rows("SELECT name FROM sqlite_master WHERE type = 'table'")]
    parents = {
        each[2] for table in tables for each in node.rows(f"PRAGMA foreign_key_list({table})")
    }
    assert parents == {"runs", "users"}
    for table in parents:
        assert 0 < largest_page_chain(node, table) < page
    assert runs.newest_model()[1] == large


def test_unchanged_private_parameters_are_not_written_again(node):
    node.add_interactions(taste_world())
    runs = NodeRuns(node)
    runs.finish_round(runs.begin("run"), done(1))
    runs.finish_round(runs.get("run"), done(2))
    assert node.rows("SELECT DISTINCT round FROM private") == [(1,)]
    runs.finish_round(runs.get("run"), done(3, selected=2, seed=1))
    rounds = node.rows("SELECT DISTINCT round FROM private ORDER BY round")
    assert rounds == [(1,), (3,)], "the selected round's are kept beside the newest"
    run = runs.get("run")
    assert np.array_equal(loaded(runs, run, 2, selected=True), _plain(filled(), 2))
    assert np.array_equal(loaded(runs, run, 2), _plain(filled(seed=1), 2))


def dump(store: NodeDatabase) -> list:
    tables = [name for (name,) in store.rows("SELECT name FROM sqlite_master WHERE type = 'table'")]
    return [(name, store.rows(f"SELECT * FROM {name}")) for name in sorted(tables)]


def test_whoever_was_overtaken_writes_nothing(node):
    """A message that is delivered twice at once, and a user who leaves while it is trained."""
    node.add_interactions(taste_world())
    runs = NodeRuns(node)
    run = runs.begin("run")
    assert runs.finish_round(run, done(1))
    before = dump(node)
    assert not runs.finish_round(run, done(1, seed=9))
    assert dump(node) == before
    run = runs.get("run")
    node.forget("user-02")
    before = dump(node)
    assert not runs.finish_round(run, done(2))
    assert dump(node) == before


def test_terms_are_pinned(node):
    runs = NodeRuns(node)
    run = runs.begin("run")
    runs.pin_terms(run, "these")
    runs.pin_terms(runs.get("run"), "these")
    with pytest.raises(MessageError, match="another assignment"):
        runs.pin_terms(runs.get("run"), "others")
    with pytest.raises(MessageError, match="not invited to the run"):
        runs.get("another")


def test_new_data_waits_for_the_next_run(node):
    world = taste_world()
    node.add_interactions(world.select(world.user < 10))
    runs = NodeRuns(node)
    first = runs.begin("first")
    node.add_interactions(world.select(world.user >= 10))
    node.add("user-00", "item-59", 1.0, 99)
    again = node.interactions(runs.begin("first").members, first.upto)
    assert len(again) == (world.user < 10).sum()
    second = runs.begin("second")
    assert len(second.members) == 60
    assert len(node.interactions(second.members, second.upto)) == len(world) + 1


def test_old_runs_go_but_for_what_is_recommended_with(node):
    node.add_interactions(taste_world())
    runs = NodeRuns(node)
    for name in ("one", "two", "three", "four"):
        run = runs.begin(name)
        runs.finish_round(run, done(1))
        if name == "one":
            runs.keep_model(run, b"model")
            assert runs.reply(run) is None, "no round of a finished run is asked for again"
    kept = {run for (run,) in node.rows("SELECT id FROM runs")}
    assert kept == {"one", "three", "four"}
    assert {run for (run,) in node.rows("SELECT DISTINCT run FROM private")} == kept
    people = {f"user-{k:02d}" for k in range(4)}
    assert runs.uploads("") == dict.fromkeys(people, 1), "the ledger keeps the sum"
    with pytest.raises(MessageError, match="is over"):
        runs.begin("two")
    runs.keep_model(runs.get("four"), b"other")
    assert [run for (run,) in node.rows("SELECT id FROM runs")] == ["four"]
    assert runs.uploads("") == dict.fromkeys(people, 3)
    assert runs.newest_model()[1] == b"other"


def bytes_of(store: NodeDatabase) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(store.path.parent.iterdir()))


def test_who_is_forgotten_is_gone_to_the_last_byte(node):
    world = taste_world()
    secret = replace(
        world,
        users=np.array(["Marie-Antoinette", *world.users[1:]]),
        items=np.array([f"item-{k:02d}" if k != 5 else "item-05-guillotine" for k in range(60)]),
    )
    rows = np.flatnonzero(secret.user < 4)
    secret = secret.select(rows)
    secret = replace(secret, item=np.where(secret.user == 0, 5, secret.item).astype(np.int32))
    secret = secret.select(~((secret.user != 0) & (secret.item == 5)))
    node.add_interactions(secret)
    runs = NodeRuns(node)
    run = runs.begin("run")
    runs.finish_round(run, done(1))
    kept = filled()
    vector = np.asarray(kept.read(np.array([0]))["vector"]).tobytes()
    here = bytes_of(node)
    for trace in (b"Marie-Antoinette", b"guillotine", vector, b"reply 1"):
        assert trace in here, "the control: it was there"
    gone = node.forget("Marie-Antoinette")
    assert gone.interactions == (secret.user == 0).sum()
    assert (gone.private_parameters, gone.uploads, gone.others) == (1, 1, 0)
    assert "shared model" in gone.still_held
    here = bytes_of(node)
    for trace in (b"Marie-Antoinette", b"guillotine", vector, b"reply 1"):
        assert trace not in here
    assert np.array_equal(loaded(runs, runs.get("run"), 1), _plain(kept, 1)), "others stay"
    assert runs.uploads("run").keys() == {"user-01", "user-02", "user-03"}
    with pytest.raises(DataError, match="no user 'Marie-Antoinette'"):
        node.forget("Marie-Antoinette")


def test_a_silo_loses_its_parameters_with_one_of_its_users(tmp_path):
    silos = contract(method="lipm", **{"silos.kind": "dirichlet", "silos.count": 3})
    with NodeDatabase.create(tmp_path / "a.node", "a", silos) as node:
        world = taste_world()
        node.add_interactions(world, silos=(np.arange(60) % 3).astype(np.int32))
        runs = NodeRuns(node)
        run = runs.begin("run")
        assert sorted(set(run.clients.values())) == [0, 1, 2]
        runs.finish_round(run, done(1, clients=3))
        assert set(runs.uploads("run").values()) == {1}
        gone = node.forget("user-00")
        assert (gone.private_parameters, gone.others) == (1, 19)
        assert node.one("SELECT COUNT(*) FROM private") == 2


def older_file(path, version, rows) -> None:
    """Write a file as an earlier hushrec did: ``rows`` by statement, after the first tables."""
    path.touch(0o600)
    connection = sqlite3.connect(path)
    for number, script in enumerate(schema.MIGRATIONS[:version]):
        connection.executescript(script)
        if not number:
            for statement, values in rows:
                connection.executemany(statement, values)
    connection.execute(f"PRAGMA application_id = {APPLICATION}")
    connection.execute(f"PRAGMA user_version = {version}")
    connection.commit()
    connection.close()


@pytest.mark.parametrize("version", range(1, schema.SEALED_FROM))
def test_an_older_file_is_brought_up_to_date(tmp_path, node, version):
    """The first version's tables, as they were written then, and every version since."""
    node.add_interactions(taste_world())
    runs = NodeRuns(node)
    assert runs.finish_round(runs.begin("run"), done(1))
    columns = "user, item, value, time, context"
    path, private = tmp_path / "old.node", "SELECT run, client, round, arrays FROM private"
    reply = [("run", 1, 999, 1, b"reply 1")]
    older_file(
        path,
        version,
        [
            ("INSERT INTO facts VALUES (?, ?)", node.rows("SELECT name, value FROM facts")),
            ("INSERT INTO users (id, name) VALUES (?, ?)", node.rows("SELECT id, name FROM users")),
            (
                f"INSERT INTO interactions ({columns}) VALUES (?, ?, ?, ?, ?)",
                node.rows(f"SELECT {columns} FROM interactions"),
            ),
            ("INSERT INTO runs (id, number, upto, round, reply) VALUES (?, ?, ?, ?, ?)", reply),
            ("INSERT INTO members VALUES (?, ?, ?, ?)", node.rows("SELECT * FROM members")),
            ("INSERT INTO private VALUES (?, ?, ?, ?)", node.rows(private)),
            ("INSERT INTO ledger VALUES (?, ?, ?)", [("run", 1, 3)]),
        ],
    )
    with NodeDatabase.open(path) as again:
        assert again.one("PRAGMA user_version") == len(schema.MIGRATIONS)
        assert all(each.damage is None for each in again.connection.check())
        runs = NodeRuns(again)
        run = runs.get("run")
        assert (runs.reply(run), run.masked) == (b"reply 1", 0)
        runs.keep_model(runs.get("run"), b"model")
        assert again.counts()["interactions"] == len(taste_world())
        assert sum(runs.uploads("run").values()) == 3
        assert np.array_equal(loaded(runs, run, 2), _plain(filled(), 2))
        assert all(each.damage is None for each in again.connection.check())


def test_a_migration_that_fails_leaves_the_old_version(tmp_path, monkeypatch):
    path = tmp_path / "old.node"
    NodeDatabase.create(path, "a", contract()).connection.close()
    before = dump(NodeDatabase.open(path))
    broken = (*schema.MIGRATIONS, "ALTER TABLE runs ADD COLUMN more TEXT; SELECT nothing")
    with monkeypatch.context() as future:
        future.setattr(schema, "MIGRATIONS", broken)
        with pytest.raises(RunError):
            NodeDatabase.open(path)
    assert dump(NodeDatabase.open(path)) == before
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(RunError, match="newer hushrec"):
        NodeDatabase.open(path)


def test_what_is_no_node_is_refused(tmp_path):
    with pytest.raises(RunError, match="no such node"):
        NodeDatabase.open(tmp_path / "nowhere")
    strange = tmp_path / "strange"
    strange.write_bytes(os.urandom(5000))
    strange.chmod(0o600)
    with pytest.raises(RunError, match="no node of hushrec"):
        NodeDatabase.open(strange)
    other = tmp_path / "other"
    sqlite3.connect(other).execute("CREATE TABLE t (x)")
    other.chmod(0o600)
    with pytest.raises(RunError, match="no node of hushrec"):
        NodeDatabase.open(other)
    with pytest.raises(RunError, match="exists already"):
        NodeDatabase.create(other, "a", contract())


def test_an_agreement_travels_in_a_file(tmp_path):
    world = described(taste_world())
    ours, path = contract(world), tmp_path / "contract"
    ours.write(path)
    back = Contract.read(path)
    assert back.experiment == ours.experiment
    assert back.catalogue.digest == ours.catalogue.digest
    assert back.settings_digest == ours.settings_digest
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ConfigError, match="no contract"):
        Contract.read(path)


def test_anything_else_is_another_catalogue():
    world = described(taste_world())
    digest = Catalogue.of(world).digest
    assert Catalogue.of(world.select(np.arange(100))).digest == digest, "rows are no part of it"
    moved = np.roll(world.items, 1)
    third = world.item_features["third"]
    codes = np.where(np.arange(60) == 47, 0, third.codes).astype(np.int32)
    taste = world.user_features["taste"]
    renamed = replace(taste, names=np.array(["low", "middle", "highest"]))
    for other in (
        replace(world, items=moved),
        replace(world, item_features={**world.item_features, "third": replace(third, codes=codes)}),
        replace(world, user_features={**world.user_features, "taste": renamed}),
        replace(world, context={}),
        replace(world, titles=world.items),
    ):
        assert Catalogue.of(other).digest != digest


@pytest.mark.parametrize(
    ("method", "settings", "match"),
    [
        ("central-mf", {}, "pools all data"),
        ("fedmf", {"split.kind": "time"}, "valid_from"),
        ("fedmf", {"evaluation.users": 5}, "use 0"),
    ],
)
def test_what_nodes_cannot_work_out_is_refused(method, settings, match):
    with pytest.raises(ConfigError, match=match):
        contract(method=method, **settings)
