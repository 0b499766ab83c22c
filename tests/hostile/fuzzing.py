"""What the fuzz suite throws at the command line, and the one oracle that judges every case."""

import io
import json
import os
import re
import shutil
import signal
import struct
import time
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from click.testing import CliRunner
from hypothesis import strategies as st

from hushrec.cli import main
from hushrec.cli.terminal import TRACEBACK
from hushrec.runs.folder import RunFolder
from hushrec.serving.recommender import BundleError, Recommender

OBEYED = re.compile(rb"[\x00-\x09\x0b-\x1f\x7f]|\xc2[\x80-\x9f]")
SECONDS = 60
"""That a case may take of a processor: none takes one where nothing hangs."""
EXIT_CODES = (0, 2, 3, 130)
LONGEST_OUTPUT = 200_000


class HangError(BaseException):
    """A case did not end; no command may catch it."""


@contextmanager
def alarm(seconds=SECONDS):
    """Stop a case that hangs."""

    def ring(number, frame):
        raise HangError

    before = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@dataclass
class Place:
    """Where cases happen: a sound run that must survive, a file of data, an empty folder."""

    top: Path
    data: Path
    run: Path
    bundles: tuple[Path, ...]
    """A bundle of every kind but a mixture."""
    kept: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self):
        self.kept = contents(self.run)

    def fresh(self):
        """Return an empty folder for one case."""
        case = self.top / "case"
        shutil.rmtree(case, ignore_errors=True)
        case.mkdir()
        return case

    def restore(self):
        """Bring the sound run back after a case that changed it on purpose."""
        shutil.rmtree(self.run)
        for name, content in self.kept.items():
            file = self.run / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)


def contents(folder):
    """Return every file of a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def judge(place, words, made=()):
    """Run a command and hold it to the oracle; ``made`` may be there afterwards."""
    os.environ[TRACEBACK] = "1"
    case = place.top / "case"
    before = {path.name for path in case.iterdir()}
    began = time.process_time()
    with alarm():
        result = CliRunner().invoke(main, [str(word) for word in words])
    spent = time.process_time() - began
    told = f"{words!r}\n{result.output[-3000:]}"
    code = result.exit_code
    assert code in EXIT_CODES or (code == 1 and "audit" in words), f"exit {code} after {told}"
    assert "Traceback" not in result.output, told
    assert spent < SECONDS, f"{spent:.0f} s: {told}"
    assert len(result.output_bytes) < LONGEST_OUTPUT, told[:500]
    seen = OBEYED.search(result.output_bytes)
    assert not seen, f"{seen!r} in {told}"
    left = {path.name for path in case.iterdir()} - before
    hidden = {name for name in left if name.startswith(".") or name.endswith((".part", ".partial"))}
    assert not hidden, f"{hidden} left by {told}"
    if code == 2:
        assert not left, f"{left} left by {told}"
    assert left <= set(made), f"{left} left by {told}"
    return result


def unharmed(place):
    """The run that was there is there, as it was."""
    assert contents(place.run) == place.kept
    RunFolder.open(place.run).read_summary()


# ---------------------------------------------------------------------------------- ingredients

WEIRD = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        [
            *("", " ", "\t", "0", "-1", "1e308", "1e-308", "nan", "inf", "9" * 25, "-0.0", "0x10"),
            *("\x1b[31mred\x1b[0m", "\x1b]0;t\x07", "\x9b2J", "\x7f", "\r", "[bold]x[/]", ":x:"),
            *(
                "\u202egnp",
                "é茶🍵",
                "ﷺ" * 30,
                "'; DROP TABLE",
                '"',
                '""',
                ",",
                "a,b",
                "\u2028",
                "\ufeff",
            ),
            *(
                "2020-01-01",
                "1970-13-45",
                "user",
                "item",
                "true",
                "None",
                "x" * 1_200,
                "../..",
                "/",
            ),
        ]
    ),
)
ID = st.one_of(st.sampled_from(["a", "b", "c", "1", "2", "3"]), WEIRD)
NUMBER = st.one_of(
    st.sampled_from(["1", "2", "0.5", "30"]), st.floats().map(repr), st.integers().map(str), WEIRD
)
HEADER = st.sampled_from(
    [
        ("user", "item", "rating", "timestamp"),
        ("userId", "movieId", "rating", "title"),
        ("item", "user"),
        ("who", "what", "when"),
        ("user", "user", "item"),
        (),
    ]
)


@st.composite
def tables(draw):
    """Rows with a header or without, nearly sound or not at all."""
    header = draw(HEADER)
    width = len(header) or draw(st.integers(1, 5))
    hostile = draw(st.booleans())
    ids = ID if hostile else st.sampled_from("abcdef")
    numbers = NUMBER if hostile else st.sampled_from(["1", "2", "3.5", "40"])
    rows = draw(
        st.lists(
            st.tuples(ids, ids, *[numbers] * max(0, width - 2)).map(lambda row: row[:width]),
            max_size=20,
        )
    )
    return [header] * bool(header) + rows


@st.composite
def data_files(draw):
    """Bytes of a file of data, and its name."""
    rows = draw(tables())
    kind = draw(st.sampled_from(["csv", "tsv", "quoted", "jsonl", "parquet", "bytes"]))
    if kind in ("csv", "tsv"):
        mark = "," if kind == "csv" else draw(st.sampled_from(["\t", ";", "|", "::", " "]))
        text = draw(st.sampled_from(["\n", "\r\n"])).join(mark.join(row) for row in rows)
        content = text.encode("utf-8", "surrogatepass")
    elif kind == "quoted":
        lines = [",".join('"' + entry.replace('"', '""') + '"' for entry in row) for row in rows]
        content = "\n".join(lines).encode("utf-8", "surrogatepass")
    elif kind == "jsonl":
        content = draw(json_lines()).encode("utf-8", "surrogatepass")
    elif kind == "parquet":
        content = draw(parquet_files())
    else:
        content = draw(st.binary(max_size=300))
    content = draw(mutated(content))
    if draw(st.integers(0, 9)) == 0:
        import gzip

        content = draw(mutated(gzip.compress(content)))
    return content, f"data.{draw(st.sampled_from(['csv', 'tsv', 'jsonl', 'parquet', 'dat', 'gz']))}"


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), WEIRD),
    lambda below: st.one_of(
        st.lists(below, max_size=3), st.dictionaries(st.text(max_size=4), below, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def json_lines(draw):
    """Lines of JSON, most with the keys that are needed."""
    lines = []
    for _ in range(draw(st.integers(1, 10))):
        record = {"user": draw(st.sampled_from("abc")), "item": draw(st.sampled_from("xyz"))}
        if draw(st.integers(0, 3)) == 0:
            record |= draw(st.dictionaries(st.sampled_from(["user", "item", "time"]), JSON))
        lines.append(json.dumps(record))
    return "\n".join(lines)


@st.composite
def parquet_files(draw):
    """Parquet of columns of many types."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    rows = draw(st.integers(1, 6))
    stamps = st.integers(-(2**62), 2**62)
    kinds = [
        (st.text(max_size=4), arrow.string()),
        (st.integers(-5, 5), arrow.int64()),
        (st.floats(), arrow.float64()),
        (st.binary(max_size=4), arrow.binary()),
        (st.booleans(), arrow.bool_()),
        (stamps, arrow.timestamp("ns")),
        (stamps, arrow.timestamp("us", "Asia/Tokyo")),
        (st.integers(-(10**6), 10**6), arrow.date32()),
        (st.lists(st.integers(0, 3), max_size=2), arrow.list_(arrow.int64())),
        (st.fixed_dictionaries({"a": st.integers(0, 3)}), arrow.struct([("a", arrow.int64())])),
        (st.none(), arrow.null()),
    ]
    columns = {}
    for name in ("user", "item", "rating", "timestamp", "title"):
        entries, kind = draw(st.sampled_from(kinds))
        values = draw(st.lists(entries, min_size=rows, max_size=rows))
        columns[name] = arrow.array(values, kind)
    out = io.BytesIO()
    parquet.write_table(arrow.table(columns), out)
    return out.getvalue()


@st.composite
def mutated(draw, content):
    """Leave bytes as they are, most times; or cut, flip, repeat some."""
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 3]))):
        if not content:
            break
        at = draw(st.integers(0, len(content) - 1))
        how = draw(st.sampled_from(["cut", "flip", "insert", "repeat"]))
        if how == "cut":
            content = content[:at]
        elif how == "flip":
            content = (
                content[:at] + bytes([content[at] ^ draw(st.integers(1, 255))]) + content[at + 1 :]
            )
        elif how == "insert":
            content = content[:at] + draw(st.binary(min_size=1, max_size=4)) + content[at:]
        else:
            content = content[:at] + content[max(0, at - 20) : at] * 3 + content[at:]
    return content


WORDS = WEIRD.filter(lambda word: "\0" not in word)
SANE = st.sampled_from(["1", "2", "3", "8", "0.5", "0.1", "true", "fixed", "poisson", "[1, 5]"])
NUMBERS = st.one_of(
    SANE,
    SANE,
    SANE,
    st.sampled_from(["0", "1", "2", "-1", "1e308", "1e-308", "nan", "inf", "9" * 22, "1e9", "0.5"]),
    st.integers().map(str),
    st.floats().map(repr),
    WORDS,
)
KEYS = st.sampled_from(
    [
        *("d", "lr", "epochs", "negatives", "batch", "item_rate", "init_std", "hidden", "x", ""),
        *("split.kind", "split.test", "split.min_train", "cohort.kind", "cohort.size"),
        *("cohort.probability", "evaluation.k", "evaluation.sampled", "evaluation.every"),
        *("evaluation.users", "evaluation.select", "store.kind", "store.budget_gb"),
        *("privacy.clip", "privacy.noise", "privacy.mode", "silos.count", "silos.kind", "a.b"),
    ]
)


@st.composite
def settings_of(draw):
    """Options of a training command."""
    words = []
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["set", "number", "choice", "text"]))
        if kind == "set":
            words += ["--set", f"{draw(KEYS)}={draw(NUMBERS)}"]
        elif kind == "number":
            flags = ["--rounds", "--seed", "--threads", "--epsilon", "--delta", "--clip", "--scale"]
            value = draw(NUMBERS)
            flag = draw(st.sampled_from(flags))
            # A long run is no hang, and is asked for by nobody here.
            words += [flag, "3" if flag == "--rounds" and value.isdigit() else value]
        elif kind == "choice":
            words += ["--privacy", draw(st.sampled_from(["central", "local-laplace", "none", "x"]))]
        else:
            words += [draw(st.sampled_from(["--method", "--preset", "--protocol"])), draw(WORDS)]
    return words


@st.composite
def paths_in(draw, folder):
    """Where to write: sound, odd or impossible."""
    name = draw(
        st.one_of(
            st.sampled_from(
                ["run", "a/b/c", ".", "..", "x" * 300, "\x1b[31m", "é", "run ", "-x", "~"]
            ),
            WORDS,
        )
    )
    made = folder / "out"
    if name in ("", ".", "..", "/") or ".." in name or name.startswith("/"):
        return str(made)
    return f"{made}/{name}" if draw(st.booleans()) else f"{made}{name.replace('/', '')}"


@st.composite
def changed_runs(draw, kept):
    """A change to one file of a run."""
    name = draw(st.sampled_from(sorted(kept)))
    content = kept[name]
    if name.endswith(".json") and draw(st.booleans()):
        value = json.loads(content)
        place = value
        for _ in range(draw(st.integers(0, 3))):
            keys = list(place) if isinstance(place, dict) else []
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(place[key], dict) and place[key] and draw(st.booleans()):
                place = place[key]
                continue
            place[key] = draw(JSON)
            break
        return name, json.dumps(value).encode()
    if draw(st.integers(0, 5)) == 0:
        return name, draw(
            st.sampled_from([b"", b"[" * 50_000, b'{"a":' * 5_000, b"\xff\xfe", b"5"])
        )
    return name, draw(mutated(content).filter(lambda changed: changed != content))


@st.composite
def bundles(draw, bundle):
    """A bundle with a changed manifest, or a changed model that its manifest vouches for."""
    import hashlib

    manifest = json.loads((bundle / "manifest.json").read_text())
    model = (bundle / "model.safetensors").read_bytes()
    if draw(st.booleans()):
        manifest[draw(st.sampled_from(sorted(manifest)))] = draw(JSON)
    else:
        model = draw(mutated(model))
        if draw(st.booleans()):
            size = draw(st.integers(0, 2**64 - 1))
            model = struct.pack("<Q", size) + model[8:]
        manifest["model_bytes"] = len(model)
        manifest["model_sha256"] = hashlib.sha256(model).hexdigest()
    return draw(mutated(json.dumps(manifest).encode())), model


def judge_bundle(folder):
    """A device gets a list of finite scores, or a sentence."""
    with alarm():
        try:
            found = Recommender.load(folder, ["a", "b"]).recommend(5)
        except BundleError as error:
            assert len(str(error)) < 5_000
            return
    assert all(np.isfinite(one.score) for one in found)


@st.composite
def arrays_of(draw, content):
    """An npz file with one array exchanged, or damaged."""
    if draw(st.booleans()):
        return draw(mutated(content))
    out = io.BytesIO()
    with np.load(io.BytesIO(content)) as stored:
        arrays = dict(stored)
    name = draw(st.sampled_from(sorted(arrays)))
    odd = draw(
        st.sampled_from(
            [np.zeros(0), np.array(5), np.array(["x"]), np.full(3, -7), np.full((2, 2), 2**40)]
        )
    )
    np.savez(out, **{**arrays, name: odd})
    with zipfile.ZipFile(io.BytesIO(out.getvalue())):
        return out.getvalue()
