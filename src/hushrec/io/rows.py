"""`Rows`: a table of results, with conversion to pandas, polars and Arrow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any, overload

from hushrec.errors import MissingExtraError, plain

SHOWN = 10
"""Rows of a long table that are printed, half from its beginning and half from its end."""


class Rows(Sequence[dict[str, Any]]):
    """A table with named columns; each row is a dict, ``rows.columns`` holds the columns as lists.

    Libraries that read the Arrow stream interface accept it directly.
    """

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        self.columns = {name: list(entries) for name, entries in columns.items()}

    @classmethod
    def of(cls, names: Iterable[str], rows: Sequence[Sequence[Any]]) -> Rows:
        """Make a table from column names and rows."""
        return cls({name: [row[k] for row in rows] for k, name in enumerate(names)})

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), []))

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | Rows:
        selected = {name: entries[index] for name, entries in self.columns.items()}
        return Rows(selected) if isinstance(index, slice) else selected

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def where(self, **wanted: Any) -> Rows:
        """Return the rows with these values, as in ``rows.where(metric="hr@10")``."""
        kept = [row for row in self if all(row[name] == value for name, value in wanted.items())]
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
        lines = [list(self.columns), *(_formatted(row) for row in self._shown())]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [
            "  ".join(
                entry.ljust(width) for entry, width in zip(line, widths, strict=True)
            ).rstrip()
            for line in lines
        ]
        hidden = len(self) - len(lines) + 1
        if hidden:
            text.insert(1 + SHOWN // 2, f"… {hidden:,} more rows …")
        return "\n".join(text)

    def _repr_html_(self) -> str:
        def row(tag: str, entries: Iterable[str]) -> str:
            return "<tr>" + "".join(f"<{tag}>{escape(one)}</{tag}>" for one in entries) + "</tr>"

        body = "".join(row("td", _formatted(entries)) for entries in self._shown())
        head = row("th", self.columns)
        return f"<table>{head}{body}</table><p>{len(self):,} rows</p>"

    def _shown(self) -> list[dict[str, Any]]:
        if len(self) <= SHOWN:
            return list(self)
        return [*self[: SHOWN // 2], *self[len(self) - SHOWN // 2 :]]


def _formatted(row: Mapping[str, Any]) -> list[str]:
    return [f"{value:.4f}" if isinstance(value, float) else plain(value) for value in row.values()]
