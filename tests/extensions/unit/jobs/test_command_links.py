"""``dtcomm plan collective --links``: unlike links between sites, and the codec of each."""

import json
from pathlib import Path

import pytest

from dtcomm.extensions.jobs.command import main
from tests.extensions.unit.jobs.test_command import plan_as_json

THREE_SITES = "0-1=1gbit:75ms,0-2=500mbit:40ms,1-2=1gbit:90ms"


def test_each_link_has_its_codec(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_as_json(capsys, "collective", "--links", THREE_SITES, "--per-host", "2", "--codec", "int4")
    assert plan["ranks"] == 6 and plan["groups"] == [[0, 1], [2, 3], [4, 5]]
    largest = plan["results"][-1]
    assert (largest["algorithm"], largest["codec"]) == ("hierarchical", "none/int4")
    assert largest["speedup"] > 3
    links = {row["links"]: (row["gbit"], row["round_trip_ms"], row["codec"]) for row in plan["links"]}
    assert links["groups 0 and 2"] == (0.5, pytest.approx(40), "int4")
    assert links["groups 1 and 2"] == (1.0, pytest.approx(90), "int4")
    assert links["inside group 1"][2] == "none"


def test_hosts_of_a_fast_link_are_one_group(capsys: pytest.CaptureFixture[str]) -> None:
    links = "0-1=1gbit:75ms,0-2=10gbit:1ms,1-2=1gbit:75ms"
    plan = plan_as_json(capsys, "collective", "--links", links, "-b", "64M", "-e", "64M")
    assert plan["groups"] == [[0, 2], [1]]
    assert [row["codec"] for row in plan["links"]] == ["none", "int8"]
    equal = plan_as_json(capsys, "collective", "--links", "0-1=1gbit:75ms", "-b", "64M", "-e", "64M")
    assert equal["groups"] == [[0, 1]] and "links are alike" in equal["verdicts"][0]


def test_a_file_has_links_between_ranks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "links.json"
    file.write_text(json.dumps({"gbit": [[0, 40, 1], [40, 0, 1], [1, 1, 0]]}))
    assert plan_as_json(capsys, "collective", "--links", str(file))["groups"] == [[0, 1], [2]]
    written = tmp_path / "plan.json"
    assert main(["collective", "--links", str(file), "--json", str(written)]) == 0
    printed = capsys.readouterr().out
    assert "groups 0 and 1" in printed and printed.startswith("verdict: 2 groups of ranks: (0 1) (2)")
    assert json.loads(written.read_text())["version"] == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("collective --links 0-1=fast", "'0-1=fast' is not a link"),
        ("collective --links 0-1=1gbit,0-2=1gbit", "there is none for sites 1-2 of 3"),
        ("collective --links 0-1=1gbit,1-0=2gbit", "1-0: given twice"),
        ("collective --links 0-0=1gbit", "two different sites"),
        ("collective --links 0-1=0gbit", "expected numbers above 0"),
        ("collective --links 0-1=1gbit --system h100", "--system: not valid with --links"),
        ("collective all_gather --links 0-1=1gbit", "--links plans an all_reduce"),
        ("collective --links 0-1=1gbit --codec exact:bits=32", "one representation"),
    ],
)
def test_wrong_arguments_are_named(capsys: pytest.CaptureFixture[str], argv: str, message: str) -> None:
    try:
        status = main(argv.split())
    except SystemExit as stop:
        status = stop.code
    assert status == 2 and message in capsys.readouterr().err
