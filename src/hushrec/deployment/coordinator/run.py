"""The coordinator's side of a federated run, from the invitation to the last evaluation.

It runs the loop of every run, `federation.rounds`, over a backend whose clients are on the nodes of
a `Link`. Each node sums its clients' uploads exactly, and the coordinator adds up the nodes' sums,
to the same bits as one process with all clients. A node that is away, too slow, or sends an invalid
reply is left out of the round: the log names it, and the round continues with the others.

A checkpoint is written after each round, so a run that was interrupted, on the server or on the
way, goes on as if nothing had happened: nodes answer a round that they have done with the bytes of
their first answer. The folder of a run holds::

    config.toml, metrics.jsonl, checkpoint/, summary.json    as in every run folder
    roster.json      which node holds which clients
    events.jsonl     the coordinator's log, one `EventLine` a line
    sums/            recovery journal of secure aggregation
    model.hushrec    the model, as long as a node that was away has not got it
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import Evaluation
from hushrec.data.splitting import Part
from hushrec.deployment.coordinator.planning import LinkRates, Policy, forecast
from hushrec.deployment.coordinator.roster import (
    Partition,
    Roster,
    partition_change,
    read_roster,
    with_digest,
)
from hushrec.deployment.coordinator.session import EventLine, EventLog, RunEvent, Session
from hushrec.deployment.coordinator.summing import PlainSumming, RecoveryJournal, SecureSumming
from hushrec.errors import FederationError, RunError, listed
from hushrec.federation import rounds
from hushrec.federation.backends import Collected
from hushrec.federation.client import Download, Task
from hushrec.federation.contract import Contract, NodeRegistry
from hushrec.federation.experiment import Experiment
from hushrec.federation.requests import (
    Assignment,
    EvaluationRequest,
    Link,
    ModelDelivery,
    ModelReceipt,
    NodeId,
    TrainRequest,
)
from hushrec.federation.setup import set_up_public
from hushrec.federation.sums import ExpectedSum, round_shape
from hushrec.io.codec import Arrays
from hushrec.io.files import remove, write_bytes
from hushrec.methods.base import Shared
from hushrec.privacy.plan import NoPlan, Plan
from hushrec.privacy.protection import Protection
from hushrec.runs.folder import FEDERATED, SUMMARY, RunFolder
from hushrec.runs.recording import CheckpointCallback, restore, saved_key, summarise_federation
from hushrec.runs.schema import Attendance, PhaseTraffic, Summary, WireBytes
from hushrec.streams import new_key

EVENTS = "events.jsonl"
MODEL = "model.hushrec"
LAST_EVALUATION, DELIVERY = "evaluate test", "model"
"""Requests with which nodes receive the model of a run."""
RunStage = Literal["training", "interrupted", "finished"]
EVENT_COUNTERS = {
    "answered": "answered",
    "no answer": "lost",
    "sat out": "sat_out",
    "declined": "declined",
    "refused": "refused",
}
"""The field of a `NodeStatus` that counts an event."""
ANSWERS = ("answered", "declined", "refused", "sat out", "excluded")
"""Events after which a node is not waited for."""


class RemoteBackend:
    """The nodes of a federation, as a backend of the training loop."""

    def __init__(
        self,
        task: Task,
        experiment: Experiment,
        roster: Roster,
        session: Session,
        summing: SecureSumming | None = None,
    ) -> None:
        """``summing`` adds up the nodes' sums, by default in the clear."""
        self.task, self.experiment, self.roster, self.session = task, experiment, roster, session
        self.summing = summing or PlainSumming(session)
        self.assignments = roster.assignments(promised=experiment.privacy.promises)
        self.round = self.selected = 0

    def train(
        self, download: Download, protection: Protection, cohort: NDArray[np.int64]
    ) -> Collected:
        """Send every node what its clients of the cohort receive, and add up what comes back."""
        self.round = download.round
        shared = replace(download, own={}).to_bytes()
        requests = {}
        for name, assignment in self.assignments.items():
            own = np.flatnonzero(np.isin(cohort, assignment.clients))
            requests[name] = TrainRequest(
                assignment, self.selected, cohort[own], shared, download.to(own).own
            )
        shape, norm = round_shape(self.task, protection, download), protection.norm_of(self.round)
        largest = self.session.policy.largest_norm if norm is None else norm
        most_steps = 2**62 // max(1, len(self.assignments)) - 1
        expected = ExpectedSum(self.roster.run, self.round, 0, shape, largest, most_steps)
        collected, nodes = self.summing.train(requests, expected)
        if not collected.lost:
            asked = [name for name, request in requests.items() if len(request.clients)]
            self._counted("train", set(asked) - set(nodes))
        method = self.task.method
        alone = min(self.experiment.rounds, method.phase_of(self.round).rounds) == 1
        if collected.lost and (alone or method.budget_shares):  # later rounds need it
            raise FederationError(
                f"round {self.round} can be summed no more, and {method.name} cannot do without "
                "it: begin a new run"
            )
        sent = (requests[name] for name in nodes)
        down_bytes = sum(replace(download, own=r.own).nbytes(len(r.clients)) for r in sent)
        return replace(collected, down_bytes=down_bytes)

    def evaluate(self, serving: Shared, part: Part, *, selected: bool = False) -> Evaluation:
        """Merge the nodes' evaluations of their own users' held-out items."""
        shared = Download(self.round, serving).to_bytes()
        requests = {
            name: EvaluationRequest(assignment, self.round, part, self.selected, selected, shared)
            for name, assignment in self.assignments.items()
        }
        reported = self.experiment.evaluation.reported(self.experiment.split.next_basket)
        found, nodes = self.summing.evaluate(requests, reported)
        self._counted(f"{'final' if selected else 'evaluate'} {part}", requests.keys() - set(nodes))
        return found

    def _counted(self, to: str, missing: Set[str]) -> None:
        """Log who is in a sum, which is part of the result."""
        left_out = sum(len(self.roster.nodes[name].users) for name in missing)
        users = sum(len(held.users) for held in self.roster.nodes.values()) - left_out
        line = EventLine(event="counted", round=self.round, to=to, users=users)
        line = line.model_copy(update={"missing": tuple(sorted(missing))})
        self.session.events.tell(line)

    def keep_selected(self) -> None:
        """Let the nodes keep this round's private parameters: the next request says so."""
        self.selected = self.round

    def save(self, *, selected: bool) -> Iterator[Arrays]:
        """Yield nothing: nodes keep what is theirs."""
        return iter(())

    def load(self, parts: Iterable[Arrays], *, selected: bool) -> None:
        """Put nothing back."""


@dataclass(frozen=True)
class FederatedRun:
    """What a server trains, how, and where it writes that down."""

    folder: RunFolder
    contract: Contract
    policy: Policy
    events: EventLog
    partition: Partition | None = None
    """In a rehearsal, which numbers of the file each node has."""
    registered: NodeRegistry | None = None
    """Who takes part in secure sums, where it is agreed that sums are."""
    node_ids: Mapping[str, NodeId] | None = None
    """What the transport calls each node, where that is known beforehand."""

    @classmethod
    def open(
        cls,
        runs: Path,
        contract: Contract,
        policy: Policy,
        partition: Partition | None = None,
        registered: NodeRegistry | None = None,
        *,
        resume: bool = False,
    ) -> FederatedRun:
        """Begin a new run among those of a server, or go on with the newest."""
        before = newest_run(runs)
        if resume and (before is None or is_finished(before)):
            raise RunError(f"{runs} has no run that was interrupted: leave out --resume")
        if before is None or is_finished(before):
            number = 1 if before is None else int(before.path.name.removeprefix("run-")) + 1
            before = RunFolder.create(runs / f"run-{number:04d}", contract.experiment)
            drop_old_models(runs, policy.keep_models)
        elif not resume and (before.path / FEDERATED).exists():
            raise RunError(
                f"{before.path} was interrupted: go on with --resume, or remove it to begin anew"
            )
        return cls(before, contract, policy, EventLog(before.path / EVENTS), partition, registered)

    def train(self, link: Link, callbacks: Sequence[rounds.Callback] = ()) -> Summary:
        """Train to the end, from the start or from the newest checkpoint; return the summary."""
        with self.folder.locked():
            roster, session = self._gather(link)
            journal = RecoveryJournal(self.folder.path / "sums")
            experiment, public = self.contract.experiment, self.contract.public
            clients = roster.pool(promised=experiment.privacy.promises)
            key, budgets = saved_key(self.folder) or new_key(), roster.epsilon
            setup = set_up_public(experiment, public, key, roster.digest, len(clients), budgets)
            secure, plan = self.contract.secure is not None, setup.plan
            if isinstance(plan, NoPlan):
                plan = replace(plan, secure=secure)
            summing = SecureSumming(session, self.registered, journal) if secure else None
            nodes = RemoteBackend(setup.task, experiment, roster, session, summing)
            state = setup.first_state(roster.clients)
            restore(state, nodes, self.folder, experiment.rounds)
            nodes.round, nodes.selected = state.round, state.selected_round
            began: RunEvent = "going on" if state.round else "begun"
            self.events.tell(EventLine(event=began, round=state.round, run=roster.run))
            if not state.round:
                self._forecast(setup.task, roster)
            training = rounds.Training(
                experiment, setup.task, plan, clients, nodes, roster.newcomers
            )
            saves = CheckpointCallback(self.folder, nodes, state)
            callbacks = (saves, _RoundEvents(plan, state, self.events), *callbacks)
            rounds.run_rounds(training, state, callbacks)
            results = rounds.finish(training, state, callbacks)
            journal.clear()
            users = {name: len(holding.users) for name, holding in roster.nodes.items()}
            status = status_of(self.folder)
            traffic = {name: status.nodes[name].traffic for name in users}
            wire = WireBytes(up_bytes=status.up_bytes, down_bytes=status.down_bytes)
            attendance = list(status.attendance.values())
            summary = summarise_federation(training, state, users, results, attendance)
            notes = [
                f"{name} runs {other}: its last bits may differ from those of this machine"
                for name in users
                if (other := status.nodes[name].software)
            ]
            more = {"traffic": traffic, "wire": wire, "notes": [*summary.notes, *notes]}
            summary = summary.model_copy(update=more)
            self.folder.write_results(summary)
            ended, selected = state.round, state.selected_round
            self.events.tell(EventLine(event="finished", round=ended, selected_round=selected))
            if without_model(self.folder):
                shared = Download(ended, training.serving(state.selected_shared)).to_bytes()
                finished = ModelDelivery(Assignment(roster.run, 0, 0), ended, selected, shared)
                write_bytes(self.folder.path / MODEL, finished.to_bytes())
            return summary

    def deliver(self, link: Link, names: Sequence[str]) -> None:
        """Give nodes the model of this run, which ended while they were away."""
        with self.folder.locked():
            roster, path = read_roster(self.folder.path / FEDERATED), self.folder.path / MODEL
            finished = ModelDelivery.from_bytes(path.read_bytes())
            assigned = roster.assignments(promised=self.contract.experiment.privacy.promises)
            requests = {name: replace(finished, assignment=assigned[name]) for name in names}
            alone = self.policy.model_copy(update={"min_nodes": 1})
            session = Session(self.contract, roster.run, link, alone, self.events)
            session.known.update({name: (self.node_ids or {})[name] for name in names})

            def read(name: str, answer: bytes) -> ModelReceipt:
                return ModelReceipt.expected(answer, requests[name])

            for _ in session.exchange(DELIVERY, finished.round, requests, read):
                pass
            if not without_model(self.folder):
                path.unlink()

    def _gather(self, link: Link) -> tuple[Roster, Session]:
        """Meet the nodes: those of the run, or in a new one all that take part."""
        path = self.folder.path / FEDERATED
        known = read_roster(path) if path.exists() else None
        run = secrets.token_hex(8) if known is None else known.run
        session = Session(self.contract, run, link, self.policy, self.events, self.node_ids)
        if known is not None:
            session.meet(list(known.nodes))
            return known, session
        enrolled = session.gather()
        changed = "" if self.partition is None else partition_change(enrolled, self.partition)
        if changed:
            why = f"{changed}: users are numbered anew, so results are not those of one process"
            self.events.tell(EventLine(event="numbered anew", why=why))
        roster = Roster.of(run, self.contract.experiment, enrolled, self.partition)
        self.folder.write_text(FEDERATED, with_digest(roster))
        return roster, session

    def _forecast(self, task: Task, roster: Roster) -> None:
        """Log what each phase of a new run will send, and the time that its messages take."""
        users = sum(len(held.users) for held in roster.nodes.values())
        nodes = len(roster.nodes)
        found = forecast(self.contract, nodes, users, LinkRates(), task)
        for each in found.phases:
            messages = each.rounds * nodes
            line = EventLine(
                event="forecast",
                to=each.phase,
                rounds=each.rounds,
                seconds=round(each.seconds, 3),
                up_bytes=messages * each.up_bytes,
                down_bytes=messages * each.down_bytes,
            )
            self.events.tell(line)


def without_model(folder: RunFolder) -> list[str]:
    """Return the nodes of a finished run that do not have its model, by the event log."""
    left = dict.fromkeys(read_roster(folder.path / FEDERATED).nodes)
    for line in EventLog(folder.path / EVENTS).lines():
        # With the last evaluation a node receives the model.
        received = line.event == "answered" and line.to.startswith((LAST_EVALUATION, DELIVERY))
        if line.node is not None and (received or line.event == "excluded"):
            left.pop(line.node, None)
    return list(left)


class _RoundEvents(rounds.Callback):
    """Adds an event to the log after every round: its costs, once its checkpoint is written."""

    def __init__(self, plan: Plan, state: rounds.ServerState, events: EventLog) -> None:
        self.plan, self.state, self.events = plan, state, events

    def on_round_end(self, record: rounds.RoundRecord) -> None:
        """Log the bytes, the time and the privacy loss so far."""
        state = self.state
        if record.not_applied:
            why = record.not_applied
            self.events.tell(EventLine(event="not applied", round=state.round, why=why))
        stated = self.plan.statement(state.account, state.round, state.ledger, state.up_bytes)
        line = EventLine(
            event="round",
            round=state.round,
            seconds=state.seconds,
            epsilon=stated.spent_epsilon,
            up_bytes=state.up_bytes,
            down_bytes=state.down_bytes,
        )
        self.events.tell(line)


def newest_run(runs: Path) -> RunFolder | None:
    """Return the newest of a server's runs."""
    found = sorted(path for path in runs.glob("run-*") if path.is_dir())
    return RunFolder(found[-1]) if found else None


def drop_old_models(runs: Path, keep: int) -> None:
    """Remove model, log and roster of all finished runs but the newest ``keep``."""
    finished = [path for path in sorted(runs.glob("run-*")) if is_finished(RunFolder(path))]
    for path in finished[:-keep]:
        for name in ("checkpoint", EVENTS, FEDERATED, "sums"):
            remove(path / name)


def is_finished(folder: RunFolder) -> bool:
    """Say whether a run came to its end."""
    return (folder.path / SUMMARY).exists()


@dataclass
class NodeStatus:
    """Counts of one node's events."""

    users: int = 0
    answered: int = 0
    """Requests with a valid reply."""
    lost: int = 0
    """Requests without a reply; a retry may have had one."""
    sat_out: int = 0
    """Rounds and evaluations that the node was left out of."""
    declined: int = 0
    refused: int = 0
    """Invalid replies."""
    excluded: bool = False
    """Whether the node is sent no more requests."""
    software: str = ""
    """What the node runs, where the coordinator runs something else."""
    last_seen: str | None = None
    traffic: dict[str, PhaseTraffic] = field(default_factory=dict)
    """By phase."""


@dataclass
class Question:
    """A request to nodes that waits for answers."""

    to: str
    round: int
    nodes: int
    """How many were asked."""
    waiting: list[str]
    """Nodes that have not answered yet."""
    until: str
    """Its deadline, in UTC."""

    def words(self, now: datetime) -> str:
        """Say how far it is."""
        what = f"round {self.round}, {self.to}" if self.round else self.to
        done = self.nodes - len(self.waiting)
        left = (datetime.fromisoformat(self.until) - now).total_seconds()
        return (
            f"{what}: {done} of {self.nodes} nodes answered, waiting for "
            f"{listed(self.waiting, quote='')}, deadline in {max(0.0, left):.0f} s"
        )


@dataclass
class Status:
    """Status of a run."""

    run: str
    stage: RunStage
    rounds: int
    round: int = 0
    seconds: float = 0.0
    epsilon: float | None = None
    """Spent so far; None without a privacy guarantee."""
    up_bytes: int = 0
    """Bytes of the messages from nodes."""
    down_bytes: int = 0
    """Bytes of the messages to nodes, repeated requests too."""
    lost_rounds: int = 0
    """Rounds whose secure sum could not be opened."""
    not_applied: dict[int, str] = field(default_factory=dict)
    """Rounds whose total was not applied, and why."""
    attendance: dict[str, Attendance] = field(default_factory=dict)
    """Who was in each round and evaluation, by its name and round."""
    question: Question | None = None
    """What the coordinator waits for, during a run."""
    strangers: int = 0
    """Invited nodes that were refused."""
    nodes: dict[str, NodeStatus] = field(default_factory=dict)


def status_of(folder: RunFolder) -> Status:
    """Read the status of a run."""
    stage: RunStage = "training" if folder.is_locked() else "interrupted"
    experiment = folder.experiment()
    status, method = Status(folder.path.name, stage, experiment.rounds), experiment.make_method()
    for line in EventLog(folder.path / EVENTS).lines():
        status.question = following_question(status.question, line)
        if line.event == "finished":
            status.stage = "finished"
        elif line.event == "round":
            status.round, status.seconds, status.epsilon = line.round, line.seconds, line.epsilon
        elif line.event == "counted":
            status.attendance[f"{line.to} {line.round}"] = Attendance(
                round=line.round, to=line.to, users=line.users, missing=list(line.missing)
            )
        elif line.event == "not applied":
            status.not_applied[line.round] = line.why
        elif line.event == "forecast":
            continue
        elif line.node is None:
            status.strangers += line.event == "refused"
            status.lost_rounds += line.event == "lost"
        else:
            node = status.nodes.setdefault(line.node, NodeStatus())
            _count(node, line)
            if line.event == "answered":
                phase = method.phase_of(line.round).name
                before = node.traffic.get(phase, PhaseTraffic())
                node.traffic[phase] = before.plus(line.up_bytes, line.down_bytes, line.seconds)
            status.up_bytes += line.up_bytes
            status.down_bytes += line.down_bytes
    if stage != "training":
        status.question = None
    return status


def following_question(before: Question | None, line: EventLine) -> Question | None:
    """Return what the coordinator waits for after an event."""
    if line.event == "asked":
        until = datetime.fromisoformat(line.time) + timedelta(seconds=line.seconds)
        names = list(line.nodes)
        return Question(line.to, line.round, len(names), names, until.isoformat())
    if before is None or line.event in ("counted", "lost", "round", "finished"):
        return None
    if line.to != before.to or line.event not in ANSWERS:
        return before
    waiting = [name for name in before.waiting if name != line.node]
    return replace(before, waiting=waiting) if waiting else None


def _count(node: NodeStatus, line: EventLine) -> None:
    counter = EVENT_COUNTERS.get(line.event)
    if counter is not None:
        setattr(node, counter, getattr(node, counter) + 1)
    if line.event == "enrolled":
        node.users, node.software = line.users, line.software
    if line.event in ("enrolled", "answered", "declined", "refused"):
        node.last_seen = line.time
    node.excluded |= line.event == "excluded"
