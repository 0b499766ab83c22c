"""The data: files, named data sets, and a made-up one to play with."""

from hushrec.data.catalog import load, names
from hushrec.data.interactions import Interactions

__all__ = ["Interactions", "load", "names"]
