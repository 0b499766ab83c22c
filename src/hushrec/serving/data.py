"""`ServingData`: the catalogue, the users and the histories that a model recommends with.

A `Filter` says which items a list of `Recommendation` may hold.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from hushrec.data.features import (
    array_to_strings,
    features_from_arrays,
    features_to_arrays,
    of_newcomer,
    text_to_array,
)
from hushrec.data.interactions import (
    Categorical,
    Features,
    MultiCategorical,
    Numeric,
    StrArray,
)
from hushrec.data.splitting import Split, join
from hushrec.data.views import Ragged, TrainView
from hushrec.errors import ConfigError, InputError, nearest, refuse_unknown
from hushrec.kernels.ragged import checked_lists, top_k
from hushrec.methods.baselines import distinct_items, where

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
    later_times: Ragged | None = None
    """Times of the later items, where items are bought again and those of one time are a basket."""

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
            top_value=float(split.data.value.max()) if len(split.data) else 0.0,
            holders=split.holders,
            later_times=split.later_times() if split.train.repeats else None,
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
            later_times=Ragged.empty(0, np.int64) if self.repeats else None,
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

    @property
    def n_rows(self) -> int:
        """Number of interactions in all histories."""
        return len(self.train.positives.values) + len(self.later.values)

    @property
    def repeats(self) -> bool:
        """Whether lists may hold items of the history, as where people buy again."""
        return self.train.repeats

    def title(self, item: int) -> str:
        """Return what to print for an item."""
        return str(self.items[item] if self.titles is None else self.titles[item])

    def item_numbers(self, items: Iterable[str | int]) -> NDArray[np.int64]:
        """Return the numbers of item ids; refuse unknown ones."""
        index, ids = self.item_index, [str(item) for item in items]
        for item in ids:
            if item not in index:
                raise ConfigError(f"no item '{item}' in the catalogue{nearest(item, index)}")
        return np.array([index[item] for item in ids], np.int64)

    def history(self, users: UserIndices) -> TrainView:
        """Return everything that these users touched, held-out items included."""
        past, later = self.train.take(users), self.later.take(users)
        ones = Ragged(later.indptr, np.ones(len(later.values), np.float32))
        items, values = join(past.positives, later), join(past.values, ones)
        if self.later_times is None:
            return _with_history(past, items, values)
        times = join(past.times, self.later_times.take(users))
        return replace(_with_history(past, items, values), times=times)

    def popularity(self) -> NDArray[np.float32] | None:
        """Return the number of training users of every item; None without users."""
        touched = distinct_items(self.train.positives.take(np.flatnonzero(self.trained)))
        counts = np.bincount(touched.values, minlength=len(self.items)).astype(np.float32)
        return counts if counts.any() else None

    def new_user(self, history: Iterable[str | int], features: Mapping[str, str]) -> TrainView:
        """Return a client with this history (item ids, oldest first) and these user features.

        Items that are not in the catalogue are left out. Where items are bought again, a new basket
        begins with an item that the last one has already.
        """
        index = self.item_index
        known = [index[str(item)] for item in reversed(list(history)) if str(item) in index]
        latest_first = known if self.repeats else list(dict.fromkeys(known))
        client = replace(
            self.train.take(NO_USERS),
            users=np.array([len(self.users)], np.int32),
            user_features=of_newcomer(self.train.user_features, features),
        )
        indptr, items = np.array([0, len(latest_first)]), np.array(latest_first[::-1], np.int32)
        # An item that is named without a rating is taken as liked.
        values = np.full(len(latest_first), self.top_value, np.float32)
        made = _with_history(client, Ragged(indptr, items), Ragged(indptr, values))
        return replace(made, times=Ragged(indptr, _baskets(items))) if self.repeats else made

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
            "repeats": np.array([self.repeats]),
        }
        if self.titles is not None:
            arrays["titles"] = text_to_array(self.titles)
        if self.holders is not None:
            arrays["holders"] = self.holders
        if self.later_times is not None:
            arrays["later.times"] = self.later_times.values
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
            (top_value,), (repeats,) = (arrays[n].tolist() for n in ("top_value", "repeats"))
            later_times = arrays["later.times"].astype(np.int64) if repeats else None
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"the data of the model is damaged: {error!r}") from None
        per_user = [numbers, trained, *features["user"].values()]
        per_user += [] if holders is None else [holders]
        per_item = [*features["item"].values(), *([] if titles is None else [titles])]
        if not (
            {len(column) for column in per_user} == {len(users)}
            and {len(column) for column in per_item} <= {len(items)}
            and len(times) == len(values) == len(positives.values)
            and (later_times is None or len(later_times) == len(later.values))
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
            repeats=bool(repeats),
        )
        baskets = None if later_times is None else Ragged(later.indptr, later_times)
        return cls(items, titles, users, train, later, trained, top_value, holders, baskets)


@dataclass(frozen=True)
class Recommendation:
    """One item of a list."""

    item: str
    title: str
    score: float
    because: str = ""
    """The largest contribution to the score, in words: "often after Heat", "popular"; empty where
    the method's scores are no sums of contributions."""


LIST_COLUMNS = ("user", "rank", *(field.name for field in fields(Recommendation)))
"""Columns of a table of lists."""


def list_rows(user: str, lines: Sequence[Recommendation]) -> list[tuple[Any, ...]]:
    """Return the rows of one user's list in a table of lists."""
    return [(user, rank, *vars(line).values()) for rank, line in enumerate(lines, 1)]


class FilterOptions(TypedDict, total=False):
    """Keyword arguments that say which items a list may hold."""

    only: Iterable[str | int] | None
    """Ids of the items to choose from; None for the whole catalogue."""
    without: Iterable[str | int]
    """Ids of items to leave out."""
    where: Iterable[str]
    """Conditions on item features that all hold: ``genres=Comedy``, ``year>=1990``."""
    seen: bool
    """Whether items of the user's history are listed too."""


CONDITION = re.compile(r"(?P<name>[^<>=!]+)(?P<sign>>=|<=|!=|=|>|<)(?P<value>.*)", re.DOTALL)
COMPARE: Mapping[str, Callable[[Array, float], Array]] = {
    ">=": np.greater_equal,
    "<=": np.less_equal,
    ">": np.greater,
    "<": np.less,
    "=": np.equal,
    "!=": np.not_equal,
}


@dataclass(frozen=True, eq=False)
class Filter:
    """Which items lists may hold."""

    items: NDArray[np.int64]
    """Numbers of the allowed items, ascending."""
    seen: bool
    """Whether a list may hold items of the user's own history."""

    @classmethod
    def of(cls, data: ServingData, options: FilterOptions) -> Filter:
        """Return the filter of some options; refuse unknown items, features and categories."""
        refuse_unknown("recommend", options, FilterOptions.__annotations__)
        only, allowed = options.get("only"), np.ones(len(data.items), np.bool_)
        if only is not None:
            allowed[:] = False
            allowed[data.item_numbers(only)] = True
        allowed[data.item_numbers(options.get("without", ()))] = False
        for condition in options.get("where", ()):
            allowed &= _holds(data.train.item_features, condition)
        return cls(np.flatnonzero(allowed), options.get("seen", False) or data.repeats)

    def top(
        self, scores: NDArray[np.float32], seen: Ragged, k: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return each row's best allowed items, [rows, k], and their scores; -1 is no item."""
        if not len(self.items):
            nothing = len(scores), 0
            return np.zeros(nothing, np.int32), np.zeros(nothing, np.float32)
        if self.seen:
            seen = Ragged.empty(len(scores))
        length = min(int(k), len(self.items))
        if len(self.items) == scores.shape[1]:
            return top_k(scores, seen.indptr, seen.values, length)
        index = np.full(scores.shape[1], -1, np.int32)
        index[self.items] = np.arange(len(self.items))
        among = index[seen.values]
        left = where(Ragged(seen.indptr, among), among >= 0)
        found, values = top_k(scores[:, self.items], left.indptr, left.values, length)
        return np.where(found < 0, -1, self.items[found]).astype(np.int32), values


def _holds(features: Features, condition: str) -> NDArray[np.bool_]:
    """Return for which items a condition on a feature holds."""
    parts = CONDITION.fullmatch(condition)
    if parts is None:
        raise ConfigError(f"'{condition}' is no condition: write genres=Comedy or year>=1990")
    name, sign, value = (parts[group].strip() for group in ("name", "sign", "value"))
    if name not in features:
        known = nearest(name, features) if features else ": the items of this data have none"
        raise ConfigError(f"no item feature '{name}'{known}")
    column = features[name]
    if isinstance(column, Numeric):
        holds = COMPARE[sign](column.values, _number(condition, value))
        return np.asarray(holds & ~np.isnan(column.values))
    if sign in ("=", "!="):
        chosen = np.isin(column.names, _categories(column, name, value))
    else:
        numbers = np.array([_number(f"{name}{sign}", each) for each in column.names.tolist()])
        chosen = COMPARE[sign](numbers, _number(condition, value))
        sign = "="
    if isinstance(column, MultiCategorical):
        has = column.flags[:, chosen].any(axis=1)
    else:
        has = np.append(chosen, False)[column.codes]
    return np.asarray(~has if sign == "!=" else has)


def _categories(column: Categorical | MultiCategorical, name: str, value: str) -> list[str]:
    """Return the categories that a condition names, divided by "|"."""
    wanted, known = value.split("|"), set(column.names.tolist())
    for one in wanted:
        if one not in known:
            raise ConfigError(f"item feature '{name}' has no '{one}'{nearest(one, known)}")
    return wanted


def _number(condition: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ConfigError(f"'{condition}' compares numbers, and '{value}' is none") from None


def has_features(view: TrainView) -> NDArray[np.bool_]:
    """Return which users have any known feature."""
    known = np.zeros(len(view), np.bool_)
    for column in view.user_features.values():
        if isinstance(column, Numeric):
            known |= ~np.isnan(column.values)
        elif isinstance(column, Categorical):
            known |= column.codes >= 0
        else:
            known |= column.flags.any(axis=1)
    return known


def _baskets(items: NDArray[np.int32]) -> NDArray[np.int64]:
    """Number the baskets of one history: an item is in a basket once."""
    number, basket, out = 0, set[int](), np.zeros(len(items), np.int64)
    for place, item in enumerate(items.tolist()):
        if item in basket:
            number, basket = number + 1, set()
        basket.add(item)
        out[place] = number
    return out


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
