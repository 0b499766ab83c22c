"""The node's side of secure sums: five answers, each stored in the database before it is sent.

A sum is over a round or an evaluation. A round is trained when its vector is due, and its vector
may be sent again, for another sum, as long as this node has not helped to open one. From then on
the round is finished: its private parameters are used, and the node is in no other sum of it. A
repeated request is answered with the same bytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

from hushrec.deployment.node.runs import FinishedRound, NodeRun, NodeRuns
from hushrec.deployment.node.training import NodeTrainer
from hushrec.errors import ConfigError, MessageError
from hushrec.federation.contract import NodeRegistry
from hushrec.federation.requests import EvaluationRequest, TrainRequest
from hushrec.federation.sums import (
    EvaluationVector,
    RoundClosed,
    RoundVector,
    StageReply,
    StageRequest,
    Vector,
    about,
    request_of,
)
from hushrec.secagg import Identity, NodeState, Stage, SumNode, VectorLayout
from hushrec.streams import SecretRound

ATTEMPTS = 5
"""Attempts where another process changes the database meanwhile."""


@dataclass(frozen=True)
class NodeCredentials:
    """The node's identity key and the public identities of all nodes, from its own folder."""

    registered: NodeRegistry
    identity: Identity = field(repr=False)


@dataclass(frozen=True)
class PendingSum:
    """The secure sum that a run is in."""

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
        agreed = runs.store.contract.secure
        if agreed is None:
            raise ConfigError("this node agreed to sums in the clear: it is in no secure one")
        self.runs = runs
        self.store = runs.store
        self.trainer = trainer
        self.credentials = credentials
        self.agreed = agreed
        self.store.contract.check_nodes(len(credentials.registered.identities))
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
        request, number = request_of(step.request), 0
        if request.assignment.run != run.id:
            raise MessageError("the request is of another run than its sum")
        self.runs.pin_terms(run, request.assignment.digest)
        if isinstance(request, TrainRequest):
            number = request.download.round
            if number <= max(run.round, run.masked - 1):
                return RoundClosed(number).to_bytes()
            _check_same(run, number, step.request)
        try:
            layout = self._layout(request)
        except ConfigError as error:
            raise MessageError(str(error)) from None
        begun = PendingSum(
            step.number, number, layout.to_json(), about(request), step.request, b"", digest, None
        )
        state, message = self._node(begun).announce(0 if kept is None else kept.number)
        return self._keep(run, kept, replace(begun, state=state.to_bytes()), message)

    def _mask(
        self, run: NodeRun, kept: PendingSum, step: StageRequest, digest: str
    ) -> bytes | None:
        state = NodeState.from_bytes(kept.state)
        if state.stage != Stage.SHARES or kept.asked is None:
            raise MessageError(f"no vector of this node's is due in sum {kept.number}")
        request, done = request_of(kept.asked), None
        if isinstance(request, TrainRequest):
            _check_same(run, kept.round, kept.asked)
            vector, done = self._train(run, request, kept)
        else:
            evaluation = self.trainer.evaluate(run, request)
            vector = self._evaluation.pack(evaluation, self._count)
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
    ) -> tuple[Vector, FinishedRound]:
        """Train a round, add this node's share of the noise, and return the sum as a vector."""
        assert kept.asked is not None, "its vector is due"
        trained = self.trainer.train(run, request)
        # Two sums of one round must not share noise, so the stream is that of this sum.
        streams = SecretRound(kept.round, trained.secret)
        own = streams.of(f"node {self.store.name}/sum {kept.number}")
        for share in trained.protection.shares(own):
            trained.sum.summed.add_steps(share)
        vector = RoundVector(self.trainer.shape(request)).pack(trained.sum, self._count)
        return vector, FinishedRound(
            kept.round,
            request.selected,
            digest_of(kept.asked),
            b"",
            trained.private,
            trained.clients,
            trained.charged,
        )

    # ------------------------------------------------------------ storage

    @property
    def _count(self) -> int:
        return len(self.credentials.registered.identities)

    @property
    def _evaluation(self) -> EvaluationVector:
        return EvaluationVector(self.store.contract.experiment.evaluation.reported)

    def _layout(self, request: TrainRequest | EvaluationRequest) -> VectorLayout:
        if isinstance(request, TrainRequest):
            return RoundVector(self.trainer.shape(request)).layout
        return self._evaluation.layout

    def _node(self, kept: PendingSum) -> SumNode:
        layout = VectorLayout.from_json(kept.layout)
        terms = self.credentials.registered.terms(self.agreed, kept.number, layout, kept.about)
        return SumNode(terms, self.store.name, self.credentials.identity)

    def _kept(self, run: NodeRun) -> PendingSum | None:
        found = self.store.rows(
            "SELECT number, round, layout, about, asked, state, request, reply FROM sums "
            "WHERE run = ?",
            (run.id,),
        )
        return PendingSum(*found[0]) if found else None

    def _keep(
        self,
        run: NodeRun,
        before: PendingSum | None,
        after: PendingSum,
        message: bytes,
        done: FinishedRound | None = None,
    ) -> bytes | None:
        """Store a stage and return its answer; None if another process changed the database."""
        reply = StageReply(message).to_bytes()
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
                (
                    run.id,
                    after.number,
                    after.round,
                    after.layout,
                    after.about,
                    after.asked,
                    after.state,
                    after.request,
                    reply,
                ),
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
