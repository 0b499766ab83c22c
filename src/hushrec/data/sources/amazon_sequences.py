"""Amazon reviews of beauty and of sports products, as sequences: a line per user, no timestamps."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hushrec.data.columns import frame_table
from hushrec.data.interactions import Interactions
from hushrec.data.reading import interactions_of
from hushrec.data.sources import NO_TERMS, DataFolder, DataSet
from hushrec.data.tables import RECOGNISED

_FILE = "sequences.txt"


def _read(folder: DataFolder) -> Interactions:
    """Read lines of a user and its items, which are in the order of time."""
    lines = folder.lines(_FILE, " ")
    columns = {
        "user": [user for user, *items in lines for _ in items],
        "item": [item for _, *items in lines for item in items],
    }
    data = interactions_of(frame_table(columns, _FILE), RECOGNISED, None)
    notes = ("no timestamps: the items of a user are in the order of time",)
    return replace(data, rows_in_order=True, notes=notes)


_amazon_sequences = partial(
    DataSet,
    licence=NO_TERMS,
    citation="J. McAuley et al. 2015. Image-based Recommendations on Styles and Substitutes. "
    "SIGIR.",
    loader=_read,
)
BEAUTY = _amazon_sequences(
    name="amazon-beauty",
    title="Amazon Beauty: sequences of users and items with at least 5 reviews, as S3-Rec",
    users=22_363,
    items=12_101,
    rows=198_502,
    files={_FILE: "226cce9c3105299ca0db9615d7d3fb32b3175e90da43100ae352599f0f0107b8"},
)
SPORTS = _amazon_sequences(
    name="amazon-sports",
    title="Amazon Sports and Outdoors: sequences of users and items with at least 5 reviews, as "
    "S3-Rec",
    users=35_598,
    items=18_357,
    rows=296_337,
    files={_FILE: "2a095e0648872beb9982408958290f5d655db5be2911c3756b5446de9f0b8de2"},
)
