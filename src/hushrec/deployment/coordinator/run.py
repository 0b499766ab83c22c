"""The coordinator's side of a federated run, from the invitation to the last evaluation.

It runs the loop of every run, `federation.rounds`, over the nodes of a `Link`. A checkpoint is
written after each round, so a run that was interrupted, on the server or on the way, goes on as if
nothing had happened: nodes answer a round that they have done with the bytes of their first answer.

The folder of a run holds::

    config.toml, metrics.jsonl, checkpoint/, summary.json    as in every run folder
    roster.json      which node holds which clients
    events.jsonl     the coordinator's log, one JSON object a line
    sums/            recovery journal of secure aggregation
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hushrec.deployment.coordinator.backend import RemoteBackend
from hushrec.deployment.coordinator.journal import RecoveryJournal
from hushrec.deployment.coordinator.roster import Partition, Roster
from hushrec.deployment.coordinator.session import Policy, Session
from hushrec.deployment.coordinator.status import EVENTS, EventLog
from hushrec.deployment.coordinator.summing import SecureSumming
from hushrec.deployment.transport import Link, NodeId
from hushrec.errors import ConfigError, RunError
from hushrec.federation.callbacks import Callback, RoundRecord
from hushrec.federation.contract import Contract, NodeRegistry
from hushrec.federation.rounds import ServerState, Training, finish, run_rounds
from hushrec.federation.setup import set_up_public
from hushrec.io.stored import read_json
from hushrec.privacy.plan import Plan
from hushrec.runs.checkpoint import CheckpointCallback, restore, saved_key
from hushrec.runs.folder import FEDERATED, SUMMARY, RunFolder
from hushrec.runs.schema import Summary
from hushrec.runs.summary import summarise_federation
from hushrec.streams import new_key


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
        elif not resume and (before.path / FEDERATED).exists():
            raise RunError(
                f"{before.path} was interrupted: go on with it with --resume, or remove it to "
                "begin anew"
            )
        return cls(before, contract, policy, EventLog(before.path / EVENTS), partition, registered)

    def train(self, link: Link, callbacks: Sequence[Callback] = ()) -> Summary:
        """Train to the end, from the start or from the newest checkpoint; return the summary."""
        with self.folder.locked():
            return self._train(link, callbacks)

    def _train(self, link: Link, callbacks: Sequence[Callback]) -> Summary:
        roster, session = self._gather(link)
        training, state = self._start(roster, session)
        restore(state, training.backend, self.folder, training.experiment.rounds)
        self.events.tell("going on" if state.round else "begun", round=state.round, run=roster.run)
        assert isinstance(training.backend, RemoteBackend)
        training.backend.round = state.round
        training.backend.selected = state.selected_round
        saves = CheckpointCallback(self.folder, training.backend, state)
        callbacks = (saves, _RoundEvents(training.plan, state, self.events), *callbacks)
        run_rounds(training, state, callbacks)
        results = finish(training, state, callbacks)
        self._journal.clear()
        nodes = {name: len(holding.users) for name, holding in roster.holdings.items()}
        summary = summarise_federation(training, state, nodes, results)
        self.folder.write(SUMMARY, summary)
        self.events.tell("finished", round=state.round, selected_round=state.selected_round)
        return summary

    def _gather(self, link: Link) -> tuple[Roster, Session]:
        """Meet the nodes: those of the run, or in a new one all that take part."""
        path = self.folder.path / FEDERATED
        if path.exists():
            roster = Roster.from_json(read_json(path), str(path))
            session = self._session(roster.run, link)
            session.meet(list(roster.holdings))
            return roster, session
        run = secrets.token_hex(8)
        session = self._session(run, link)
        roster = Roster.of(run, self.contract.experiment, session.gather(), self.partition)
        self.folder.write_text(FEDERATED, json.dumps(roster.to_json()))
        return roster, session

    def _session(self, run: str, link: Link) -> Session:
        return Session(self.contract, run, link, self.policy, self.events, self.node_ids)

    @property
    def _journal(self) -> RecoveryJournal:
        return RecoveryJournal(self.folder.path / "sums")

    def _summing(self, session: Session) -> SecureSumming | None:
        """Return how sums come together; None where they are in the clear."""
        if self.contract.secure is None:
            return None
        if self.registered is None:
            raise ConfigError(
                "secure sums need every node's identity: start from the server's folder"
            )
        return SecureSumming(session, self.registered, self._journal)

    def _start(self, roster: Roster, session: Session) -> tuple[Training, ServerState]:
        """Build the training over the nodes, and the state before the first round."""
        experiment, public = self.contract.experiment, self.contract.public
        clients = roster.clients(promised=experiment.privacy.promises)
        key, budgets = saved_key(self.folder) or new_key(), roster.epsilon
        setup = set_up_public(experiment, public, key, roster.digest, len(clients), budgets)
        nodes = RemoteBackend(
            setup.task, experiment, roster, session, summing=self._summing(session)
        )
        training = Training(experiment, setup.task, setup.plan, clients, nodes, roster.newcomers)
        return training, setup.first_state(len(roster.trains))


class _RoundEvents(Callback):
    """Adds an event to the log after every round: its costs, once its checkpoint is written."""

    def __init__(self, plan: Plan, state: ServerState, events: EventLog) -> None:
        self.plan, self.state, self.events = plan, state, events

    def on_round_end(self, record: RoundRecord) -> None:
        """Log the bytes, the time and the privacy loss so far."""
        state = self.state
        sent = {"up_bytes": state.up_bytes, "down_bytes": state.down_bytes}
        spent = spent_epsilon(self.plan, state)
        self.events.tell("round", round=state.round, seconds=state.seconds, epsilon=spent, **sent)


def spent_epsilon(plan: Plan, state: ServerState) -> float | None:
    """Return the epsilon of the rounds so far; None without a guarantee."""
    statement = plan.statement(state.account, state.round, state.ledger, state.up_bytes)
    return statement.spent_epsilon


def newest_run(runs: Path) -> RunFolder | None:
    """Return the newest of a server's runs."""
    found = sorted(path for path in runs.glob("run-*") if path.is_dir())
    return RunFolder(found[-1]) if found else None


def is_finished(folder: RunFolder) -> bool:
    """Say whether a run came to its end."""
    return (folder.path / SUMMARY).exists()
