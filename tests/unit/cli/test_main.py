from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from dtcomm.cli import main as cli


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    output = capsys.readouterr().out
    assert "usage: dtcomm <command>" in output and "  perf " in output
    assert "perf" in cli.COMMANDS
    assert cli.main([]) == 0


def test_every_command_is_in_one_group_of_the_help() -> None:
    grouped = [name for names in cli.GROUPS.values() for name in names if name in cli.COMMANDS]
    assert sorted(grouped) == sorted(cli.COMMANDS)
    usage = cli.usage().splitlines()
    for name, (_, line) in cli.COMMANDS.items():
        assert sum(text.split() == [name, *line.split()] for text in usage) == 1


def test_the_error_of_an_unknown_command_lists_the_valid_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pref"]) == 2
    error_output = capsys.readouterr().err
    assert "'pref' is not a command" in error_output and all(name in error_output for name in cli.COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import dtcomm

    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"dtcomm {dtcomm.__version__}\n"


def test_python_m_dtcomm_is_the_same_and_loads_no_command() -> None:
    code = (
        "import runpy, sys\nsys.argv = ['dtcomm', '--help']\n"
        "try:\n    runpy.run_module('dtcomm', run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    print(end.code, [name for name in sys.modules if name.startswith('dtcomm.cli.perf')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True
    )
    assert done.stdout.startswith("usage: dtcomm") and done.stdout.endswith("0 []\n")


# Calls the commands, and prints of each its name, exit status and what it wrote.
HELP_WITHOUT_EXTRAS = """
import contextlib, io, json, sys
sys.modules |= {"rich": None, "matplotlib": None}
from dtcomm.cli import main

for command in sys.argv[1:]:
    written, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(written), contextlib.redirect_stderr(errors):
        try:
            status = main.main([command, "--help"])
        except SystemExit as end:
            status = end.code
    print(json.dumps([command, status, written.getvalue(), errors.getvalue()]))
"""


def test_a_command_says_which_package_to_install() -> None:
    own = {name for name, (module, _) in cli.COMMANDS.items() if not module.startswith("dtcomm.extensions")}
    commands = sorted(own - {"perf"})
    done = subprocess.run(
        [sys.executable, "-c", HELP_WITHOUT_EXTRAS, *commands], capture_output=True, text=True, check=True
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [result[0] for result in results] == commands
    for command, status, written, errors in results:
        if status:
            assert status == 2
            message = rf"dtcomm {command}: (rich|matplotlib) is not installed: pip install \1\n"
            assert re.fullmatch(message, errors), errors
        else:
            assert written.startswith(f"usage: dtcomm {command}")
    assert {status for _, status, *_ in results} == {0, 2}, "some need the packages, and some do not"


def test_another_missing_module_is_not_taken_for_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dtcomm.cli.trace", None)
    with pytest.raises(ModuleNotFoundError, match=r"dtcomm\.cli\.trace"):
        cli.main(["trace"])


def test_a_closed_pipe_gives_no_traceback() -> None:
    command = f"{sys.executable} -m dtcomm perf all_reduce --help | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=600)
    assert done.stderr == ""
