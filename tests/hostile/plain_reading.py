"""The slow twin of `hushrec.data`: the whole file at once, one row after the other."""

import csv
import io
import json
from datetime import UTC, datetime

import numpy as np

from hushrec.data import text as guesses
from hushrec.data.interactions import id_order
from hushrec.errors import listed


class RefusedError(Exception):
    """With the words after the path."""


def read_plainly(text):
    """Return (users, items, values, times, titles, notes) of a text with its usual columns."""
    notes = []
    if "\r" in text:
        notes.append("Windows line ends (CRLF) read as line ends")
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise RefusedError(": the file is empty")
    if text.lstrip()[0] in "{[":
        names, rows, lines, blank = json_rows(text)
        known, header = True, True
    else:
        names, rows, lines, blank, known, header = delimited_rows(text)
    if blank:
        notes.append(f"{blank:,} blank line{'s' * (blank > 1)} skipped")
    if not header:
        notes.append("no header line: columns taken by position")
    if not rows:
        raise RefusedError(": only a header line, no rows under it")
    if header:
        found = guesses.columns_by_name(dict(enumerate(names)))
    else:
        found = {role: k for k, role in enumerate(guesses.POSITIONS) if k < len(names)}
    for role in ("user", "item"):
        if role not in found:
            tail = "" if known else "; if there is no header line, --user 0 --item 1"
            raise RefusedError(
                f": no {role} column among {listed(names if header else [])}; name it: "
                f"hushrec data import … --{role} COLUMN{tail}"
            )

    def at(row, role):
        k = found[role]
        label = f"column '{names[k]}'" if header else f"column {k}"
        return f", line {lines[row]}, {label}"

    read = [{role: row(k) for role, k in found.items()} for row in rows]
    columns = {role: [row[role] for row in read] for role in found}
    for role in ("user", "item"):
        for row, entry in enumerate(columns[role]):
            if entry == "":
                raise RefusedError(f"{at(row, role)}: empty id")
    for role in ("user", "item"):
        if len(set(columns[role])) == 1:
            raise RefusedError(
                f": only one {role} ({columns[role][0]!r}) in {len(rows):,} rows; if that is the "
                f"wrong column, choose another with --{role}"
            )
    if "value" in found:
        values = value_numbers(columns["value"], lambda row: at(row, "value"))
    else:
        notes.append("no value column: every row counts 1")
        values = [1.0] * len(rows)
    if "time" in found:
        times = time_numbers(columns["time"], lambda row: at(row, "time"), notes)
    else:
        notes.append("no time column: rows have no order in time")
        times = list(range(len(rows)))
    titles = None
    if "title" in found:
        first = {}
        for item, title in zip(columns["item"], columns["title"], strict=True):
            first.setdefault(item, title[:300])
        items = np.array(list(first))
        titles = [first[str(item)] for item in items[id_order(items)]]
    return columns["user"], columns["item"], values, times, titles, notes


def delimited_rows(text):
    delimiter = guesses.delimiter_of(text)
    if delimiter is None or delimiter not in guesses.head_of(text)[0]:
        raise RefusedError(f": only one column found{guesses.delimiter_hint(text, None)}")
    rows, numbers, blank, end = [], [], 0, 0
    if '"' in text and len(delimiter) == 1:
        stream = io.StringIO(text.rstrip("\n"), newline="\n")
        reader = csv.reader(stream, delimiter=delimiter, strict=True, skipinitialspace=True)
        found = []
        try:
            for row in reader:
                found.append((end + 1, row))
                end = reader.line_num
                check_width(found)
        except csv.Error as error:
            raise RefusedError(
                f", line {end + 1}: a quoted field does not end as it should ({error}); write a "
                "quote inside quotes twice"
            ) from None
    else:
        found = [
            (number, line.split(delimiter) if line.strip() else [])
            for number, line in enumerate(text.rstrip("\n").split("\n"), 1)
        ]
    for number, row in found:
        if not row or (len(row) == 1 and not row[0].strip()):
            blank += 1
        else:
            rows.append([entry.strip() for entry in row])
            numbers.append(number)
            check_width([(numbers[0], rows[0]), (number, rows[-1])])
    first = rows[0]
    known = any(guesses.role_of(name) for name in first)
    header = guesses.is_header(first)
    skip = int(header)
    return first, [row.__getitem__ for row in rows[skip:]], numbers[skip:], blank, known, header


def check_width(found):
    filled = [(n, row) for n, row in found if row and not (len(row) == 1 and not row[0].strip())]
    if filled and len(filled[-1][1]) != len(filled[0][1]):
        number, row = filled[-1]
        raise RefusedError(
            f", line {number}: {len(row)} field{'s' * (len(row) > 1)} where line 1 has "
            f"{len(filled[0][1])}; mend the line, or quote fields that contain the delimiter"
        )


def json_rows(text):
    lines = text.rstrip("\n").split("\n")
    numbers = [number for number, line in enumerate(lines, 1) if line.strip()]
    records = []
    for number in numbers:
        try:
            record = json.loads(lines[number - 1])
        except (ValueError, RecursionError) as error:
            raise RefusedError(f", line {number}: invalid JSON ({error})") from None
        if not isinstance(record, dict):
            raise RefusedError(f", line {number}: expected one JSON object per line")
        records.append(record)
    names = list(records[0])

    def entry(number, record):
        def column(k):
            if names[k] not in record:
                raise RefusedError(f", line {number}: column '{names[k]}' is missing")
            value = record[names[k]]
            if isinstance(value, dict | list):
                kind = "an object" if isinstance(value, dict) else "a list"
                raise RefusedError(
                    f", line {number}, column '{names[k]}': {kind} where one entry is expected; "
                    "write a line for each, or choose another column"
                )
            return "" if value is None else str(value).strip()

        return column

    rows = [entry(number, record) for number, record in zip(numbers, records, strict=True)]
    return names, rows, numbers, len(lines) - len(numbers)


def value_numbers(entries, at):
    for row, entry in enumerate(entries):
        if not guesses.is_number(entry):
            raise RefusedError(f"{at(row)}: {entry!r} is not a number")
    with np.errstate(over="ignore"):
        values = [float(np.float32(float(entry))) for entry in entries]
    for row, value in enumerate(values):
        if not np.isfinite(value):
            raise RefusedError(f"{at(row)}: {entries[row]!r} is not a finite number")
    return values


def time_numbers(entries, at, notes):
    try:
        whole = [int(entry) for entry in entries]
        if all(-(2**63) <= time < 2**63 for time in whole):
            return whole
    except ValueError:
        pass
    number = guesses.is_number(entries[0])
    seconds = []
    for row, entry in enumerate(entries):
        try:
            if number:
                second = float(entry)
            else:
                moment = datetime.fromisoformat(entry)
                second = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            second = np.nan
        if not abs(second) < 2**53:
            kind = "a number" if number else "a number or an ISO date like 2020-01-31"
            raise RefusedError(f"{at(row)}: time {entry!r} is not {kind}")
        seconds.append(second)
    if all(second == np.floor(second) for second in seconds):
        return [int(second) for second in seconds]
    notes.append("times have fractions of a second: kept in microseconds")
    return [int(np.rint(second * 1e6)) for second in seconds]
