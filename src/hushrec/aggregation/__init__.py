"""What clients upload, and its sum."""

from hushrec.aggregation.exact_sum import Aggregate, ExactSum
from hushrec.aggregation.update import OWN_WEIGHT, ClientRows, Steps, Total, Update, UploadShape

__all__ = [
    "OWN_WEIGHT",
    "Aggregate",
    "ClientRows",
    "ExactSum",
    "Steps",
    "Total",
    "Update",
    "UploadShape",
]
