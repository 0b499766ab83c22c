"""MovieLens 100K and 1M: film ratings with ages, genders and occupations, years and genres."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from hushrec.data.interactions import Categorical, Column, Interactions, MultiCategorical, Numeric
from hushrec.data.reading import years
from hushrec.data.sources import DataFolder, DataSet

# The answers that MovieLens offered its users.
_GENDERS = ("F", "M")
_100K_OCCUPATIONS = (
    *("administrator", "artist", "doctor", "educator", "engineer", "entertainment", "executive"),
    *("healthcare", "homemaker", "lawyer", "librarian", "marketing", "none", "other"),
    *("programmer", "retired", "salesman", "scientist", "student", "technician", "writer"),
)
_1M_AGES = {
    "1": "under 18", "18": "18-24", "25": "25-34", "35": "35-44",
    "45": "45-49", "50": "50-55", "56": "56+",
}  # fmt: skip
_1M_OCCUPATIONS = (
    *("other", "academic/educator", "artist", "clerical/admin", "college/grad student"),
    *("customer service", "doctor/health care", "executive/managerial", "farmer", "homemaker"),
    *("K-12 student", "lawyer", "programmer", "retired", "sales/marketing", "scientist"),
    *("self-employed", "technician/engineer", "tradesman/craftsman", "unemployed", "writer"),
)


def _read_100k(folder: DataFolder) -> Interactions:
    data = folder.interactions("u.data")
    people = folder.rows_of(data.users, "u.user", "|")
    films = folder.rows_of(data.items, "u.item", "|", encoding="latin-1")
    genres = list(folder.rows("u.genre", "|"))
    if people:
        features: dict[str, Column] = {
            "age": Numeric(np.array([row[1] for row in people], dtype=np.float32), 0.0, 100.0),
            "gender": Categorical.of((row[2] for row in people), _GENDERS),
            "occupation": Categorical.of((row[3] for row in people), _100K_OCCUPATIONS),
        }
        data = replace(data, user_features=features)
    if films:
        described: dict[str, Column] = {"year": years(row[2][-4:] for row in films)}  # 01-Jan-1995
        if genres:
            flags = np.array([row[5 : 5 + 19] for row in films]) == "1"
            described["genres"] = MultiCategorical(flags, np.array([g for g in genres if g]))
        data = replace(data, titles=np.array([row[1] for row in films]), item_features=described)
    return data


def _read_1m(folder: DataFolder) -> Interactions:
    data = folder.interactions("ratings.dat")
    people = folder.rows_of(data.users, "users.dat", "::")
    films = folder.rows_of(data.items, "movies.dat", "::", encoding="latin-1")
    if people:
        occupations = (_1M_OCCUPATIONS[int(row[3])] for row in people)
        features: dict[str, Column] = {
            "gender": Categorical.of((row[1] for row in people), _GENDERS),
            "age group": Categorical.of((_1M_AGES[row[2]] for row in people), _1M_AGES.values()),
            "occupation": Categorical.of(occupations, _1M_OCCUPATIONS),
        }
        data = replace(data, user_features=features)
    if films:
        titles = [row[1] for row in films]
        described: dict[str, Column] = {
            "year": years(title[-5:-1] for title in titles),  # Toy Story (1995)
            "genres": MultiCategorical.of(row[2].split("|") for row in films),
        }
        data = replace(data, titles=np.array(titles), item_features=described)
    return data


_movielens = partial(
    DataSet,
    licence="research use, acknowledge; no redistribution, no commercial use without permission",
    citation="F. Maxwell Harper and Joseph A. Konstan. 2015. The MovieLens Datasets: History and "
    "Context. ACM TiiS 5, 4, Article 19.",
)
ML_100K = _movielens(
    name="ml-100k",
    title="MovieLens 100K: film ratings, 1997-1998",
    users=943,
    items=1_682,
    rows=100_000,
    loader=_read_100k,
    files={
        "u.data": "06416e597f82b7342361e41163890c81036900f418ad91315590814211dca490",
        "u.item": "553841ebc7de3a0fd0d6b62a204ea30c1e651aacfb2814c7a6584ac52f2c5701",
        "u.user": "f120e114da2e8cf314fd28f99417c94ae9ddf1cb6db8ce0e4b5995d40e90e62c",
        "u.genre": "9757e0d3e6b298159a80dd48eaf938114690e911e39af97a76949ef1663610bb",
    },
    url="https://files.grouplens.org/datasets/movielens/ml-100k.zip",
)
ML_1M = _movielens(
    name="ml-1m",
    title="MovieLens 1M: film ratings, 2000-2003",
    users=6_040,
    items=3_706,
    rows=1_000_209,
    loader=_read_1m,
    files={
        "ratings.dat": "506d64ca44484487c11dc2d9a28de5c54948213e6b96285e298afe28d6ea4e0f",
        "movies.dat": "0140fc2356357c1a851d0f52e893a1e4d3696df632c4141cea8d5bc3d621f0b9",
        "users.dat": "1dc3a95300cb19f7c10e027daf29b8cdf1d908dab65b5edfb45950aa389a10a3",
    },
    url="https://files.grouplens.org/datasets/movielens/ml-1m.zip",
)
