"""The table of capabilities, played: every cell on small data, or its refusal by the real API.

Cells that need a deployment run the real coordinator over real node databases and workers, through
bytes; only the transport is in memory. A cell that the table calls a refusal must raise the same
sentence, and a cell that it does not must work: nothing is undecided.
"""

import hashlib
import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import pytest
from click.testing import CliRunner

import hushrec
from dealing import SUFFIX, deal
from hushrec.api import train
from hushrec.audit import audit
from hushrec.cli import main
from hushrec.cli.capabilities import (
    COLUMNS,
    DISTRIBUTED,
    NODES,
    PAPERS,
    capability_page,
    capability_table,
    refusal,
)
from hushrec.cli.federate import ExperimentOptions
from hushrec.config import DEFAULT_METHOD, DEFAULT_UNDER_NOISE
from hushrec.deployment.coordinator.planning import Policy
from hushrec.deployment.coordinator.run import FederatedRun, newest_run
from hushrec.deployment.node.database import SHARED_STILL_HOLDS, NodeDatabase
from hushrec.deployment.node.training import recommend
from hushrec.deployment.node.worker import NodeCredentials, Worker
from hushrec.errors import ConfigError, HushrecError, StoppedError
from hushrec.federation.contract import Catalogue, NodeRegistry, SecureSums
from hushrec.federation.experiment import ExperimentRequest
from hushrec.federation.rounds import Callback
from hushrec.methods.base import method_class, method_names
from hushrec.reporting.html import write_report
from hushrec.runs.folder import FINAL
from hushrec.secagg import Identity
from hushrec.serving.bundle import can_export
from hushrec.serving.recommender import Recommender
from hushrec.testing import taste_world
from hushrec.testing.backend import CENTRAL, SMALLER, MemoryLink

METHODS = [
    name for name in method_names() if method_class(name).__module__.startswith("hushrec.methods.")
]
QUICK = {"evaluation.k": [10]}
SMALL = {
    **SMALLER,
    DEFAULT_METHOD: {"network_rounds": 2, "newton_rounds": 1},
    "fednext": {"recency": 0.5, "popularity": 0.0},
    "fedease": {"recency": 0.5, "popularity": 0.0},
    "privrec-cen": SMALLER["privrec"],
    "pfedrec": {"d": 8},
    "fedrap": {"d": 4, "epochs": 2},
    "gru4rec": {"d": 4, "length": 10},
    "sasrec": {"d": 4, "length": 10, "blocks": 1},
}
"""Options that keep a run short; under noise the default and item pairs have other options."""
ROUNDS = 2
PAGE = Path(hushrec.__file__).parents[2] / "docs" / "capabilities.md"


class Killed(BaseException):
    """As a SIGKILL: nothing is tidied up."""


class Interrupts(Callback):
    """Ctrl-C after the first round; after the only round it would be too late, so a kill."""

    def on_begin(self, experiment):
        self.rounds = experiment.rounds

    def on_round_end(self, record):
        if self.rounds == 1:
            raise Killed
        self.interrupt()


def digest(folder):
    """The bits of the shared model of a run."""
    file = folder / "checkpoint" / FINAL / "selected-shared.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest()


class Federation:
    """Nodes in files that answer as processes do which are started for each message."""

    def __init__(self, folder, experiment, secure=None):
        folder.mkdir(exist_ok=True)
        self.folder, self.data = folder, taste_world()
        self.contract, self.partition = deal(self.data, experiment, folder, NODES, secure)
        self.contract.check_nodes(NODES)
        identities = {name: Identity(bytes([k + 1] * 32)) for k, name in enumerate(self.partition)}
        public = {name: identity.public for name, identity in identities.items()}
        self.registered = NodeRegistry("test", public)
        self.credentials = {
            name: NodeCredentials(self.registered, identity)
            for name, identity in identities.items()
        }

    def store(self, name):
        return NodeDatabase.open(self.folder / f"{name}{SUFFIX}")

    def _answer(self, name, message):
        with self.store(name) as store:
            worker = Worker(store, tell=print, credentials=self.credentials[name])
            return worker.answer(message)

    def train(self, callbacks=(), *, resume=False):
        policy = Policy(nodes=NODES, min_nodes=NODES, backoff_seconds=0.01, enrol_seconds=0.5)
        run = FederatedRun.open(
            self.folder / "runs",
            self.contract,
            policy,
            self.partition,
            self.registered,
            resume=resume,
        )
        answers = {
            name: lambda message, name=name: self._answer(name, message) for name in self.partition
        }
        return run.train(MemoryLink(answers), callbacks)

    @property
    def digest(self):
        return digest(newest_run(self.folder / "runs").path)


@dataclass
class Played:
    """One row: a method on small data, trained once in one process."""

    name: str
    folder: Path
    cells: dict = field(repr=False)
    data: hushrec.Interactions = field(default_factory=taste_world, repr=False)

    @property
    def asked(self):
        """The default's row is for somebody who names no method."""
        return None if self.name == DEFAULT_METHOD else self.name

    def request(self, **settings):
        noised = settings.get("privacy.mode") == "distributed"
        small = SMALLER if noised else SMALL
        settings = {**QUICK, **small.get(self.name, {}), **settings}
        request = ExperimentRequest(self.data.name, self.asked, settings=settings)
        method = request.experiment().make_method()
        rounds = None if len(method.phases) > 1 else min(ROUNDS, method.planned_rounds)
        return replace(request, rounds=rounds)

    def simulation(self, out, **options):
        request = self.request()
        if not options.get("resume"):
            options |= {"settings": request.settings, "rounds": request.rounds}
        return train(self.data, self.asked, out=self.folder / out, progress=False, **options)

    @cached_property
    def run(self):
        return self.simulation("alone")

    @property
    def digest(self):
        assert self.run.folder is not None
        return digest(self.folder / "alone")

    def federation(self, name, secure=None, **settings):
        experiment = self.request(**settings).experiment().resolved(None)
        return Federation(self.folder / name, experiment, secure)

    @cached_property
    def clear(self):
        federation = self.federation("clear")
        self.summary = federation.train()
        return federation


@pytest.fixture(scope="module")
def table():
    return capability_table()


@pytest.fixture(scope="module")
def rows(table, tmp_path_factory):
    """Every row of the table, each trained when a cell first needs it."""
    return {name: Played(name, tmp_path_factory.mktemp(name), table[name]) for name in METHODS}


def play_simulate(row):
    figures = row.run.metrics["full"]
    assert 0 <= figures["hr@10"] <= 1 and row.run.summary.users.ranked_users == 60


def play_deploy(row):
    assert row.clear.digest == row.digest
    assert row.summary.test == row.run.summary.test


def play_securely(row):
    federation = row.federation("secure", SecureSums())
    assert federation.train().test == row.run.summary.test
    assert federation.digest == row.digest


def play_noise(row):
    federation = row.federation("noised", SecureSums(), **DISTRIBUTED)
    summary = federation.train()
    claim = summary.privacy
    if row.name in ("local-only", "negative-counter"):
        assert claim.epsilon == 0, "nothing is uploaded"
        return
    assert 0 < claim.epsilon <= 8 and claim.trust == "nodes", claim
    assert summary.method == (DEFAULT_UNDER_NOISE if row.asked is None else row.name)


def play_resume(row):
    with pytest.raises((StoppedError, Killed)):
        row.simulation("resumed", callbacks=[Interrupts()])
    row.simulation("resumed", resume=True)
    assert digest(row.folder / "resumed") == row.digest


def play_report(row):
    assert "</html>" in write_report(row.run).read_text("utf-8")


def play_export(row, item="item-01"):
    user = None if can_export(row.run.model.method) else "user-07"
    row.run.export(row.folder / "bundle", user=user)
    device = Recommender.load(row.folder / "bundle")
    device.touch(item)
    assert len(device.recommend(5)) == 5


def play_explain(row, user="user-07"):
    lines = row.run.recommend(user, 5)
    reasons = row.run.model.explain(user, [line.item for line in lines])
    assert all(reasons) and reasons == [line.because for line in lines]


def play_forget(row):
    federation = row.clear
    with federation.store("node-1") as store:
        gone, kept = "user-00", "user-03"
        assert recommend(store, gone, 3)
        found = store.forget(gone)
        assert found.interactions and found.still_held == SHARED_STILL_HOLDS
        with pytest.raises(ConfigError, match=f"has no user '{gone}'"):
            recommend(store, gone, 3)
        assert len(recommend(store, kept, 3)) == 3
    again = federation.train()
    assert again.users.users == 59


def play_audit(row):
    found = audit(row.run, users=20, trials=1000)
    assert found.verdict == "no claim" and (row.folder / "alone" / "audit.json").exists()
    if row.name in PAPERS:  # a claim is tested as well
        settings = row.request(**CENTRAL).settings
        noised = train(row.data, row.name, settings=settings, rounds=2, out=row.folder / "central")
        assert audit(noised, users=20, trials=1000).verdict == "kept"


PLAYS = {
    "simulate": play_simulate,
    "deploy": play_deploy,
    "deploy securely": play_securely,
    "distributed noise": play_noise,
    "resume": play_resume,
    "report": play_report,
    "export": play_export,
    "explain": play_explain,
    "forget": play_forget,
    "audit": play_audit,
}


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("method", METHODS)
def test_every_cell(method, column, rows):
    row = rows[method]
    sentence = row.cells[column]
    if sentence is None:
        PLAYS[column](row)
    else:
        with pytest.raises(HushrecError) as refused:
            PLAYS[column](row)
        assert str(refused.value) == sentence


# ------------------------------------------------------------ the table and its page


def test_every_column_is_played():
    assert PLAYS.keys() == COLUMNS.keys()


def test_the_default_refuses_nothing(table):
    assert not any(table[DEFAULT_METHOD].values())
    named = refusal("distributed noise", DEFAULT_METHOD)
    assert named is not None and named.endswith(f"use the method {DEFAULT_UNDER_NOISE}")
    asked = ExperimentOptions(None, None, None, None, ("privacy.mode=distributed",))
    contract = asked.contract("tastes", Catalogue.of(taste_world()), NODES)
    assert contract.experiment.method == DEFAULT_UNDER_NOISE and contract.secure is not None


def test_the_papers_methods_refuse_nothing_but_what_their_papers_rule_out(table):
    refused = {name: {c for c, why in table[name].items() if why} for name in PAPERS}
    scored_by = {"lipm": "a network", "privrec": "a network", "fedrkg": "(eq. 9)"}
    assert refused == {name: {"explain"} if name in scored_by else set() for name in PAPERS}
    for name, why in scored_by.items():
        assert why in table[name]["explain"]


def test_the_page_is_current(table):
    command = "hushrec methods --capabilities --markdown > docs/capabilities.md"
    assert PAGE.read_text("utf-8") == capability_page(table), command


def test_the_command_shows_a_row(table):
    words = ["methods", "fedrkg", "--capabilities"]
    done = CliRunner().invoke(main, [*words, "--json"])
    assert json.loads(done.stdout) == table["fedrkg"]
    shown = " ".join(CliRunner().invoke(main, words).stdout.split())
    assert table["fedrkg"]["explain"] in shown and "audit yes" in shown


@pytest.mark.slow
def test_the_default_on_ml_1m(data_dir, tmp_path):
    """The default's row on real data, with few rounds; deployments are measured elsewhere."""
    if not (data_dir / "ml-1m").is_dir():
        pytest.skip("no ml-1m below HUSHREC_DATA")
    row = Played(DEFAULT_METHOD, tmp_path, {}, data=hushrec.load("ml-1m"))
    user = str(row.data.users[0])
    assert row.run.metrics["full"]["hr@10"] > row.run.summary.baselines.popularity["full"]["hr@10"]
    play_report(row)
    play_export(row, str(row.data.items[0]))
    play_explain(row, user)
    play_audit(row)
