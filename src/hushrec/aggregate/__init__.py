"""What clients upload, and its sum."""

from hushrec.aggregate.base import Aggregate
from hushrec.aggregate.exact import ExactSum
from hushrec.aggregate.shape import UploadShape
from hushrec.aggregate.update import OWN_WEIGHT, ClientRows, Steps, Total, Update

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
