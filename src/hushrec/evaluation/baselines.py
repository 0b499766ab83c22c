"""What every figure is shown beside: popularity and chance, for the same users and candidates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hushrec.data.splitting import Part
from hushrec.evaluation.evaluator import Evaluator, PartRanks
from hushrec.methods.baselines import Popularity, distinct_items
from hushrec.private.store import PrivateStore


def popularity_ranks(evaluator: Evaluator, part: Part) -> PartRanks:
    """Rank by the number of training users of an item."""
    split = evaluator.split
    touched = distinct_items(split.train.positives.take(split.training_users))
    counts = np.bincount(touched.values, minlength=split.train.n_items).astype(np.float32)
    nothing_private = PrivateStore({}, split.n_users)
    return evaluator.rank(Popularity(), {"counts": counts}, nothing_private, part)


def chance_ranks(ranks: PartRanks) -> PartRanks:
    """Return the ranks that constant scores get: everything tied with everything."""
    out = {}
    for candidates, value in ranks.items():
        others = np.repeat(value.candidates, np.diff(value.indptr)) - 1
        out[candidates] = replace(value, ahead=np.zeros_like(value.ahead), tied=others)
    return out
