"""Rank held-out items, turn ranks into metrics, and say which differences are real."""

from hushrec.evaluation.groups import PairedTest, bootstrap_interval, holm, paired_test
from hushrec.evaluation.metrics import (
    ListMetric,
    Metric,
    Ranks,
    parse_metric,
    per_user,
    rank_full,
    rank_sampled,
    summarise,
)

__all__ = [
    "ListMetric",
    "Metric",
    "PairedTest",
    "Ranks",
    "bootstrap_interval",
    "holm",
    "paired_test",
    "parse_metric",
    "per_user",
    "rank_full",
    "rank_sampled",
    "summarise",
]
