"""A folder of runs for the studio, and the studio over it."""

import shutil
import threading
from contextlib import contextmanager

from hushrec.api import train
from hushrec.reporting.html import write_report
from hushrec.studio.server import studio_server

HOSTILE = "<script>alert(1)<"
"""The name of a run."""


@contextmanager
def answering(folder, host="127.0.0.1"):
    """Give where a studio over the folder answers."""
    kept = []
    with studio_server(folder, host, 0, lambda error: kept.append(error) or "the log") as opened:
        server, address = opened
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield address
        finally:
            server.shutdown()
            thread.join(10)
    assert kept == [], kept


def make_runs(folder):
    """Make finished runs, one that was stopped, one that is damaged, and odd names."""
    write_report(train("demo", "fedmf", rounds=3, out=folder / "fedmf"))
    write_report(train("demo", "popularity", out=folder / "grid" / "popularity"))
    for name in ("stopped", HOSTILE, "damaged"):
        shutil.copytree(folder / "fedmf", folder / name)
    (folder / "stopped" / "summary.json").unlink()
    (folder / "damaged" / "summary.json").write_text('{"method": "<b>bold</b>"}')
    (folder / "no-run").mkdir()
