"""A run of a federation from the first invitation to its last look, and what can interrupt it."""

import json
import time
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from pydantic import ValidationError
from safetensors.numpy import load_file

from dealing import SUFFIX, deal
from hushrec.api import train
from hushrec.cli import main
from hushrec.deployment.coordinator.planning import LinkRates, Policy, allowed_seconds, forecast
from hushrec.deployment.coordinator.run import FederatedRun, is_finished, newest_run, status_of
from hushrec.deployment.coordinator.session import EventLine, EventLog
from hushrec.deployment.flower.gateway import StatusCollector
from hushrec.deployment.node.database import NodeDatabase
from hushrec.deployment.node.runs import NodeRuns
from hushrec.deployment.node.training import model_of, recommend
from hushrec.deployment.node.worker import NodeCredentials, Worker
from hushrec.errors import ConfigError, FederationError, RunError, StoppedError
from hushrec.federation import setup
from hushrec.federation.contract import Catalogue, Contract, NodeRegistry, SecureSums
from hushrec.federation.experiment import ExperimentRequest
from hushrec.federation.requests import TrainRequest
from hushrec.io.codec import kind_of
from hushrec.reporting.html import write_federated_report
from hushrec.runs.folder import RunFolder, record_digest
from hushrec.secagg import Identity
from hushrec.serving.recommender import Recommender
from hushrec.studio.pages import Studio, find_runs
from hushrec.testing import taste_world
from hushrec.testing.backend import MemoryLink
from test_api import OnRound, StopAfter

NODES = 3
NOISE = {"privacy.mode": "central", "privacy.epsilon": 8.0, "privacy.noise_seed": 1}


@dataclass
class Lossy:
    """Nodes in files, whose answers can be lost or spoilt, and everything that was said."""

    paths: dict
    lose: set = field(default_factory=set)
    """(node, how many messages it answered before)."""
    spoil: dict = field(default_factory=dict)
    """What a node says in place of an answer."""
    said: list = field(default_factory=list)
    asked: dict = field(default_factory=dict)
    members: dict = field(default_factory=dict)
    """Who nodes are in secure sums."""
    kept: dict | None = None
    """Workers that go on from message to message, where they do."""

    def link(self):
        return MemoryLink(
            {name: lambda data, name=name: self.answer(name, data) for name in self.paths}
        )

    def answer(self, name, message):
        number = self.asked[name] = self.asked.get(name, 0) + 1
        answer = self.work(name, message)
        self.said += [message, answer]
        if (name, number) in self.lose:
            raise RuntimeError("lost on the way")
        return self.spoil.get((name, number), answer)

    def work(self, name, message):
        member = self.members.get(name)
        if self.kept is None:
            with NodeDatabase.open(self.paths[name]) as store:
                return Worker(store, tell=print, credentials=member).answer(message)
        if name not in self.kept:
            store = NodeDatabase.open(self.paths[name])
            self.kept[name] = Worker(store, tell=print, credentials=member)
        return self.kept[name].answer(message)


class Killed(BaseException):
    """As a SIGKILL: nothing is tidied up."""


def dying(lossy, after):
    """A link to nodes whose server is gone after so many messages."""

    def answer(name, message):
        if len(lossy.said) >= 2 * after:
            raise Killed
        return lossy.answer(name, message)

    return MemoryLink({name: lambda data, name=name: answer(name, data) for name in lossy.paths})


def rehearsal(folder, data, method, settings=None, rounds=3, nodes=NODES, secure=None):
    """A federation of one data set, and what answers for its nodes."""
    folder.mkdir(exist_ok=True)
    experiment = ExperimentRequest(
        data.name, method, rounds=rounds, settings=settings or {}
    ).experiment()
    contract, partition = deal(data, experiment, folder, nodes, secure)
    policy = Policy(nodes=nodes, min_nodes=2, backoff_seconds=0.01, enrol_seconds=0.5)
    lossy = Lossy({name: folder / f"{name}{SUFFIX}" for name in partition})
    identities = {name: Identity(bytes([k + 1] * 32)) for k, name in enumerate(partition)}
    public = {name: identity.public for name, identity in identities.items()}
    registered = NodeRegistry("test", public)
    lossy.members = {
        name: NodeCredentials(registered, identity) for name, identity in identities.items()
    }

    def begin(resume=False, **more):
        ruled, runs = policy.model_copy(update=more), folder / "runs"
        return FederatedRun.open(runs, contract, ruled, partition, registered, resume=resume)

    return begin, lossy


def model(folder):
    return load_file(folder / "checkpoint" / "final" / "selected-shared.safetensors")


@pytest.mark.parametrize(
    ("method", "settings", "rounds"),
    [
        *[("pfedrec", {}, 3), ("fednext", {}, 3), ("fednext", NOISE, 2), ("fedrap", {}, 3)],
        (None, {"network_rounds": 2, "newton_rounds": 2}, None),
    ],
)
def test_it_is_the_run_of_one_process(method, settings, rounds, tmp_path):
    data = taste_world()
    begin, lossy = rehearsal(tmp_path / "f", data, method, settings, rounds)
    result = begin().train(lossy.link())
    alone = train(data, method, settings=settings, rounds=rounds, out=tmp_path / "alone")
    folder = newest_run(tmp_path / "f" / "runs").path
    for name, array in model(tmp_path / "alone").items():
        np.testing.assert_array_equal(model(folder)[name], array)
    assert result.test == alone.summary.test
    assert result.valid == alone.summary.valid
    sent, expected = result.communication, alone.summary.communication
    # How many rows of its own a client of pfedrec keeps is not known to the coordinator.
    assert sent.serving_bytes == (None if method == "pfedrec" else expected.serving_bytes)
    assert sent == expected.model_copy(update={"serving_bytes": sent.serving_bytes})
    assert result.privacy.statement == alone.summary.privacy.statement
    assert (folder / "checkpoint" / "final" / "state.json").exists()
    assert result == RunFolder.open(folder).read_summary()


@pytest.mark.parametrize("secure", [None, SecureSums()], ids=["clear", "secure"])
def test_a_node_that_keeps_running_says_what_one_that_starts_anew_says(secure, tmp_path):
    """Also after somebody was forgotten in the middle: what a worker keeps follows its file."""
    data, results = taste_world(), []
    for kept in (False, True):
        begin, lossy = rehearsal(tmp_path / str(kept), data, "pfedrec", secure=secure)
        lossy.kept = {} if kept else None
        forgotten = iter([None, "user-01"])

        def forget(record, lossy=lossy, forgotten=forgotten):
            user = next(forgotten, None)
            for path in lossy.paths.values():
                with NodeDatabase.open(path) as store:
                    if user is not None and store.number_of(user) is not None:
                        store.forget(user)

        results.append(begin().train(lossy.link(), [OnRound(forget)]))
        assert next(forgotten, "all") == "all", "somebody was forgotten after the second round"
    same = {"test", "valid", "communication"}
    assert results[0].model_dump(include=same) == results[1].model_dump(include=same)


@pytest.mark.parametrize("after", [20, 33, 47, 60])
def test_a_server_that_dies_in_a_secure_sum_goes_on(after, tmp_path):
    data = taste_world()
    begin, lossy = rehearsal(tmp_path / "a", data, "fedmf", rounds=2, secure=SecureSums())
    whole = begin().train(lossy.link())
    begin, lossy = rehearsal(tmp_path / "b", data, "fedmf", rounds=2, secure=SecureSums())
    with pytest.raises(Killed):
        begin().train(dying(lossy, after))
    again = begin(resume=True).train(lossy.link())
    assert again.test == whole.test
    assert not list((tmp_path / "b" / "runs" / "run-0001" / "sums").glob("sum-kept"))


@pytest.mark.parametrize("settings", [{}, NOISE], ids=["plain", "noise"])
def test_an_interrupted_run_goes_on_as_if_nothing_had_been(settings, tmp_path):
    data = taste_world()
    begin, lossy = rehearsal(tmp_path / "a", data, "fedmf", settings, rounds=4)
    whole = begin().train(lossy.link())
    begin, lossy = rehearsal(tmp_path / "b", data, "fedmf", settings, rounds=4)
    for _ in range(3):
        with pytest.raises(StoppedError):
            begin(resume=bool(lossy.said)).train(lossy.link(), [StopAfter(1)])
        assert status_of(newest_run(tmp_path / "b" / "runs")).stage == "interrupted"
    with pytest.raises(RunError, match="--resume"):
        begin()
    again = begin(resume=True).train(lossy.link())
    same = ("test", "valid", "selected_round", "communication", "privacy")
    assert again.model_dump(include=set(same)) == whole.model_dump(include=set(same))
    with pytest.raises(RunError, match="leave out --resume"):
        begin(resume=True)
    assert begin().folder.path.name == "run-0002"


@pytest.mark.parametrize("after", range(4, 27, 3))
def test_a_server_that_dies_anywhere_goes_on_from_the_last_round(after, tmp_path):
    """After so many messages the server is gone, and does not even close its files."""
    data = taste_world()
    begin, lossy = rehearsal(tmp_path / "a", data, "fedmf", NOISE)
    whole = begin().train(lossy.link())
    begin, lossy = rehearsal(tmp_path / "b", data, "fedmf", NOISE)
    with pytest.raises(Killed):
        begin().train(dying(lossy, after))
    again = begin(resume=(tmp_path / "b" / "runs" / "run-0001" / "roster.json").exists())
    result = again.train(lossy.link())
    same = {"test", "valid", "privacy"}
    assert result.model_dump(include=same) == whole.model_dump(include=same)
    for name, array in model(newest_run(tmp_path / "a" / "runs").path).items():
        np.testing.assert_array_equal(model(again.folder.path)[name], array)


def test_lost_answers_are_asked_for_again_and_count_once(tmp_path):
    data = taste_world()
    begin, lossy = rehearsal(tmp_path / "a", data, "pfedrec")
    whole = begin().train(lossy.link())
    begin, lossy = rehearsal(tmp_path / "b", data, "pfedrec")
    lossy.lose = {("node-1", 2), ("node-2", 4), ("node-2", 5), ("node-3", 7)}
    result = begin().train(lossy.link())
    assert result.test == whole.test
    status = status_of(newest_run(tmp_path / "b" / "runs"))
    assert {name: node.lost for name, node in status.nodes.items()} == {
        **{"node-1": 1, "node-2": 2, "node-3": 1}
    }
    assert status.stage == "finished"
    with NodeDatabase.open(tmp_path / "b" / "node-2.node") as store:
        assert NodeRuns(store).status()["round"] == 3


def test_a_node_that_says_what_cannot_be_is_named_and_left_out(tmp_path):
    data = taste_world()
    begin, lossy = rehearsal(tmp_path / "f", data, "pfedrec", rounds=4)
    lossy.spoil = {("node-2", number): b"\x80\x04pickle" for number in range(2, 20)}
    result = begin(max_invalid_replies=3).train(lossy.link())
    status = status_of(newest_run(tmp_path / "f" / "runs"))
    assert status.nodes["node-2"].excluded and status.nodes["node-2"].refused == 3
    assert not status.nodes["node-1"].excluded
    assert result.rounds == 4
    registry = CollectorRegistry()
    registry.register(StatusCollector(lambda: status))
    text = generate_latest(registry).decode()
    assert 'hushrec_federation_node_refused_total{node="node-2"} 3' in text
    assert 'hushrec_federation_node_excluded{node="node-2"} 1' in text
    assert "hushrec_federation_round 4" in text


def test_events_are_read_as_they_were_written(tmp_path):
    told = []
    log = EventLog(tmp_path / "events.jsonl", told.append)
    assert list(log.lines()) == []
    log.tell(EventLine(event="enrolled", node="node-1", users=3, identity="7"))
    log.path.write_text(log.path.read_text() + '{"time": "2026-01-01T0')  # killed here
    log.tell(EventLine(event="round", round=1, seconds=0.5, epsilon=None, up_bytes=9))
    assert list(log.lines()) == told
    assert [line.event for line in told] == ["enrolled", "round"] and told[0].time <= told[1].time
    written = json.loads(log.path.read_text().splitlines()[-1])
    assert written.keys() == {"time", "event", "round", "seconds", "epsilon", "up_bytes"}
    with pytest.raises(ValidationError, match="viewer"):
        EventLine(event="enrolled", viewer="user-01")
    log.path.write_text('{"time": "", "event": "round", "round": -1}\n')
    with pytest.raises(RunError, match=r"events.jsonl, line 1, is damaged: 'round'"):
        list(log.lines())


class Hurried(MemoryLink):
    """Notes the seconds that nodes have to answer."""

    def __init__(self, nodes):
        super().__init__(nodes)
        self.seconds = []

    def send(self, node, request, seconds):
        if node == "node-1":
            self.seconds.append(seconds)
        return super().send(node, request, seconds)


def test_the_deadline_of_a_round_is_that_of_its_phase(tmp_path):
    """Phases of one round each, and then several: the first round of each has more time."""
    settings = {"network_rounds": 2, "newton_rounds": 2, "evaluation.every": 100}
    begin, lossy = rehearsal(tmp_path / "f", taste_world(), None, settings, rounds=None)
    run = begin(round_seconds=100.0, phase_seconds={"fit network": 50.0}, first_round_factor=2.0)
    phases, link = run.contract.experiment.make_method().phases, Hurried(lossy.link().nodes)
    run.train(link)
    asked = link.seconds[1:]  # after the invitation
    expected = [
        (50 if phase.name == "fit network" else 100) * (2 if number == 0 else 1)
        for phase in phases
        for number in range(phase.rounds)
    ]
    np.testing.assert_allclose(asked[: len(expected)], expected, atol=5)
    assert max(phase.rounds for phase in phases) > 1 and len(phases) > 2
    with pytest.raises(ConfigError, match="has no phase 'fit netwrk'; did you mean 'fit network'"):
        begin(phase_seconds={"fit netwrk": 1.0}).train(lossy.link())


@given(
    st.floats(0.1, 1e4),
    st.floats(1, 10),
    st.integers(0, 2**40),
    st.none() | st.floats(0, 1e5),
    st.floats(0, 1e4),
)
def test_a_deadline_grows_with_measured_times_and_sizes(shortest, factor, size, slowest, more):
    """It is never below the policy, and never shorter for a slower node or a larger message."""
    policy = Policy(round_seconds=shortest, first_round_factor=factor, slowest_factor=factor)
    seconds = allowed_seconds(policy, "count", size, slowest)
    assert seconds >= shortest + size / policy.bytes_per_second * (1 - 1e-9)
    assert seconds >= factor * (shortest if slowest is None else slowest)
    assert allowed_seconds(policy, "count", size + int(more), slowest) >= seconds
    if slowest is not None:
        assert allowed_seconds(policy, "count", size, slowest + more) >= seconds
    patient = policy.model_copy(update={"phase_seconds": {"count": shortest + more}})
    assert allowed_seconds(patient, "count", size, slowest) >= seconds
    assert allowed_seconds(patient, "other", size, slowest) == seconds


def test_a_node_that_was_slow_once_has_time_to_be_slow_again(tmp_path):
    """The deadline follows what a node needed; who is slower still is told which key to raise."""
    begin, lossy = rehearsal(tmp_path / "f", taste_world(), "pfedrec", {"evaluation.every": 9})
    link, told = Hurried(lossy.link().nodes), []
    run = begin(round_seconds=0.2, first_round_factor=100.0, slowest_factor=50.0)
    run = replace(run, events=EventLog(run.folder.path / "events.jsonl", told.append))
    answer = link.nodes["node-1"]

    def slow(message):
        time.sleep(0.3 if len(link.seconds) > 1 else 0)
        return answer(message)

    link.nodes["node-1"] = slow
    run.train(link)
    first, second, third = link.seconds[1:4]
    assert first > 19 and min(second, third) > 50 * 0.3 - 1
    assert all(line.seconds >= 0.3 for line in told if line.event == "answered" and line.round)
    begin, lossy = rehearsal(tmp_path / "g", taste_world(), "pfedrec")
    lossy.lose |= {("node-1", number) for number in range(2, 99)}
    run = begin(backoff_seconds=1e9)
    run = replace(run, events=EventLog(run.folder.path / "events.jsonl", told.append))
    run.train(lossy.link())
    why = next(line.why for line in told if line.event == "sat out")
    assert why == "no answer in 900 s; policy.phase_seconds.'train' gives it more"


def test_a_reply_that_arrived_while_another_was_read_is_in_time(tmp_path):
    """The coordinator reads the first reply until the deadline is over; the second was there."""
    begin, lossy = rehearsal(tmp_path / "f", taste_world(), "pfedrec", rounds=1)
    run, link = begin(first_round_factor=1.0, round_seconds=20.0), lossy.link()
    plain = link.receive

    def slowly(tickets):
        for found in plain(tickets):
            link.wait(30.0)
            yield found

    link.receive = slowly
    run.train(link)
    status = status_of(newest_run(tmp_path / "f" / "runs"))
    assert all(node.answered >= 3 and not node.sat_out for node in status.nodes.values())


def test_a_request_is_encoded_when_it_is_sent(tmp_path, monkeypatch):
    """A download of 100 MB is in memory once, not once for each node."""
    begin, lossy = rehearsal(tmp_path / "f", taste_world(), "pfedrec", rounds=1)
    encode, order = TrainRequest.to_bytes, []
    monkeypatch.setattr(
        TrainRequest, "to_bytes", lambda self: order.append("encoded") or encode(self)
    )
    link = lossy.link()
    for name, answer in dict(link.nodes).items():
        link.nodes[name] = lambda data, answer=answer: order.append(kind_of(data)) or answer(data)
    begin().train(link)
    trained = [each for each in order if each in ("encoded", "train")]
    assert trained == ["encoded", "train"] * NODES


HEADERS = 2**16
SHORT = {"network_rounds": 2, "newton_rounds": 2}


@pytest.mark.parametrize(
    ("method", "settings", "rounds"),
    [
        ("fedmix", {**SHORT, "evaluation.every": 3}, None),
        ("pfedrec", {"evaluation.every": 2}, 3),
        ("fedrkg", {"interval": 1, "d": 4}, 3),
        ("fednext", NOISE, None),
    ],
)
@pytest.mark.parametrize("secure", [None, SecureSums()])
def test_a_run_sends_what_was_forecast(method, settings, rounds, secure, tmp_path):
    """Exchanges are exact, and bytes down but for headers and deflated tables; in the clear, bytes
    up are a bound."""
    data = taste_world()
    begin, lossy = rehearsal(tmp_path / "f", data, method, settings, rounds, secure=secure)
    run = begin()
    planned = forecast(run.contract, NODES, data.n_users, LinkRates())
    summary = run.train(lossy.link())
    others = ("evaluation", "set-up of secure sums")
    trained = [phase for phase in planned.phases if phase.phase not in others]
    assert sum(phase.rounds for phase in trained) == summary.rounds
    exchanges, down, up = 0, 0, 0
    for phases in summary.traffic.values():
        exchanges += sum(each.exchanges for each in phases.values())
        down += sum(each.down_bytes for each in phases.values())
        up += sum(each.up_bytes for each in phases.values())
    assert exchanges == NODES * sum(phase.exchanges for phase in planned.phases)
    assert up <= planned.up_bytes + exchanges * HEADERS
    if secure is None:
        assert down <= planned.down_bytes + exchanges * 4000
        if method != "fedmix":
            assert down >= planned.down_bytes - exchanges * 4000
    else:
        vectors = sum(each.rounds * each.up_bytes for each in planned.phases[:-1])
        assert up >= NODES * vectors, "a secure sum sends all of its vector"
    assert summary.traffic == {name: n.traffic for name, n in status_of(run.folder).nodes.items()}
    page = write_federated_report(run.folder).read_text()
    assert "Messages</b> of each node" in page and planned.phases[0].phase in page


def test_the_plan_of_a_federation_is_shown(tmp_path):
    from hushrec.cli.federate import ExperimentOptions, make_rehearsal

    make_rehearsal(tmp_path / "f", "demo", 2, ExperimentOptions("pfedrec", None, 4, 0, ()))
    server = tmp_path / "f" / "server"
    said = CliRunner().invoke(main, ["federate", "plan", str(server)])
    assert said.exit_code == 0, said.output
    assert "train" in said.output and "1 s an exchange" in said.output
    slow = ["--megabytes-per-second", "0.001", "--exchange-seconds", "9", "--json"]
    said = json.loads(CliRunner().invoke(main, ["federate", "plan", str(server), *slow]).stdout)
    train_phase, _ = said["phases"]
    assert (train_phase["rounds"], train_phase["exchanges"], said["nodes"]) == (4, 4, 2)
    sent = 4 * 2 * (train_phase["down_bytes"] + train_phase["up_bytes"])
    assert train_phase["seconds"] == pytest.approx(4 * 9 + sent / 1000)
    (server / "partition.json").unlink()
    said = CliRunner().invoke(main, ["federate", "plan", str(server)])
    assert said.exit_code == 2 and "--users N" in said.output
    assert (
        CliRunner().invoke(main, ["federate", "plan", str(server), "--users", "9"]).exit_code == 0
    )


def test_too_few_nodes_stop_the_run_and_nothing_is_lost(tmp_path):
    data = taste_world()
    begin, lossy = rehearsal(tmp_path / "a", data, "pfedrec")
    whole = begin().train(lossy.link())
    begin, lossy = rehearsal(tmp_path / "b", data, "pfedrec")
    for name in ("node-1", "node-2"):
        lossy.lose |= {(name, number) for number in range(4, 10)}
    with pytest.raises(FederationError, match=r"2 are needed.*--resume"):
        begin(backoff_seconds=1e9).train(lossy.link())
    lossy.lose = set()
    assert begin(resume=True).train(lossy.link()).test == whole.test


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("trains", [[0, "x"]], "'trains': not a list of spans"),
        ("members", [[0, 10_000]], "'clients' is fewer"),
        ("epsilon", ["much"], "'epsilon'"),
        ("nodes", {"node-1": {"users": []}}, "it lacks 'nodes.node-1.clients'"),
    ],
)
def test_a_damaged_roster_is_a_sentence(key, value, match, tmp_path):
    begin, lossy = rehearsal(tmp_path / "f", taste_world(), "pfedrec")
    with pytest.raises(StoppedError):
        begin().train(lossy.link(), [StopAfter(1)])
    file = tmp_path / "f" / "runs" / "run-0001" / "roster.json"
    changed = {**json.loads(file.read_text()), key: value}
    file.write_text(json.dumps(changed))
    with pytest.raises(RunError, match=r"roster.json is damaged.*its digest does not fit"):
        begin(resume=True).train(lossy.link())
    del changed["check"]
    file.write_text(json.dumps({**changed, "check": record_digest(changed)}))
    with pytest.raises(RunError, match=rf"roster.json is damaged: {match}"):
        begin(resume=True).train(lossy.link())


def test_nobody_takes_anothers_name(tmp_path):
    """A registered node that says it is another is sent away, and the other takes part."""
    begin, lossy = rehearsal(tmp_path / "f", taste_world(), "pfedrec")
    honest = lossy.link()
    liar = {
        "id-1": honest.nodes["node-2"],
        **{f"id-{k}": honest.nodes[f"node-{k}"] for k in (2, 3)},
    }
    ids = {f"node-{k}": f"id-{k}" for k in (1, 2, 3)}
    run = replace(begin(nodes=2), node_ids=ids)
    with pytest.raises(FederationError, match="0 of the 2 nodes"):
        replace(run, node_ids={}).train(MemoryLink(liar))
    result = run.train(MemoryLink(liar))
    assert sorted(result.nodes) == ["node-2", "node-3"]
    status = status_of(newest_run(tmp_path / "f" / "runs"))
    assert status.strangers >= 1 and not status.nodes["node-2"].refused


def test_without_enough_nodes_no_run_begins(tmp_path):
    begin, lossy = rehearsal(tmp_path / "f", taste_world(), "pfedrec")
    with pytest.raises(FederationError, match="3 of the 4 nodes"):
        begin(nodes=4).train(lossy.link())
    assert not (tmp_path / "f" / "runs" / "run-0001" / "roster.json").exists()
    begin().train(lossy.link())
    assert is_finished(newest_run(tmp_path / "f" / "runs"))
    assert newest_run(tmp_path / "f" / "runs").path.name == "run-0001"


@pytest.mark.parametrize("method", ["pfedrec", "fedrap", "fedrkg", "fednext", "lipm"])
def test_no_message_names_a_user_or_holds_what_is_private(method, tmp_path):
    """Everything that was said in a run, searched for ids, histories and private parameters."""
    data = taste_world()
    settings = {"lipm": {"silos.kind": "dirichlet", "silos.count": 7, "d": 8, "hidden": [8]}}
    begin, lossy = rehearsal(tmp_path / "f", data, method, settings.get(method))
    begin().train(lossy.link())
    said = b"\0".join(lossy.said)
    assert len(said) > 10_000
    for user in data.users:
        assert user.encode() not in said
    kept = 0
    for path in lossy.paths.values():
        with NodeDatabase.open(path) as store:
            assert store.noise_key.encode() not in said
            for (arrays,) in store.rows("SELECT arrays FROM private"):
                # Any 16 numbers in a row of what a client keeps to itself.
                values = np.frombuffer(arrays[-64:], np.uint8).tobytes()
                kept += 1
                assert len(set(values)) < 8 or values not in said
            for (user,) in store.rows("SELECT id FROM users"):
                items = [data.items.tolist().index(item) for item in store.items_of(user)]
                for dtype in (np.int32, np.int64):
                    history = np.array(items, dtype).tobytes()
                    assert len(items) < 4 or history not in said
    assert kept or method in ("fednext", "lipm")


def test_a_node_recommends_what_one_process_would(tmp_path):
    data = taste_world()
    for method in ("pfedrec", "fednext", "fedrap"):
        begin, lossy = rehearsal(tmp_path / method, data, method)
        begin().train(lossy.link())
        alone = train(data, method, rounds=3)
        for path in lossy.paths.values():
            with NodeDatabase.open(path) as store:
                for (user,) in store.rows("SELECT name FROM users ORDER BY id LIMIT 4"):
                    assert recommend(store, user, 5) == alone.recommend(user, 5)
                made = tmp_path / f"{method}-{store.name}"
                done = invoked("node", "export", path, user, made, "--precision", "single")
                assert done.exit_code == 0 and f"parameters of user '{user}'" in done.output
                device = Recommender.load(made)
                expected = [line.item for line in alone.recommend(user, 5)]
                assert [line.item for line in device.recommend(5)] == expected


def test_new_interactions_and_newcomers_count_at_once(tmp_path):
    data = taste_world()
    begin, lossy = rehearsal(tmp_path / "f", data, "fednext")
    with NodeDatabase.open(lossy.paths["node-1"]) as store:
        user = store.one("SELECT name FROM users ORDER BY id")
        with pytest.raises(RunError, match="no model yet"):
            recommend(store, user)
    begin().train(lossy.link())
    with NodeDatabase.open(lossy.paths["node-1"]) as store:
        first = recommend(store, user, 5)
        store.add(user, first[0].item, 1.0, None)
        then = recommend(store, user, 5)
        assert first[0].item not in [line.item for line in then]
        store.add("somebody new", first[1].item, 1.0, None)
        new = recommend(store, "somebody new", 5)
        assert len(new) == 5 and first[1].item not in [line.item for line in new]
        with pytest.raises(ConfigError, match=r"'somebody new' came to .* after its last run"):
            model_of(store, "somebody new")
        with pytest.raises(ConfigError, match="no user 'nobody'"):
            recommend(store, "nobody")


def invoked(*words):
    return CliRunner().invoke(main, [str(word) for word in words])


def test_a_federated_run_is_a_run(tmp_path):
    """It is reported and compared by what the coordinator knows; users are asked on their nodes."""
    begin, lossy = rehearsal(tmp_path / "f", taste_world(), "pfedrec")
    run = begin()
    summary = run.train(lossy.link())
    folder, alone = run.folder.path, tmp_path / "alone"
    train(taste_world(), "pfedrec", rounds=3, out=alone)
    assert sum(summary.nodes.values()) == summary.users.users == 60
    assert summary.baselines is None and summary.users.train_rows is None
    reported = invoked("report", folder)
    assert reported.exit_code == 0, reported.output
    page = (folder / "report.html").read_text()
    for words in ("node-1", "Full ranking", "Convergence", "What it costs", "No formal guarantee"):
        assert words in page
    assert f"{summary.test['full']['ndcg@10']:.4f}" in page
    card = (folder / "model-card.md").read_text()
    assert f"on {len(summary.nodes)} nodes" in card
    assert f"| {summary.test['full']['ndcg@10']:.4f} |" in card
    compared = invoked("compare", alone, folder, "--json")
    assert compared.exit_code == 0, compared.output
    first, second = json.loads(compared.stdout)[:2]
    assert second["mean"] == pytest.approx(first["mean"]) and second["difference"] == 0
    assert (second["low"], second["p_value"]) == (None, None) and first["low"] is not None
    assert "stay on its nodes" in " ".join(invoked("compare", alone, folder).output.split())
    page = tmp_path / "both.html"
    assert invoked("report", alone, folder, "--out", page).exit_code == 0
    assert "Means alone" in page.read_text()
    missing = invoked("compare", alone, folder, "--metric", "hr@3")
    assert missing.exit_code == 2 and "nodes reported no 'hr@3'" in missing.output
    for command in (("recommend", folder, "--user", "1"), ("analyse", folder), ("audit", folder)):
        refused = invoked(*command)
        assert refused.exit_code == 2
        assert "hushrec node recommend" in " ".join(refused.output.split())
    assert invoked("report", folder, "--map").exit_code == 2
    (tmp_path / "f" / "config.toml").write_text('federation = "tastes"\n')
    status = invoked("federate", "status", tmp_path / "f", "--json")
    assert json.loads(status.stdout)["summary"] == json.loads((folder / "summary.json").read_text())
    assert "users of each node: node-1 20" in invoked("federate", "status", tmp_path / "f").output


def test_the_studio_shows_a_federated_run(tmp_path):
    begin, lossy = rehearsal(tmp_path / "f", taste_world(), "fednext")
    run = begin()
    run.train(lossy.link())
    found = find_runs(tmp_path / "f" / "runs")["run-0001"]
    assert found.state == "finished" and not found.single
    page = Studio(tmp_path / "f" / "runs").page("run", {"run": "run-0001"})
    assert "HR@10, all items" in page and "Its users" not in page


def test_an_undeclared_list_cannot_be_agreed_on():
    experiment = ExperimentRequest(
        "x", "fednext", settings={**NOISE, "privacy.undeclared": True}
    ).experiment()
    with pytest.raises(ConfigError, match=r"leave out privacy\.undeclared"):
        Contract(experiment, Catalogue.of(taste_world()))


def test_a_failure_is_no_answer():
    link = MemoryLink({"a": lambda data: data})
    assert link.send("b", b"2", 1.0) is None, "not connected"
    tickets = [link.send("a", b"1", 1.0)]
    assert [answer for _, answer in link.receive(tickets)] == [b"1"]
    assert list(link.receive(tickets)) == [], "a reply is received once"


@pytest.mark.parametrize("secure", [None, SecureSums()])
def test_the_plan_is_found_once_by_the_coordinator_and_once_by_each_node(
    secure, tmp_path, monkeypatch
):
    found, make_plan = [], setup.make_plan

    def counted(*args):
        found.append(args)
        return make_plan(*args)

    monkeypatch.setattr(setup, "make_plan", counted)
    settings = {**NOISE, "d": 4}
    begin, lossy = rehearsal(tmp_path / "f", taste_world(), "fedmf", settings, 3, NODES, secure)
    lossy.kept = {}
    begin().train(lossy.link())
    assert len(found) == 1 + NODES
