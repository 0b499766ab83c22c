"""The examples of services name commands and files that exist."""

import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hushrec.cli import main
from hushrec.deployment.flower import programs
from hushrec.deployment.flower.processes import END_SECONDS
from hushrec.errors import MissingExtraError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "deployment"


@pytest.mark.parametrize("name", ["hushrec-server.service", "hushrec-node@.service"])
def test_units_start_a_command_that_exists_and_let_it_end(name):
    unit = configparser.ConfigParser(interpolation=None, comment_prefixes="#")
    unit.optionxform = str
    unit.read(EXAMPLES / name)
    service = unit["Service"]
    program, *words, folder = service["ExecStart"].split()
    assert program == "/opt/hushrec/bin/hushrec"
    assert CliRunner().invoke(main, [*words, "--help"]).exit_code == 0
    assert service["ReadWritePaths"] == folder
    assert int(service["TimeoutStopSec"]) > 2 * END_SECONDS
    assert (service["Restart"], unit["Unit"]["StartLimitIntervalSec"]) == ("always", "0")


def test_the_compose_file_uses_commands_and_folders_that_exist():
    text = (EXAMPLES / "compose.yaml").read_text()
    commands = re.findall(r'command: \["(\w+)", "/federation"\]', text)
    assert commands == ["server", "node", "node"]
    for command in commands:
        assert CliRunner().invoke(main, ["federate", command, "--help"]).exit_code == 0
    mounted = re.findall(r'volumes: \["\.\./\.\./(\S+):/federation"\]', text)
    assert mounted == ["films/server", "films/nodes/node-1", "films/nodes/node-2"]
    assert int(re.search(r"stop_grace_period: (\d+)s", text)[1]) > 2 * END_SECONDS


@pytest.mark.parametrize("command", ["server", "node"])
def test_without_flower_commands_say_what_to_install(tmp_path, monkeypatch, command):
    done = CliRunner().invoke(
        main, ["federate", "init", str(tmp_path / "f"), "--data", "demo", "--node", "a"]
    )
    assert done.exit_code == 0, done.output
    monkeypatch.setattr(programs.sys, "executable", str(tmp_path / "bin" / "python"))
    with pytest.raises(MissingExtraError):
        programs.program("flwr")
    folder = "server" if command == "server" else "nodes/a"
    done = CliRunner().invoke(main, ["federate", command, str(tmp_path / "f" / folder)])
    assert done.exit_code == 2
    assert "pip install 'hushrec[flower]'" in done.output


def test_folders_are_made_without_flower(tmp_path):
    """What the extra installs is needed where a server or node runs, and nowhere else."""
    blocked = ("flwr", "h11", "prometheus_client", "psutil")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked}))\n"
        "from hushrec.cli import main; main(sys.argv[1:])"
    )
    folder = str(tmp_path / "f")

    def run(*words):
        return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)

    done = run("federate", "init", folder, "--data", "demo", "--node", "a")
    assert done.returncode == 0, done.stderr
    for words in (("server", f"{folder}/server"), ("node", f"{folder}/nodes/a"), ("rehearse",)):
        done = run("federate", *words)
        assert done.returncode == 2, done.stderr
        assert "pip install 'hushrec[flower]'" in done.stderr


@pytest.mark.parametrize("command", ["server", "node"])
def test_a_folder_that_is_none_is_a_sentence(tmp_path, command):
    done = CliRunner().invoke(main, ["federate", command, str(tmp_path)])
    assert done.exit_code == 2
    assert "hushrec federate init" in done.output
