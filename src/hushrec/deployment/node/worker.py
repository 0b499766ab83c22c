"""A node's answers to the coordinator's messages, from its database.

A worker keeps no state between messages outside of the database, so it may crash at any point. A
repeated request is answered with the bytes of the first answer; an unfinished round is trained from
the start. A request that cannot be answered gets a refusal that tells nothing of the node's users.

Secure sums need two answers for a set-up, and three for each sum, each stored before it is sent. A
sum is over a round or an evaluation. A round is trained when its vector is due; the vector is
stored, and sent in pieces. The round may be summed again, in another sum, as long as this node has
not helped to open one. From then on the round is finished: its private parameters are used, and the
node is in no other sum of it.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass, field, replace

import numpy as np

from hushrec.deployment.node.database import NodeDatabase
from hushrec.deployment.node.runs import FinishedRound, NodeRun, NodeRuns
from hushrec.deployment.node.tables import content_digest
from hushrec.deployment.node.training import NodeTrainer, split_of
from hushrec.errors import ConfigError, HushrecError, MessageError, listed
from hushrec.federation import requests as messages
from hushrec.federation import sums
from hushrec.federation.backends import THIS_MACHINE, Machine
from hushrec.federation.contract import NodeRegistry
from hushrec.federation.requests import (
    EvaluationRequest,
    Invitation,
    ModelDelivery,
    TrainRequest,
)
from hushrec.federation.sums import StageRequest
from hushrec.io.codec import kind_of
from hushrec.privacy.budgets import by_feature
from hushrec.secagg import (
    Identity,
    NodeState,
    SetupNode,
    SetupState,
    Stage,
    SumNode,
    VectorLayout,
)

ATTEMPTS = 5
"""Attempts where another process changes the database meanwhile."""


@dataclass(frozen=True)
class NodeCredentials:
    """The node's identity key and the public identities of all nodes, from its own folder."""

    registered: NodeRegistry
    identity: Identity = field(repr=False)


class Worker:
    """Answers the coordinator's messages."""

    def __init__(
        self,
        store: NodeDatabase,
        machine: Machine = THIS_MACHINE,
        tell: Callable[[str], None] = lambda line: None,
        credentials: NodeCredentials | None = None,
    ) -> None:
        """``tell`` is called with errors, for the node's own log; ``credentials`` are needed where
        the contract has secure sums."""
        self.store = store
        self.runs = NodeRuns(store)
        self.trainer = NodeTrainer(self.runs, machine)
        self.tell = tell
        self.sums: SecureSumWorker | None = None
        if store.contract.secure is not None:
            if credentials is None:
                raise ConfigError(
                    f"node '{store.name}' agreed to secure sums, and has no identity for them: "
                    "start it from its folder"
                )
            self.sums = SecureSumWorker(self.runs, self.trainer, credentials)

    def answer(self, message: bytes) -> bytes:
        """Answer any message."""
        try:
            return self._answer(message)
        except MessageError as error:
            why = str(error)
        except HushrecError as error:
            self.tell(f"hushrec: {error}")
            why = f"the node could not do it ({type(error).__name__}); its own log says why"
        return messages.Refusal(why).to_bytes()

    def _answer(self, message: bytes) -> bytes:
        kind = kind_of(message)
        if kind == Invitation.kind:
            return self._invited(message)
        if kind == StageRequest.kind:
            if self.sums is None:
                raise MessageError("this node agreed to sums in the clear: it is in no secure one")
            return self.sums.answer(message)
        if kind in (TrainRequest.kind, EvaluationRequest.kind) and self.sums is not None:
            raise MessageError("sums are agreed to be secure: this node sends none in the clear")
        if kind == TrainRequest.kind:
            return self._train(TrainRequest.from_bytes(message), digest_of(message))
        if kind == EvaluationRequest.kind:
            return self._evaluate(EvaluationRequest.from_bytes(message)).to_bytes()
        if kind == ModelDelivery.kind:
            return self._keep_model(ModelDelivery.from_bytes(message)).to_bytes()
        raise MessageError("a node answers invitations, training requests and evaluations")

    def _invited(self, message: bytes) -> bytes:
        """Take part, or decline with a reason that both logs have."""
        try:
            try:
                invitation = Invitation.from_bytes(message)
            except MessageError as error:
                why = f"{error} (this node runs {messages.software()})"
                raise MessageError(why) from None
            return self._enrol(invitation).to_bytes()
        except MessageError as error:
            self.tell(f"hushrec: declined to take part in a run: {error}")
            return messages.Refusal(str(error), self.store.name).to_bytes()

    def _enrol(self, invitation: Invitation) -> messages.Enrolment:
        contract, software = self.store.contract, messages.software()
        messages.check_release("this node", software, "the server", invitation.software)
        if invitation.catalogue != contract.catalogue.digest:
            raise MessageError(
                "this node has another catalogue than the server: give both the same contract"
            )
        if invitation.settings != contract.settings_digest:
            which = listed(contract.differences(invitation.terms), most=3, quote="")
            raise MessageError(
                "this node agreed to other settings than the server: give both the same contract"
                + (f"; they differ in {which}" if which else "")
            )
        run, privacy = self.runs.begin(invitation.run), contract.experiment.privacy
        split = split_of(self.store, run)
        view = split.train_view(contract.experiment.protocol)
        activity, declared = np.diff(view.positives.indptr[view.client_indptr]), None
        if privacy.budgets == "declared":
            assert privacy.budget_feature is not None, "checked"
            feature, features = privacy.budget_feature, split.train.user_features
            declared = by_feature(features, feature, split.data.users, split.members)
        return messages.Enrolment(
            run.id,
            self.store.name,
            users=len(run.members),
            idle=int((split.train.positives.lengths == 0).sum()),
            trains=activity > 0,
            activity=activity if privacy.budgets == "activity" else None,
            epsilon=declared,
            software=software,
        )

    def _train(self, request: TrainRequest, digest: str) -> bytes:
        number = request.download.round
        for _ in range(ATTEMPTS):
            run = self.runs.get(request.assignment.run)
            if number == run.round and run.request == digest:
                reply = self.runs.reply(run)
                if reply is not None:
                    return reply
            if number <= run.round:
                raise MessageError(
                    f"round {number} is over: this node is at round {run.round} and does none twice"
                )
            self.runs.check_joined(run, number)
            self.runs.pin_terms(run, request.assignment.digest)
            summed, trained = self.trainer.train(run, request, digest)
            done = replace(trained, reply=summed.to_bytes())
            if self.runs.finish_round(run, done):
                return done.reply
        raise MessageError("the node's users changed again and again while they were trained")

    def _evaluate(self, request: EvaluationRequest) -> messages.EvaluationReply:
        run = self.runs.get(request.assignment.run)
        self.runs.pin_terms(run, request.assignment.digest)
        evaluation = self.trainer.evaluate(run, request)
        return messages.EvaluationReply(run.id, request.round, request.part, evaluation.to_bytes())

    def _keep_model(self, delivery: ModelDelivery) -> messages.ModelReceipt:
        run = self.runs.get(delivery.assignment.run)
        self.runs.pin_terms(run, delivery.assignment.digest)
        self.trainer.keep_model(run, delivery.as_evaluation)
        return messages.ModelReceipt(run.id, delivery.round)


@dataclass(frozen=True)
class KeptSetup:
    """The set-up that a run's next sums use, as the table ``setups`` holds it."""

    first: int
    """Number of its first sum."""
    state: bytes = field(repr=False)
    request: str
    """Digest of the last request."""
    reply: bytes
    """The answer to it."""


@dataclass(frozen=True)
class PendingSum:
    """The secure sum that a run is in, as the table ``sums`` holds it."""

    number: int
    first: int
    """Number of the first sum of its set-up."""
    round: int
    """The summed round; 0 for an evaluation."""
    layout: str
    about: str
    state: bytes = field(repr=False)
    masked: str
    """Digest of the request for the vector's first piece."""
    request: str
    """Digest of the last stage request."""
    reply: bytes | None
    """The answer to it; pieces of the vector are masked again."""


class SecureSumWorker:
    """Answers stage requests of secure sums."""

    def __init__(self, runs: NodeRuns, trainer: NodeTrainer, credentials: NodeCredentials) -> None:
        self.runs = runs
        self.store = runs.store
        self.trainer = trainer
        self.credentials = credentials
        self.count = len(credentials.registered.identities)
        """Number of nodes."""
        contract = self.store.contract
        assert contract.secure is not None, "a worker of secure sums"
        self.agreed = contract.secure
        agreed = contract.experiment
        reported = agreed.evaluation.reported(agreed.split.next_basket)
        self.evaluation = sums.EvaluationVector(reported)
        contract.check_nodes(self.count)
        if credentials.registered.identities.get(self.store.name) != credentials.identity.public:
            raise ConfigError(
                f"node '{self.store.name}' is registered with another identity, or not at all: "
                "copy its whole folder again"
            )

    def answer(self, message: bytes) -> bytes:
        """Answer one stage request."""
        step, digest = StageRequest.from_bytes(message), digest_of(message)
        act = {Stage.KEYS: self._set_up, Stage.SHARES: self._set_up, Stage.MASKED: self._mask}
        for _ in range(ATTEMPTS):
            run = self.runs.get(step.run)
            reply = act.get(step.stage, self._go_on)(run, step, digest)
            if reply is not None:
                return reply
        raise MessageError("the node's users changed again and again while they were summed")

    # ------------------------------------------------------------ stages

    def _set_up(self, run: NodeRun, step: StageRequest, digest: str) -> bytes | None:
        kept = self._kept_setup(run)
        if kept is not None and kept.request == digest:
            return kept.reply
        terms = self.credentials.registered.setup_terms(self.agreed, step.number)
        node = SetupNode(terms, self.store.name, self.credentials.identity)
        if step.stage == Stage.KEYS:
            last = 0 if kept is None else kept.first + self.agreed.setup_sums - 1
            state, message = node.announce(last)
        elif kept is None or kept.first != step.number:
            raise MessageError(f"this node is not in {terms.title}")
        else:
            state, message = node.share(SetupState.from_bytes(kept.state), step.message)
        reply = sums.StageReply(message).to_bytes()
        with self.store.changing():
            if self._kept_setup(run) != kept:
                return None
            self._write_setup(run, KeptSetup(step.number, state.to_bytes(), digest, reply))
        return reply

    def _mask(self, run: NodeRun, step: StageRequest, digest: str) -> bytes | None:
        """Answer with a piece of the masked vector. The vector is worked out, and stored, when the
        first piece is asked for; it is the same for every later request."""
        kept = self._kept(run)
        if kept is None or kept.number != step.number:
            return self._begin(run, kept, step, digest)
        node, state = self._node(kept), NodeState.from_bytes(kept.state)
        if state.stage != Stage.MASKED:
            raise MessageError(f"no vector of this node's is due in sum {kept.number}")
        if step.piece == 0 and digest != kept.masked:
            raise MessageError(f"the server asks for sum {kept.number} again, with something else")
        if step.piece >= node.terms.layout.pieces:
            raise MessageError(f"the vector of sum {kept.number} has no piece {step.piece}")
        digest_of_piece = dict(self.store.connection.sealed("pieces", run.id)).get(step.piece)
        if digest_of_piece is None:
            raise MessageError("what this node answered went with a user who left it")
        query = "SELECT words FROM pieces WHERE run = ? AND number = ?"
        words = self.store.one(query, (run.id, step.piece))
        self.store.connection.verified("pieces", digest_of_piece, run.id, step.piece, words)
        return _masked(node, state, step.piece, zlib.decompress(words))

    def _begin(
        self, run: NodeRun, before: PendingSum | None, step: StageRequest, digest: str
    ) -> bytes | None:
        """Take the material of a sum out of the set-up, and store the vector."""
        setup = self._kept_setup(run)
        count = self.agreed.setup_sums
        if setup is None or step.piece or not setup.first <= step.number < setup.first + count:
            raise MessageError(f"this node is not in sum {step.number}")
        request, number = sums.request_of(step.request), 0
        if request.assignment.run != run.id:
            raise MessageError("the request is of another run than its sum")
        self.runs.pin_terms(run, request.assignment.digest)
        if isinstance(request, TrainRequest):
            number = request.download.round
            self.runs.check_joined(run, number)
            if number <= max(run.round, run.masked - 1):
                return sums.RoundClosed(number).to_bytes()
            _check_same(run, number, step.request)
        form = self._form(request)
        begun = PendingSum(
            number=step.number,
            first=setup.first,
            round=number,
            layout=form.layout.to_json(),
            about=sums.about(request),
            state=b"",
            masked=digest,
            request=digest,
            reply=None,
        )
        node, done = self._node(begun), None
        left, state = node.begin(SetupState.from_bytes(setup.state), step.message)
        if isinstance(form, sums.RoundVector):
            assert isinstance(request, TrainRequest), "its form"
            pieces, done = self._train(run, request, digest_of(step.request), step.number)
        else:
            assert isinstance(request, EvaluationRequest), "its form"
            pieces = form.pack(self.trainer.evaluate(run, request), self.count)
        with self.store.changing():
            if self._kept(run) != before or self._kept_setup(run) != setup:
                return None
            if done is not None and not self.runs.send_round(run, done):
                return None
            self._write_setup(run, replace(setup, state=left.to_bytes()))
            self._write(run, replace(begun, state=state.to_bytes()))
            first = self._write_pieces(run, pieces)
        return _masked(node, state, 0, first)

    def _go_on(self, run: NodeRun, step: StageRequest, digest: str) -> bytes | None:
        kept = self._kept(run)
        if kept is None or kept.number != step.number:
            raise MessageError(f"this node is not in sum {step.number}")
        if kept.request == digest:
            if kept.reply is None:
                raise MessageError("what this node answered went with a user who left it")
            return kept.reply
        node, state = self._node(kept), NodeState.from_bytes(kept.state)
        act = {Stage.CONSISTENCY: node.agree, Stage.REVEALED: node.reveal}
        state, message = act[step.stage](state, step.message)
        reply = sums.StageReply(message).to_bytes()
        with self.store.changing():
            if self._kept(run) != kept:
                return None
            if kept.round and state.stage == Stage.REVEALED:
                self.runs.close_round(run, kept.round)
            self.store.connection.execute("DELETE FROM pieces WHERE run = ?", (run.id,))
            self._write(run, replace(kept, state=state.to_bytes(), request=digest, reply=reply))
        return reply

    def _form(
        self, request: TrainRequest | EvaluationRequest
    ) -> sums.RoundVector | sums.EvaluationVector:
        """Return the form of the vector, which follows from public facts and the request."""
        if isinstance(request, EvaluationRequest):
            return self.evaluation
        try:
            shape, clients = self.trainer.shape(request), request.assignment.training
            form = sums.RoundVector(shape, clients, self.agreed.most_bytes)
            _ = form.layout  # refuses what is too long
        except ConfigError as error:
            raise MessageError(str(error)) from None
        return form

    def _train(
        self, run: NodeRun, request: TrainRequest, asked: str, number: int
    ) -> tuple[Iterator[bytes], FinishedRound]:
        """Train a round, add this node's share of the noise, and return the sum's pieces."""
        # Two sums of one round must not share noise, so the stream is that of this sum.
        own = f"node {self.store.name}/sum {number}"
        summed, done = self.trainer.train(run, request, asked, own)
        form = self._form(request)
        assert isinstance(form, sums.RoundVector), "of a round"
        return form.pack(summed, self.count), done

    def _node(self, kept: PendingSum) -> SumNode:
        layout, registered = VectorLayout.from_json(kept.layout), self.credentials.registered
        terms = registered.terms(self.agreed, kept.first, kept.number, layout, kept.about)
        return SumNode(terms, self.store.name, self.credentials.identity)

    # ------------------------------------------------------------ storage

    def _kept_setup(self, run: NodeRun) -> KeptSetup | None:
        found = self.store.connection.sealed("setups", run.id)
        return KeptSetup(*found[0]) if found else None

    def _kept(self, run: NodeRun) -> PendingSum | None:
        found = self.store.connection.sealed("sums", run.id)
        return PendingSum(*found[0]) if found else None

    def _write_setup(self, run: NodeRun, kept: KeptSetup) -> None:
        query = "INSERT OR REPLACE INTO setups VALUES (?, ?, ?, ?, ?)"
        self.store.connection.execute(query, (run.id, *astuple(kept)))

    def _write(self, run: NodeRun, kept: PendingSum) -> None:
        query = "INSERT OR REPLACE INTO sums VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
        self.store.connection.execute(query, (run.id, *astuple(kept)))

    def _write_pieces(self, run: NodeRun, pieces: Iterable[bytes]) -> bytes:
        """Write the vector in place of the one before; return its first piece."""
        self.store.connection.execute("DELETE FROM pieces WHERE run = ?", (run.id,))
        first = b""
        for number, piece in enumerate(pieces):
            first = first or piece
            # Of many keys few have a value.
            words = zlib.compress(piece, 1)
            values = run.id, number, content_digest(run.id, number, words), words
            self.store.connection.execute("INSERT INTO pieces VALUES (?, ?, ?, ?)", values)
        return first


def _masked(node: SumNode, state: NodeState, number: int, piece: bytes) -> bytes:
    return sums.StageReply(node.mask(state, number, piece)).to_bytes()


def digest_of(message: bytes) -> str:
    """Return the digest of a message."""
    return hashlib.blake2b(message, digest_size=16).hexdigest()


def _check_same(run: NodeRun, number: int, asked: bytes) -> None:
    """Refuse another request of a round whose vector was sent: its noise covers one request."""
    if number == run.masked and digest_of(asked) != run.masked_request:
        raise MessageError(
            f"the server asks for round {number} again, with something else than before"
        )
