"""A node's answers to the coordinator's messages, from its database.

A worker keeps no state between messages outside of the database, so it may crash at any point. A
repeated request is answered with the bytes of the first answer; an unfinished round is trained from
the start. A request that cannot be answered gets a refusal that tells nothing of the node's users.

A secure sum is five answers, each stored before it is sent. It is over a round or an evaluation. A
round is trained when its vector is due, and its vector may be sent again, for another sum, as long
as this node has not helped to open one. From then on the round is finished: its private parameters
are used, and the node is in no other sum of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import astuple, dataclass, field, replace

import numpy as np

from hushrec.deployment.node.database import NodeDatabase
from hushrec.deployment.node.runs import FinishedRound, NodeRun, NodeRuns
from hushrec.deployment.node.training import NodeTrainer, split_of
from hushrec.errors import ConfigError, HushrecError, MessageError
from hushrec.federation import requests as messages
from hushrec.federation import sums
from hushrec.federation.backends import THIS_MACHINE, Machine
from hushrec.federation.contract import NodeRegistry
from hushrec.federation.requests import EvaluationRequest, Invitation, TrainRequest
from hushrec.federation.sums import StageRequest
from hushrec.io.codec import kind_of
from hushrec.privacy.budgets import by_feature
from hushrec.secagg import Identity, NodeState, Stage, SumNode, VectorLayout

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
            return self._enrol(Invitation.from_bytes(message)).to_bytes()
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
        raise MessageError("a node answers invitations, training requests and evaluations")

    def _enrol(self, invitation: Invitation) -> messages.Enrolment:
        contract = self.store.contract
        if invitation.catalogue != contract.catalogue.digest:
            raise MessageError(
                "this node has another catalogue than the server: give both the same contract"
            )
        if invitation.settings != contract.settings_digest:
            raise MessageError(
                "this node agreed to other settings than the server: give both the same contract"
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


@dataclass(frozen=True)
class PendingSum:
    """The secure sum that a run is in, as the table ``sums`` holds it."""

    number: int
    round: int
    """The summed round; 0 for an evaluation."""
    layout: str
    about: str
    asked: bytes | None
    """The request, until the vector is sent."""
    state: bytes = field(repr=False)
    request: str
    """Digest of the last stage request."""
    reply: bytes | None
    """The answer to it."""


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
        for _ in range(ATTEMPTS):
            run = self.runs.get(step.run)
            kept = self._kept(run)
            if kept is not None and kept.request == digest:
                if kept.reply is None:
                    raise MessageError("what this node answered went with a user who left it")
                return kept.reply
            if step.stage == Stage.KEYS:
                reply = self._begin(run, kept, step, digest)
            elif kept is None or kept.number != step.number:
                raise MessageError(f"this node is not in sum {step.number}")
            elif step.stage == Stage.MASKED:
                reply = self._mask(run, kept, step, digest)
            else:
                reply = self._go_on(run, kept, step, digest)
            if reply is not None:
                return reply
        raise MessageError("the node's users changed again and again while they were summed")

    # ------------------------------------------------------------ stages

    def _begin(
        self, run: NodeRun, kept: PendingSum | None, step: StageRequest, digest: str
    ) -> bytes | None:
        request, number = sums.request_of(step.request), 0
        if request.assignment.run != run.id:
            raise MessageError("the request is of another run than its sum")
        self.runs.pin_terms(run, request.assignment.digest)
        if isinstance(request, TrainRequest):
            number = request.download.round
            if number <= max(run.round, run.masked - 1):
                return sums.RoundClosed(number).to_bytes()
            _check_same(run, number, step.request)
        try:
            if isinstance(request, TrainRequest):
                layout = sums.RoundVector(self.trainer.shape(request)).layout
            else:
                layout = self.evaluation.layout
        except ConfigError as error:
            raise MessageError(str(error)) from None
        form, about = layout.to_json(), sums.about(request)
        begun = PendingSum(step.number, number, form, about, step.request, b"", digest, None)
        state, message = self._node(begun).announce(0 if kept is None else kept.number)
        return self._keep(run, kept, replace(begun, state=state.to_bytes()), message)

    def _mask(
        self, run: NodeRun, kept: PendingSum, step: StageRequest, digest: str
    ) -> bytes | None:
        state = NodeState.from_bytes(kept.state)
        if state.stage != Stage.SHARES or kept.asked is None:
            raise MessageError(f"no vector of this node's is due in sum {kept.number}")
        request, done = sums.request_of(kept.asked), None
        if isinstance(request, TrainRequest):
            _check_same(run, kept.round, kept.asked)
            vector, done = self._train(run, request, kept)
        else:
            vector = self.evaluation.pack(self.trainer.evaluate(run, request), self.count)
        state, message = self._node(kept).mask(state, step.message, vector)
        following = replace(kept, asked=None, state=state.to_bytes(), request=digest)
        return self._keep(run, kept, following, message, done)

    def _go_on(
        self, run: NodeRun, kept: PendingSum, step: StageRequest, digest: str
    ) -> bytes | None:
        node, state = self._node(kept), NodeState.from_bytes(kept.state)
        act = {Stage.SHARES: node.share, Stage.CONSISTENCY: node.agree, Stage.REVEALED: node.reveal}
        state, message = act[step.stage](state, step.message)
        return self._keep(run, kept, replace(kept, state=state.to_bytes(), request=digest), message)

    def _train(
        self, run: NodeRun, request: TrainRequest, kept: PendingSum
    ) -> tuple[sums.Vector, FinishedRound]:
        """Train a round, add this node's share of the noise, and return the sum as a vector."""
        assert kept.asked is not None, "its vector is due"
        # Two sums of one round must not share noise, so the stream is that of this sum.
        own = f"node {self.store.name}/sum {kept.number}"
        summed, done = self.trainer.train(run, request, digest_of(kept.asked), own)
        form = sums.RoundVector(self.trainer.shape(request))
        return form.pack(summed, self.count), done

    def _node(self, kept: PendingSum) -> SumNode:
        layout, agreed = VectorLayout.from_json(kept.layout), self.store.contract.secure
        assert agreed is not None, "a worker of secure sums"
        terms = self.credentials.registered.terms(agreed, kept.number, layout, kept.about)
        return SumNode(terms, self.store.name, self.credentials.identity)

    # ------------------------------------------------------------ storage

    def _kept(self, run: NodeRun) -> PendingSum | None:
        found = self.store.rows("SELECT * FROM sums WHERE run = ?", (run.id,))
        return PendingSum(*found[0][1:]) if found else None

    def _keep(
        self,
        run: NodeRun,
        before: PendingSum | None,
        after: PendingSum,
        message: bytes,
        done: FinishedRound | None = None,
    ) -> bytes | None:
        """Store a stage and return its answer; None if another process changed the database."""
        reply = sums.StageReply(message).to_bytes()
        with self.store.changing():
            now = self._kept(run)
            if (now and (now.number, now.request)) != (before and (before.number, before.request)):
                return None
            if done is not None and not self.runs.send_round(run, done):
                return None
            if after.round and NodeState.from_bytes(after.state).stage == Stage.REVEALED:
                self.runs.close_round(run, after.round)
            self.store.connection.execute(
                "INSERT OR REPLACE INTO sums VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (run.id, *astuple(replace(after, reply=reply))),
            )
        return reply


def digest_of(message: bytes) -> str:
    """Return the digest of a message."""
    return hashlib.blake2b(message, digest_size=16).hexdigest()


def _check_same(run: NodeRun, number: int, asked: bytes) -> None:
    """Refuse another request of a round whose vector was sent: its noise covers one request."""
    if number == run.masked and digest_of(asked) != run.masked_request:
        raise MessageError(
            f"the server asks for round {number} again, with something else than before"
        )
