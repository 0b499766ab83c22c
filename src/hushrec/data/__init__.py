"""Interactions: files, published data sets by name, and generated data.

From the bytes of a file to `Interactions`, each step in one module:

- ``text``: bytes to text, unpacked and checked; delimiter, header and roles of columns, guessed;
- ``tables``: CSV and its relatives, JSON lines and Parquet as columns of text;
- ``columns``: columns of text to ids, values and times;
- ``reading``: interactions, features and histories from these columns;
- ``frames``: data frames, Arrow tables and sparse matrices as columns of text;
- ``interactions``: the result, which the rest of hushrec works with;
- ``features``: features as numbers, for methods that know no ids.

Data by name:

- ``catalog``: `load`, downloads and imports;
- ``sources``: the published data sets, one file each, with checksums and terms;
- ``synthetic``: the demo data set, and large populations for benchmarks.

Data for an experiment: ``splitting`` (training, validation, test), ``partition`` (silos), ``views``
(what training may see).
"""

from hushrec.data.catalog import load, names
from hushrec.data.interactions import Interactions

__all__ = ["Interactions", "load", "names"]
