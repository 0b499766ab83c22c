"""Interactions: files, published data sets by name, and generated data.

From the bytes of a file to `Interactions`, each step in one module: ``text`` (bytes to text; what
can be recognised in it), ``tables`` (CSV and its relatives, JSON lines and Parquet as columns of
text), ``columns`` (columns of text, or of data in memory, to ids, values and times), ``reading``
(interactions, features and histories from these columns).

Data by name: ``catalog`` (`load`, downloads, imports), ``sources`` (published data sets),
``synthetic`` (generated data). Data for an experiment: ``splitting`` (training, validation, test),
``partition`` (silos), ``features`` (as numbers), ``views`` (what training may see).
"""

from hushrec.data.catalog import load, names
from hushrec.data.interactions import Interactions

__all__ = ["Interactions", "load", "names"]
