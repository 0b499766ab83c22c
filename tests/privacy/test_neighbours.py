"""Whoever is emptied or replaced: nothing but the sums moves, and they move within the bound."""

from dataclasses import replace

import numpy as np
import pytest

import hushrec
from hushrec.data.interactions import Categorical, Interactions, MultiCategorical, Numeric
from hushrec.data.splitting import make_split
from hushrec.federation.backends import Machine
from hushrec.federation.experiment import ExperimentRequest
from hushrec.federation.setup import set_up, upload_schedule
from hushrec.methods.base import method_class, method_names
from hushrec.methods.relations import Relates
from hushrec.privacy.accountant import sensitivity
from hushrec.privacy.clipping import BIT
from hushrec.streams import SecretRound, Streams
from hushrec.testing import taste_world

CENTRAL = {"privacy.mode": "central", "privacy.noise_seed": 0, "privacy.epsilon": 8.0}
TRAITS = {name: method_class(name).traits for name in method_names()}
PROTECTED = [
    name
    for name, has in TRAITS.items()
    if not has.pooled
    and not issubclass(method_class(name), Relates)
    and not (has.exact_sums and method_class(name).under_noise is None)
]
"""Methods that can be given a guarantee; those that cannot are refused (below)."""
ONE = Machine(threads=1)


def emptied(data: Interactions, user: int) -> Interactions:
    """Take a user's rows and features away; its place on the list stays."""

    def unknown(column):
        if isinstance(column, Categorical):
            codes = column.codes.copy()
            codes[user] = -1
            return replace(column, codes=codes)
        if isinstance(column, MultiCategorical):
            flags = column.flags.copy()
            flags[user] = False
            return replace(column, flags=flags)
        assert isinstance(column, Numeric)
        values = column.values.copy()
        values[user] = np.nan
        return replace(column, values=values)

    features = {name: unknown(column) for name, column in data.user_features.items()}
    return replace(data.select(data.user != user), user_features=features)


def replaced(data: Interactions, user: int) -> Interactions:
    """Give a user the mirror image of its rows, large values, and somebody else's features."""
    mine, other = data.user == user, (user + 1) % data.n_users
    swap = np.arange(data.n_users)
    swap[user] = other
    return replace(
        data,
        item=np.where(mine, data.n_items - 1 - data.item, data.item).astype(np.int32),
        value=np.where(mine, 1e30, data.value).astype(np.float32),
        user_features={name: column.take(swap) for name, column in data.user_features.items()},
    )


CHANGES = {"zero-out-one": emptied, "replace-one": replaced}


def numbers(total):
    """A sum as one mapping from names to whole arrays."""
    found = {}
    for name, (ids, rows) in total.rows.items():
        found[name] = {int(key): row for key, row in zip(ids, rows, strict=True) if row.any()}
    return found, dict(total.dense)


def apart(one, other):
    """The L2 distance of two sums, and that of their bits."""
    squares, bits = 0.0, 0.0
    rows, dense = numbers(one)
    other_rows, other_dense = numbers(other)
    for name in rows.keys() | other_rows.keys():
        mine, theirs = rows.get(name, {}), other_rows.get(name, {})
        for key in mine.keys() | theirs.keys():
            squares += float(((mine.get(key, 0.0) - theirs.get(key, 0.0)) ** 2).sum())
    for name in dense.keys() | other_dense.keys():
        moved = np.asarray(dense.get(name, 0.0)) - np.asarray(other_dense.get(name, 0.0))
        if name == BIT:
            bits = abs(float(moved))
        else:
            squares += float((moved**2).sum())
    return squares**0.5, bits


def settings_of(method, neighbours):
    asked = {**CENTRAL, "privacy.neighbours": neighbours}
    return asked | ({"d": 8} if "d" in method_class(method).Config.model_fields else {})


def world_of(experiment, data):
    split = make_split(data, experiment.split, Streams(experiment.seed), experiment.silos)
    setup = set_up(experiment, split)
    return split, setup.plan, *setup.start(ONE)


def public(world, experiment):
    """All that nobody's data may change."""
    split, plan, server, state = world
    return (
        split.data.items.tolist(),
        server.clients.tolist(),
        upload_schedule(server.task, experiment.rounds),
        plan.protection,
        plan.event,
        plan.delta,
        plan.statement([], 0).statement,
        {name: array.tobytes() for name, array in state.shared.items()},
        {name: list(getattr(c, "names", [])) for name, c in split.train.user_features.items()},
    )


def hold(data, method, neighbours, user, rounds=2):
    """Play rounds in two neighbouring worlds that release the same, and compare what is summed."""
    experiment = ExperimentRequest(
        data.name, method, settings=settings_of(method, neighbours)
    ).experiment()
    one = world_of(experiment, data)
    other = world_of(experiment, CHANGES[neighbours](data, user))
    assert public(one, experiment) == public(other, experiment)
    _, plan, server, state = one
    if plan.event is None:
        return  # nothing is uploaded
    shared, protection_state = state.shared, state.protection
    for number in range(1, min(rounds, experiment.rounds) + 1):
        download = server.task.download(number, shared, server.clients, protection_state)
        protection = server.task.protection_of(download.to(server.clients[:0]))
        sums = [
            world[2].backend.train(download, protection, server.clients).summed
            for world in (one, other)
        ]
        moved, bits = apart(*(summed.total() for summed in sums))
        if number not in protection.silent:
            (layer,) = protection.mechanisms
            bound = sensitivity(layer.clip.whole_bound(layer.shape), neighbours)
            assert moved <= bound, (method, neighbours, user, number)
            assert bits <= sensitivity(0.5, neighbours)
        else:
            assert moved == bits == 0
        total, following = protection.finish(sums[0], SecretRound(number, server.task.secret))
        shared = server.task.method.phase_of(number).apply(shared, total, number)
        protection_state = following.state


@pytest.mark.parametrize("neighbours", CHANGES)
@pytest.mark.parametrize("method", PROTECTED)
def test_one_user_moves_nothing_but_the_sums_and_those_within_the_bound(method, neighbours):
    data = taste_world()
    for user in (0, 31, 59):
        hold(data, method, neighbours, user)


@pytest.mark.slow
@pytest.mark.parametrize("method", PROTECTED)
@pytest.mark.parametrize(
    ("name", "neighbours"), [("demo", "replace-one"), ("ml-100k", "zero-out-one")]
)
def test_the_most_active_user_of_a_data_set(name, method, neighbours, request):
    if name == "ml-100k":
        request.getfixturevalue("data_dir")
    data = hushrec.load(name)
    hold(data, method, neighbours, int(np.bincount(data.user).argmax()), rounds=1)


@pytest.mark.parametrize("kind", ["ratio", "unseen-users"])
def test_a_random_order_is_drawn_user_by_user(kind):
    """Were it drawn for all rows together, one user's rows would move everybody's."""
    data = taste_world()
    experiment = ExperimentRequest(
        "tastes", "fedmf", settings={"split.kind": kind, "split.order": "random"}
    ).experiment()
    parts = []
    for given in (data, emptied(data, 0)):
        split = make_split(given, experiment.split, Streams(0))
        parts.append([[p[user].tolist() for user in range(1, 60)] for p in pieces(split)])
    assert parts[0] == parts[1]


def pieces(split):
    return split.train.positives, split.valid, split.test


def test_the_comparison_would_notice():
    """Without clipping the same change moves the sum out of bounds."""
    data = taste_world()
    experiment = ExperimentRequest(
        "tastes", "fedmf", settings=settings_of("fedmf", "replace-one")
    ).experiment()
    worlds = [world_of(experiment, given) for given in (data, replaced(data, 3))]
    sums = []
    for _, plan, server, state in worlds:
        download = server.task.download(1, state.shared, server.clients, state.protection)
        loud = replace(plan.protection, mechanisms=())
        sums.append(server.backend.train(download, loud, server.clients).summed.total())
    moved, _ = apart(*sums)
    assert moved > 2 * plan.protection.mechanisms[0].clip.bound * 0.01


def test_an_emptied_user_uploads_nothing_whatever_the_method_makes_of_it():
    """The zeros of somebody without rows are made by the protection, not left to the method."""
    experiment = ExperimentRequest("tastes", "fedmf", settings=CENTRAL).experiment()
    split, plan, server, state = world_of(experiment, emptied(taste_world(), 5))
    assert 5 in server.clients
    assert len(split.training_users) == 59
    alone = np.array([5])
    download = server.task.download(1, state.shared, alone, state.protection)
    total = server.backend.train(download, plan.protection, alone).summed.total()
    assert not any(rows.any() for _, rows in total.rows.values())
    assert not any(np.any(array) for array in total.dense.values())
