"""Backends: the clients' side of a run, wherever the clients are.

The server's side is `federation.rounds`. It draws cohorts, makes downloads and sums uploads, and
never sees a client's data or private parameters. Two backends are embedded:

- `InProcess` trains a few thousand clients at a time, on threads;
- `OneByOne` trains every client alone, with its own data and store. It is slow and obvious: nothing
  reaches a client but a `Download` in bytes, and nothing leaves it but an `Upload` or an
  `Evaluation` in bytes, which the server validates. `hushrec.testing.BackendContract` holds every
  other backend to its bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from hushrec.aggregation import Evaluation, ExactSum, LossSum, Update
from hushrec.data.splitting import Part, Split
from hushrec.data.views import TrainView, balanced_chunks, chunks
from hushrec.errors import ConfigError
from hushrec.evaluation.evaluator import Evaluator, PartRanks
from hushrec.federation.client import Download, Expected, Task, Upload, take_part
from hushrec.federation.experiment import Experiment
from hushrec.federation.spool import Spool
from hushrec.io import usable_cores
from hushrec.io.codec import Arrays, payload
from hushrec.methods.base import Shared
from hushrec.methods.relations import Relates
from hushrec.privacy.protection import Protection
from hushrec.private import PrivateStore


@dataclass(frozen=True)
class Collected:
    """The uploads of a round, summed."""

    summed: ExactSum
    loss: LossSum
    up_bytes: int
    down_bytes: int
    zeroed_out: int = 0
    """Uploads that held NaN or infinite values, and counted as zero."""
    noised: bool = False
    """Whether nodes added their shares of the noise before the sum."""
    lost: bool = False
    """Whether the secure sum can never be opened; the round then changes nothing."""


class Backend(Protocol):
    """The clients of a run."""

    def train(
        self, download: Download, protection: Protection, cohort: NDArray[np.int64]
    ) -> Collected:
        """Send the download to a cohort, train its clients, and sum their uploads.

        ``protection`` is the server's side: how it treats uploads as they arrive.
        """

    def evaluate(self, serving: Shared, part: Part, *, selected: bool = False) -> Evaluation:
        """Rank the held-out items of all clients, with their newest or selected parameters."""

    def keep_selected(self) -> None:
        """Keep the clients' private parameters as those of the selected round."""

    def save(self, *, selected: bool) -> Iterator[Arrays]:
        """Yield the clients' newest or selected private parameters, in parts, for a checkpoint."""

    def load(self, parts: Iterable[Arrays], *, selected: bool) -> None:
        """Put back what `save` yielded."""


class Simulation(Backend, Protocol):
    """A backend that holds all clients, with ranks and private parameters: for `hushrec train`.

    It is made as ``Mine(task, view, store, evaluator, machine)``.
    """

    store: PrivateStore
    selected: PrivateStore | None
    evaluator: Evaluator | None
    ranks: dict[str, PartRanks]


ALGEBRA_THREADS = 2
"""Threads of the server's linear algebra on every machine: the last bits depend on them."""
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
        self.task, self.evaluator, self.machine = task, evaluator, machine
        self.view = view.prepared()
        indptr = self.view.positives.indptr
        self.rows_before = indptr if view.holders is None else indptr[view.client_indptr]
        self.store = store
        self.selected: PrivateStore | None = None
        self.ranks: dict[str, PartRanks] = {}
        """Ranks of all users at the last evaluation of each part; only a simulation has them."""

    def train(
        self, download: Download, protection: Protection, cohort: NDArray[np.int64]
    ) -> Collected:
        """Train the cohort batch by batch; protect and sum the uploads."""
        threads, number = self.machine.n_threads, download.round
        batches, spool = self.batches(protection, cohort), self._spool(download, cohort)

        def work(mine: list[NDArray[np.int64]]) -> tuple[ExactSum, LossSum, int, int]:
            summed, loss = ExactSum(self.view.n_items), LossSum()
            sent = zeroed_out = 0
            for clients in mine:
                view = self.view.take_clients(clients)
                own = download.to(np.searchsorted(cohort, clients))
                upload, kept = take_part(self.task, protection, own, view, self.store.read(clients))
                received = protection.receive(upload.update, view.clients, number)
                if spool is None:
                    summed.add(received)
                else:
                    spool.put(np.searchsorted(cohort, clients), received)
                self.store.write(clients, kept)
                loss, sent = loss.merge(upload.loss), sent + upload.update.nbytes
                zeroed_out += upload.update.zeroed_out
            return summed, loss, sent, zeroed_out

        with ThreadPoolExecutor(threads) as pool:
            results = list(pool.map(work, [batches[t::threads] for t in range(threads)]))
        self.store.release()
        total, loss, up_bytes, zeroed_out = ExactSum(self.view.n_items), LossSum(), 0, 0
        for summed, more, sent, count in results:
            total.merge(summed)
            loss, up_bytes, zeroed_out = loss.merge(more), up_bytes + sent, zeroed_out + count
        down_bytes = download.nbytes(len(cohort))
        if spool is not None:
            total.add(_related(spool))
            down_bytes += self._answer(spool, cohort, batches)
        return Collected(total, loss, up_bytes, down_bytes, zeroed_out)

    def _spool(self, download: Download, cohort: NDArray[np.int64]) -> Spool | None:
        """Return room for the uploads of a round, if the method relates them."""
        method = self.task.method
        if not isinstance(method, Relates):
            return None
        shape = self.task.upload_shape(download.to(ALONE[:0])).dense[method.uploaded]
        return Spool(method, len(cohort), shape, self.store.folder)

    def _answer(
        self, spool: Spool, cohort: NDArray[np.int64], batches: list[NDArray[np.int64]]
    ) -> int:
        """Give every client its answer to keep; return the bytes of all answers."""
        name, sent = spool.method.answered, 0
        for clients in batches:
            answers, own = spool.take(np.searchsorted(cohort, clients)), self.store.read(clients)
            kept = {field: own[field] for field in own if field != name}
            self.store.write(clients, {**kept, name: answers})
            sent += answers.nbytes
        spool.close()
        self.store.release()
        return sent

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


ALONE = np.zeros(1, np.int64)


def _related(spool: Spool) -> Update:
    """Let the server relate the uploads of a round; return the sum of its answers."""
    with ThreadpoolController().limit(limits=ALGEBRA_THREADS, user_api="blas"):
        return spool.relate()


class Device:
    """One client: a device, or a silo of several users."""

    def __init__(
        self, task: Task, split: Split, experiment: Experiment, noise: NDArray[np.float64] | None
    ) -> None:
        self.task = task
        view = split.train_view(experiment.protocol)
        self.view = replace(view, noise=noise).prepared()
        fields = task.method.private_fields(self.view, task.initial, task.streams)
        self.store = PrivateStore(fields, 1)
        self.selected: PrivateStore | None = None
        tolerant = experiment.privacy.promises
        self.evaluator = Evaluator(split, experiment.evaluation, task.streams, 1, tolerant)

    def take_part(self, message: bytes) -> bytes:
        """Answer a download with an upload."""
        download = Download.from_bytes(message)
        protection = self.task.protection_of(download)
        kept = self.store.read(ALONE)
        upload, private = take_part(self.task, protection, download, self.view, kept)
        self.store.write(ALONE, private)
        return upload.to_bytes()

    def keep_answer(self, message: bytes) -> None:
        """Keep the server's answer to the upload."""
        answer, own = Download.from_bytes(message).own, self.store.read(ALONE)
        self.store.write(ALONE, {**own, **answer})

    def evaluate(self, message: bytes, part: Part, selected: bool) -> bytes:
        """Answer the parameters that score with the evaluation of the own held-out items."""
        serving, store = Download.from_bytes(message).common, self.store
        if selected:
            assert self.selected is not None, "a round was selected"
            store = self.selected
        ranks = self.evaluator.rank(self.evaluator.model(self.task.method, serving, store), part)
        return self.evaluator.tally(ranks).to_bytes()


class OneByOne:
    """Every client of a split by itself."""

    def __init__(
        self,
        task: Task,
        split: Split,
        experiment: Experiment,
        deviations: NDArray[np.float64] | None = None,
    ) -> None:
        """``deviations``: standard deviation of each client's noise, where they differ."""
        self.task = task
        agreed = replace(task, protection=task.protection.on_device())
        owner = split.train.users if split.holders is None else split.holders
        self.devices = {}
        for client in np.unique(owner).tolist():
            own = split.take(np.flatnonzero(owner == client))
            noise = None if deviations is None else deviations[client : client + 1]
            self.devices[client] = Device(agreed, own, experiment, noise)
        self.metrics = experiment.evaluation.reported(experiment.split.next_basket)

    def train(
        self, download: Download, protection: Protection, cohort: NDArray[np.int64]
    ) -> Collected:
        """Let the clients take part one after the other."""
        summed, loss = ExactSum(self.task.public.n_items), LossSum()
        up_bytes = down_bytes = zeroed_out = 0
        method, shape = self.task.method, self.task.upload_shape(download.to(ALONE[:0]))
        spool = None
        if isinstance(method, Relates):
            spool = Spool(method, len(cohort), shape.dense[method.uploaded])
        expected = Expected(
            download.round,
            protection.sent_shape(shape, download.round),
            whole=protection.sends_whole(download.round),
            norm=protection.norm_of(download.round),
        )
        for index, client in enumerate(cohort.tolist()):
            message = download.to(np.array([index])).to_bytes()
            answer = self.devices[client].take_part(message)
            upload = Upload.from_bytes(answer, expected)
            number = np.array([client], np.int32)
            received = protection.receive(upload.update, number, download.round)
            if spool is None:
                summed.add(received)
            else:
                spool.put(np.array([index]), received)
            loss = loss.merge(upload.loss)
            up_bytes, down_bytes = up_bytes + payload(answer), down_bytes + payload(message)
            zeroed_out += upload.update.zeroed_out
        if spool is not None:
            summed.add(_related(spool))
            for index, client in enumerate(cohort.tolist()):
                own = {spool.method.answered: spool.take(np.array([index]))}
                message = Download(download.round, {}, own).to_bytes()
                self.devices[client].keep_answer(message)
                down_bytes += payload(message)
        return Collected(summed, loss, up_bytes, down_bytes, zeroed_out)

    def evaluate(self, serving: Shared, part: Part, *, selected: bool = False) -> Evaluation:
        """Merge the clients' evaluations of their own held-out items."""
        message, merged = Download(0, serving).to_bytes(), Evaluation({})
        for device in self.devices.values():
            answer = device.evaluate(message, part, selected)
            merged = merged.merge(Evaluation.from_bytes(answer, self.metrics))
        return merged

    def keep_selected(self) -> None:
        """Let every client remember its own."""
        for device in self.devices.values():
            device.selected = device.store.snapshot(device.selected)

    def save(self, *, selected: bool) -> Iterator[Arrays]:
        """Yield nothing: clients keep what is theirs."""
        return iter(())

    def load(self, parts: Iterable[Arrays], *, selected: bool) -> None:
        """Put nothing back."""
