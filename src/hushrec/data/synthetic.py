"""Generated data: small data sets with known structure, and large populations for benchmarks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hushrec.data.interactions import Categorical, IntArray, Interactions, MultiCategorical, Numeric
from hushrec.data.sources import DataSet
from hushrec.kernels.jit import njit

# A film's title is its position in the world: the noun is the trail it lies on, the adjective its
# position there. Whoever reads a list of recommendations sees the structure that made it.
_NOUNS = (
    *("Lighthouse", "Orchard", "Harbour", "Comet", "Violin", "Garden", "Telegraph", "Mountain"),
    *("Carousel", "Library", "River", "Lantern", "Island", "Clockmaker", "Meadow", "Archive"),
    *("Bakery", "Voyage", "Theatre", "Winter", "Signal", "Railway", "Kingdom", "Mirror"),
    *("Observatory", "Forest", "Letter", "Painter", "Bridge", "Tide", "Station", "Cathedral"),
    *("Kite", "Summer", "Labyrinth", "Market", "Glacier", "Postcard", "Waltz", "Detective"),
    *("Balloon", "Monsoon", "Cartographer", "Fountain", "Sparrow", "Desert", "Piano", "Attic"),
    *("Ferry", "Constellation"),
)
_ADJECTIVES = (
    *("First", "Amber", "Silent", "Crimson", "Wandering", "Hidden", "Golden", "Distant"),
    *("Paper", "Midnight", "Emerald", "Broken", "Gentle", "Silver", "Forgotten", "Hollow"),
    *("Scarlet", "Drifting", "Velvet", "Restless", "Ivory", "Burning", "Secret", "Frozen"),
    *("Laughing", "Indigo", "Faithful", "Fading", "Radiant", "Last"),
)
_GENRES = (
    *("Adventure", "Animation", "Comedy", "Crime", "Documentary"),
    *("Drama", "Fantasy", "Mystery", "Romance", "Science fiction"),
)
_AGE_GROUPS = ("under 25", "25-39", "40-59", "60 and over")
_REGIONS = ("coast", "hills", "islands", "plains", "valley")
_DEVICES = ("phone", "tablet", "television", "laptop")
_N_TRAILS, _TRAIL_LENGTH = len(_NOUNS), len(_ADJECTIVES)
_TRAIL_GENRE = np.arange(_N_TRAILS) % len(_GENRES)
_TRAIL_WEIGHT = np.arange(1, _N_TRAILS + 1, dtype=np.float64) ** -1.2

_DAY = 86_400
_START = 1_704_067_200  # 2024-01-01


def demo(seed: int = 0, viewers: int = 1_000) -> Interactions:
    """Make 1,000 users and 1,500 films with tastes, a long tail, and an order to find.

    Fifty trails of thirty films, five trails to a genre. A viewer has an early and a late
    favourite genre and moves from the one to the other. Mostly the next film lies one or two
    steps further along the trail of the last one; else the viewer goes to another trail, a
    known one or one by taste and popularity. `docs/data.md` has the numbers.
    """
    rng = np.random.default_rng(seed)
    age = rng.integers(len(_AGE_GROUPS), size=viewers)
    early, late = _tastes(rng, age)

    user, item, value, time = [], [], [], []
    for who in range(viewers):
        films = _walk(rng, early[who], late[who])
        liked = np.isin(_TRAIL_GENRE[films // _TRAIL_LENGTH], (early[who], late[who]))
        gaps = rng.exponential(3 * _DAY, len(films)).astype(np.int64) + 3_600
        user.append(np.full(len(films), who, np.int32))
        item.append(films)
        value.append(np.clip(np.rint(rng.normal(3.0 + liked, 0.9)), 1, 5))
        time.append(_START + rng.integers(180 * _DAY) + np.cumsum(gaps))

    n_items = _N_TRAILS * _TRAIL_LENGTH
    trail, position = np.divmod(np.arange(n_items), _TRAIL_LENGTH)
    titles = [f"The {_ADJECTIVES[p]} {_NOUNS[t]}" for t, p in zip(trail, position, strict=True)]
    genres = np.zeros((n_items, len(_GENRES)), np.bool_)
    genres[np.arange(n_items), _TRAIL_GENRE[trail]] = True
    second = rng.integers(len(_GENRES), size=n_items)
    genres[np.arange(n_items), second] |= rng.random(n_items) < 0.4
    device_by_age = np.array([[6, 1, 1, 2], [4, 2, 2, 2], [2, 3, 4, 1], [1, 3, 6, 0]]) / 10
    device = [rng.choice(len(_DEVICES), p=device_by_age[group]) for group in age]
    region = rng.integers(len(_REGIONS), size=viewers, dtype=np.int32)
    made = Interactions(
        name="demo",
        user=np.concatenate(user),
        item=np.concatenate(item).astype(np.int32),
        value=np.concatenate(value).astype(np.float32),
        time=np.concatenate(time),
        users=np.array([f"viewer-{k + 1:04d}" for k in range(viewers)]),
        items=np.array([f"film-{k + 1:04d}" for k in range(n_items)]),
        titles=np.array(titles),
        user_features={
            "age group": _declared(age, _AGE_GROUPS),
            "region": _declared(region, _REGIONS),
            "device": _declared(device, _DEVICES),
        },
        item_features={
            "genres": MultiCategorical(genres, np.array(_GENRES)),
            "year": Numeric((1970 + trail + position % 7).astype(np.float32), 1950.0, 2050.0),
        },
        notes=("made up: no person or film in it exists",),
    )
    # The films that were seen are the catalogue of this world, by decree.
    return replace(made.compacted(), items_declared=True)


def _declared(codes: ArrayLike, names: tuple[str, ...]) -> Categorical:
    return Categorical(np.asarray(codes, np.int32), np.array(names), declared=True)


def _tastes(
    rng: np.random.Generator, age: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw an early and a late favourite genre for each user; ages lean to different genres."""
    genre = np.arange(len(_GENRES))
    leaning = np.exp(-0.35 * np.abs(genre[None, :] - 3.0 * np.arange(len(_AGE_GROUPS))[:, None]))
    share = leaning / leaning.sum(axis=1, keepdims=True)
    early = np.array([rng.choice(genre, p=share[group]) for group in age])
    late = (early + rng.integers(1, 4, size=len(age))) % len(_GENRES)
    return early, late


def _walk(rng: np.random.Generator, early: int, late: int) -> NDArray[np.int64]:
    """Return the distinct films of one viewer in the order of viewing."""
    length = 12 + int(rng.exponential(24))
    by_taste = []
    for genre in (early, late):
        weight = _TRAIL_WEIGHT * np.where(genre == _TRAIL_GENRE, 12.0, 1.0)
        by_taste.append(np.cumsum(weight / weight.sum()))
    chance = rng.random((4 * length, 5))
    reached: dict[int, int] = {}
    seen: dict[int, None] = {}
    trail = -1
    for stay, back, drift, where, step in chance:
        if len(seen) == length:
            break
        if trail < 0 or stay > 0.72:
            if reached and back < 0.35:
                known = list(reached)
                trail = known[int(where * len(known))]
            else:
                taste = by_taste[int(drift < len(seen) / length)]
                trail = min(int(np.searchsorted(taste, where)), _N_TRAILS - 1)
        # A first visit starts near the beginning of a trail, any other where the last one ended.
        if trail in reached:
            position = reached[trail] + (1 if step < 0.7 else 2)
        else:
            position = int(_TRAIL_LENGTH * step**2.5)
        if position >= _TRAIL_LENGTH:
            trail = -1
            continue
        reached[trail] = position
        seen[trail * _TRAIL_LENGTH + position] = None
    return np.array(list(seen), dtype=np.int64)


DEMO = DataSet(
    name="demo",
    title="A made-up world of films with known structure",
    licence="none needed: made up by hushrec",
    citation="hushrec",
    users=1_000,
    items=1_495,
    rows=34_997,
    loader=lambda _: demo(),
)


_DEPARTMENTS = (
    *("Bakery", "Dairy", "Fruit", "Vegetables", "Meat", "Drinks", "Snacks", "Frozen"),
    *("Pantry", "Household", "Baby", "Pets"),
)
_KINDS = (
    *("Fresh", "Organic", "Family", "Light", "Classic", "Mini", "Smoked", "Sweet", "Green"),
    *("Crunchy", "Daily", "Premium", "Country", "Mild"),
)
_GOODS = ("box", "pack", "jar", "bottle", "bag")


def receipts(seed: int = 0, customers: int = 1_000, products: int = 800) -> Interactions:
    """Make receipts of a supermarket over four months: baskets of several products at a time.

    A customer likes a few departments, and has favourites in them that run out and are bought
    again, each after its own number of days, until the customer changes to another one. The rest of
    a basket is bought once: complements of what is in it already, and products by taste and by
    popularity, which has a long tail and rises for two weeks where a product is on offer.
    """
    rng = np.random.default_rng(seed)
    department = rng.integers(len(_DEPARTMENTS), size=products)
    popularity = (np.arange(products) + 3.0) ** -0.9
    popularity = popularity[rng.permutation(products)]
    # What runs out is bought again: milk within days, a pan hardly ever.
    lasts = np.exp(rng.normal(2.9, 1.0, products))
    complements = rng.integers(products, size=(products, 3))
    days = 120
    offered = rng.random((days // 7 + 2, products)) < 0.02
    offered[1:] |= offered[:-1]
    by_day = [np.cumsum(popularity * (1 + 8.0 * offered[day // 7 + 1])) for day in range(days)]
    age = rng.integers(len(_AGE_GROUPS), size=customers)
    rows: list[tuple[int, int, int]] = []
    for customer in range(customers):
        liked = rng.choice(len(_DEPARTMENTS), 4, replace=False)
        weight = popularity**0.7 * np.where(np.isin(department, liked), 1.0, 0.05)
        count = 4 + rng.poisson(8)
        own = rng.choice(products, count, replace=False, p=weight / weight.sum())
        every = lasts[own] * np.exp(rng.normal(0, 0.3, count))
        bought, since = -every * rng.random(count), rng.uniform(-60, 100, count)
        until = since + 20 + rng.exponential(50, count)
        by_taste = np.cumsum(weight)
        gap, size = 6 + rng.exponential(12), 1 + rng.poisson(3)
        day = min(rng.exponential(gap), days - 1.0)
        while day < days:
            due = np.where((since < day) & (day < until), (day - bought) / every, 0.0)
            basket = dict.fromkeys(own[rng.random(count) < 0.7 * (1 - np.exp(-(due**3)))].tolist())
            bought[np.isin(own, list(basket))] = day
            for how, where, which in rng.random((1 + rng.poisson(size), 3)):
                if basket and how < 0.25:
                    last = list(basket)[int(where * len(basket))]
                    basket[int(complements[last, int(which * 3)])] = None
                else:
                    sums = by_taste if how < 0.5 else by_day[int(day)]
                    basket[int(np.searchsorted(sums, where * sums[-1]))] = None
            rows += [(customer, product, int(day)) for product in basket]
            day += 1 + rng.exponential(gap)
    user, item, when = np.array(rows).T
    named = [
        f"{_KINDS[k % len(_KINDS)]} {_DEPARTMENTS[d].lower()} {_GOODS[k % len(_GOODS)]} {k}"
        for k, d in enumerate(department)
    ]
    made = Interactions(
        name="receipts",
        user=user.astype(np.int32),
        item=item.astype(np.int32),
        value=np.ones(len(rows), np.float32),
        time=_START + when * _DAY,
        users=np.array([f"customer-{k + 1:04d}" for k in range(customers)]),
        items=np.array([f"product-{k + 1:03d}" for k in range(products)]),
        titles=np.array(named),
        user_features={"age group": _declared(age, _AGE_GROUPS)},
        item_features={"department": _declared(department, _DEPARTMENTS)},
        notes=("made up: no person or product in it exists",),
    )
    return replace(made.compacted(), items_declared=True)


RECEIPTS = DataSet(
    name="receipts",
    title="Made-up receipts of a supermarket: baskets, and products that are bought again",
    licence="none needed: made up by hushrec",
    citation="hushrec",
    users=1_000,
    items=800,
    rows=58_431,
    loader=lambda _: receipts(),
)


def crowd(n_users: int, n_items: int, length: int = 30, seed: int = 0) -> Interactions:
    """Make many users of a large catalogue, each with as many items in an order to find.

    Items lie on trails. Mostly the next item lies one or two steps further on; else the user jumps,
    to a trail that is popular or to one near the home of their taste.
    """
    rng = np.random.default_rng(seed)
    item, at_once = np.empty((n_users, length), np.int32), 50_000
    for start in range(0, n_users, at_once):
        part = item[start : start + at_once]
        _fill_walks(part, rng.random((len(part), 1 + 3 * length), np.float32), n_items)
    return Interactions(
        name="crowd",
        user=np.repeat(np.arange(n_users, dtype=np.int32), length),
        item=item.reshape(-1),
        value=np.ones(item.size, np.float32),
        time=_START + np.tile(np.arange(length) * _DAY, n_users),
        users=np.array([f"user-{k:07d}" for k in range(n_users)]),
        items=np.array([f"item-{k:06d}" for k in range(n_items)]),
        items_declared=True,
        notes=("made up: nobody and nothing in it exists",),
    )


_TRAIL = 25
"""Items on a trail of the crowd."""


@njit(cache=True, nogil=True)
def _fill_walks(items: IntArray, draws: NDArray[np.float32], n_items: int) -> None:
    """Fill each row with distinct items from its uniform draws."""
    trails = max(1, n_items // _TRAIL)
    for user in range(len(items)):
        home, item, near = draws[user, 0], 0, max(1.0, trails * 0.01)
        for k in range(items.shape[1]):
            stay, where, step = draws[user, 1 + 3 * k : 4 + 3 * k]
            if k and stay < 0.7:
                item += 1 if step < 0.7 else 2
            else:
                # The same number says whether to jump far: to the popular, or near home.
                trail = trails * where**3 if stay > 0.85 else trails * home + near * (where - 0.5)
                item = int(trail) % trails * _TRAIL + int(_TRAIL * step**2)
            item %= n_items
            while item in items[user, :k]:
                item = (item + 1) % n_items
            items[user, k] = item


def population(
    n_users: int, n_items: int, mean_length: int = 20, seed: int = 0
) -> tuple[NDArray[np.int64], IntArray]:
    """Make a large long-tailed population as ``(indptr, items)``: rows sorted, items distinct."""
    rng = np.random.default_rng(seed)
    shortest = max(1, mean_length // 4)
    lengths = shortest + rng.exponential(mean_length - shortest, n_users).round().astype(np.int64)
    indptr = np.zeros(n_users + 1, np.int64)
    np.cumsum(np.minimum(lengths, n_items), out=indptr[1:])
    draws = rng.random(int(indptr[-1]), dtype=np.float32)
    return indptr, _distinct_items(indptr, draws, n_items)


@njit(cache=True, nogil=True)
def _distinct_items(
    indptr: NDArray[np.int64], draws: NDArray[np.float32], n_items: int
) -> IntArray:
    """Turn uniform draws into items, the lower the more popular; a taken item yields the next."""
    items = np.empty(len(draws), np.int32)
    for user in range(len(indptr) - 1):
        start, end = indptr[user], indptr[user + 1]
        for k in range(start, end):
            draw = np.float64(draws[k])
            item = int(n_items * draw * draw * draw)
            at = start
            # The row so far is sorted: find the position, walk over neighbours that are taken.
            while at < k and items[at] < item:
                at += 1
            while at < k and items[at] == item:
                at += 1
                item += 1
                if item == n_items:
                    item = 0
                    at = start
            for other in range(k, at, -1):
                items[other] = items[other - 1]
            items[at] = item
    return items
