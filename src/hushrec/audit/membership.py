"""Membership inference: whether the released model reveals who, or what, it was trained on.

The attacker has what training releases (the shared parameters, which every client downloads) and
one person's past. It folds that past in as a new user's device would, and computes how high the
model ranks some items of that person. Items of training tend to rank higher. There are two forms,
by what the run's split leaves out of training:

* **people** (split.kind = unseen-users): training users against unseen ones, drawn at random, and
  everybody's past cut in the same way. An item is ranked after folding in the other half.
* **pairs** (all other splits): of the same user, the latest training items against the validation
  items that came next. Popularity among other users is the baseline for the drift with time; in
  the order of time a small AUC above it need not be a leak (docs/privacy.md).

A claim covers the shared model alone, and bounds how often a guess can be right where chance alone
decided what trained: for people, and for pairs that a split in random order chose. Members and
others are paired at random, and the attacker guesses which one of a pair trained, or abstains. That
was a fair coin, whatever the other pairs are, and the two outcomes differ by one user's data for
another's: one step between neighbours under replace-one, two under zero-out-one. So right guesses
prove an epsilon (`guessing_bound`), and if that exceeds the claim, the claim is false.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import binom, rankdata

from hushrec.api import Run
from hushrec.audit.canary import CONFIDENCE, certain_among
from hushrec.data.splitting import Split
from hushrec.data.views import Ragged, TrainView, chunks
from hushrec.methods.base import fold_in
from hushrec.privacy.accountant import Accountant, Values
from hushrec.privacy.statement import PrivacyStatement
from hushrec.private import store_bytes
from hushrec.streams import Streams

RESAMPLES = 500
BOLDNESS = (1.0, 0.5, 0.2, 0.1)
"""Shares of the pairs that are guessed, those with the clearest difference."""
MOST_GUESSED = 30.0
"""Largest epsilon that guesses are tested for."""
SMALL_DELTA = 1e-7
LOW_FPR = 0.01
FEWEST_FOR_LOW_FPR = 100
BATCH_BYTES = 128 * 2**20
THREATS = {
    "people": "somebody who holds the released model and a person's past wants to know whether "
    "that person took part in training",
    "pairs": "somebody who holds the released model and the rest of a user's past wants to know "
    "whether one more item of theirs was trained on",
}
COMPARED = {
    "people": "training users against unseen ones, drawn at random, each with the first half of "
    "its rows",
    "pairs": "the latest training items of a user against the same user's validation items",
}

Items = NDArray[np.int32]


@dataclass(frozen=True)
class Case:
    """One attack: fold in ``past``, then rank ``targets``."""

    user: int
    past: Items
    targets: Items
    known: Items
    """Items known to be the user's, which are no candidates beside a target."""
    member: bool


def membership(
    run: Run, users: int, streams: Streams, on_case: Callable[[int, int], None]
) -> dict[str, Any]:
    """Attack the released model; about ``users`` members and as many others."""
    if not run.model.method.traits.pooled and not run.summary.communication.up_bytes:
        return {"skipped": "nothing is uploaded, so nothing that was learnt is released"}
    people = run.experiment.split.kind == "unseen-users"
    form = "people" if people else "pairs"
    generator = streams.generator("audit/membership")
    cases = list((_people if people else _pairs)(run.split, users, generator))
    if not cases or all(case.member for case in cases):
        return {"skipped": "no user has enough interactions to be asked about"}
    scores, popularity = _scores(run, cases, streams, on_case)
    owner = np.array([case.user for case in cases])
    member = np.array([case.member for case in cases])
    # A person is attacked twice, once for each half of the past: the score is the mean.
    who, index = np.unique(np.stack([owner, member]), axis=1, return_inverse=True)
    count = np.bincount(index)
    score, popular = (np.bincount(index, values) / count for values in (scores, popularity))
    owner, member = who[0], who[1].astype(bool)
    # Scores are in the order of users: in pairs, a user's own two scores are compared.
    others = generator.permutation(score[~member]) if people else score[~member]
    differences = score[member] - others
    by_chance = people or (run.split.config.kind == "ratio" and run.split.config.order == "random")
    claim = _at_small_delta(run.summary.privacy)
    return {
        "threat": THREATS[form],
        "compared": COMPARED[form],
        "members": int(member.sum()),
        "others": int((~member).sum()),
        **rates(score[member], score[~member]),
        "intervals": _intervals(score, member, owner, generator),
        "chance": {
            "auc": 0.5,
            "advantage": _advantage_by_chance(score, member, generator),
            "tpr_at_1_fpr": LOW_FPR,
        },
        "baseline": {
            "name": "popularity among other users",
            **rates(popular[member], popular[~member]),
        },
        "guesses": guesses(differences, claim) if by_chance and claim.epsilon else None,
    }


def _at_small_delta(claim: PrivacyStatement) -> PrivacyStatement:
    """Return the claim at a smaller delta, if it has an account.

    Each pair may fail with probability delta, which would use up the whole error probability.
    """
    if not claim.claimed or claim.delta <= SMALL_DELTA:
        return claim
    epsilon = Accountant(claim.claimed).epsilon(SMALL_DELTA)
    return claim.model_copy(update={"epsilon": epsilon, "delta": SMALL_DELTA})


def guesses(differences: Values, claim: PrivacyStatement) -> dict[str, Any]:
    """Guess the member of each pair by the score, and test the claim by the right guesses.

    ``differences`` are the members' scores less those of the others that they are paired with.
    """
    apart = 1 if claim.neighbours == "replace-one" else 2
    clearest = np.argsort(-np.abs(differences), kind="stable")
    certain, coins, found = certain_among(len(BOLDNESS)), len(differences), []
    for share in BOLDNESS:
        made = clearest[: math.ceil(share * coins)]
        made = made[differences[made] != 0]
        right = int((differences[made] > 0).sum())
        lower, surely = (
            guessing_bound(right, len(made), coins, claim.delta, confidence, apart)
            for confidence in (CONFIDENCE, certain)
        )
        found.append((surely, lower, len(made), right))
    surely, lower, count, right = max(found, key=lambda one: one[0])
    return {
        "pairs": coins,
        "guesses": count,
        "right": right,
        "claimed_epsilon": claim.epsilon,
        "delta": claim.delta,
        "lower_bound": lower,
        "certain_lower_bound": surely,
        "contradicted": surely > (claim.epsilon or 0.0),
    }


def guessing_bound(
    right: int, guesses: int, coins: int, delta: float, confidence: float, apart: int = 1
) -> float:
    """Return the epsilon that so many right guesses of coins in one run prove.

    Coins are fair and independent, each decides between two data sets that are ``apart`` neighbours
    from each other, and what is guessed is what one run released. Then right guesses are hardly
    more than those of coins that fall right with probability e^epsilon / (1 + e^epsilon), however
    they depend on each other (Steinke, Nasr, Jagielski 2023, theorem 5.2).
    """
    most = np.arange(1, coins + 1)

    def chance(epsilon: float) -> float:
        # Steps of a path between data sets: their deltas add up, each times what comes after it.
        slack = delta * sum(math.exp(step * epsilon) for step in range(apart))
        likely = binom(guesses, 1 / (1 + math.exp(-apart * epsilon)))
        beyond = float(likely.sf(right - 1))
        more = float(((likely.sf(right - 1 - most) - beyond) / most).max())
        return beyond + 2 * coins * min(slack, 1.0) * more

    if not guesses or chance(0.0) >= 1 - confidence:
        return 0.0
    if chance(MOST_GUESSED) < 1 - confidence:
        return MOST_GUESSED
    return float(brentq(lambda eps: chance(eps) - (1 - confidence), 0.0, MOST_GUESSED, xtol=1e-4))


def rates(members: Values, others: Values) -> dict[str, float | None]:
    """Return AUC, the largest TPR - FPR, and TPR at 1 % FPR of a threshold on the score."""
    n, m = len(members), len(others)
    ranks = rankdata(np.concatenate([members, others]))
    auc = (ranks[:n].sum() - n * (n + 1) / 2) / (n * m)
    thresholds = np.unique(np.concatenate([members, others]))
    true = (n - np.searchsorted(np.sort(members), thresholds, side="left")) / n
    false = (m - np.searchsorted(np.sort(others), thresholds, side="left")) / m
    low = true[false <= LOW_FPR].max(initial=0.0) if m >= FEWEST_FOR_LOW_FPR else None
    return {
        "auc": float(auc),
        "advantage": float(max(0.0, (true - false).max())),
        "tpr_at_1_fpr": None if low is None else float(low),
    }


def _intervals(
    score: Values, member: NDArray[np.bool_], owner: NDArray[np.int64], generator: Any
) -> dict[str, list[float] | None]:
    """Return 95 % percentile intervals from resampled users, each with all scores."""
    rows = [np.flatnonzero(owner == user) for user in np.unique(owner)]
    drawn: list[dict[str, float | None]] = []
    while len(drawn) < RESAMPLES:
        chosen = np.concatenate([rows[k] for k in generator.integers(0, len(rows), len(rows))])
        of = member[chosen]
        if of.any() and not of.all():
            drawn.append(rates(score[chosen][of], score[chosen][~of]))
    out: dict[str, list[float] | None] = {}
    for name in drawn[0]:
        values = np.array([one[name] for one in drawn], np.float64)  # None becomes NaN
        known = not np.isnan(values).any()
        out[name] = np.quantile(values, [0.025, 0.975]).tolist() if known else None
    return out


def _advantage_by_chance(score: Values, member: NDArray[np.bool_], generator: Any) -> float:
    """Return the mean advantage with members named at random: a maximum is never 0."""
    shuffled = [generator.permutation(member) for _ in range(100)]
    found = [rates(score[who], score[~who])["advantage"] for who in shuffled]
    return float(np.mean(np.array(found, np.float64)))


def _people(split: Split, users: int, generator: Any) -> Iterator[Case]:
    """Attack each half of a person's known past with the other half as the past."""
    trains = np.isin(np.arange(split.n_users), split.training_users)
    lengths = split.train.positives.lengths
    # An unseen user's training rows are already the first half of its rows.
    known = np.where(trains, (lengths + 1) // 2, lengths)
    members = np.flatnonzero(trains & (known >= 2))
    others = np.flatnonzero(~trains & (known >= 2))
    each = min(users, len(members), len(others))
    for chosen, member in ((members, True), (others, False)):
        for user in np.sort(generator.choice(chosen, each, replace=False)):
            items = split.train.positives[user]
            if member and split.config.order == "random":
                items = generator.permutation(items)
            items = items[: known[user]]
            for half in (0, 1):
                yield Case(int(user), items[half::2], items[1 - half :: 2], items, member)


def _pairs(split: Split, users: int, generator: Any) -> Iterator[Case]:
    """Attack the latest training items, and the validation items, with the items before both."""
    trains = np.isin(np.arange(split.n_users), split.training_users)
    count = split.valid.lengths
    usable = np.flatnonzero(trains & (count > 0) & (split.train.positives.lengths > count))
    for user in np.sort(generator.choice(usable, min(users, len(usable)), replace=False)):
        items, valid = split.train.positives[user], split.valid[user]
        if split.config.kind == "ratio" and split.config.order == "random":
            items = generator.permutation(items)
        past, latest = items[: -len(valid)], items[-len(valid) :]
        known = np.concatenate([items, valid])
        yield Case(int(user), past, latest, known, True)
        yield Case(int(user), past, valid, known, False)


def _scores(
    run: Run, cases: list[Case], streams: Streams, on_case: Callable[[int, int], None]
) -> tuple[Values, Values]:
    """Return how high the model, and popularity, rank the targets of each case."""
    method, shared, split = run.model.method, run.model.shared, run.split
    trained = split.train.take(split.training_users).positives.values
    counts = np.bincount(trained, minlength=split.data.n_items)
    fields = method.private_fields(replace(split.train, holders=None), shared, streams)
    most = max(1, BATCH_BYTES // max(1, store_bytes(fields, split.n_users) // split.n_users))
    scores, popularity = np.empty(len(cases)), np.empty(len(cases))
    trains = set(split.training_users.tolist())
    for part in chunks(np.arange(len(cases)), min(most, 64)):
        view = _view(split, [cases[k] for k in part])
        private = fold_in(method, shared, view, streams)
        ranked = method.score(shared, private, view)
        for row, k in zip(ranked, part, strict=True):
            case = cases[k]
            scores[k] = _height(row, case)
            # Popularity among the others: a member's own row must not count for it.
            own = split.train.positives[case.user] if case.user in trains else case.past[:0]
            others = counts - np.bincount(own, minlength=len(counts))
            popularity[k] = _height(others, case)
        on_case(int(part[-1]) + 1, len(cases))
    return scores, popularity


def _height(scores: NDArray[Any], case: Case) -> float:
    """Return the mean of logit(share of candidates below) over the targets; ties count half."""
    others, mine = np.sort(np.delete(scores, case.known)), scores[case.targets]
    below = np.searchsorted(others, mine, "left") + np.searchsorted(others, mine, "right")
    share = (below / 2 + 0.5) / (len(others) + 1)
    return float(np.mean(np.log(share / (1 - share))))


def _view(split: Split, cases: list[Case]) -> TrainView:
    """Return the cases as a batch of new users, each a client of its own with its past."""
    lengths = np.array([len(case.past) for case in cases])
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    items = np.concatenate([case.past for case in cases]).astype(np.int32)
    return replace(
        split.train.take(np.array([case.user for case in cases])),
        positives=Ragged(indptr, items),
        times=Ragged(indptr, np.concatenate([np.arange(n) for n in lengths])),
        values=Ragged(indptr, np.ones(len(items), np.float32)),
        holders=None,
    )
