"""`Rows`: a result as a table, for whatever library of frames is at hand, and for none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any, overload

from hushrec.errors import MissingExtraError, plain

SHOWN = 10
"""Rows that are printed of a long table, half of them its first."""


class Rows(Sequence[dict[str, Any]]):
    """Rows with named columns. A row is a dict, ``rows.columns`` has the columns as lists.

    ``rows.to_pandas()``, ``rows.to_polars()``; whoever reads Arrow's stream takes it as it is.
    """

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        self.columns = {name: list(entries) for name, entries in columns.items()}

    @classmethod
    def of(cls, names: Iterable[str], rows: Sequence[Sequence[Any]]) -> Rows:
        """Make a table of rows."""
        return cls({name: [row[k] for row in rows] for k, name in enumerate(names)})

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), []))

    @overload
    def __getitem__(self, place: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, place: slice) -> Rows: ...
    def __getitem__(self, place: int | slice) -> dict[str, Any] | Rows:
        found = {name: entries[place] for name, entries in self.columns.items()}
        return Rows(found) if isinstance(place, slice) else found

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[place] for place in range(len(self)))

    def where(self, **wanted: Any) -> Rows:
        """Return the rows with these entries, as in ``rows.where(metric="hr@10")``."""
        kept = [row for row in self if all(row[name] == at for name, at in wanted.items())]
        return Rows.of(self.columns, [list(row.values()) for row in kept])

    def to_pandas(self) -> Any:
        """Return a pandas data frame."""
        try:
            import pandas
        except ImportError:
            raise MissingExtraError("to_pandas()", "pandas", own=False) from None
        return pandas.DataFrame(self.columns)

    def to_polars(self) -> Any:
        """Return a polars data frame."""
        try:
            import polars
        except ImportError:
            raise MissingExtraError("to_polars()", "polars", own=False) from None
        return polars.DataFrame(self.columns)

    def to_arrow(self) -> Any:
        """Return an Arrow table."""
        try:
            import pyarrow
        except ImportError:
            raise MissingExtraError("to_arrow()", "parquet") from None
        return pyarrow.table(self.columns)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.to_arrow().__arrow_c_stream__(requested_schema)

    def __repr__(self) -> str:
        lines = [list(self.columns), *(_words(row) for row in self._shown())]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [
            "  ".join(
                entry.ljust(width) for entry, width in zip(line, widths, strict=True)
            ).rstrip()
            for line in lines
        ]
        left = len(self) - len(lines) + 1
        if left:
            text.insert(1 + SHOWN // 2, f"… {left:,} more rows …")
        return "\n".join(text)

    def _repr_html_(self) -> str:
        def row(tag: str, entries: Iterable[str]) -> str:
            return "<tr>" + "".join(f"<{tag}>{escape(one)}</{tag}>" for one in entries) + "</tr>"

        body = "".join(row("td", _words(entries)) for entries in self._shown())
        head = row("th", self.columns)
        return f"<table>{head}{body}</table><p>{len(self):,} rows</p>"

    def _shown(self) -> list[dict[str, Any]]:
        if len(self) <= SHOWN:
            return list(self)
        return [*self[: SHOWN // 2], *self[len(self) - SHOWN // 2 :]]


def _words(row: Mapping[str, Any]) -> list[str]:
    return [f"{at:.4f}" if isinstance(at, float) else plain(at) for at in row.values()]
