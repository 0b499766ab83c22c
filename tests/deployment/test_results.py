"""Who was in a federated result, how long it takes, and training that blows up."""

import json
import secrets
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest
from test_coordinator import NOISE, invoked, rehearsal

from hushrec.api import train
from hushrec.cli.display import EventPrinter, status_tables
from hushrec.cli.terminal import Console
from hushrec.deployment.coordinator.run import EVENTS, Question, newest_run, status_of
from hushrec.deployment.coordinator.session import EventLine, EventLog
from hushrec.deployment.node.database import NodeDatabase
from hushrec.deployment.node.worker import Worker
from hushrec.errors import DivergedError, FederationError, StoppedError
from hushrec.federation import requests, sums
from hushrec.federation.contract import SecureSums
from hushrec.federation.requests import Enrolment, Invitation, Refusal
from hushrec.io.codec import kind_of
from hushrec.testing import taste_world
from hushrec.testing.backend import MemoryLink
from test_api import StopAfter

SECURE = SecureSums(min_nodes=2, threshold=2)


def log_of(folder):
    return list(EventLog(newest_run(folder / "runs").path / EVENTS).lines())


# ------------------------------------------------------------ who was there


@pytest.fixture(scope="module")
def missing(tmp_path_factory):
    """A run whose second node is away in rounds 3 and 4, and from the last evaluation on."""
    folder = tmp_path_factory.mktemp("missing") / "f"
    begin, lossy = rehearsal(folder, taste_world(), "fedmf", {"evaluation.every": 2}, rounds=6)

    def answer(name, message):
        away = False
        if name == "node-2" and kind_of(message) == "train":
            number = requests.TrainRequest.from_bytes(message).download.round
            away = number in (3, 4)
        elif name == "node-2" and kind_of(message) == "evaluate":
            away = requests.EvaluationRequest.from_bytes(message).with_selected
        if away:
            raise RuntimeError("away")
        return lossy.answer(name, message)

    nodes = {name: lambda data, name=name: answer(name, data) for name in lossy.paths}
    told = []
    run = begin(backoff_seconds=1e9)
    run = replace(run, events=replace(run.events, echo=told.append))
    return folder, run.train(MemoryLink(nodes)), told


def test_users_and_nodes_of_every_round_and_evaluation_are_in_the_summary(missing):
    folder, summary, _ = missing
    stored = json.loads((newest_run(folder / "runs").path / "summary.json").read_text())
    found = {(one["to"], one["round"]): one for one in stored["attendance"]}
    assert [number for to, number in found if to == "train"] == [1, 2, 3, 4, 5, 6]
    assert found["train", 3] == {"round": 3, "to": "train", "users": 40, "missing": ["node-2"]}
    assert found["train", 5]["users"] == 60 and not found["train", 5]["missing"]
    assert found["final test", 6]["missing"] == ["node-2"]
    assert summary.users.ranked_users < 60 and summary.counted_users == 40
    words = "node-2 was missing in rounds 3 and 4 and in the final evaluation"
    assert summary.attendance_words == f"evaluated 40 of 60 enrolled users; {words}"
    assert summary.marks[-1] == f"40 of 60 enrolled users are in the figures: {words}"
    assert "40 of 60 enrolled users are in the figures" in summary.short_marks


def test_who_was_missing_is_shown_wherever_a_figure_is(missing, tmp_path):
    folder, _, _ = missing
    path = newest_run(folder / "runs").path
    (folder / "config.toml").write_text('federation = "tastes"\n')
    shown = " ".join(invoked("federate", "status", folder).output.split())
    assert "node-2 was missing in rounds 3 and 4 and in the final evaluation" in shown
    assert "evaluated 40 of 60 enrolled users" in shown
    assert "20 of 60 users are not evaluated" not in shown  # they are not too short: they were away
    assert invoked("report", path).exit_code == 0
    page = (path / "report.html").read_text()
    assert "40 of 60 enrolled users are in the figures" in page
    assert "Who was there" in page and "On the wire" in page
    alone = tmp_path / "alone"
    train(taste_world(), "fedmf", rounds=6, settings={"evaluation.every": 2}, out=alone)
    compared = " ".join(invoked("compare", alone, path).output.split())
    assert "40 of 60 enrolled users are in the figures" in compared


def test_bytes_on_the_wire_are_those_that_were_sent(missing):
    """Of every question and answer, those that got no answer too."""
    folder, summary, _ = missing
    lines = [line for line in log_of(folder) if line.node is not None]
    assert any(line.event == "no answer" and line.down_bytes for line in lines)
    assert summary.wire.down_bytes == sum(line.down_bytes for line in lines)
    assert summary.wire.up_bytes == sum(line.up_bytes for line in lines)
    assert summary.wire.down_bytes < summary.communication.down_bytes


def test_nothing_is_marked_where_nobody_was_missing(tmp_path):
    begin, lossy = rehearsal(tmp_path / "f", taste_world(), "fedmf", rounds=2)
    summary = begin().train(lossy.link())
    assert summary.attendance_words.endswith("no node was missing in a round or an evaluation")
    assert not any("enrolled" in mark for mark in summary.marks) and not summary.not_applied


# ------------------------------------------------------------ forecast and progress


def test_a_run_says_before_it_begins_what_its_phases_send(tmp_path, capsys):
    settings = {"network_rounds": 2, "newton_rounds": 2, "evaluation.every": 100}
    begin, lossy = rehearsal(tmp_path / "f", taste_world(), None, settings, rounds=None)
    run = begin()
    run = replace(run, events=replace(run.events, echo=EventPrinter(every=0)))
    run.train(lossy.link())
    said = capsys.readouterr().err
    phases = run.contract.experiment.make_method().phases
    before, _, _ = said.partition("0 of 3 nodes answered")
    for phase in phases:
        assert f"forecast, {phase.name}, {phase.rounds} time" in before
    assert "forecast, evaluation, " in before and "forecast, the whole run: at most" in before
    assert "round 1, train: 0 of 3 nodes answered, waiting for node-1, node-2, node-3" in said
    assert "round 1, train: 2 of 3 nodes answered, waiting for node-3, deadline in" in said


def test_status_says_whom_the_coordinator_waits_for(tmp_path):
    begin, lossy = rehearsal(tmp_path / "f", taste_world(), "fedmf", rounds=2)
    seen = []

    def told(line):
        if (line.event, line.to, line.node) == ("answered", "train", "node-1"):
            seen.append(status_of(newest_run(tmp_path / "f" / "runs")))

    run = begin()
    replace(run, events=replace(run.events, echo=told)).train(lossy.link())
    question = seen[0].question
    assert (question.to, question.round, question.waiting) == ("train", 1, ["node-2", "node-3"])
    words = question.words(datetime.now(UTC))
    assert "round 1, train: 1 of 3 nodes answered, waiting for node-2, node-3" in words
    assert status_of(newest_run(tmp_path / "f" / "runs")).question is None


# ------------------------------------------------------------ enrolment


@pytest.mark.parametrize("change", ["forget", "add"])
def test_a_user_more_or_less_does_not_end_a_rehearsed_federation(change, tmp_path):
    begin, lossy = rehearsal(tmp_path / "f", taste_world(), "fedmf", rounds=2)
    with NodeDatabase.open(lossy.paths["node-1"]) as store:
        if change == "forget":
            store.forget(store.one("SELECT name FROM users ORDER BY id"))
        else:
            for item in taste_world().items[:6].tolist():
                store.add("somebody new", item, 1.0, None)
    summary = begin().train(lossy.link())
    count = 19 if change == "forget" else 21
    assert summary.nodes["node-1"] == count and summary.users.users == 40 + count
    told = next(line for line in log_of(tmp_path / "f") if line.event == "numbered anew")
    assert f"node-1 holds {count} users" in told.why and "numbered anew" in told.why


def claiming(lossy, liar, users):
    """Nodes of which one claims so many users."""

    def answer(name, message):
        answer = lossy.answer(name, message)
        if name == liar and kind_of(answer) == Enrolment.kind:
            honest = Enrolment.from_bytes(answer)
            return replace(honest, users=users).to_bytes()
        return answer

    return MemoryLink({name: lambda data, name=name: answer(name, data) for name in lossy.paths})


@pytest.mark.parametrize("users", [10_000_000, 2**31 - 1])
def test_a_node_that_claims_millions_of_users_is_refused_and_the_others_train(users, tmp_path):
    settings = {"silos.kind": "dirichlet", "silos.count": 7, "d": 8, "hidden": [8], "epochs": 1}
    begin, lossy = rehearsal(tmp_path / "f", taste_world(), "lipm", settings, rounds=1)
    summary = begin().train(claiming(lossy, "node-3", users))
    assert sorted(summary.nodes) == ["node-1", "node-2"]
    refused = next(line for line in log_of(tmp_path / "f") if line.event == "refused")
    assert refused.node == "node-3"
    assert f"claims {users:,} users, more than policy.max_users_per_node" in refused.why


def test_a_claim_that_the_memory_cannot_hold_is_refused(tmp_path):
    begin, lossy = rehearsal(tmp_path / "f", taste_world(), "fedmf", rounds=1)
    link = claiming(lossy, "node-3", 2**31 - 1)
    begin(max_users_per_node=2**31 - 1).train(link)
    refused = next(line for line in log_of(tmp_path / "f") if line.event == "refused")
    assert refused.node == "node-3" and "of memory are available" in refused.why


def test_two_nodes_of_three_are_still_too_few_where_three_are_needed(tmp_path):
    begin, lossy = rehearsal(tmp_path / "f", taste_world(), "fedmf", rounds=1)
    with pytest.raises(FederationError, match=r"2 of the 3 nodes.*'node-3' declined or were"):
        begin(min_nodes=3).train(claiming(lossy, "node-3", 10**7))


def test_another_version_is_named_by_both_sides(tmp_path, monkeypatch):
    begin, lossy = rehearsal(tmp_path / "f", taste_world(), "fedmf", rounds=1)
    said = []

    def answer(name, message):
        with monkeypatch.context() as patched, NodeDatabase.open(lossy.paths[name]) as store:
            if name == "node-2":
                patched.setattr(requests, "version", lambda package: "0.0.1")
            return Worker(store, tell=said.append).answer(message)

    link = MemoryLink({name: lambda data, name=name: answer(name, data) for name in lossy.paths})
    summary = begin().train(link)
    assert sorted(summary.nodes) == ["node-1", "node-3"]
    refused = next(line for line in log_of(tmp_path / "f") if line.event == "refused")
    assert refused.node == "node-2" and "this node runs hushrec 0.0.1" in refused.why
    assert f"the server runs {requests.software()}" in refused.why
    assert len(said) == 1 and "declined to take part" in said[0] and "hushrec 0.0.1" in said[0]


def test_other_settings_are_named_with_both_values(tmp_path):
    begin, lossy = rehearsal(tmp_path / "f", taste_world(), "fedmf", rounds=2)
    _, wrong = rehearsal(tmp_path / "g", taste_world(), "fedmf", {"d": 5}, rounds=2)
    lossy.paths["node-2"] = wrong.paths["node-2"]
    summary = begin().train(lossy.link())
    assert sorted(summary.nodes) == ["node-1", "node-3"]
    refused = next(line for line in log_of(tmp_path / "f") if line.event == "refused")
    assert refused.node == "node-2"
    assert "they differ in options.d (5 here, 32 there)" in refused.why


def test_an_invitation_of_another_format_is_declined_with_the_version(tmp_path):
    _, lossy = rehearsal(tmp_path / "f", taste_world(), "fedmf", rounds=1)
    strange = Invitation("run", "x", "y", "hushrec 9.9").to_bytes()
    with NodeDatabase.open(lossy.paths["node-1"]) as store:
        answer = Refusal.from_bytes(Worker(store).answer(strange.replace(b"software", b"softwear")))
    assert answer.name == "node-1" and f"this node runs {requests.software()}" in answer.why


# ------------------------------------------------------------ privacy in words


def test_with_secure_sums_no_raw_updates_reach_the_server(tmp_path):
    begin, lossy = rehearsal(tmp_path / "f", taste_world(), "fedmf", rounds=1, secure=SECURE)
    secure = begin().train(lossy.link())
    begin, lossy = rehearsal(tmp_path / "g", taste_world(), "fedmf", rounds=1)
    clear = begin().train(lossy.link())
    assert "raw updates reach the server" in clear.privacy.statement
    words = " ".join((secure.privacy.statement, *secure.privacy.in_words))
    assert "raw updates" not in words and "trust the server" not in words
    assert "what the updates of all nodes add up to" in words


# ------------------------------------------------------------ training that blows up


def lying(monkeypatch, spoil, first=1, name="node-2"):
    """Let a node spoil its sum, before it is masked or sent, from a round on."""
    trained, liars = Worker.__init__, []

    def begin(self, store, *more, **named):
        trained(self, store, *more, **named)
        if store.name != name:
            return
        train_round = self.trainer.train

        def train_spoilt(run, request, *rest):
            summed, done = train_round(run, request, *rest)
            if request.download.round >= first:
                liars.append(request.download.round)
                summed = spoil(summed)
            return summed, done

        monkeypatch.setattr(self.trainer, "train", train_spoilt)

    monkeypatch.setattr(Worker, "__init__", begin)
    return liars


def random_sum(size):
    """Replace all numbers of a sum by random ones of about this size."""

    def spoil(summed):
        arrays = {
            name: array
            if name.startswith("ids/")
            else (np.random.default_rng(7).normal(0, size, array.shape) * 2**32).astype(np.int64)
            for name, array in summed.summed.to_arrays().items()
        }
        shape = sums.UploadShape(
            summed.summed.n_rows,
            {n[5:]: a.shape[1] for n, a in arrays.items() if n.startswith("rows/")},
            {n[6:]: a.shape for n, a in arrays.items() if n.startswith("dense/")},
        )
        spoilt = sums.ExactSum.from_arrays(shape, summed.summed.clients, arrays)
        return replace(summed, summed=spoilt)

    return spoil


@pytest.mark.parametrize("secure", [None, SECURE], ids=["clear", "secure"])
def test_random_sums_in_the_middle_are_not_applied(secure, tmp_path, monkeypatch):
    """Two such rounds are left out, it is said, and the model is as good as that of the others."""
    data = taste_world()
    begin, lossy = rehearsal(tmp_path / "a", data, "fedmf", rounds=8, secure=secure)
    honest = begin().train(lossy.link())
    begin, lossy = rehearsal(tmp_path / "b", data, "fedmf", rounds=8, secure=secure)
    liars = lying(monkeypatch, random_sum(1e4), first=7)
    summary = begin().train(lossy.link())
    assert liars == [7, 8]
    assert [one.round for one in summary.not_applied] == [7, 8]
    assert "norm" in summary.not_applied[0].why
    assert any("2 of 8 rounds were not applied: rounds 7 and 8" in mark for mark in summary.marks)
    hits = summary.test["full"]["hr@10"]
    assert hits >= honest.test["full"]["hr@10"] - 0.1
    status = status_of(newest_run(tmp_path / "b" / "runs"))
    assert list(status.not_applied) == [7, 8]
    console = Console()
    with console.capture() as shown:
        console.print(*status_tables(status))
    assert "round 7 is not applied" in shown.get()


@pytest.mark.parametrize("secure", [None, SECURE], ids=["clear", "secure"])
def test_random_sums_from_the_first_round_on_end_the_run(secure, tmp_path, monkeypatch):
    """There is nothing to compare the first round with; the loss of the next ones tells."""
    begin, lossy = rehearsal(tmp_path / "f", taste_world(), "fedmf", rounds=9, secure=secure)
    lying(monkeypatch, random_sum(1e5))
    with pytest.raises(DivergedError, match=r"3 rounds in a row were not applied.*loss"):
        begin().train(lossy.link())
    told = [line for line in log_of(tmp_path / "f") if line.event == "not applied"]
    assert [line.round for line in told] == [2, 3, 4] and "its loss is" in told[0].why
    assert (newest_run(tmp_path / "f" / "runs").path / "checkpoint" / "round-000004").exists()


def test_a_node_of_random_masked_vectors_does_not_go_unnoticed(tmp_path):
    """Its vector is random bytes: the sum cannot be read, and rounds without one end the run."""
    begin, lossy = rehearsal(tmp_path / "f", taste_world(), "fedmf", rounds=6, secure=SECURE)

    def answer(name, message):
        answer = lossy.answer(name, message)
        masked = kind_of(message) == "stage" and sums.StageRequest.from_bytes(message)
        if name != "node-2" or not masked or masked.stage != sums.Stage.MASKED:
            return answer
        if not masked.request or kind_of(masked.request) != "train":
            return answer
        sent = sums.StageReply.from_bytes(answer).message
        return sums.StageReply(sent[:-4096] + secrets.token_bytes(4096)).to_bytes()

    link = MemoryLink({name: lambda data, name=name: answer(name, data) for name in lossy.paths})
    with pytest.raises(DivergedError, match="3 rounds in a row were not applied"):
        begin().train(link)


def test_under_a_guarantee_the_noised_total_alone_decides(tmp_path, monkeypatch):
    """The loss, which no noise covers, is not looked at: a node may claim any."""
    data = taste_world()
    begin, lossy = rehearsal(tmp_path / "a", data, "fedmf", NOISE, rounds=4)
    honest = begin().train(lossy.link())
    begin, lossy = rehearsal(tmp_path / "b", data, "fedmf", NOISE, rounds=4)

    def large_loss(summed):
        return replace(summed, loss=replace(summed.loss, steps=summed.loss.clients * 2**150))

    lying(monkeypatch, large_loss, first=3)
    summary = begin().train(lossy.link())
    assert summary.test == honest.test and not summary.not_applied
    assert summary.privacy.epsilon == honest.privacy.epsilon


def test_distributed_noise_has_a_bound_in_the_first_round(tmp_path, monkeypatch):
    """The sum of a noised round may be any vector: what clipping and noise allow bounds it."""
    settings = {**NOISE, "privacy.mode": "distributed", "privacy.nodes": 3, "d": 4}
    begin, lossy = rehearsal(
        tmp_path / "f", taste_world(), "fedmf", settings, rounds=5, secure=SecureSums()
    )
    lying(monkeypatch, random_sum(1e5))
    with pytest.raises(DivergedError, match="clipping and noise allow"):
        begin().train(lossy.link())


def test_a_resumed_run_knows_what_the_guard_has_seen(tmp_path, monkeypatch):

    begin, lossy = rehearsal(tmp_path / "f", taste_world(), "fedmf", rounds=6)
    lying(monkeypatch, random_sum(1e4), first=5)
    with pytest.raises(StoppedError):
        begin().train(lossy.link(), [StopAfter(4)])
    summary = begin(resume=True).train(lossy.link())
    assert [one.round for one in summary.not_applied] == [5, 6]


def test_a_question_without_a_round_is_named_by_its_request():
    now = datetime(2026, 1, 1, tzinfo=UTC)
    question = Question("invitation", 0, 2, ["node-1"], "2026-01-01T00:00:09+00:00")
    assert question.words(now).startswith("invitation: 1 of 2 nodes answered")
    line = EventLine(event="asked", time=now.isoformat(), nodes=("a",), seconds=9.0)
    assert line.to_json().count("nodes") == 1
