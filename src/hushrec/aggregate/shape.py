"""What an upload looks like: names, widths and sizes, which follow from public things alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hushrec.errors import ConfigError

if TYPE_CHECKING:
    from hushrec.aggregate.update import Update


@dataclass(frozen=True)
class UploadShape:
    """What every client of a method uploads, written out whole; the same for all data."""

    n_rows: int
    tables: Mapping[str, int]
    """Width of each table of ``n_rows`` rows."""
    dense: Mapping[str, tuple[int, ...]]
    spaces: Mapping[str, tuple[int | None, int]] = field(default_factory=dict)
    """Number of keys, and width, of each space of keys; None for an open one."""

    @classmethod
    def of(cls, nobody: Update, n_rows: int) -> UploadShape:
        """Read the shape from the update of a stack of no clients."""
        if nobody.rows.keys() & nobody.dense.keys():
            raise ConfigError("a table and a dense array of an upload need different names")
        return cls(
            n_rows,
            {name: rows.rows.shape[1] for name, rows in nobody.rows.items() if not rows.keyed},
            {name: array.shape[1:] for name, array in nobody.dense.items()},
            {
                name: (rows.space, rows.rows.shape[1])
                for name, rows in nobody.rows.items()
                if rows.keyed
            },
        )

    def require_closed(self) -> UploadShape:
        """Refuse what noise cannot cover; return the shape."""
        for name, (keys, _) in self.spaces.items():
            if keys is None:
                raise ConfigError(
                    f"'{name}' has no row for every item but keys of an open space, and noise "
                    "cannot cover every key: use another method, or privacy.mode = none"
                )
        return self

    @property
    def whole(self) -> dict[str, tuple[int, ...]]:
        """Shape of every table, closed space and dense array of one upload written out whole."""
        tables = {name: (self.n_rows, width) for name, width in self.tables.items()}
        spaces = {name: (keys or 0, width) for name, (keys, width) in self.spaces.items()}
        return {**tables, **spaces, **self.dense}

    @property
    def entries(self) -> int:
        """Count the numbers of one upload; of an open space, one row."""
        sizes = [int(np.prod(shape)) for shape in self.dense.values()]
        sizes += [(keys or 1) * width for keys, width in self.spaces.values()]
        return self.n_rows * sum(self.tables.values()) + sum(sizes)

    @property
    def parts(self) -> int:
        """Count what `RowClip` bounds one by one: rows of tables and spaces, and dense arrays."""
        keys = sum(keys or 1 for keys, _ in self.spaces.values())
        return self.n_rows * len(self.tables) + len(self.dense) + keys

    @property
    def nbytes(self) -> int:
        """Bytes of one upload written out whole, as float32: its size tells nothing."""
        return 4 * self.entries
