"""Adding up the nodes' sums on the coordinator: in the clear, or by secure aggregation.

Both ways give the same numbers. In the clear, the coordinator checks each node's sum and names the
node of an invalid one. With secure aggregation it learns the total only, and keeps a recovery
journal for a restart: the number of the last sum, as a node begins no number twice, and the sum of
the round in progress from the moment that nodes reveal shares of it, as they reveal shares for one
sum of a round only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hushrec.aggregation import Evaluation, ExactSum, LossSum
from hushrec.deployment.coordinator.session import EventLine, Session
from hushrec.errors import ConfigError, FederationError, MessageError, RunError, TooFewError
from hushrec.federation import sums
from hushrec.federation.backends import Collected
from hushrec.federation.contract import NodeRegistry
from hushrec.federation.requests import EvaluationReply, EvaluationRequest, TrainRequest
from hushrec.federation.sums import ExpectedSum, NodeSum, StageRequest
from hushrec.io.codec import HEADER_BYTES, ArraySpec, Count, Message, kind_of
from hushrec.io.files import write_bytes, writing
from hushrec.secagg import Stage, SumServer, VectorLayout

LARGEST_TOTAL = 2**62 - 1
Metrics = Mapping[str, list[str]]
Value = TypeVar("Value")


class RecoveryJournal:
    """The last sum's number and the sum in progress, on disk; one process writes at a time."""

    def __init__(self, folder: Path) -> None:
        self.number, self.entry = folder / "sum-number", folder / "sum-kept"

    def next_number(self) -> int:
        """Return a number above all before it, from 1 on; it is on the disk before it is used."""
        file = self.number
        try:
            number = 1 + int(file.read_text("ascii") if file.exists() else 0)
        except (OSError, ValueError):
            raise RunError(f"{file} is damaged: the run cannot go on with secure sums") from None
        self._write(file, str(number).encode())
        return number

    def write(self, entry: JournalEntry) -> None:
        """Write an entry in place of the one before."""
        self._write(self.entry, entry.to_bytes())

    def read(self) -> JournalEntry | None:
        """Return the last entry."""
        return JournalEntry.from_bytes(self.entry.read_bytes()) if self.entry.exists() else None

    def clear(self) -> None:
        """Remove the entry, once its round is in a checkpoint."""
        self.entry.unlink(missing_ok=True)

    def _write(self, file: Path, data: bytes) -> None:
        with writing(file):
            file.parent.mkdir(mode=0o700, exist_ok=True)
        write_bytes(file, data, secret=True)


@dataclass(frozen=True, eq=False)
class JournalEntry(Message, kind="journal-entry", most_bytes=2**32):
    """A secure sum that is about to be opened, or was opened."""

    number: Count
    about: Annotated[str, Field(max_length=1000)]
    """What was summed."""
    server: bytes = b""
    """The server's state before the last stage."""
    message: bytes = b""
    """What nodes are sent in the last stage."""
    total: Annotated[NDArray[np.int64] | None, ArraySpec("int64", ("words",), optional=True)] = None
    """The sum, once it is opened."""
    survivors: tuple[str, ...] = ()
    """Names of the nodes that are in it."""


class PlainSumming:
    """The coordinator receives each node's own sum, and adds them up."""

    def __init__(self, session: Session) -> None:
        if session.contract.secure is not None:
            raise ConfigError("sums are agreed to be secure: nodes answer no other question")
        self.session = session

    def train(
        self, requests: Mapping[str, TrainRequest], expected: ExpectedSum
    ) -> tuple[Collected, tuple[str, ...]]:
        """Train on the nodes whose clients take part; return the total, and the nodes in it."""
        active = {name: request for name, request in requests.items() if len(request.clients)}
        total, names = _empty(expected), []

        def read(name: str, answer: bytes) -> NodeSum:
            own = replace(expected, clients=len(active[name].clients))
            return NodeSum.from_bytes(answer, own)

        exchange = self.session.exchange("train", expected.round, active, read, expected.most_bytes)
        for name, found in exchange:
            total.summed.merge(found.summed)
            total = replace(
                total,
                loss=total.loss.merge(found.loss),
                up_bytes=total.up_bytes + found.up_bytes,
                zeroed_out=total.zeroed_out + found.zeroed_out,
            )
            names.append(name)
        return total, tuple(names)

    def evaluate(self, requests: Mapping[str, EvaluationRequest], metrics: Metrics) -> Evaluation:
        """Evaluate on every node."""
        merged, first = Evaluation({}), _any(requests)

        def read(name: str, answer: bytes) -> Evaluation:
            return EvaluationReply.expected(answer, requests[name], metrics)

        what = f"evaluate {first.part}"
        for _, evaluation in self.session.exchange(what, first.round, requests, read):
            merged = merged.merge(evaluation)
        return merged


class SecureSumming:
    """The coordinator learns the sum of the nodes' vectors, and no vector (`hushrec.secagg`)."""

    def __init__(
        self, session: Session, registered: NodeRegistry | None, journal: RecoveryJournal
    ) -> None:
        agreed = session.contract.secure
        if agreed is None:
            raise ConfigError("sums are agreed to be in the clear: nodes are in no secure one")
        if registered is None:
            raise ConfigError("secure sums need all identities: start from the server's folder")
        session.contract.check_nodes(len(registered.identities))
        self.session, self.registered, self.journal = session, registered, journal
        self.agreed = agreed
        self.noised = session.contract.experiment.privacy.mode == "distributed"

    def train(
        self, requests: Mapping[str, TrainRequest], expected: ExpectedSum
    ) -> tuple[Collected, tuple[str, ...]]:
        """Sum a round, once, so that no two sums of it can be compared.

        After a restart, a sum that nodes have begun to open is continued. A round that too many
        nodes have closed, without a sum that opens, is lost.
        """
        form, subject = sums.RoundVector(expected.shape), sums.about(_any(requests))
        clients = sum(len(request.clients) for request in requests.values())
        expected = replace(expected, clients=clients, most_steps=LARGEST_TOTAL)
        try:
            kept = self._kept(subject, expected.round, form.layout)
            if kept is None:
                kept = self._sum("train", expected.round, requests, form.layout, keep=True)
            assert kept.total is not None, "it was opened"
            facts, arrays = form.unpack(kept.total)
            found = NodeSum.of(expected, facts, arrays, noised=self.noised)
        except MessageError as error:
            lost = EventLine(event="lost", round=expected.round, why=str(error))
            self.session.events.tell(lost)
            return replace(_empty(expected), lost=True), ()
        sizes = found.up_bytes, 0, found.zeroed_out
        return Collected(found.summed, found.loss, *sizes, self.noised), kept.survivors

    def evaluate(self, requests: Mapping[str, EvaluationRequest], metrics: Metrics) -> Evaluation:
        """Sum an evaluation."""
        form, first = sums.EvaluationVector(metrics), _any(requests)
        what = f"evaluate {first.part}"
        try:
            kept = self._sum(what, first.round, requests, form.layout, keep=False)
            assert kept.total is not None, "it was opened"
            return Evaluation.from_bytes(form.unpack(kept.total).to_bytes(), metrics)
        except MessageError as error:
            raise FederationError(
                f"the sum of an evaluation is invalid ({error}): what is done is saved; go on with "
                "--resume"
            ) from None

    # ------------------------------------------------------------ one sum

    def _sum(
        self,
        what: str,
        number: int,
        requests: Mapping[str, TrainRequest | EvaluationRequest],
        layout: VectorLayout,
        *,
        keep: bool,
    ) -> JournalEntry:
        """Run every stage of a secure sum and return its journal entry."""
        subject = sums.about(_any(requests))
        terms = self.registered.terms(self.agreed, self.journal.next_number(), layout, subject)
        server, closed = SumServer(terms), set[str]()
        messages = {name: b"" for name in requests if name in terms.identities}
        for stage in (Stage.KEYS, Stage.SHARES, Stage.MASKED, Stage.CONSISTENCY):
            steps = {}
            for name, message in messages.items():
                request = requests[name].to_bytes() if stage == Stage.KEYS else b""
                steps[name] = StageRequest(self.session.run, terms.number, stage, message, request)
            with _enough():
                self._collect(f"{what}, {stage.name.lower()}", number, server, steps, closed)
                if len(closed) > len(terms.names) - terms.threshold:
                    names = ", ".join(sorted(closed))
                    raise MessageError(f"its sum was opened before by {names}, and is not known")
                messages = server.close()
        kept = JournalEntry(terms.number, subject, server.to_bytes(), _any(messages))
        if keep:
            self.journal.write(kept)
        return self._open(what, number, server, kept, keep=keep)

    def _open(
        self, what: str, number: int, server: SumServer, kept: JournalEntry, *, keep: bool
    ) -> JournalEntry:
        """Let nodes reveal the shares that open a sum."""
        last = StageRequest(self.session.run, kept.number, Stage.REVEALED, kept.message)
        steps = dict.fromkeys(server.awaited, last)
        with _enough():
            self._collect(f"{what}, revealed", number, server, steps, set())
            total = server.total()
        opened = JournalEntry(kept.number, kept.about, total=total, survivors=server.survivors)
        if keep:
            self.journal.write(opened)
        return opened

    def _kept(self, subject: str, number: int, layout: VectorLayout) -> JournalEntry | None:
        """Return the sum of this round that was begun before a restart, if it can be opened."""
        try:
            kept = self.journal.read()
            if kept is None or kept.about != subject:
                return None
            if kept.total is not None:
                return kept
            terms = self.registered.terms(self.agreed, kept.number, layout, subject)
            server = SumServer.from_bytes(terms, kept.server)
        except MessageError as error:
            raise RunError(f"the journal of secure sums is damaged: {error}") from None
        try:
            return self._open("train", number, server, kept, keep=True)
        except FederationError:
            return None  # nodes that have not revealed shares yet may be in another sum

    def _collect(
        self,
        what: str,
        number: int,
        server: SumServer,
        steps: Mapping[str, StageRequest],
        closed: set[str],
    ) -> None:
        """Collect a stage; nodes without a valid reply are left out of the sum."""
        most = 8 * server.terms.layout.length + 2**20 + HEADER_BYTES

        def read(name: str, answer: bytes) -> None:
            if kind_of(answer) == sums.RoundClosed.kind:
                sums.RoundClosed.from_bytes(answer)
                closed.add(name)
            else:
                server.receive(name, sums.StageReply.from_bytes(answer, most).message)

        for _ in self.session.exchange(what, number, steps, read, most):
            pass


def _empty(expected: ExpectedSum) -> Collected:
    """Return the sum over no clients."""
    return Collected(ExactSum(expected.shape.n_rows), LossSum(), up_bytes=0, down_bytes=0)


@contextmanager
def _enough() -> Iterator[None]:
    """Stop the run where a sum lacks nodes; the run can continue when they are back."""
    try:
        yield
    except TooFewError as error:
        raise FederationError(
            f"{error}: what is done is saved; see the log for the others, and go on with --resume"
        ) from None


def _any(of: Mapping[str, Value]) -> Value:
    return next(iter(of.values()))
