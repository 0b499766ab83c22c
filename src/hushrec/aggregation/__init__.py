"""Client updates and their exact sum."""

from hushrec.aggregation.exact_sum import ExactSum
from hushrec.aggregation.update import (
    OWN_WEIGHT,
    ClientRows,
    KeyedRows,
    Steps,
    Total,
    Update,
    UploadShape,
)

__all__ = [
    "OWN_WEIGHT",
    "ClientRows",
    "ExactSum",
    "KeyedRows",
    "Steps",
    "Total",
    "Update",
    "UploadShape",
]
