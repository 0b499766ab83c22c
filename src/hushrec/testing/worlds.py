"""Small worlds whose answer is known, and a federation to play rounds in."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from hushrec.data.interactions import Categorical, Features, Interactions, Numeric
from hushrec.data.views import Ragged, TrainView
from hushrec.federation.backends.base import Collected
from hushrec.federation.backends.simulation import THIS_MACHINE, InProcess, Machine
from hushrec.federation.client import Task
from hushrec.methods.base import Method
from hushrec.privacy.protection import Protection
from hushrec.private.store import PrivateStore
from hushrec.streams import SecretRound, SecretStreams, Streams

N_USERS, N_ITEMS, N_GROUPS = 60, 60, 3
_GROUPS = np.array(["low", "middle", "high"])


def taste_world(seed: int = 0) -> Interactions:
    """Make users who each touch items of one third of the catalogue only, equally popular."""
    generator = np.random.default_rng(seed)
    size = N_ITEMS // N_GROUPS
    user, item, time = [], [], []
    for number in range(N_USERS):
        liked = number % N_GROUPS * size + generator.permutation(size)[: 9 + number % 4]
        user += [number] * len(liked)
        item += liked.tolist()
        time += list(range(len(liked)))
    return Interactions(
        name="tastes",
        user=np.array(user, np.int32),
        item=np.array(item, np.int32),
        value=np.ones(len(user), np.float32),
        time=np.array(time, np.int64),
        users=np.array([f"user-{k:02d}" for k in range(N_USERS)]),
        items=np.array([f"item-{k:02d}" for k in range(N_ITEMS)]),
        user_features=_group_of_users(N_USERS),
        item_features=_group_of_items(N_ITEMS),
        items_declared=True,
    )


def _group_of_users(count: int) -> Features:
    """Say which third of the catalogue each user likes."""
    taste = np.arange(count, dtype=np.int32) % N_GROUPS
    return {"taste": Categorical(taste, _GROUPS, declared=True)}


def _group_of_items(count: int) -> Features:
    """Say which third of the catalogue each item is in, and give it a number besides."""
    place = np.arange(count, dtype=np.int32)
    third = Categorical(np.minimum(place // (N_ITEMS // N_GROUPS), N_GROUPS - 1), _GROUPS)
    return {"third": third, "place": Numeric((place % 7).astype(np.float32), 0.0, 7.0)}


def clients_of(rows: list[list[int]], n_items: int = N_ITEMS) -> TrainView:
    """Make a stack of clients from their training items, oldest first."""
    indptr = np.cumsum([0, *(len(row) for row in rows)])
    items = np.array([item for row in rows for item in row], np.int32)
    return TrainView(
        users=np.arange(len(rows), dtype=np.int32),
        n_items=n_items,
        positives=Ragged(indptr, items),
        times=Ragged(indptr, np.arange(len(items))),
        values=Ragged(indptr, np.ones(len(items), np.float32)),
        user_features=_group_of_users(len(rows)),
        item_features=_group_of_items(n_items),
    )


class Federation:
    """A method and its clients: rounds as `federation.rounds` plays them, nothing around them."""

    def __init__(
        self,
        method: Method,
        view: TrainView,
        *,
        store: PrivateStore | None = None,
        protection: Protection = Protection(),  # noqa: B008 - a frozen value
        machine: Machine = THIS_MACHINE,
        seed: int = 0,
    ) -> None:
        streams, public = Streams(seed), view.take(np.zeros(0, np.int64))
        self.task = Task(method, protection, streams, SecretStreams(seed), public)
        self.shared = method.init(view, streams)
        fields = method.private_fields(view, self.shared, streams)
        self.store = store or PrivateStore(fields, len(view.clients))
        self.backend = InProcess(self.task, view, self.store, machine=machine)
        self.state: Mapping[str, float] = protection.state
        self.number = 0

    def round(self, cohort: NDArray[np.int64] | None = None) -> Collected:
        """Play a round; without a cohort, everybody takes part."""
        self.number += 1
        if cohort is None:
            cohort = np.arange(len(self.backend.view.clients))
        download = self.task.download(self.number, self.shared, cohort, self.state)
        protection = self.task.protection_of(download.to(cohort[:0]))
        collected = self.backend.train(download, protection, cohort)
        secret = SecretRound(self.number, self.task.secret)
        total, following = protection.finish(collected.summed, secret)
        phase = self.task.method.phase_of(self.number)
        self.shared = phase.apply(self.shared, total, self.number)
        self.state = following.state
        return collected
