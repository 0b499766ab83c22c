"""What a score per description can reach: the mean popularity of items described alike."""

from __future__ import annotations

import numpy as np

from hushrec import load
from hushrec.data.features import encode
from hushrec.data.splitting import SplitConfig, make_split
from hushrec.evaluation.metrics import rank_full, summarise
from hushrec.streams import Streams


def ceiling(data: str, only: tuple[str, ...] | None = None) -> None:
    """Print Hits@20 of popularity, and of the mean popularity of each item's description.

    Also of what a network would learn with n drawn negatives per row, beside the disliked rows: of
    each description, or item, the likes over the dislikes plus its share of the drawn ones.
    """
    config = SplitConfig(kind="unseen-users", positive_above=3.0)
    split = make_split(load(data), config, Streams(0))
    training = split.train.take(split.training_users)
    liked = training.positives.values[training.values.values > 3]
    popularity = np.bincount(liked, minlength=split.data.n_items).astype(np.float64)
    columns = {n: c for n, c in split.train.item_features.items() if only is None or n in only}
    described = encode(columns, np.arange(split.data.n_items), "item").rows
    rows, place = np.unique(described, axis=0, return_inverse=True)
    place = place.reshape(-1)
    of_description = (np.bincount(place, popularity) / np.bincount(place))[place]
    scores = {"popularity": popularity, "by description": of_description}
    disliked_by = np.bincount(training.positives.values, minlength=len(popularity)) - popularity
    likes, dislikes, count = (
        np.bincount(place, v) for v in (popularity, disliked_by, popularity**0)
    )
    for n in (1, 4, 8):
        drawn = n * len(training.positives.values) / len(popularity)
        odds = likes / (dislikes + count * drawn)
        scores[f"by description, {n} drawn per row"] = odds[place]
        scores[f"by item, {n} drawn per row"] = popularity / (disliked_by + drawn)
    users = split.evaluated("valid")
    past, disliked = split.train.take(users).positives, split.disliked.take(users)
    seen = past.union(disliked)
    aim = split.valid.take(users)
    for name, score in scores.items():
        whole = np.tile(score.astype(np.float32), (len(users), 1))
        ranks = rank_full(whole, users.astype(np.int32), seen, aim)
        hits = summarise(ranks, ["hits@20"])["hits@20"]
        print(f"{data} {tuple(columns)} {name}: {hits:.3f} ({len(rows):,} descriptions)")


if __name__ == "__main__":
    ceiling("ml-1m")
    ceiling("frappe", ("category", "price"))
    ceiling("frappe")
