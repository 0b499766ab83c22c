"""`ServingData`: the catalogue, the users and the histories that a model recommends with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hushrec.data.features import (
    array_to_strings,
    features_from_arrays,
    features_to_arrays,
    of_newcomer,
    text_to_array,
)
from hushrec.data.interactions import StrArray
from hushrec.data.splitting import Split, join
from hushrec.data.views import Ragged, TrainView
from hushrec.errors import ConfigError, InputError
from hushrec.kernels.ragged import checked_lists

Array = NDArray[Any]
UserIndices = NDArray[np.int64]
NO_USERS = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class ServingData:
    """Catalogue, users and histories that a model recommends with; methods take user indices."""

    items: StrArray
    titles: StrArray | None
    """What to print for an item; None prints its id."""
    users: StrArray
    train: TrainView
    """Training interactions of every user; devices adapt on them."""
    later: Ragged
    """Items that each user touched outside of training, oldest first; they are history too."""
    trained: NDArray[np.bool_]
    """Whether a user takes part in training; the others are folded in."""
    top_value: float
    """Largest value of an interaction; each item in a new user's history gets it."""
    holders: NDArray[np.int32] | None = None
    """Silo of every user; None if every user is a client."""

    @classmethod
    def of(cls, split: Split) -> ServingData:
        """Return the data of a split; held-out items are part of the histories."""
        trained = np.zeros(split.n_users, bool)
        trained[split.training_users] = True
        return cls(
            items=split.data.items,
            titles=split.data.titles,
            users=split.data.users,
            train=split.train,
            later=join(split.valid, join(split.test, split.disliked)),
            trained=trained,
            top_value=float(split.data.value.max()),
            holders=split.holders,
        )

    def without_users(self) -> ServingData:
        """Return the catalogue alone."""
        return replace(
            self,
            users=self.users[:0],
            train=self.train.take(NO_USERS),
            later=Ragged.empty(0),
            trained=self.trained[:0],
            holders=None,
        )

    @cached_property
    def user_index(self) -> Mapping[str, int]:
        """Index of every user id."""
        return {user: index for index, user in enumerate(self.users.tolist())}

    @cached_property
    def item_index(self) -> Mapping[str, int]:
        """Index of every item id."""
        return {item: index for index, item in enumerate(self.items.tolist())}

    @cached_property
    def client_index(self) -> UserIndices:
        """Index of every user's client in the private store."""
        if self.holders is None:
            return np.arange(len(self.users))
        return np.unique(self.holders, return_inverse=True)[1]

    def title(self, item: int) -> str:
        """Return what to print for an item."""
        return str(self.items[item] if self.titles is None else self.titles[item])

    def history(self, users: UserIndices) -> TrainView:
        """Return everything that these users touched, held-out items included."""
        past, later = self.train.take(users), self.later.take(users)
        ones = Ragged(later.indptr, np.ones(len(later.values), np.float32))
        return _with_history(past, join(past.positives, later), join(past.values, ones))

    def new_user(self, history: Iterable[str | int], features: Mapping[str, str]) -> TrainView:
        """Return a client with this history (item ids, oldest first) and these user features."""
        index = self.item_index
        known = [index[str(item)] for item in history if str(item) in index]
        if not known:
            raise ConfigError("none of the items in the history is in the catalogue of this model")
        latest_first = list(dict.fromkeys(reversed(known)))
        client = replace(
            self.train.take(NO_USERS),
            users=np.array([len(self.users)], np.int32),
            user_features=of_newcomer(self.train.user_features, features),
        )
        indptr, items = np.array([0, len(latest_first)]), np.array(latest_first[::-1], np.int32)
        # An item that is named without a rating is taken as liked.
        values = np.full(len(latest_first), self.top_value, np.float32)
        return _with_history(client, Ragged(indptr, items), Ragged(indptr, values))

    @property
    def clients(self) -> TrainView:
        """Training interactions by client, in the order of the private store."""
        if self.holders is None:
            return self.train
        order = np.argsort(self.holders, kind="stable")
        return replace(self.train, holders=self.holders).take(order)

    # ------------------------------------------------------------ in a file

    def to_arrays(self) -> dict[str, Array]:
        """Return everything as plain arrays."""
        train = self.train
        arrays: dict[str, Array] = {
            "items": text_to_array(self.items),
            "users": text_to_array(self.users),
            "numbers": train.users,
            "train.indptr": train.positives.indptr,
            "train.items": train.positives.values,
            "train.times": train.times.values,
            "train.values": train.values.values,
            "later.indptr": self.later.indptr,
            "later.items": self.later.values,
            "trained": self.trained,
            "top_value": np.array([self.top_value]),
        }
        if self.titles is not None:
            arrays["titles"] = text_to_array(self.titles)
        if self.holders is not None:
            arrays["holders"] = self.holders
        features = {"user": train.user_features, "item": train.item_features}
        return arrays | features_to_arrays(features)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> ServingData:
        """Read back what `to_arrays` wrote; refuse arrays that do not fit together."""
        try:
            items, users = (array_to_strings(arrays[name]) for name in ("items", "users"))
            titles = array_to_strings(arrays["titles"]) if "titles" in arrays else None
            features = features_from_arrays(("user", "item"), arrays)
            sizes = len(users), len(items)
            positives, later = (
                Ragged(*checked_lists(p, arrays[f"{p}.indptr"], arrays[f"{p}.items"], *sizes))
                for p in ("train", "later")
            )
            times, values = arrays["train.times"], arrays["train.values"]
            numbers, trained = arrays["numbers"].astype(np.int32), arrays["trained"].astype(bool)
            holders = arrays["holders"].astype(np.int32) if "holders" in arrays else None
            (top_value,) = arrays["top_value"].tolist()
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"the data of the model is damaged: {error!r}") from None
        per_user = [numbers, trained, *features["user"].values()]
        per_user += [] if holders is None else [holders]
        per_item = [*features["item"].values(), *([] if titles is None else [titles])]
        if not (
            {len(column) for column in per_user} == {len(users)}
            and {len(column) for column in per_item} <= {len(items)}
            and len(times) == len(values) == len(positives.values)
        ):
            raise InputError("the data of the model is damaged: its arrays do not fit together")
        train = TrainView(
            users=numbers,
            n_items=len(items),
            positives=positives,
            times=Ragged(positives.indptr, times.astype(np.int64)),
            values=Ragged(positives.indptr, values.astype(np.float32)),
            user_features=features["user"],
            item_features=features["item"],
        )
        return cls(items, titles, users, train, later, trained, top_value, holders)


def _with_history(client: TrainView, items: Ragged, values: Ragged) -> TrainView:
    """Return clients with these histories, oldest first, in place of their own."""
    order = np.arange(len(items.values)) - np.repeat(items.indptr[:-1], items.lengths)
    return replace(
        client,
        positives=items,
        times=Ragged(items.indptr, order),
        values=values,
        never_negative=None,
    )
