"""Rank held-out items, turn ranks into metrics, and say which differences are real."""

from hushrec.evaluation.groups import PairedTest, bootstrap_interval, holm, paired_test
from hushrec.evaluation.metrics import ListMetric, Metric, parse_metric, per_user, summarise
from hushrec.evaluation.ranking import Ranks, rank_full, rank_sampled

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
