"""The data: files, named data sets, and a made-up one to play with.

From the bytes of a file to `Interactions`, each step in one module:

- ``text``: bytes to text, unpacked and checked;
- ``guesses``: delimiter, header, and which column is what, where the file does not say;
- ``tables``: CSV and its relatives, JSON lines and Parquet as columns of text;
- ``files``: columns of text to interactions, features and histories;
- ``interactions``: what everybody else works with;
- ``features``: features as numbers, for methods that know no ids.

Data by name:

- ``catalog``: `load`, downloads and imports;
- ``datasets``: the data sets we know, their checksums and terms;
- ``loaders``: how each of them is read;
- ``folders``: where their files are looked for;
- ``synthetic``: the made-up world, and a large population for benchmarks.
"""

from hushrec.data.catalog import load, names
from hushrec.data.interactions import Interactions

__all__ = ["Interactions", "load", "names"]
