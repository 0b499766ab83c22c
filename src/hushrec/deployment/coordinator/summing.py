"""How the sums of nodes come together on the server: in the clear, or so that only all are seen.

Both ways give the same numbers. In the clear every node's sum is checked by itself, and a node
whose answer cannot be used is named. Of a secure sum only the total is ever known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from hushrec.aggregation import ExactSum
from hushrec.aggregation.statistics import Evaluation, LossSum
from hushrec.deployment.coordinator.journal import JournalEntry, SumBook
from hushrec.deployment.coordinator.session import Desk
from hushrec.deployment.sums import (
    ExpectedSum,
    LookForm,
    NodeSum,
    RoundClosed,
    RoundForm,
    StageReply,
    StageRequest,
    about,
)
from hushrec.errors import ConfigError, FederationError, MessageError, RunError, TooFewError
from hushrec.federation.contract import Registered
from hushrec.federation.requests import EvaluationReply, EvaluationRequest, TrainRequest
from hushrec.io.codec import HEADER_BYTES, kind_of
from hushrec.secagg import Layout, Server, Stage

LARGEST_TOTAL = 2**62 - 1
Metrics = Mapping[str, list[str]]
Value = TypeVar("Value")


@dataclass(frozen=True, eq=False)
class Gathered:
    """What the nodes' sums of a round add up to."""

    sum: NodeSum
    nodes: tuple[str, ...]
    """Those that are in it."""
    noised: bool = False
    """Whether they added their shares of the noise."""
    lost: bool = False
    """Whether there is no sum, and never will be."""


class Summing(Protocol):
    """A way to add up what nodes have."""

    def train(self, requests: Mapping[str, TrainRequest], expected: ExpectedSum) -> Gathered:
        """Let nodes train a round, and add up their sums."""
        ...

    def look(self, requests: Mapping[str, EvaluationRequest], metrics: Metrics) -> Evaluation:
        """Let nodes look at their users, and add up what they see."""
        ...


class InTheClear:
    """The server sees each node's own sum, and adds them up."""

    def __init__(self, desk: Desk) -> None:
        if desk.agreement.secure is not None:
            raise ConfigError("sums are agreed to be secure: nodes answer no other question")
        self.desk = desk

    def train(self, requests: Mapping[str, TrainRequest], expected: ExpectedSum) -> Gathered:
        """Ask the nodes whose clients take part."""
        asked = {name: request for name, request in requests.items() if len(request.clients)}
        total, names = nothing(expected), []

        def read(name: str, answer: bytes) -> NodeSum:
            own = replace(expected, clients=len(asked[name].clients))
            return NodeSum.from_bytes(answer, own)

        def request(name: str) -> bytes:
            return asked[name].to_bytes()

        for name, found in self.desk.ask("train", expected.round, asked, request, read):
            total.summed.merge(found.summed)
            total = replace(
                total,
                loss=total.loss.merge(found.loss),
                up_bytes=total.up_bytes + found.up_bytes,
                zeroed_out=total.zeroed_out + found.zeroed_out,
            )
            names.append(name)
        return Gathered(total, tuple(names))

    def look(self, requests: Mapping[str, EvaluationRequest], metrics: Metrics) -> Evaluation:
        """Ask every node."""
        merged, (what, number) = Evaluation({}), _look_of(requests)

        def read(name: str, answer: bytes) -> Evaluation:
            return EvaluationReply.expected(answer, requests[name], metrics)

        def request(name: str) -> bytes:
            return requests[name].to_bytes()

        for _, evaluation in self.desk.ask(what, number, requests, request, read):
            merged = merged.merge(evaluation)
        return merged


class Securely:
    """The server sees what all nodes' vectors add up to, and no vector (`hushrec.secagg`)."""

    def __init__(self, desk: Desk, registered: Registered, book: SumBook) -> None:
        agreed = desk.agreement.secure
        if agreed is None:
            raise ConfigError("sums are agreed to be in the clear: nodes are in no secure one")
        desk.agreement.check_nodes(len(registered.identities))
        self.desk = desk
        self.registered = registered
        self.book = book
        self.agreed = agreed
        self.noised = desk.agreement.experiment.privacy.mode == "distributed"

    def train(self, requests: Mapping[str, TrainRequest], expected: ExpectedSum) -> Gathered:
        """Sum a round: each once, so that no two sums of it can be compared.

        A sum that nodes have begun to open is gone on with after a restart. A round that too many
        of them have closed, without a sum that opens, is lost.
        """
        form, said = RoundForm(expected.shape), about(_any(requests))
        clients = sum(len(request.clients) for request in requests.values())
        expected = replace(expected, clients=clients, most_steps=LARGEST_TOTAL)
        try:
            kept = self._kept(said, expected.round, form.layout)
            if kept is None:
                kept = self._sum("train", expected.round, requests, form.layout, keep=True)
            assert kept.total is not None, "it was opened"
            facts, arrays = form.unpack(kept.total)
            found = NodeSum.of(expected, facts, arrays, noised=self.noised)
        except MessageError as error:
            self.desk.events.tell("lost", round=expected.round, why=str(error))
            return Gathered(nothing(expected), (), lost=True)
        return Gathered(found, kept.survivors, self.noised)

    def look(self, requests: Mapping[str, EvaluationRequest], metrics: Metrics) -> Evaluation:
        """Sum a look."""
        form, (what, number) = LookForm(metrics), _look_of(requests)
        try:
            kept = self._sum(what, number, requests, form.layout, keep=False)
            assert kept.total is not None, "it was opened"
            looked = form.unpack(kept.total)
            return Evaluation.from_bytes(looked.to_bytes(), metrics)
        except MessageError as error:
            raise FederationError(
                f"the sum of a look cannot be used ({error}): what is done is saved; go on with "
                "--resume"
            ) from None

    # ------------------------------------------------------------ one sum

    def _sum(
        self,
        what: str,
        number: int,
        requests: Mapping[str, TrainRequest | EvaluationRequest],
        layout: Layout,
        *,
        keep: bool,
    ) -> JournalEntry:
        """Ask nodes for every stage and return what their vectors add up to."""
        said = about(_any(requests))
        number_of_sum = self.book.next_number()
        terms = self.registered.terms(self.agreed, number_of_sum, layout, said)
        server, closed = Server(terms), set[str]()
        told = {name: b"" for name in requests if name in terms.identities}
        for stage in (Stage.KEYS, Stage.SHARES, Stage.MASKED, Stage.AGREEMENT):
            asked = {
                name: StageRequest(
                    self.desk.run,
                    terms.number,
                    stage,
                    message,
                    requests[name].to_bytes() if stage == Stage.KEYS else b"",
                )
                for name, message in told.items()
            }
            with _enough():
                self._ask(f"{what}, {stage.name.lower()}", number, server, asked, closed)
                if len(closed) > len(terms.names) - terms.threshold:
                    names = ", ".join(sorted(closed))
                    raise MessageError(f"its sum was opened before by {names}, and is not known")
                told = server.close()
        kept = JournalEntry(terms.number, said, server.to_bytes(), _any(told))
        if keep:
            self.book.keep(kept.to_bytes())
        return self._open(what, number, server, kept, keep=keep)

    def _open(
        self, what: str, number: int, server: Server, kept: JournalEntry, *, keep: bool
    ) -> JournalEntry:
        """Let nodes reveal what opens a sum."""
        asked = {
            name: StageRequest(self.desk.run, kept.number, Stage.REVEALED, kept.message)
            for name in server.awaited
        }
        with _enough():
            self._ask(f"{what}, revealed", number, server, asked, set())
            total = server.total()
        opened = JournalEntry(kept.number, kept.about, total=total, survivors=server.survivors)
        if keep:
            self.book.keep(opened.to_bytes())
        return opened

    def _kept(self, said: str, number: int, layout: Layout) -> JournalEntry | None:
        """Return the sum of this round that was begun before a restart, if it opens."""
        data = self.book.kept()
        if data is None:
            return None
        try:
            kept = JournalEntry.from_bytes(data)
            if kept.about != said or kept.total is not None:
                return kept if kept.about == said else None
            terms = self.registered.terms(self.agreed, kept.number, layout, said)
            server = Server.from_bytes(terms, kept.server)
        except MessageError as error:
            raise RunError(f"what the server kept of its last sum is damaged: {error}") from None
        try:
            return self._open("train", number, server, kept, keep=True)
        except FederationError:
            return None  # who has not revealed yet may be in another sum

    def _ask(
        self,
        what: str,
        number: int,
        server: Server,
        asked: Mapping[str, StageRequest],
        closed: set[str],
    ) -> None:
        """Collect a stage; who does not answer, or what cannot be used, is left out of the sum."""
        most = 8 * server.terms.layout.length + 2**20 + HEADER_BYTES

        def request(name: str) -> bytes:
            return asked[name].to_bytes()

        def read(name: str, answer: bytes) -> None:
            if kind_of(answer) == RoundClosed.kind:
                RoundClosed.from_bytes(answer)
                closed.add(name)
            else:
                server.receive(name, StageReply.from_bytes(answer, most).message)

        for _ in self.desk.ask(what, number, asked, request, read):
            pass


def nothing(expected: ExpectedSum) -> NodeSum:
    """Return the sum of nobody."""
    empty = ExactSum(expected.shape.n_rows)
    return NodeSum(expected.run, expected.round, empty, LossSum(), 0, 0)


@contextmanager
def _enough() -> Iterator[None]:
    """Let a sum that lacks nodes end the run, which can go on when they are back."""
    try:
        yield
    except TooFewError as error:
        raise FederationError(
            f"{error}: what is done is saved; see the log for the others, and go on with --resume"
        ) from None


def _any(of: Mapping[str, Value]) -> Value:
    return next(iter(of.values()))


def _look_of(requests: Mapping[str, EvaluationRequest]) -> tuple[str, int]:
    first = _any(requests)
    return f"look at {first.part}", first.round
