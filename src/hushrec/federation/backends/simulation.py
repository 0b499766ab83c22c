"""The embedded backend: all clients in this process, a few thousand at a time, on threads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregation import ExactSum
from hushrec.aggregation.statistics import Evaluation, LossSum
from hushrec.data.splitting import Part
from hushrec.data.views import TrainView, balanced_chunks, chunks
from hushrec.errors import ConfigError
from hushrec.evaluation.evaluator import Evaluator, PartRanks
from hushrec.federation.backends.base import Collected
from hushrec.federation.client import Task, take_part
from hushrec.federation.messages import Download
from hushrec.io.codec import Arrays
from hushrec.io.memory import usable_cores
from hushrec.methods.base import Shared
from hushrec.privacy.protection import Protection
from hushrec.private.store import PrivateStore

BATCH_INTERACTIONS = 3072
"""Training interactions per batch of clients: enough to keep the interpreter idle, few enough for
their rows to stay in the cache."""
BATCH_SILOS = 8
"""Silos per batch: they are few and large, and share a batched product."""
BATCH_BYTES = 64 * 2**20
"""Private parameters and uploads per batch, where clients keep or send whole tables."""


@dataclass(frozen=True)
class Machine:
    """What does not change a result: threads, batch sizes, how often checkpoints are written."""

    threads: int | None = None
    chunk: int | None = None
    checkpoint_seconds: float = 20.0
    backend: str = "in-process"
    """Where the clients of a simulation are: a name of the entry points ``hushrec.federation``."""

    def __post_init__(self) -> None:
        for name, value in (("threads", self.threads), ("chunk", self.chunk)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} = {value}: must be at least 1")

    @property
    def n_threads(self) -> int:
        """Number of threads to use."""
        return self.threads or usable_cores()


THIS_MACHINE = Machine()


class InProcess:
    """All clients in this process, with their data and private parameters."""

    def __init__(
        self,
        task: Task,
        view: TrainView,
        store: PrivateStore,
        evaluator: Evaluator | None = None,
        machine: Machine = THIS_MACHINE,
    ) -> None:
        self.task = task
        self.view = view.prepared()
        indptr = self.view.positives.indptr
        self.rows_before = indptr if view.holders is None else indptr[view.client_indptr]
        self.store = store
        self.selected: PrivateStore | None = None
        self.evaluator = evaluator
        self.machine = machine
        self.ranks: dict[str, PartRanks] = {}
        """Ranks of all users at the last evaluation of each part; only a simulation has them."""

    def train(
        self, download: Download, protection: Protection, cohort: NDArray[np.int64]
    ) -> Collected:
        """Train the cohort batch by batch; protect and sum the uploads."""
        threads, number = self.machine.n_threads, download.round
        batches = self.batches(protection, cohort)

        def work(mine: list[NDArray[np.int64]]) -> tuple[ExactSum, LossSum, int, int]:
            summed, loss = ExactSum(self.view.n_items), LossSum()
            sent = zeroed_out = 0
            for clients in mine:
                view = self.view.take_clients(clients)
                own = download.to(np.searchsorted(cohort, clients))
                upload, kept = take_part(self.task, protection, own, view, self.store.read(clients))
                summed.add(protection.receive(upload.update, view.clients, number))
                self.store.write(clients, kept)
                loss, sent = loss.merge(upload.loss), sent + upload.update.nbytes
                zeroed_out += upload.update.zeroed_out
            return summed, loss, sent, zeroed_out

        with ThreadPoolExecutor(threads) as pool:
            results = list(pool.map(work, [batches[t::threads] for t in range(threads)]))
        self.store.release()
        total, loss = ExactSum(self.view.n_items), LossSum()
        for summed, more, *_ in results:
            total.merge(summed)
            loss = loss.merge(more)
        up_bytes = sum(sent for _, _, sent, _ in results)
        zeroed_out = sum(count for *_, count in results)
        return Collected(total, loss, up_bytes, download.nbytes(len(cohort)), zeroed_out)

    def batches(self, protection: Protection, cohort: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Cut a cohort into batches, each trained by one call of `Method.fit`."""
        method = self.task.method
        if method.traits.pooled:
            return [cohort]
        if self.machine.chunk is not None:
            return list(chunks(cohort, self.machine.chunk))
        most = max(1, BATCH_BYTES // (self.store.bytes_per_user + protection.client_bytes))
        work = self.rows_before[cohort + 1] - self.rows_before[cohort]
        if self.view.holders is not None:
            # Silos of about the same size share a batched product.
            by_size = cohort[np.argsort(work, kind="stable")[::-1]]
            return list(chunks(by_size, min(most, BATCH_SILOS)))
        per_batch = method.traits.batch_interactions or BATCH_INTERACTIONS
        return list(balanced_chunks(cohort, work, per_batch, most))

    def evaluate(self, serving: Shared, part: Part, *, selected: bool = False) -> Evaluation:
        """Rank the held-out items of all users."""
        assert self.evaluator is not None, "who evaluates has held-out items"
        store = self.selected if selected else self.store
        assert store is not None, "a round was selected"
        model = self.evaluator.model(self.task.method, serving, store)
        self.ranks[part] = self.evaluator.rank(model, part)
        return self.evaluator.tally(self.ranks[part])

    def keep_selected(self) -> None:
        """Copy the private parameters of all clients."""
        self.selected = self.store.snapshot(self.selected)

    def save(self, *, selected: bool) -> Iterator[Arrays]:
        """Yield the private parameters of all clients."""
        store = self.selected if selected else self.store
        return iter(()) if store is None else store.tensors()

    def load(self, parts: Iterable[Arrays], *, selected: bool) -> None:
        """Put private parameters back."""
        if selected:
            self.selected = PrivateStore.beside(self.store)
        for part in parts:
            (self.selected if selected and self.selected else self.store).restore(part)
