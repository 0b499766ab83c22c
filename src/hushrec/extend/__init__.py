"""Everything that an extension is written against, in one module (docs/extend.md).

A method, an expert, a metric, a data set, a mechanism, a backend or a callback of another package
imports its base class and types from here. The names of this module and of `hushrec` are the public
surface; they change only with an entry in the changelog.
"""

from hushrec.aggregation import (
    ClientRows,
    FixedPoint,
    KeyedRows,
    Steps,
    Total,
    Update,
    UploadShape,
)
from hushrec.data.interactions import Categorical, Interactions, MultiCategorical, Numeric
from hushrec.data.sources import DataFolder, DataSet
from hushrec.data.views import Ragged, TrainView
from hushrec.errors import ConfigError, DataError
from hushrec.evaluation.metrics import ListMetric, Metric, Ranks, expected_gain
from hushrec.federation.backends import InProcess
from hushrec.federation.experiment import Experiment
from hushrec.federation.rounds import EvaluationRecord, RoundRecord, TrainingResult
from hushrec.methods.base import (
    Exports,
    ExportsUser,
    Fitted,
    Method,
    MethodConfig,
    Phase,
    Shared,
    Traits,
)
from hushrec.methods.forms import (
    ItemCounts,
    ItemFactors,
    ItemNetworks,
    ItemWeights,
    Part,
    RowNetwork,
)
from hushrec.methods.statistics.experts import Expert, ExpertsConfig
from hushrec.privacy.accountant import Everybody, Gaussian, Grid, Pure, sensitivity
from hushrec.privacy.noise import LocalMechanism
from hushrec.privacy.protection import Mechanism, PrivacyTarget, Protection, Release
from hushrec.private import PerClient, PerClientRows, PerClientTable, Private, PrivateFields
from hushrec.streams import Round, SecretRound, Streams

__all__ = [
    "Categorical",
    "ClientRows",
    "ConfigError",
    "DataError",
    "DataFolder",
    "DataSet",
    "EvaluationRecord",
    "Everybody",
    "Experiment",
    "Expert",
    "ExpertsConfig",
    "Exports",
    "ExportsUser",
    "Fitted",
    "FixedPoint",
    "Gaussian",
    "Grid",
    "InProcess",
    "Interactions",
    "ItemCounts",
    "ItemFactors",
    "ItemNetworks",
    "ItemWeights",
    "KeyedRows",
    "ListMetric",
    "LocalMechanism",
    "Mechanism",
    "Method",
    "MethodConfig",
    "Metric",
    "MultiCategorical",
    "Numeric",
    "Part",
    "PerClient",
    "PerClientRows",
    "PerClientTable",
    "Phase",
    "PrivacyTarget",
    "Private",
    "PrivateFields",
    "Protection",
    "Pure",
    "Ragged",
    "Ranks",
    "Release",
    "Round",
    "RoundRecord",
    "RowNetwork",
    "SecretRound",
    "Shared",
    "Steps",
    "Streams",
    "Total",
    "TrainView",
    "TrainingResult",
    "Traits",
    "Update",
    "UploadShape",
    "expected_gain",
    "sensitivity",
]
