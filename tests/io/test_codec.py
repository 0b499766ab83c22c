"""A message class declares its format, and whatever else arrives is refused."""

from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import pytest
from numpy.typing import NDArray

from hushrec.errors import MessageError
from hushrec.io.codec import ArrayGroup, ArraySpec, Count, Message, Name, kind_of

Rows = Annotated[NDArray[np.int64], ArraySpec("int64", ("rows",))]
Weights = Annotated[NDArray[np.float64] | None, ArraySpec("float64", ("rows", 2), optional=True)]


@dataclass(frozen=True, eq=False)
class Inner(Message, kind="inner"):
    run: Name
    rows: Rows


@dataclass(frozen=True, eq=False)
class Outer(Message, kind="outer", most_bytes=10_000):
    number: Count
    inner: Inner
    rows: Rows
    weights: Weights = None
    more: ArrayGroup = field(default_factory=dict)
    text: bytes = b""

    def validate(self):
        if self.number == 13:
            raise MessageError("13 does not fit")


ROWS, THREE = np.arange(3), np.zeros((3, 2))


def outer(**changes):
    whole = {"number": 1, "inner": Inner("run", np.arange(5)), "rows": ROWS, **changes}
    return Outer(**whole)


def test_a_message_comes_back_with_what_is_nested_optional_and_grouped():
    sent = outer(weights=THREE, more={"a/b": np.ones(2)}, text=b"\x00x")
    read = Outer.from_bytes(sent.to_bytes())
    assert (read.number, read.inner.run, read.text) == (1, "run", b"\x00x")
    assert read.inner.rows.tolist() == [0, 1, 2, 3, 4]
    assert read.more["a/b"].tolist() == [1, 1]
    assert read.weights.shape == (3, 2)
    assert Outer.from_bytes(outer().to_bytes()).weights is None
    assert sent.to_bytes() == read.to_bytes(), "equal messages are equal bytes"
    assert kind_of(sent.to_bytes()) == "outer"


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (outer(number=-1), "'number': Input should be greater"),
        (outer(number=True), "'number': Input should be a valid integer"),
        (outer(number=2**63), "'number': Input should be less"),
        (outer(number="1"), "'number': Input should be a valid integer"),
        (outer(number=13), "13 does not fit"),
        (outer(inner=Inner("x" * 201, ROWS)), "'inner.run': String should have at most 200"),
        (outer(inner=Inner("run", ROWS * 0.5)), "'rows' of the inner is float64"),
        (outer(rows=ROWS.astype(np.uint64)), "'rows' of the outer is uint64"),
        (outer(rows=THREE.astype(np.int64)), r"'rows' of the outer is int64\(3, 2\)"),
        (outer(weights=THREE[:2]), r"'weights' of the outer is float64\(2, 2\), not"),
        (outer(weights=THREE[:, :1]), r"float64\(3, 1\), not float64\(rows, 2\)"),
        (outer(weights=THREE * np.nan), "'weights' holds numbers that are not finite"),
        (outer(more={"x": np.array([np.inf])}), "'x' holds numbers that are not finite"),
        (outer(more={"x": np.zeros(2000)}), "more than the 10,000 allowed"),
        (outer(rows=None), "the outer lacks 'rows'"),
        (Inner("run", ROWS), "no outer of this version"),
    ],
)
def test_what_is_not_as_declared_is_refused(message, why):
    with pytest.raises(MessageError, match=why):
        Outer.from_bytes(message.to_bytes())


def test_fields_and_arrays_that_are_not_declared_are_refused():
    @dataclass(frozen=True, eq=False)
    class Wide(Message, kind="inner"):
        run: str
        rows: Rows
        admin: bool = True

    @dataclass(frozen=True, eq=False)
    class Long(Message, kind="inner"):
        run: str
        rows: Rows
        other: Rows

    with pytest.raises(MessageError, match="'admin': Extra inputs are not permitted"):
        Inner.from_bytes(Wide("run", ROWS).to_bytes())
    with pytest.raises(MessageError, match="undeclared array 'other'"):
        Inner.from_bytes(Long("run", ROWS, ROWS).to_bytes())
