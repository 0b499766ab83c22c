"""Columns of a Parquet file as text; what is no single entry is refused by column."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hushrec.errors import DataError, MissingExtraError

if TYPE_CHECKING:
    import pyarrow as arrow

ROWS = 1 << 16
"""Rows that become text at once."""

Blocks = Callable[[Sequence[int]], Iterator[list[list[str]]]]


def parquet_blocks(path: Path, raw: bytes) -> tuple[list[str], int, Blocks]:
    """Return the names of a file's columns, the number of its rows, and what reads them."""
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise MissingExtraError("Parquet", "parquet") from None
    try:
        stored = parquet.read_table(arrow.BufferReader(raw))
    except (arrow.ArrowException, OSError) as error:
        reason = str(error).split("\n")[0]
        raise DataError(f"{path}: damaged Parquet file ({reason}); get it again") from None
    if stored.num_rows == 0:
        raise DataError(f"{path}: only a header, no rows")
    names = [str(name) for name in stored.column_names]

    def blocks(wanted: Sequence[int]) -> Iterator[list[list[str]]]:
        columns = [_readable(f"{path}, column '{names[k]}'", stored.column(k)) for k in wanted]
        for start in range(0, stored.num_rows, ROWS):
            yield [
                _as_text(f"{path}, column '{names[k]}'", column.slice(start, ROWS))
                for k, column in zip(wanted, columns, strict=True)
            ]

    return names, stored.num_rows, blocks


def _readable(where: str, column: arrow.ChunkedArray) -> arrow.ChunkedArray:
    """Refuse what is no single entry; cut times that Python cannot hold to microseconds."""
    import pyarrow as arrow

    kind = column.type
    if arrow.types.is_nested(kind):
        raise DataError(
            f"{where}: holds {_cut(kind)}, and one entry is expected in each row; write a row for "
            "each, or choose another column"
        )
    if arrow.types.is_timestamp(kind) and kind.unit == "ns":
        return column.cast(arrow.timestamp("us", kind.tz), safe=False)
    return column


def _as_text(where: str, column: arrow.ChunkedArray) -> list[str]:
    try:
        return [_entry(entry) for entry in column.to_pylist()]
    except (ValueError, OverflowError, TypeError) as error:
        # Dates of the year 300000, zones that do not exist, bytes that are no text.
        raise DataError(
            f"{where}: {_cut(column.type)} that cannot be read ({error}); write the column as "
            "text or numbers"
        ) from None


def _entry(entry: Any) -> str:
    if entry is None:
        return ""
    return (entry.decode() if isinstance(entry, bytes) else str(entry)).strip()


def _cut(kind: object) -> str:
    words = str(kind)
    return words if len(words) < 100 else words[:99] + "…"
