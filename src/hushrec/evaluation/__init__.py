"""Rank held-out items, turn ranks into metrics, and say which differences are real."""

from hushrec.evaluation.metrics import (
    Metric,
    coverage,
    parse_metric,
    per_user,
    popularity_bias,
    summarise,
)
from hushrec.evaluation.ranking import Ranks, rank_full, rank_sampled, top_k
from hushrec.evaluation.significance import PairedTest, bootstrap_interval, holm, paired_test

__all__ = [
    "Metric",
    "PairedTest",
    "Ranks",
    "bootstrap_interval",
    "coverage",
    "holm",
    "paired_test",
    "parse_metric",
    "per_user",
    "popularity_bias",
    "rank_full",
    "rank_sampled",
    "summarise",
    "top_k",
]
