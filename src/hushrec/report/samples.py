"""Some users' lists, made with the model of the run."""

from __future__ import annotations

from typing import Any

import numpy as np

from hushrec.data.interactions import Interactions, MultiCategorical
from hushrec.evaluate.ranking import Ranks, top_k
from hushrec.report.contenders import LIST_LENGTH
from hushrec.run import Run

LAST_SEEN = 5
SAMPLE_USERS = 6


def samples(run: Run) -> list[dict[str, Any]]:
    """Show some users' lists, from the least to the most active."""
    ranks = run.ranks["test"]["full"]
    trained = run.split.train.positives.lengths[ranks.users]
    order = np.argsort(trained, kind="stable")
    wanted = np.linspace(0, len(order) - 1, SAMPLE_USERS + 2)[1:-1].round().astype(int)
    return [_sample(run, ranks, int(order[place])) for place in dict.fromkeys(wanted.tolist())]


def _sample(run: Run, ranks: Ranks, row: int) -> dict[str, Any]:
    data, split = run.split.data, run.split
    user = int(ranks.users[row])
    alone = np.array([user])
    view = split.history("test").take(alone)
    scores = run.evaluator(threads=1).scores(run.method, run.shared, run.store, alone, view)
    seen = view.positives
    best = top_k(scores, seen.indptr, seen.values, LIST_LENGTH)[0][0]
    rows = slice(int(ranks.indptr[row]), int(ranks.indptr[row + 1]))
    found = set(ranks.targets[rows].tolist()) & set(best.tolist())
    heldout = [
        {
            **_item(data, target),
            "hit": target in found,
            "listed": best.tolist().index(target) + 1 if target in found else None,
            "place": int(ahead) + 1,
            "tied": int(tied),
        }
        for target, ahead, tied in sorted(
            zip(
                ranks.targets[rows].tolist(),
                ranks.ahead[rows].tolist(),
                ranks.tied[rows].tolist(),
                strict=True,
            ),
            key=lambda entry: (entry[1], entry[0]),
        )
    ]
    return {
        "user": str(data.users[user]),
        "trained": int(split.train.positives.lengths[user]),
        "last": [_item(data, int(item)) for item in seen.values[: -LAST_SEEN - 1 : -1]],
        "list": [
            {**_item(data, int(item)), "hit": int(item) in found} for item in best if item >= 0
        ],
        "heldout": heldout[:3],
        "more_heldout": max(0, len(heldout) - 3),
        "n_heldout": len(heldout),
        "hits": len(found),
        "candidates": int(ranks.candidates[row]),
    }


def _item(data: Interactions, item: int) -> dict[str, str]:
    kinds = [c for c in data.item_features.values() if isinstance(c, MultiCategorical)]
    names = kinds[0].names[kinds[0].flags[item]] if kinds else []
    return {"title": data.title(item), "kinds": ", ".join(str(name) for name in names[:3])}
