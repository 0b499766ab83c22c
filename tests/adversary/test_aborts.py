"""Whether a protected run ends in an error, and which files it writes, tells nothing of one user.

Pairs of neighbouring data sets are trained over splits and options. The outcome, an error or the
names of all files, is the same for both, also where one user alone has what a step seems to need:
rows after the dates, a value that is kept, a second row, any row at all.
"""

from dataclasses import replace

import numpy as np
import pytest

import hushrec
from hushrec.data.interactions import Categorical, Interactions
from hushrec.errors import HushrecError
from hushrec.reporting.html import write_report
from hushrec.reporting.tables import summary_lines

ITEMS = 12
ONE = 0
"""The user that is different."""


def world(kind):
    """Return data in which user `ONE` alone has something, and its neighbours without it."""
    length = 1 if kind == "the only long history" else 5
    rows = [
        (user, (3 * user + place) % ITEMS, 10 + place, 2.0)
        for user in range(1, 9)
        for place in range(length)
    ]
    if kind == "the only rows":
        rows = []
    mine = [(ONE, item, 10 + 9 * item, 5.0) for item in range(6)]
    if kind == "every item":
        mine = [(ONE, item, 10 + item, 2.0) for item in range(ITEMS)]
    if kind == "absurd numbers":
        mine = [(ONE, item, (-1) ** item * 2**61, 3e38 if item % 2 else -3e38) for item in range(6)]
    if kind == "one row":
        mine = [(ONE, 3, 10, 2.0)]
    user, item, time, value = (np.array(column) for column in zip(*mine, *rows, strict=True))
    codes = np.array([2, *[0, 1] * 4])
    return Interactions(
        name="neighbours",
        user=user.astype(np.int32),
        item=item.astype(np.int32),
        value=value.astype(np.float32),
        time=time.astype(np.int64),
        users=np.array([f"u{k}" for k in range(9)]),
        items=np.array([f"i{k:02d}" for k in range(ITEMS)]),
        user_features={
            "taste": Categorical(codes.astype(np.int32), np.array(["a", "b", "c"]), declared=True)
        },
        items_declared=True,
    )


def without(data):
    """Zero the user out: neither rows nor features, and its place on the list stays."""
    (name, column), *_ = data.user_features.items()
    codes = column.codes.copy()
    codes[ONE] = -1
    changed = replace(data, user_features={name: replace(column, codes=codes)})
    return changed.select(data.user != ONE)


def outcome(data, method, settings, folder):
    """Train; return the kind of error, or the names of the files."""
    try:
        run = hushrec.train(data, method, settings=settings, out=folder, rounds=ROUNDS.get(method))
        write_report(run)
        assert summary_lines(run.summary)
    except HushrecError as error:
        return f"{type(error).__name__}: {error}"
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))


ROUNDS = {"fedmf": 2, "fedrap": 2, "fedncf": 2, "lipm": 2}
CENTRAL = {"privacy.mode": "central", "privacy.epsilon": 8.0, "privacy.noise_seed": 0}
LOCAL = {
    "privacy.mode": "local-gaussian",
    "privacy.epsilon": 8.0,
    "privacy.clip": 1.0,
    "privacy.noise_seed": 0,
}
QUERIES = {**CENTRAL, "privacy.selection_share": 0.1}
DATES = {"split.kind": "time", "split.valid_from": 30, "split.test_from": 52}
SPLITS = {
    "leave-one-out": {},
    "time": DATES,
    "ratio": {"split.kind": "ratio", "split.test": 0.2, "split.valid": 0.2},
    "unseen-users": {"split.kind": "unseen-users", "split.test": 0.2, "split.valid": 0.2},
}
WORLDS = ["the only late rows", "the only long history", "the only rows", "every item", "one row"]
CASES = [
    *((kind, name, "fednext", CENTRAL) for kind in WORLDS for name in SPLITS),
    ("absurd numbers", "leave-one-out", "fednext", CENTRAL),
    ("absurd numbers", "ratio", "fedmf", LOCAL),
    ("the only late rows", "drop_below", "fednext", CENTRAL),
    ("the only late rows", "drop_below", "fedmf", LOCAL),
    ("the only late rows", "positive_above", "fednext", CENTRAL),
    ("the only late rows", "time", "fedmf", LOCAL),
    ("the only rows", "leave-one-out", "fedrap", CENTRAL),
    ("the only rows", "leave-one-out", "fedncf", LOCAL),
    ("the only long history", "leave-one-out", "fedmf", QUERIES),
    ("the only late rows", "min_train", "fedmf", CENTRAL),
    ("every item", "sampled", "fedmf", CENTRAL),
    ("the only long history", "silos", "lipm", CENTRAL),
    ("the only rows", "next-basket", "personal-frequency", LOCAL),
]
OPTIONS = {
    **SPLITS,
    "next-basket": {"split.kind": "next-basket"},
    "drop_below": {"split.drop_below": 4.0},
    "positive_above": {"split.positive_above": 4.0},
    "min_train": {"split.min_train": 4},
    "sampled": {"evaluation.select_on": "sampled"},
    "silos": {"silos.kind": "dirichlet", "silos.count": 3},
}


@pytest.mark.parametrize(("kind", "options", "method", "privacy"), CASES)
def test_neighbours_end_alike(kind, options, method, privacy, tmp_path):
    data = world(kind)
    settings = {**privacy, **OPTIONS[options]}
    one = outcome(data, method, settings, tmp_path / "one")
    other = outcome(without(data), method, settings, tmp_path / "other")
    assert isinstance(one, list), one
    assert one == other
