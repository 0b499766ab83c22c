"""A node's answers to the coordinator's messages, from its database.

A worker keeps no state between messages outside of the database, so it may crash at any point. A
finished round is answered with the bytes of the first answer; an unfinished one is trained from the
start. A request that cannot be answered gets a refusal that tells nothing of the node's users.
"""

from __future__ import annotations

from collections.abc import Callable

from hushrec.deployment.node.database import NodeDatabase
from hushrec.deployment.node.runs import FinishedRound, NodeRun, NodeRuns
from hushrec.deployment.node.sums import ATTEMPTS, NodeCredentials, SecureSumWorker, digest_of
from hushrec.deployment.node.training import NodeTrainer, activity_of, declared_by, split_of
from hushrec.errors import ConfigError, HushrecError, MessageError
from hushrec.federation.backends import THIS_MACHINE, Machine
from hushrec.federation.requests import (
    Enrolment,
    EvaluationReply,
    EvaluationRequest,
    Invitation,
    Refusal,
    TrainRequest,
)
from hushrec.federation.sums import StageRequest
from hushrec.io.codec import kind_of


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
        return Refusal(why).to_bytes()

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

    # ------------------------------------------------------------ enrolment

    def _enrol(self, invitation: Invitation) -> Enrolment:
        contract = self.store.contract
        if invitation.catalogue != contract.catalogue.digest:
            raise MessageError(
                "this node has another catalogue than the server: give both the same contract"
            )
        if invitation.settings != contract.settings_digest:
            raise MessageError(
                "this node agreed to other settings than the server has: give both the same "
                "contract"
            )
        run, config = self.runs.begin(invitation.run), contract.experiment.privacy
        split = split_of(self.store, run)
        view = split.train_view(contract.experiment.protocol)
        activity, idle = activity_of(view), int((split.train.positives.lengths == 0).sum())
        declared = config.budgets == "declared"
        return Enrolment(
            run.id,
            self.store.name,
            len(run.members),
            idle,
            activity > 0,
            activity if config.budgets == "activity" else None,
            declared_by(contract.experiment, split) if declared else None,
        )

    # ------------------------------------------------------------ training

    def _train(self, request: TrainRequest, digest: str) -> bytes:
        for _ in range(ATTEMPTS):
            run = self.runs.get(request.assignment.run)
            done_before = self._done_before(run, request.download.round, digest)
            if done_before is not None:
                return done_before
            self.runs.pin_terms(run, request.assignment.digest)
            trained = self.trainer.train(run, request)
            done = FinishedRound(
                request.download.round,
                max(run.selected, request.selected),
                digest,
                trained.sum.to_bytes(),
                trained.private,
                trained.clients,
                trained.charged,
            )
            if self.runs.finish_round(run, done):
                return done.reply
        raise MessageError("the node's users changed again and again while they were trained")

    def _done_before(self, run: NodeRun, number: int, digest: str) -> bytes | None:
        if number > run.round:
            return None
        if number == run.round and run.request == digest and run.reply is not None:
            return run.reply
        raise MessageError(
            f"round {number} is over: this node has done round {run.round} and does none twice"
        )

    # ------------------------------------------------------------ evaluation

    def _evaluate(self, request: EvaluationRequest) -> EvaluationReply:
        run = self.runs.get(request.assignment.run)
        self.runs.pin_terms(run, request.assignment.digest)
        evaluation = self.trainer.evaluate(run, request)
        return EvaluationReply(run.id, request.round, request.part, evaluation.to_bytes())
