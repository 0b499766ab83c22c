"""What others wrote is shown by the terminal, and not obeyed; messages stay short."""

import ast
import io
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.progress import BarColumn
from rich.table import Table

import hushrec
from hushrec.cli import main, terminal
from hushrec.errors import LONGEST_MESSAGE, listed, nearest, plain, shortened
from hushrec.reporting import plots

EVERYTHING = "".join(map(chr, (*range(0x20), *range(0x7F, 0xA0))))
HOSTILE = (
    "\x1b[31mred\x1b[0m \x1b]0;owned\x07 \x9b2J \x90q\x9c \u202egnp.exe [bold]b[/] :skull: \x7f\r\t"
)
OBEYED = re.compile(rb"[\x00-\x09\x0b-\x1f\x7f]|\xc2[\x80-\x9f]")


def hushrec_says(*words):
    return CliRunner().invoke(main, [str(word) for word in words])


def test_plain_text_is_as_long_and_keeps_line_ends():
    shown = plain(EVERYTHING + "aé茶\udcff\u202e")
    assert len(shown) == len(EVERYTHING) + 5
    assert not OBEYED.search(shown.encode())
    assert shown.count("\n") == 1
    assert shown.endswith("aé茶��")


def test_long_messages_and_lists_are_shortened():
    assert shortened("x" * LONGEST_MESSAGE) == "x" * LONGEST_MESSAGE
    message = shortened("begin" + "x" * 10**6 + "end")
    assert len(message) < LONGEST_MESSAGE + 60
    assert message.startswith("begin")
    assert message.endswith("end")
    assert "998,008 characters left out" in message
    assert listed([str(k) for k in range(10)], 3) == "'0', '1', '2' and 7 more"
    assert len(nearest("zz", [f"column {k}" * 9 for k in range(100_000)])) < 6_000


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory):
    """A run on a file whose name, ids and titles are hostile."""
    folder = tmp_path_factory.mktemp("hostile")
    data = folder / f"{HOSTILE.strip()}.csv".replace("/", "")
    header = "user,item,rating,time,title"
    lines = [
        f"u{u}\x1b[2J,i{i}\x9b\x07,1,{u + i},{HOSTILE.strip()} {i}".replace("\r", "")
        for u in range(6)
        for i in range(8)
        if (u + i) % 3
    ]
    data.write_text("\n".join([header, *lines]), "utf-8")
    out = folder / "run\x1b[31m"
    words = ("train", "--data", data, "--method", "popularity", "--out", out)
    return data, out, hushrec_says(*words)


def test_no_hostile_title_id_or_name_reaches_the_terminal(hostile_run, tmp_path):
    data, out, trained = hostile_run
    user = "u1\x1b[2J"
    said = [
        trained,
        hushrec_says("recommend", out, "--user", user),
        hushrec_says("recommend", out, "--user", user, "--json"),
        hushrec_says("recommend", out, "--user", f"{user}?"),
        hushrec_says("data", "info", data),
        hushrec_says("data", "info", data, "--json"),
        hushrec_says("data", "import", data, "--name", "n\x1b", "--user", HOSTILE),
        hushrec_says("evaluate", out),
        hushrec_says("analyse", out),
        hushrec_says("compare", out, out),
        hushrec_says("report", out),
        hushrec_says(f"\x1b[31m{EVERYTHING}"),
        hushrec_says("train", "--privacy", EVERYTHING),
        hushrec_says("train", "--method", EVERYTHING, "--out", tmp_path / "other"),
        hushrec_says("train", "--set", f"lr={EVERYTHING}", "--out", tmp_path / "other"),
        hushrec_says("train", f"--x{EVERYTHING}"),
    ]
    for result in said:
        assert result.exit_code in (0, 2), result.output
        assert not OBEYED.search(result.output_bytes), result.output
    assert "red" in said[1].output  # shown, not hidden
    assert "[bold]b[/]" in said[1].output and ":skull:" in said[1].output
    assert json.loads(said[2].stdout)["user"] == user
    page = (out / "report.html").read_bytes()
    assert not OBEYED.search(page)


def test_rich_text_progress_and_drawings_are_safe_too():
    table = Table(title=HOSTILE, caption=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(HOSTILE)
    console = terminal.Console()
    console.file = io.StringIO()
    console.print(table, HOSTILE)
    bars = terminal.progress(terminal.text_column("{task.description}"), BarColumn())
    console.print(bars.make_tasks_table([]))
    bars.add_task(HOSTILE)
    console.print(bars.make_tasks_table(bars.tasks))
    assert not OBEYED.search(console.file.getvalue().encode())
    assert "[bold]b[/] :skull:" in console.file.getvalue().replace("\n", " ")
    assert not OBEYED.search(plots.text("x", "0", 0, HOSTILE).encode())


def test_a_file_of_many_columns_gets_a_short_message(tmp_path):
    file = tmp_path / "wide.csv"
    wide = ",".join(f"column {k}" for k in range(60_000))
    file.write_text(f"{wide}\n{wide}\n")
    for words in (("data", "info", file), ("data", "import", file, "--name", "w", "--user", "q")):
        result = hushrec_says(*words)
        assert result.exit_code == 2
        assert len(result.output) < LONGEST_MESSAGE + 100
        assert "more" in result.output


def test_only_two_modules_print():
    """Whoever prints in another way has to make words safe again, and forgets it.

    `runs.progress` shows labels, phases and metrics, which `test_progress` holds to be safe.
    """
    for file in Path(hushrec.__file__).parent.rglob("*.py"):
        if file.name in ("terminal.py", "progress.py"):
            continue
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("print", "click.echo", "click.secho"), file
            if isinstance(node, ast.ImportFrom):
                names = {name.name for name in node.names}
                assert node.module != "rich.console" or names <= {"Group"}, file
                assert node.module != "rich.progress" or "Progress" not in names, file
                assert node.module != "rich.markup", file
