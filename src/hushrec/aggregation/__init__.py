"""Client updates and their exact sum."""

from hushrec.aggregation.sums import (
    OWN_WEIGHT,
    ClientRows,
    ExactSum,
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
