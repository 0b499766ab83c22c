"""Adding up the nodes' sums on the coordinator: in the clear, or by secure aggregation.

Both ways give the same numbers. In the clear, the coordinator checks each node's sum and names the
node of an invalid one. With secure aggregation it learns the total only. Vectors are in files, and
in memory piece by piece. A recovery journal has what a restart needs: the number of the last sum,
as a node begins no number twice, and the sum of the round in progress from the moment that nodes
reveal shares of it, as they reveal shares for one sum of a round only.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field

from hushrec.aggregation import Evaluation, ExactSum, LossSum
from hushrec.deployment.coordinator.session import EventLine, Session
from hushrec.errors import ConfigError, FederationError, MessageError, RunError, TooFewError
from hushrec.federation import sums
from hushrec.federation.backends import Collected
from hushrec.federation.contract import NodeRegistry
from hushrec.federation.requests import EvaluationReply, EvaluationRequest, TrainRequest
from hushrec.federation.sums import ExpectedSum, NodeSum, StageRequest
from hushrec.io.codec import HEADER_BYTES, Count, Message, kind_of
from hushrec.io.files import sync, write_bytes, writing
from hushrec.secagg import SetupServer, Stage, SumServer, VectorLayout
from hushrec.secagg.server import MASKED

LARGEST_TOTAL = 2**62 - 1
Metrics = Mapping[str, list[str]]
Value = TypeVar("Value")


TOTAL = "total"
"""Name of an opened sum among the pieces of its folder."""


class FilePieces:
    """Pieces of vectors in files of one folder (`secagg.server.PieceStore`)."""

    def __init__(self, folder: Path, piece_bytes: int) -> None:
        self.folder, self.piece_bytes = folder, piece_bytes

    def write(self, name: str, number: int, piece: bytes) -> None:
        """Keep the next piece of a vector."""
        path = self.folder / name
        with writing(path):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            kept = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            with os.fdopen(kept, "wb") as file:
                file.seek(number * self.piece_bytes)
                file.write(piece)

    def read(self, name: str, number: int) -> bytes:
        """Return a piece."""
        try:
            with (self.folder / name).open("rb") as file:
                file.seek(number * self.piece_bytes)
                return file.read(self.piece_bytes)
        except OSError as error:
            raise RunError(f"cannot read {self.folder / name}: {error.strerror}") from None

    def remove(self, name: str) -> None:
        """Remove all pieces of a vector, if there are any."""
        (self.folder / name).unlink(missing_ok=True)

    def sync(self, name: str) -> None:
        """Wait until a vector is on the disk."""
        with writing(self.folder / name):
            sync(self.folder / name)


class RecoveryJournal:
    """The last sum's number and the sum in progress, on disk; one process writes at a time.

    The vectors of a sum are in a folder of its number.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.number, self.entry = folder / "sum-number", folder / "sum-kept"

    def next_number(self, count: int = 1) -> int:
        """Return the first of ``count`` numbers above all before them, from 1 on; the last one is
        on the disk before any is used."""
        file = self.number
        try:
            number = 1 + int(file.read_text("ascii") if file.exists() else 0)
        except (OSError, ValueError):
            raise RunError(f"{file} is damaged: the run cannot go on with secure sums") from None
        self._write(file, str(number + count - 1).encode())
        return number

    def write(self, entry: JournalEntry) -> None:
        """Write an entry in place of the one before."""
        self._write(self.entry, entry.to_bytes())
        self.tidy()

    def read(self) -> JournalEntry | None:
        """Return the last entry."""
        if not self.entry.exists():
            return None
        try:
            return JournalEntry.from_bytes(self.entry.read_bytes())
        except MessageError as error:
            raise RunError(f"the journal of secure sums is damaged: {error}") from None

    def pieces(self, number: int, layout: VectorLayout) -> FilePieces:
        """Return the pieces of the vectors of a sum."""
        return FilePieces(self.folder / f"pieces-{number}", layout.piece_bytes)

    def tidy(self) -> None:
        """Remove all vectors but those of the entry."""
        entry = self.read()
        kept = None if entry is None else f"pieces-{entry.number}"
        for folder in self.folder.glob("pieces-*"):
            if folder.name != kept:
                shutil.rmtree(folder, ignore_errors=True)

    def clear(self) -> None:
        """Remove the entry, once its round is in a checkpoint."""
        self.entry.unlink(missing_ok=True)
        self.tidy()

    def _write(self, file: Path, data: bytes) -> None:
        with writing(file):
            file.parent.mkdir(mode=0o700, exist_ok=True)
        write_bytes(file, data, secret=True)


@dataclass(frozen=True, eq=False)
class JournalEntry(Message, kind="journal-entry"):
    """A secure sum that is about to be opened, or was opened; its vectors are beside it."""

    number: Count
    first: Count
    """Number of the first sum of its set-up."""
    about: Annotated[str, Field(max_length=1000)]
    """What was summed."""
    server: bytes = b""
    """The server's state before the last stage."""
    message: bytes = b""
    """What nodes are sent in the last stage."""
    opened: bool = False
    survivors: tuple[str, ...] = ()
    """Names of the nodes that are in an opened sum."""


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

    def evaluate(
        self, requests: Mapping[str, EvaluationRequest], metrics: Metrics
    ) -> tuple[Evaluation, tuple[str, ...]]:
        """Evaluate on every node; return the sums, and the nodes in them."""
        merged, first, names = Evaluation({}), _any(requests), []

        def read(name: str, answer: bytes) -> Evaluation:
            return EvaluationReply.expected(answer, requests[name], metrics)

        what = f"evaluate {first.part}"
        for name, evaluation in self.session.exchange(what, first.round, requests, read):
            merged = merged.merge(evaluation)
            names.append(name)
        return merged, tuple(names)


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
        self.setup: SetupServer | None = None
        """The set-up of the next sums; after a restart there is none."""
        self.following = 0
        """Number of the next sum in it."""
        self.away: set[str] = set()
        """Nodes that were not connected when it was made."""
        journal.tidy()

    def train(
        self, requests: Mapping[str, TrainRequest], expected: ExpectedSum
    ) -> tuple[Collected, tuple[str, ...]]:
        """Sum a round, once, so that no two sums of it can be compared.

        After a restart, a sum that nodes have begun to open is continued. A round that too many
        nodes have closed, without a sum that opens, is lost.
        """
        first = _any(requests)
        training, most = first.assignment.training, self.agreed.most_bytes
        form, subject = sums.RoundVector(expected.shape, training, most), sums.about(first)
        clients = sum(len(request.clients) for request in requests.values())
        expected = replace(expected, clients=clients, most_steps=LARGEST_TOTAL)
        try:
            kept = self._kept(subject, expected.round, form.layout)
            if kept is None:
                kept = self._sum("train", expected.round, requests, form.layout, keep=True)
            opened, pieces = kept
            facts, arrays = form.unpack(pieces)
            found = NodeSum.of(expected, facts, arrays, noised=self.noised)
        except MessageError as error:
            lost = EventLine(event="lost", round=expected.round, why=str(error))
            self.session.events.tell(lost)
            return replace(_empty(expected), lost=True), ()
        sizes = found.up_bytes, 0, found.zeroed_out
        return Collected(found.summed, found.loss, *sizes, self.noised), opened.survivors

    def evaluate(
        self, requests: Mapping[str, EvaluationRequest], metrics: Metrics
    ) -> tuple[Evaluation, tuple[str, ...]]:
        """Sum an evaluation; return the sums, and the nodes in them."""
        form, first = sums.EvaluationVector(metrics), _any(requests)
        what = f"evaluate {first.part}"
        try:
            opened, pieces = self._sum(what, first.round, requests, form.layout, keep=False)
            found = Evaluation.from_bytes(form.unpack(pieces).to_bytes(), metrics)
            held = sum(len(requests[name].assignment.users) for name in opened.survivors)
            if found.users > held:
                raise MessageError(f"it counts {found.users:,} users, and its nodes hold {held:,}")
            return found, opened.survivors
        except MessageError as error:
            raise FederationError(
                f"the sum of an evaluation is invalid ({error}): what is done is saved; go on with "
                "--resume"
            ) from None

    # ------------------------------------------------------------ the set-up of many sums

    def _next_sum(self, what: str, number: int, names: Iterable[str]) -> tuple[SetupServer, int]:
        """Return a set-up and the number of the next sum in it.

        A set-up is made anew when its sums are used up, when too few of its nodes are connected,
        or when a node is back that was away when it was made.
        """
        present = self._connected(names)
        if self.setup is not None:
            terms, members = self.setup.terms, self.setup.told.keys()
            left = self.following < terms.first + terms.count
            enough = len(members & present) >= terms.threshold
            if not left or not enough or (present & self.away):
                self.setup = None
        if self.setup is None:
            self.setup = self._set_up(what, number, names)
            self.following = self.setup.terms.first
            self.away = set(names) - self._connected(names) - self.setup.told.keys()
        self.following += 1
        return self.setup, self.following - 1

    def _connected(self, names: Iterable[str]) -> set[str]:
        present = set(self.session.link.present())
        return {name for name in names if self.session.known.get(name) in present}

    def _set_up(self, what: str, number: int, names: Iterable[str]) -> SetupServer:
        """Let nodes announce keys for the next sums, and share their secrets."""
        first = self.journal.next_number(self.agreed.setup_sums)
        server = SetupServer(self.registered.setup_terms(self.agreed, first))
        told = {name: b"" for name in names if name in server.terms.identities}
        for stage in (Stage.KEYS, Stage.SHARES):
            steps = {
                name: StageRequest(self.session.run, first, stage, message)
                for name, message in told.items()
            }
            with _enough():
                self._collect(f"{what}, {stage.name.lower()}", number, server, steps, set())
                told = server.close()
        return server

    # ------------------------------------------------------------ one sum

    def _sum(
        self,
        what: str,
        number: int,
        requests: Mapping[str, TrainRequest | EvaluationRequest],
        layout: VectorLayout,
        *,
        keep: bool,
    ) -> tuple[JournalEntry, Iterator[bytes]]:
        """Run every stage of a secure sum; return its journal entry and the sum's pieces."""
        subject = sums.about(_any(requests))
        setup, following = self._next_sum(what, number, requests)
        first = setup.terms.first
        terms = self.registered.terms(self.agreed, first, following, layout, subject)
        server = SumServer(terms, setup, self.journal.pieces(following, layout))
        self._vectors(what, number, server, setup, requests)
        with _enough():
            messages = server.close()
            steps = {
                name: StageRequest(self.session.run, following, Stage.CONSISTENCY, message)
                for name, message in messages.items()
            }
            self._collect(f"{what}, consistency", number, server, steps, set())
            messages = server.close()
        kept = JournalEntry(following, first, subject, server.to_bytes(), _any(messages))
        if keep:
            self.journal.pieces(following, layout).sync(MASKED)
            self.journal.write(kept)
        return self._open(what, number, server, kept, keep=keep)

    def _vectors(
        self,
        what: str,
        number: int,
        server: SumServer,
        setup: SetupServer,
        requests: Mapping[str, TrainRequest | EvaluationRequest],
    ) -> None:
        """Collect the masked vectors, piece by piece, from the nodes that sent every piece."""
        terms, closed, pieces = server.terms, set[str](), server.terms.layout.pieces
        for piece in range(pieces):
            steps = {}
            for name in server.awaiting(piece):
                told, request = b"", b""
                if piece == 0:
                    told, request = setup.told[name], requests[name].to_bytes()
                about = self.session.run, terms.number, Stage.MASKED
                steps[name] = StageRequest(*about, told, request, piece)
            if len(steps) < terms.threshold:
                return  # closing the stage says who is missing
            part = f" {piece + 1} of {pieces}" if pieces > 1 else ""
            self._collect(f"{what}, masked{part}", number, server, steps, closed)
            if len(closed) > len(terms.names) - terms.threshold:
                names = ", ".join(sorted(closed))
                raise MessageError(f"its sum was opened before by {names}, and is not known")

    def _open(
        self, what: str, number: int, server: SumServer, kept: JournalEntry, *, keep: bool
    ) -> tuple[JournalEntry, Iterator[bytes]]:
        """Let nodes reveal the shares that open a sum."""
        last = StageRequest(self.session.run, kept.number, Stage.REVEALED, kept.message)
        steps, layout = dict.fromkeys(server.awaited, last), server.terms.layout
        with _enough():
            self._collect(f"{what}, revealed", number, server, steps, set())
            total = server.total()
        opened = replace(kept, server=b"", message=b"", opened=True, survivors=server.survivors)
        files = self.journal.pieces(kept.number, layout)
        for piece, words in enumerate(total):
            files.write(TOTAL, piece, words)
        if keep:
            files.sync(TOTAL)
            self.journal.write(opened)
        files.remove(MASKED)
        return opened, self._opened(files, layout, keep=keep)

    def _opened(self, files: FilePieces, layout: VectorLayout, *, keep: bool) -> Iterator[bytes]:
        for piece in range(layout.pieces):
            words = files.read(TOTAL, piece)
            if len(words) != layout.size(piece):
                raise RunError(f"{files.folder / TOTAL} is damaged: the sum is not whole")
            yield words
        if not keep:
            self.journal.tidy()

    def _kept(
        self, subject: str, number: int, layout: VectorLayout
    ) -> tuple[JournalEntry, Iterator[bytes]] | None:
        """Return the sum of this round that was begun before a restart, if it can be opened."""
        kept = self.journal.read()
        if kept is None or kept.about != subject:
            return None
        files = self.journal.pieces(kept.number, layout)
        if kept.opened:
            return kept, self._opened(files, layout, keep=True)
        terms = self.registered.terms(self.agreed, kept.first, kept.number, layout, subject)
        try:
            server = SumServer.from_bytes(terms, kept.server, files)
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
        server: SetupServer | SumServer,
        steps: Mapping[str, StageRequest],
        closed: set[str],
    ) -> None:
        """Collect a stage; nodes without a valid reply are left out of the sum."""
        most = 2**10 * server.terms.count * len(server.terms.names)
        if isinstance(server, SumServer):
            most = server.terms.layout.size(0)

        def read(name: str, answer: bytes) -> None:
            if kind_of(answer) == sums.RoundClosed.kind:
                sums.RoundClosed.from_bytes(answer)
                closed.add(name)
            else:
                whole = most + 2**20 + HEADER_BYTES
                server.receive(name, sums.StageReply.from_bytes(answer, whole).message)

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
