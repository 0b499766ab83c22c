"""The embedded backend: all clients in this process, a few thousand at a time, on threads."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hushrec.aggregate import ExactSum
from hushrec.client import take_part
from hushrec.clients import TrainView, balanced_chunks, chunks
from hushrec.methods.base import Method, Shared
from hushrec.privacy.protection import Protection
from hushrec.rng import SecretStreams, Streams
from hushrec.store import PrivateStore

STACK_INTERACTIONS = 3072
"""Training interactions per stack of clients: enough to keep the interpreter idle, few enough for
their rows to stay in the cache."""
STACK_SILOS = 8
"""Silos per stack: they are few and large, so it is the batched product that counts."""
STACK_BYTES = 64 * 2**20
"""Private parameters and uploads per stack, where clients keep or send whole tables."""


@dataclass(frozen=True)
class RoundOutcome:
    """What the server has after a round of uploads."""

    summed: ExactSum
    losses: NDArray[np.float64]
    down_bytes: int


class InProcess:
    """Runs the clients' side of a round on this machine."""

    def __init__(
        self,
        view: TrainView,
        store: PrivateStore,
        threads: int | None = None,
        chunk: int | None = None,
    ) -> None:
        self.view = view.prepared()
        indptr = self.view.positives.indptr
        self.rows_before = indptr if view.holders is None else indptr[view.client_indptr]
        self.store = store
        self.threads = threads or usable_cores()
        self.chunk = chunk

    def run_clients(
        self,
        method: Method,
        shared: Shared,
        stack: Protection,
        cohort: NDArray[np.int64],
        streams: Streams,
        round_number: int,
    ) -> RoundOutcome:
        """Send the shared parameters to the cohort, train it, protect and sum what comes back."""
        received = method.download(shared)
        secret = SecretStreams(streams.seed)
        stacks = self._stacks(method, stack, cohort)
        order = np.concatenate([*stacks, np.zeros(0, np.int64)])

        def work(mine: list[NDArray[np.int64]]) -> tuple[ExactSum, list[NDArray[np.float64]]]:
            summed, losses = ExactSum(self.view.n_items), []
            for clients in mine:
                view = self.view.take_clients(clients)
                private = self.store.read(clients)
                part = take_part(
                    method, stack, received, private, view, round_number, streams, secret
                )
                summed.add(stack.receive(part.upload, view.clients, round_number))
                self.store.write(clients, part.private)
                losses.append(part.losses)
            return summed, losses

        with ThreadPoolExecutor(self.threads) as pool:
            results = list(pool.map(work, [stacks[t :: self.threads] for t in range(self.threads)]))
        self.store.release()
        total = ExactSum(self.view.n_items)
        losses: list[NDArray[np.float64]] = [np.zeros(0)] * len(stacks)
        for t, (summed, part) in enumerate(results):
            total.merge(summed)
            losses[t :: self.threads] = part
        download = sum(array.nbytes for array in received.values())
        said = np.concatenate([*losses, np.zeros(0)])
        if len(said) == len(order):
            said = said[np.argsort(order, kind="stable")]
        return RoundOutcome(total, said, download * len(cohort))

    def _stacks(
        self, method: Method, stack: Protection, cohort: NDArray[np.int64]
    ) -> list[NDArray[np.int64]]:
        if method.traits.pooled:
            return [cohort]
        if self.chunk is not None:
            return list(chunks(cohort, self.chunk))
        most = max(1, STACK_BYTES // (self.store.bytes_per_user + stack.client_bytes))
        work = self.rows_before[cohort + 1] - self.rows_before[cohort]
        if self.view.holders is not None:
            # Silos of about the same size keep each other company in a batched product.
            by_size = cohort[np.argsort(work, kind="stable")[::-1]]
            return list(chunks(by_size, min(most, STACK_SILOS)))
        per_stack = method.traits.stack_interactions or STACK_INTERACTIONS
        return list(balanced_chunks(cohort, work, per_stack, most))


def usable_cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
