"""The bytes form of messages and stored values: a safetensors file with a typed header.

A message is a frozen dataclass that derives from `Message`, and its fields declare the format:

- a field annotated with an `ArraySpec`, or of type ``bytes``, is one array;
- a field annotated with a `GroupSpec` is any number of arrays, whose names start with the field's;
- a field of another message's type is nested, and its arrays' names start with the field's;
- every other field is in the header, which pydantic validates strictly on arrival.

A reader states the largest size before anything is parsed. Whatever does not match the declaration
raises a `MessageError` that names what is wrong.

Files of a run (`Stored`, arrays, TOML) may be edited, cut short or copied from elsewhere. A file is
read up to a maximum size and validated against its class; a file that does not match raises a
`RunError` that names the file and the key.
"""

from __future__ import annotations

import json
import tomllib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar, get_type_hints, overload
from zipfile import BadZipFile, ZipFile

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_core import to_jsonable_python
from safetensors import SafetensorError
from safetensors.numpy import load, save

from hushrec.errors import MessageError, MissingExtraError, RunError, plain, refuse_unknown

Array = NDArray[Any]
Arrays = Mapping[str, Array]

FORMAT = "hushrec-2"
HEADER_BYTES = 2**16
"""Largest header: names and shapes of the arrays, and the header's fields."""
LARGEST = 2**30
"""Largest message where nothing tighter is known."""

Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Whole = Annotated[int, Field(ge=-(2**300), le=2**300)]
Name = Annotated[str, Field(max_length=200)]


@dataclass(frozen=True)
class ArraySpec:
    """The dtype, or several with a bar between them, and the shape of an array of a message."""

    dtype: str
    shape: tuple[int | str, ...]
    """A name stands for a size that is the same wherever the name appears in the message, and
    ``*`` for any size."""
    optional: bool = False

    def __str__(self) -> str:
        return f"{self.dtype}({', '.join(map(str, self.shape))})"


@dataclass(frozen=True)
class GroupSpec:
    """Declares a group of arrays, which the reader may check with `check_arrays`."""

    finite: bool = True
    """Whether NaN and infinite numbers are refused."""


ArrayGroup = Annotated[Mapping[str, NDArray[Any]], GroupSpec()]
BYTES = ArraySpec("uint8", ("*",))


def check_arrays(kind: str, arrays: Arrays, specs: Mapping[str, ArraySpec]) -> None:
    """Refuse arrays whose names, dtypes or shapes are not the declared ones, or NaN and infinite
    numbers."""
    required = {name for name, spec in specs.items() if not spec.optional}
    for name in sorted(required - arrays.keys()):
        raise MessageError(f"the {kind} lacks '{name}'")
    for name in sorted(arrays.keys() - specs.keys()):
        raise MessageError(f"the {kind} holds an undeclared array '{printable(name)}'")
    sizes: dict[str, int] = {}
    for name, spec in specs.items():
        if name not in arrays:
            continue
        array = arrays[name]
        fits = array.dtype.name in spec.dtype.split("|") and array.ndim == len(spec.shape)
        for size, declared in zip(array.shape, spec.shape, strict=False):
            known = sizes.setdefault(declared, size) if isinstance(declared, str) else declared
            fits = fits and (declared == "*" or size == known)
        if not fits:
            raise MessageError(f"'{name}' of the {kind} is {array.dtype}{array.shape}, not {spec}")
        check_finite(array, name)


def check_finite(array: Array, name: str) -> None:
    """Refuse NaN and infinite numbers."""
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise MessageError(f"'{printable(name)}' holds numbers that are not finite")


def printable(text: str) -> str:
    """Return somebody else's text without control characters, which a terminal would obey."""
    return "".join(letter for letter in text if letter.isprintable())


class Message:
    """Base class of the dataclasses that are sent or stored as bytes."""

    kind: ClassVar[str]
    most_bytes: ClassVar[int]

    def __init_subclass__(cls, kind: str, most_bytes: int = LARGEST) -> None:
        """``kind`` is written into the header; ``most_bytes`` is the largest accepted size."""
        cls.kind, cls.most_bytes = kind, most_bytes

    def to_bytes(self) -> bytes:
        """Encode the message; equal messages are equal bytes."""
        header, arrays = _split(self)
        # One entry: safetensors writes several in any order.
        envelope = {FORMAT: json.dumps({"kind": self.kind, "header": header})}
        whole = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        return bytes(save(whole, metadata=envelope))

    @property
    def array_bytes(self) -> int:
        """Bytes of the message's arrays, which are all of a large message but its header."""
        return sum(np.asarray(array).nbytes for array in _split(self)[1].values())

    @classmethod
    def from_bytes(cls, data: bytes, most_bytes: int | None = None) -> Self:
        """Decode and validate a message of this class."""
        most = cls.most_bytes if most_bytes is None else most_bytes
        if len(data) > most:
            sizes = f"{len(data):,} bytes, more than the {most:,} allowed"
            raise MessageError(f"the {cls.kind} has {sizes}")
        text, kind = _envelope(data, cls.kind)
        if kind != cls.kind:
            raise MessageError(f"the message is no {cls.kind} of this version of hushrec")
        try:
            header = _format_of(cls).envelope.model_validate_json(text)
            arrays = load(data)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = printable(".".join(map(str, first["loc"][1:])))[:100]
            problem = f"'{where}': {first['msg']}"
            raise MessageError(f"the {cls.kind}'s header is invalid: {problem}") from None
        except (ValueError, KeyError, TypeError, SafetensorError) as error:
            raise MessageError(f"the {cls.kind} is damaged: {type(error).__name__}") from None
        return _joined(cls, header.header, arrays)  # type: ignore[attr-defined]

    def validate(self) -> None:
        """Refuse, with a `MessageError`, fields that do not fit each other; called on arrival."""


M = TypeVar("M", bound=Message)


def kind_of(data: bytes) -> str:
    """Return the kind that a message claims to be, for a reader that accepts several."""
    return _envelope(data, "message")[1]


def payload(data: bytes) -> int:
    """Return the bytes of a message's arrays, its header left out."""
    return len(data) - 8 - int.from_bytes(data[:8], "little")


def _envelope(data: bytes, kind: str) -> tuple[str, str]:
    """Return the header of a message as JSON, and the kind that it states."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(HEADER_BYTES, len(data) - 8):
        raise MessageError(f"the {kind} is no message of hushrec: it has no header")
    try:
        entries = json.loads(data[8 : 8 + size])["__metadata__"]
        if FORMAT not in entries:
            raise MessageError(f"the message is no {kind} of this version of hushrec")
        return entries[FORMAT], str(json.loads(entries[FORMAT])["kind"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise MessageError(f"the {kind} is damaged: {type(error).__name__}") from None


@dataclass(frozen=True)
class _Format:
    """The format that a message class declares."""

    envelope: type[BaseModel]
    header: tuple[str, ...]
    specs: Mapping[str, ArraySpec]
    groups: Mapping[str, GroupSpec]
    nested: Mapping[str, type[Message]]


_FORMATS: dict[type[Message], _Format] = {}


def _format_of(cls: type[Message]) -> _Format:
    if cls in _FORMATS:
        return _FORMATS[cls]
    hints = get_type_hints(cls, include_extras=True)
    header: dict[str, Any] = {}
    specs: dict[str, ArraySpec] = {}
    groups: dict[str, GroupSpec] = {}
    nested: dict[str, type[Message]] = {}
    for field in fields(cls):  # type: ignore[arg-type]
        name, hint = field.name, hints[field.name]
        marks = getattr(hint, "__metadata__", ())
        mark = next((each for each in marks if isinstance(each, ArraySpec | GroupSpec)), None)
        if hint is bytes or isinstance(mark, ArraySpec):
            specs[name] = mark if isinstance(mark, ArraySpec) else BYTES
        elif isinstance(mark, GroupSpec):
            groups[name] = mark
        elif isinstance(hint, type) and issubclass(hint, Message):
            nested[name] = hint
            header[name] = (_format_of(hint).envelope.model_fields["header"].annotation, ...)
        else:
            header[name] = (hint, ...)
    strict = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)
    model = create_model(f"{cls.__name__}Header", __config__=strict, **header)
    envelope = create_model(cls.__name__, __config__=strict, kind=(str, ...), header=(model, ...))
    own = tuple(name for name in header if name not in nested)
    _FORMATS[cls] = _Format(envelope, own, specs, groups, nested)
    return _FORMATS[cls]


def _split(message: Message) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return the header and the arrays of a message."""
    declared = _format_of(type(message))
    header = {name: to_jsonable_python(getattr(message, name)) for name in declared.header}
    arrays: dict[str, Array] = {}
    for name in declared.specs:
        value = getattr(message, name)
        if value is not None:
            arrays[name] = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else value
    for name in declared.groups:
        arrays |= {f"{name}/{part}": array for part, array in getattr(message, name).items()}
    for name in declared.nested:
        header[name], inner = _split(getattr(message, name))
        arrays |= {f"{name}/{part}": array for part, array in inner.items()}
    return header, arrays


def _joined(cls: type[M], header: BaseModel, arrays: Arrays) -> M:
    """Make a message of a validated header and of arrays, which are checked here."""
    declared = _format_of(cls)
    values: dict[str, Any] = {name: getattr(header, name) for name in declared.header}
    own: dict[str, Array] = {}
    parts: dict[str, dict[str, Array]] = {n: {} for n in (*declared.groups, *declared.nested)}
    for name, array in arrays.items():
        prefix, _, rest = name.partition("/")
        if rest and prefix in parts:
            parts[prefix][rest] = array
        else:
            own[name] = array
    check_arrays(cls.kind, own, declared.specs)
    for name, spec in declared.specs.items():
        values[name] = own[name].tobytes() if spec is BYTES else own.get(name)
    for name, group in declared.groups.items():
        for part, array in parts[name].items() if group.finite else ():
            check_finite(array, part)
        values[name] = parts[name]
    for name, inner in declared.nested.items():
        values[name] = _joined(inner, getattr(header, name), parts[name])
    message = cls(**values)
    message.validate()
    return message


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
        refuse_unknown("where", wanted, self.columns)
        kept = [row for row in self if all(row[name] == value for name, value in wanted.items())]
        return Rows.of(self.columns, [list(row.values()) for row in kept])

    def to_pandas(self) -> Any:
        """Return a pandas data frame."""
        return imported("pandas", "to_pandas()").DataFrame(self.columns)

    def to_polars(self) -> Any:
        """Return a polars data frame."""
        return imported("polars", "to_polars()").DataFrame(self.columns)

    def to_arrow(self) -> Any:
        """Return an Arrow table."""
        return imported("pyarrow", "to_arrow()", "parquet").table(self.columns)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.to_arrow().__arrow_c_stream__(requested_schema)

    def __repr__(self) -> str:
        lines = [list(self.columns), *(_formatted(row) for row in self._shown())]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        hidden = len(self) - len(lines) + 1
        if hidden:
            text.insert(1 + SHOWN // 2, f"… {hidden:,} more rows …")
        return "\n".join(text)

    def _repr_html_(self) -> str:
        def row(tag: str, entries: Iterable[str]) -> str:
            return "<tr>" + "".join(f"<{tag}>{escape(one)}</{tag}>" for one in entries) + "</tr>"

        body = "".join(row("td", _formatted(entries)) for entries in self._shown())
        return f"<table>{row('th', self.columns)}{body}</table><p>{len(self):,} rows</p>"

    def _shown(self) -> list[dict[str, Any]]:
        if len(self) <= SHOWN:
            return list(self)
        return [*self[: SHOWN // 2], *self[len(self) - SHOWN // 2 :]]


def imported(module: str, what: str, extra: str | None = None) -> Any:
    """Return a module that ``what`` needs and that may not be installed."""
    try:
        return import_module(module)
    except ImportError:
        raise MissingExtraError(what, extra or module, own=extra is not None) from None


def _formatted(row: Mapping[str, Any]) -> list[str]:
    return [f"{value:.4f}" if isinstance(value, float) else plain(value) for value in row.values()]


LARGEST_TEXT = 256 << 20
"""Largest text file in bytes; metrics.jsonl of a million rounds is smaller."""
LARGEST_ARRAYS = 16 << 30
"""Largest total size in bytes of the unpacked arrays of one file."""

Number = Annotated[float, Field(allow_inf_nan=False, ge=-1e300, le=1e300)]
Positive = Annotated[float, Field(allow_inf_nan=False, ge=0, le=1e300)]
Metrics = dict[str, Number]
Tables = dict[str, Metrics]
"""Metrics by candidate set: ``tables["full"]["hr@10"]``."""


class Stored(BaseModel):
    """Base class of what is written as JSON and read back; unknown keys are kept as they are."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    def as_dict(self) -> dict[str, Any]:
        """Return the object that is written; fields that were never set are left out."""
        return self.model_dump(exclude_unset=True)

    def to_json(self, indent: int | None = None) -> str:
        """Return the JSON text that `parse` reads."""
        return json.dumps(self.as_dict(), indent=indent)


StoredT = TypeVar("StoredT", bound=Stored)


def parse(kind: type[StoredT], text: str, where: str) -> StoredT:
    """Read ``kind`` from JSON; ``where`` names the source in the error message."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        problem = first["msg"].removeprefix("Value error, ")
        if first["type"] == "missing":
            problem = f"it lacks '{key}'"
        elif first["type"] == "model_type" and not key:
            problem = "not an object"
        elif key:
            problem = f"'{key}': {problem}"
        raise RunError(f"{where} is damaged: {problem}") from None


def read_stored(kind: type[StoredT], path: Path) -> StoredT:
    """Read a JSON file as ``kind``."""
    return parse(kind, read_text(path), str(path))


def read_text(path: Path) -> str:
    """Read a UTF-8 text file of bounded size."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_TEXT + 1)
        if len(content) > LARGEST_TEXT:
            raise RunError(f"{path} is damaged: larger than {LARGEST_TEXT:,} bytes")
        return content.decode()
    except UnicodeDecodeError as error:
        raise RunError(f"{path} is damaged: not UTF-8 text at byte {error.start}") from None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file whose keys are checked elsewhere."""
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:  # also numbers too long to be read
        raise RunError(f"{path} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise RunError(f"{path} is damaged: not an object")
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file."""
    try:
        return tomllib.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged: {error}") from None


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Read an npz file of bounded size, without pickle."""
    try:
        with ZipFile(path) as packed:
            size = sum(entry.file_size for entry in packed.infolist())
        if size > LARGEST_ARRAYS:
            raise RunError(f"{path} is damaged: it declares {size:,} bytes of arrays")
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except (ValueError, OSError, EOFError, KeyError, BadZipFile, zlib.error) as error:
        raise RunError(f"{path} is damaged: {error}") from None
    except (MemoryError, NotImplementedError, RuntimeError, OverflowError) as error:
        # A size that exceeds the memory, an unknown compression, a password.
        raise RunError(f"{path} is damaged: {error!r}") from None
