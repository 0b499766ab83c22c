"""Splits: which interactions train, which validate, which test.

A `Split` belongs to the evaluation side. Training receives `Split.train_view`, from which the
held-out rows cannot be reached.

Which row is later is part of the protocol. Rows are ordered by (time, file order): 40 % and more of
MovieLens users have ties at their latest timestamp. Where rows of one time are a basket, they stay
on one side of the split, and their order within the basket is drawn, so that no result depends on
the order of lines. Data without times has no order: a drawn one takes its place, in the split and
in the histories.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from hushrec.config import Moment, Settings
from hushrec.data.features import usual
from hushrec.data.interactions import Categorical, Column, Interactions
from hushrec.data.partition import SilosConfig, hold
from hushrec.data.views import Protocol, Ragged, TrainView
from hushrec.errors import ConfigError, DataError
from hushrec.kernels.draws import draw_each
from hushrec.streams import Streams

Part = Literal["valid", "test"]


class SplitConfig(Settings):
    """How to split."""

    kind: Literal["leave-one-out", "ratio", "time", "unseen-users", "next-basket"] = "leave-one-out"
    """Last item tests and the one before validates; a share of each user's rows; one date for
    everybody; whole users whose later half is tested after adapting on the earlier half; or a
    user's last basket (the rows of one time) tests, the one before validates, and lists may hold
    items that the user bought before."""
    valid: Annotated[float, Field(gt=0, lt=0.5)] = 0.1
    """Share that validates (not for leave-one-out and next-basket)."""
    test: Annotated[float, Field(gt=0, lt=0.9)] = 0.2
    """Share that tests (not for leave-one-out and next-basket)."""
    valid_from: Moment | None = None
    """For `time`: rows from this time on validate, in place of a share of everybody's rows; needed,
    with `test_from`, where privacy is promised."""
    test_from: Moment | None = None
    """For `time`: rows from this time on test."""
    order: Literal["auto", "time", "random"] = "auto"
    """What "later" means: the order of time, which is that of the file where there are no times, or
    an order drawn for each user.  [random where the data has no times, else time]"""
    ties: Literal["auto", "together", "file"] = "auto"
    """Rows of one user and time: all on one side of the split, or one after the other in the order
    of the file.  [together for baskets, else file]"""
    hold_out: bool = True
    """False: all rows train, as for a final model (`hushrec train --final`)."""
    min_train: Annotated[int, Field(ge=1)] = 1
    """A user left with fewer training rows than this is not evaluated; all its rows train."""
    positive_above: float | None = None
    """Held-out rows with a value above this are targets; the others are neither targets nor
    candidates.  [all are targets]"""
    drop_below: float | None = None
    """Rows with a smaller value are left out before the split: 4 leaves what people liked."""
    repeats: Literal["auto", "merge", "keep"] = "auto"
    """Repeated (user, item) rows: keep the latest, or keep them all as some papers count them
    (then the held-out item can be a training item too).  [keep for next-basket, else merge]"""

    @model_validator(mode="after")
    def _fits_together(self) -> SplitConfig:
        if self.order == "random" and self.kind in ("time", "next-basket"):
            raise ValueError(f"split.kind = {self.kind} needs the order of time: leave out order")
        if self.kind == "next-basket" and self.ties == "file":
            raise ValueError("a basket is held out as a whole: leave out split.ties = file")
        if self.kind == "next-basket" and self.repeats == "merge":
            raise ValueError("items are bought again in a next basket: leave out split.repeats")
        if self.order == "random" and self.ties == "together":
            raise ValueError(
                "a drawn order separates rows of one time: leave out split.ties = together, or use "
                "split.order = time"
            )
        return self

    @property
    def next_basket(self) -> bool:
        """Whether baskets are held out, and lists may hold items of the history."""
        return self.kind == "next-basket"

    def resolved(self, in_order: bool, has_baskets: bool) -> SplitConfig:
        """Decide what is "auto", for data that has an order or not, and baskets or not.

        Whether there are times is public. Whether rows are baskets is in people's rows, so it must
        not be told where privacy is promised, and a node does not know it of the others.
        """
        by_time = in_order or self.kind in ("time", "next-basket") or self.ties == "together"
        order = ("time" if by_time else "random") if self.order == "auto" else self.order
        together = self.next_basket or (has_baskets and order == "time")
        return self.model_copy(
            update={
                "order": order,
                "ties": ("together" if together else "file") if self.ties == "auto" else self.ties,
                "repeats": ("keep" if self.next_basket else "merge")
                if self.repeats == "auto"
                else self.repeats,
            }
        )


@dataclass(frozen=True)
class Split:
    """Training rows and held-out items of every user, oldest first."""

    config: SplitConfig
    data: Interactions
    """The rows that were split, repeats merged if so configured."""
    train: TrainView
    valid: Ragged
    test: Ragged
    members: NDArray[np.int64]
    """All users but unseen ones, also those without rows, so the population does not depend on
    anyone's data."""
    training_users: NDArray[np.int64]
    """The population that trains: members with a past."""
    disliked: Ragged
    """Held-out non-relevant items; they are neither targets nor candidates."""
    holders: NDArray[np.int32] | None = None
    """Silo of every user; None if every user is a client of its own."""

    @property
    def n_users(self) -> int:
        """Number of users, evaluated or not."""
        return len(self.train)

    @property
    def newcomers(self) -> bool:
        """Whether some users are left out of training."""
        return len(self.training_users) < self.n_users

    @property
    def training_clients(self) -> NDArray[np.int64]:
        """Return the population that cohorts are drawn from."""
        return self._clients_of(self.training_users)

    @property
    def member_clients(self) -> NDArray[np.int64]:
        """Return the population that cohorts are drawn from where data may not decide it."""
        return self._clients_of(self.members)

    def _clients_of(self, users: NDArray[np.int64]) -> NDArray[np.int64]:
        return users if self.holders is None else np.unique(self.holders[users]).astype(np.int64)

    def heldout(self, part: Part) -> Ragged:
        """Return the targets of this part."""
        return self.valid if part == "valid" else self.test

    def evaluated(self, part: Part) -> NDArray[np.int64]:
        """Return the users that have a target in this part."""
        return np.flatnonzero(self.heldout(part).lengths)

    def train_view(self, protocol: Protocol) -> TrainView:
        """Return what training may see; ``published`` adds the held-out items: the leak."""
        view = self.train
        if protocol == "published":
            view = replace(view, never_negative=join(self.valid, self.test))
        if self.holders is None:
            return view
        return replace(view, holders=self.holders).take(np.argsort(self.holders, kind="stable"))

    def history(self, part: Part) -> TrainView:
        """Return the history that a device scores from: at test time with its validation items."""
        if part == "valid":
            return self.train
        latest = self._latest()
        shape = self.valid.indptr
        latest += self.train.repeats  # a basket of its own
        return replace(
            self.train,
            positives=join(self.train.positives, self.valid),
            # The device knows that these came last; exact times and values are not needed.
            times=join(self.train.times, Ragged(shape, np.repeat(latest, self.valid.lengths))),
            values=join(self.train.values, Ragged(shape, np.ones(shape[-1], np.float32))),
        )

    def later_times(self) -> Ragged:
        """Return times of all held-out rows, as many as valid, test and disliked ones together.

        Validation rows are a basket of their own, and so are all others.
        """
        latest = self._latest()
        valid, others = self.valid, join(self.test, self.disliked)
        return join(
            Ragged(valid.indptr, np.repeat(latest + 1, valid.lengths)),
            Ragged(others.indptr, np.repeat(latest + 2, others.lengths)),
        )

    def _latest(self) -> NDArray[np.int64]:
        """Return the last time of each user's training rows; 0 without any."""
        has_past = self.train.times.lengths > 0
        latest = np.zeros(self.n_users, np.int64)
        latest[has_past] = self.train.times.values[self.train.times.indptr[1:][has_past] - 1]
        return latest

    def take(self, users: NDArray[np.int64]) -> Split:
        """Return the share of some users, as a node that holds only them would have it."""
        trains = np.isin(users, self.training_users)
        return replace(
            self,
            data=self.data.select(np.isin(self.data.user, users)),
            train=self.train.take(users),
            valid=self.valid.take(users),
            test=self.test.take(users),
            members=np.flatnonzero(np.isin(users, self.members)),
            training_users=np.flatnonzero(trains),
            disliked=self.disliked.take(users),
            holders=None if self.holders is None else self.holders[users],
        )

    def digest(self) -> str:
        """Identify what trains and what is held out: a model of other data does not fit."""
        hashed = hashlib.blake2b(str(self.data.n_items).encode(), digest_size=16)
        train = self.train
        for part in (train.positives, train.times, train.values, self.valid, self.test):
            hashed.update(part.indptr.tobytes())
            hashed.update(part.values.tobytes())
        for columns in (train.user_features, train.item_features):
            for name, column in columns.items():
                hashed.update(name.encode() + column.tobytes())
        if len(self.disliked.values):
            hashed.update(self.disliked.indptr.tobytes() + self.disliked.values.tobytes())
        if self.holders is not None:
            hashed.update(self.holders.tobytes())
        if train.repeats:
            hashed.update(b"repeats")
        return hashed.hexdigest()

    def facts(self) -> dict[str, Any]:
        """Count what a reader must know to judge the figures."""
        trained = np.zeros(self.data.n_items, bool)
        trained[self.train.positives.values] = True
        unknown, evaluated = ~trained[self.test.values], len(self.evaluated("test"))
        parts = (self.train.positives, self.valid, self.test, self.disliked)
        return {
            "users": self.n_users,
            "items": self.data.n_items,
            "train_rows": int(self.train.positives.lengths[self.training_users].sum()),
            "unused_rows": len(self.data) - sum(len(part.values) for part in parts),
            "training_clients": len(self.training_clients),
            "evaluated_users": evaluated,
            "not_evaluated_users": self.n_users - evaluated,
            "test_items_nobody_trained_on": float(unknown.mean()) if len(unknown) else 0.0,
        }


TRAIN, VALID, TEST, UNUSED, DISLIKED = 0, 1, 2, 3, 4


@dataclass(frozen=True)
class Share:
    """The users whose rows are split: all of them, or those of one node."""

    numbers: NDArray[np.int64]
    """Number of each user in the population."""
    population: int
    holders: NDArray[np.int32] | None = None
    """Silo of each user, where a silo is a client."""


def make_split(
    data: Interactions,
    config: SplitConfig,
    streams: Streams,
    silos: SilosConfig = SilosConfig(),  # noqa: B008 - a frozen value
    tolerant: bool = False,
) -> Split:
    """Split interactions; the random orders come from the run's seed.

    ``tolerant``: nothing to evaluate on is no error, which under a guarantee would tell of a user.
    """
    if silos.kind != "none" and config.kind == "unseen-users":
        why = "silos hold the users they train on"
        raise ConfigError(f"{why}: use another split.kind than unseen-users, or silos.kind = none")
    config = config.resolved(data.in_order, data.has_baskets)
    # An item's number is its row in released tables, so it must not depend on the order of rows.
    data = data.ordered()
    if data.n_users < 2 or data.n_items < 2:
        raise DataError(f"{data.name}: needs at least two users and two items")
    split = split_share(data, config, streams, Share(np.arange(data.n_users), data.n_users))
    for part, use in ((split.valid, "validate"), (split.test, "test")):
        if config.hold_out and not len(part.values) and not tolerant:
            if not len(split.data) and (least := config.drop_below) is not None:
                raise DataError(f"{data.name}: no value reaches split.drop_below = {least:g}")
            raise DataError(
                f"{data.name}: no user is long enough for a {config.kind} split with something to "
                f"{use} on; use more data, larger shares or another split.kind"
            )
    holders = None if silos.kind == "none" else hold(split.train, silos, streams)
    return replace(split, holders=holders)


def split_share(data: Interactions, config: SplitConfig, streams: Streams, share: Share) -> Split:
    """Split the rows of some users, as `make_split` splits them among everybody's.

    What is "auto" is not decided by these rows: they may be those of one node.
    """
    config = config.resolved(in_order=True, has_baskets=False)
    if config.next_basket and not data.has_time:
        raise ConfigError(
            f"{data.name} has no timestamps, so its rows are no baskets: use another split.kind"
        )
    if config.next_basket or config.repeats == "merge":
        data = data.merged(baskets=config.next_basket)
    if config.drop_below is not None:
        keep = data.value >= config.drop_below
        note = f"{int((~keep).sum()):,} rows with a value below {config.drop_below:g} left out"
        data = replace(data.select(keep), notes=(*data.notes, note))
    if config.order == "random" and not data.in_order:
        data = replace(data, time=_drawn(data, share, streams))
    rows = _Ordered.of(data, share, streams if config.ties == "together" else None)
    part = _parts(rows, config, streams)
    n_train = np.bincount(rows.user[part == TRAIN], minlength=data.n_users)
    too_short = (n_train < config.min_train)[rows.user] & (part != TRAIN)
    # A later row of a user without a past would be the future under one date for everybody, and
    # a stranger's row among unseen users; elsewhere it may as well train.
    part[too_short] = UNUSED if config.kind in ("time", "unseen-users") else TRAIN
    if config.repeats == "keep":
        _drop_repeated_targets(part, rows)
    if config.positive_above is not None:
        low = data.value[rows.order] <= config.positive_above
        part[low & ((part == VALID) | (part == TEST))] = DISLIKED

    def ragged(number: int, values: NDArray[Any]) -> Ragged:
        chosen = part == number
        counts = np.bincount(rows.user[chosen], minlength=data.n_users)
        return Ragged(np.concatenate([[0], np.cumsum(counts)]), values[rows.order][chosen])

    train = TrainView(
        users=share.numbers.astype(np.int32),
        n_items=data.n_items,
        positives=ragged(TRAIN, data.item),
        times=ragged(TRAIN, data.time),
        values=ragged(TRAIN, data.value),
        user_features={**data.user_features, **_usual_context(rows, part == TRAIN)},
        item_features=data.item_features,
        repeats=config.next_basket,
        merged=config.repeats == "merge",
    )
    valid, test = ragged(VALID, data.item), ragged(TEST, data.item)
    members = np.flatnonzero(may_train(config, streams, share.population)[share.numbers])
    training = members[train.positives.lengths[members] > 0]
    disliked = ragged(DISLIKED, data.item)
    return Split(config, data, train, valid, test, members, training, disliked, share.holders)


def may_train(config: SplitConfig, streams: Streams, population: int) -> NDArray[np.bool_]:
    """Return for each user of the population whether the split lets it train."""
    if config.kind != "unseen-users" or not config.hold_out:
        return np.ones(population, np.bool_)
    return np.asarray(_unseen_role(population, config, streams) == TRAIN)


def _usual_context(rows: _Ordered, training: NDArray[np.bool_]) -> dict[str, Column]:
    """Return each user's most frequent context in its training rows; held-out rows do not count."""
    mine, data = rows.order[training], rows.data
    return {
        name: usual(column.take(mine), data.user[mine], data.n_users)
        for name, column in data.context.items()
        if isinstance(column, Categorical)
    }


def _drop_repeated_targets(part: NDArray[np.int8], rows: _Ordered) -> None:
    """Keep a held-out item once in its part: it is one target, however often it was touched."""
    pair = rows.user.astype(np.int64) * rows.data.n_items + rows.data.item[rows.order]
    for number in (VALID, TEST):
        held = np.flatnonzero(part == number)
        first = np.unique(pair[held], return_index=True)[1]
        part[np.delete(held, first)] = UNUSED


def _drawn(data: Interactions, share: Share, streams: Streams) -> NDArray[np.int64]:
    """Return the place of each row in an order drawn for its user.

    The order follows from users and items, so it is the same whatever the order of the rows.
    """
    numbers = share.numbers[data.user].astype(np.int32)
    tickets = draw_each(streams.key("split/order"), numbers, data.item.astype(np.int64))
    place = np.empty(len(data), np.int64)
    place[np.lexsort((tickets, data.user))] = np.arange(len(data))
    return place


@dataclass(frozen=True)
class _Ordered:
    """All rows, user by user, oldest first."""

    data: Interactions
    share: Share
    order: NDArray[np.int64]
    user: NDArray[np.int32]
    position: NDArray[np.int64]
    """0 is the user's oldest row."""
    size: NDArray[np.int64]
    """Number of rows of the row's user."""

    @classmethod
    def of(cls, data: Interactions, share: Share, streams: Streams | None = None) -> _Ordered:
        """Order by time; ties by the order of the file, or as they are drawn from the streams."""
        ties = np.arange(len(data)) if streams is None else _drawn(data, share, streams)
        order = np.lexsort((ties, data.time, data.user))
        user = data.user[order]
        count = np.bincount(data.user, minlength=data.n_users)
        first = np.cumsum(count) - count
        return cls(data, share, order, user, np.arange(len(order)) - first[user], count[user])

    @cached_property
    def starts_moment(self) -> NDArray[np.bool_]:
        """Whether a row has another user or time than the row before it."""
        time = self.data.time[self.order]
        return np.append(True, (np.diff(self.user) != 0) | (np.diff(time) != 0))[: len(time)]

    def moments(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the number of each row's time among its user's, from 0 on, and their count."""
        number = np.cumsum(self.starts_moment) - 1
        count = np.bincount(self.user[self.starts_moment], minlength=self.data.n_users)
        first = np.cumsum(count) - count
        return number - first[self.user], count[self.user]

    def last_of_moment(self) -> NDArray[np.int64]:
        """Return for each row the position of the last row of the same user and time."""
        starts = np.flatnonzero(self.starts_moment)
        last = np.append(starts[1:], len(self.order)) - 1
        position: NDArray[np.int64] = self.position[last][np.cumsum(self.starts_moment) - 1]
        return position

    def shuffled_position(self, streams: Streams) -> NDArray[np.int64]:
        """Return positions in a random order in place of the order in time."""
        # From each user's own stream, so no user's rows change another user's order.
        numbers = self.share.numbers[self.user].astype(np.int32)
        ticket = draw_each(streams.key("split/order"), numbers, self.position)
        position = np.empty(len(ticket), np.int64)
        position[np.lexsort((ticket, self.user))] = self.position
        return position


def _parts(rows: _Ordered, config: SplitConfig, streams: Streams) -> NDArray[np.int8]:
    """Return the part that each row belongs to."""
    if not config.hold_out:
        return np.full(len(rows.order), TRAIN, np.int8)
    if config.kind == "time":
        data = rows.data
        if not data.has_time:
            raise ConfigError(f"{data.name} has no timestamps: split.kind = 'time' cannot be used")
        time = data.time[rows.order]
        shares = [1 - config.test - config.valid, 1 - config.test]
        found = np.quantile(time, shares, method="higher") if len(time) else np.zeros(2)
        first_valid = found[0] if config.valid_from is None else config.valid_from
        first_test = found[1] if config.test_from is None else config.test_from
        return _select(time >= first_test, time >= first_valid)
    position, size, together = rows.position, rows.size, config.ties == "together"
    if config.order == "random" and rows.data.in_order:
        position = rows.shuffled_position(streams)
    if config.kind in ("leave-one-out", "next-basket"):
        if together:
            position, size = rows.moments()
        from_end = size - 1 - position
        return _select(from_end == 0, from_end == 1)
    if together:
        # A moment that a limit cuts is on the later side.
        position = rows.last_of_moment()
    if config.kind == "ratio":
        from_end = size - 1 - position
        n_test, n_valid = np.floor(size * config.test), np.floor(size * config.valid)
        return _select(from_end < n_test, from_end < n_test + n_valid)
    role = _unseen_role(rows.share.population, config, streams)[rows.share.numbers[rows.user]]
    # The earlier half adapts the model on the device; only the later half is ranked.
    return np.where(position >= (size + 1) // 2, role, TRAIN).astype(np.int8)


def _unseen_role(n_users: int, config: SplitConfig, streams: Streams) -> NDArray[np.int8]:
    rank = streams.generator("split/unseen-users").permutation(n_users)
    n_test, n_valid = round(n_users * config.test), round(n_users * config.valid)
    return _select(rank < n_test, rank < n_test + n_valid)


def _select(tests: NDArray[np.bool_], validates: NDArray[np.bool_]) -> NDArray[np.int8]:
    return np.select([tests, validates], [TEST, VALID], TRAIN).astype(np.int8)


def join(first: Ragged, second: Ragged) -> Ragged:
    """Append the second's values to the first's, row by row."""
    values = np.empty(len(first.values) + len(second.values), first.values.dtype)
    before = np.repeat(second.indptr[:-1], first.lengths)
    values[np.arange(len(first.values)) + before] = first.values
    before = np.repeat(first.indptr[1:], second.lengths)
    values[np.arange(len(second.values)) + before] = second.values
    return Ragged(first.indptr + second.indptr, values)
