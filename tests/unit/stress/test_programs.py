"""The parts of the stress programs reach the goals, and a short run cannot pass for a full one."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from bench import pages, reliability
from bench.common import conditions
from bench.reliability import Counts, Entry, Kept
from tests.stress import __main__ as command
from tests.stress import fuzz
from tests.stress.campaign_cases import ACTIONS, PHASES, TRANSPORTS, WORLD_SIZES, cases
from tests.stress.programs import PROGRAMS, Program


def kept(parts: int = 2) -> Kept:
    return Kept(
        program="fuzz", what="noise", command="run", goal={"payloads": 20}, parts=parts, planned_seconds=90
    )


def entry(part: int, payloads: float = 10, commit: str = "aaaa", failures: tuple[str, ...] = ()) -> Entry:
    return Entry(
        part=part,
        command="run",
        seconds=3.0,
        counts={"payloads": payloads},
        failures=list(failures),
        commit=commit,
        processor="a processor",
        date="2026-01-01",
    )


def test_parts_add_up_to_a_pass() -> None:
    result = kept()
    assert result.verdict == "not run"
    result.add(entry(1))
    assert (result.verdict, result.missing("aaaa")) == ("**1 of 2 parts**", [2])
    result.add(entry(2))
    assert (result.verdict, result.counts, result.missing("aaaa")) == ("passed", {"payloads": 20}, [])


def test_a_short_run_passes_nothing_and_is_replaced_by_a_full_one() -> None:
    result = kept(parts=1)
    result.add(entry(0, payloads=1000))  # however much it counted
    assert (result.verdict, result.complete) == ("**short run only**", False)
    text = reliability.page(result.as_dict())
    assert "**short run only**" in text and "**The full runs are not complete**: `fuzz`" in text
    result.add(entry(1, payloads=20))
    assert (result.verdict, result.counts) == ("passed", {"payloads": 20})
    assert "not complete" not in reliability.page(result.as_dict())


def test_benchmarks_and_documents_do_not_make_a_tested_tree_another_one(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    def commit(path: str) -> str:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("text")
        git("add", "-A")
        git("commit", "-qm", "message")
        return git("rev-parse", "--short", "HEAD")

    git("init", "-q")
    tested = [commit(path) for path in ("dtcomm/codecs/int8.py", "tests/stress/soak.py", "csrc/a.cpp")]
    untested = ("bench/soak.py", "docs/page.md", "tests/stress/README.md", "tests/stress/programs.py")
    soak = PROGRAMS["soak"].tested
    for path in (*untested, "dtcomm/cli/demo/train.py", "tests/stress/campaign.py"):
        assert commit(path) not in tested
        assert conditions.code_commit(tmp_path, soak) == tested[-1]
    codec = commit("csrc/codec/b.h")  # the fuzzer tests codecs and kernels alone
    engine = commit("csrc/engine/a.cpp")
    assert conditions.code_commit(tmp_path, soak) == engine
    assert conditions.code_commit(tmp_path, PROGRAMS["fuzz"].tested) == codec
    for part in ("measure/netns.py", "ddp/state.py", "tp/layers.py"):  # what it does not import
        assert commit(f"dtcomm/{part}") != conditions.code_commit(tmp_path, soak) == engine
    layer = conditions.code_commit(tmp_path, PROGRAMS["elastic"].tested)
    assert layer not in (engine, conditions.code_commit(tmp_path, PROGRAMS["soak"].tested))
    (tmp_path / "bench/soak.py").write_text("changed")
    assert not conditions.changed_files(tmp_path, reliability.TESTED)
    (tmp_path / "csrc/a.cpp").write_text("changed")
    assert conditions.changed_files(tmp_path, reliability.TESTED) == ["csrc/a.cpp"]


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_imports_only_parts_that_its_counts_depend_on(program: Program) -> None:
    # dtcomm imports what its names stand for when they are first used.
    used = ["dtcomm.collectives", "dtcomm.kernels.ops", *(f"tests.stress.{name}" for name in program.modules)]
    files = _imported_files(used)
    assert not files & {"tests/support/autotune_simulation.py", "tests/support/import_rules.py"}
    parts = {path.removeprefix("dtcomm/") for path in files if path.startswith("dtcomm/")}

    def imported(names: Iterable[str]) -> set[str]:
        return {name for name in names if any(f"{path}/".startswith(f"{name}/") for path in parts)}

    elastic = set(reliability.ELASTIC) if program.code is reliability.TESTED_WITH_ELASTIC else set()
    assert imported(["collectives", "codecs", "runtime"]) == {"collectives", "codecs", "runtime"}
    assert not imported(reliability.NOT_IMPORTED)
    assert imported(reliability.ELASTIC) == elastic


def _imported_files(modules: list[str]) -> set[str]:
    """Return the files of the repository that modules import, directly or through others, also in functions."""
    files: set[str] = set()
    pending = list(modules)
    while pending:
        name = pending.pop()
        base = conditions.ROOT / name.replace(".", "/")
        path = next((path for path in (base / "__init__.py", base.with_suffix(".py")) if path.exists()), None)
        if path is None or (file := path.relative_to(conditions.ROOT).as_posix()) in files:
            continue
        files.add(file)
        pending += [".".join(name.split(".")[:length]) for length in range(1, name.count(".") + 1)]
        for node in _run_nodes(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                pending += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                pending += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Attribute) and (written := ast.unparse(node)).startswith("dtcomm."):
                pending.append(written)  # dtcomm.ddp, which is imported when it is used
    return files


def _run_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a tree except those below ``if TYPE_CHECKING``."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from _run_nodes(child)


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_names_the_modules_that_it_uses(program: Program) -> None:
    def imports(module: str) -> set[str]:
        text = (conditions.ROOT / f"tests/stress/{module}.py").read_text()
        names = {
            name
            for line in re.findall(r"^from tests.stress import (.*)$", text, re.M)
            for name in line.split(", ")
        }
        names |= set(re.findall(r"^from tests\.stress\.(\w+) import", text, re.M))
        return {name for name in names if (conditions.ROOT / f"tests/stress/{name}.py").exists()}

    used = set(program.modules)
    while more := {name for module in used for name in imports(module)} - used:
        used |= more
    assert used == set(program.modules)


def test_parts_of_two_commits_are_not_added() -> None:
    result = kept()
    result.add(entry(1))
    result.add(entry(2, commit="bbbb"))
    assert (result.counts, result.missing("bbbb")) == ({"payloads": 10}, [1])


def test_a_full_run_that_is_too_small_does_not_pass() -> None:
    result = kept(parts=1)
    result.add(entry(1, payloads=19))
    assert not result.complete and result.verdict == "**1 of 1 parts**"
    assert "19 (95 %)" in reliability.page(result.as_dict())


def test_failures_are_shown_and_their_part_runs_again() -> None:
    result = kept()
    result.add(entry(1, failures=("seed 1 ended with status -11",)))
    result.add(entry(2))
    assert (result.verdict, result.missing("aaaa")) == ("**1 failed**", [1])
    assert "failed: seed 1 ended with status -11" in reliability.page(result.as_dict())
    result.add(entry(1))
    assert result.verdict == "passed"


def test_a_file_gives_the_same_result_back(tmp_path: Path) -> None:
    result = kept()
    result.add(entry(2))
    reliability.write(result, tmp_path / "fuzz.json")
    assert reliability.read(tmp_path / "fuzz.json") == result


def _value(arguments: tuple[str, ...], option: str) -> list[int]:
    values = arguments[arguments.index(option) + 1 :]
    end = next((i for i, text in enumerate(values) if text.startswith("-")), len(values))
    return [int(text) for text in values[:end]]


def test_the_parts_reach_the_goals() -> None:
    def reached(name: str, option: str) -> int:
        return sum(sum(_value(part.arguments, option)) for part in PROGRAMS[name].parts)

    goals = {name: program.goal for name, program in PROGRAMS.items()}
    assert reached("fuzz", "--payloads") == goals["fuzz"]["payloads"] == 10_000_000
    assert reached("operations", "--operations") == goals["operations"]["operations"] == 600_000
    assert reached("soak", "--minutes") == goals["soak"]["minutes"] == 30
    assert reached("rendezvous", "--seeds") == goals["rendezvous"]["seeds"]
    repetitions = [
        number for part in PROGRAMS["campaign"].parts for number in _value(part.arguments, "--repetition")
    ]
    assert sorted(repetitions) == list(range(20))
    without_ucx = [name for name in TRANSPORTS if name != "ucx"]
    actions = list(dict.fromkeys(action for of_phase in ACTIONS.values() for action in of_phase))
    drawn = list(cases(list(PHASES), actions, without_ucx, list(WORLD_SIZES), repetitions, 0))
    assert len(drawn) == goals["campaign"]["cases"] == 10_260
    suite = [part.arguments for part in PROGRAMS["torch_suite"].parts]
    assert [(_value(call, "--world-size"), _value(call, "--share")) for call in suite] == [
        ([ranks], [share, 4]) for ranks in (2, 3, 4) for share in (1, 2, 3, 4)
    ]


def test_no_two_parts_repeat_each_other() -> None:
    for program in PROGRAMS.values():
        calls = [part.arguments for part in program.parts]
        assert len(set(calls)) == len(calls)
    seeds = [_value(part.arguments, "--seed")[0] for part in PROGRAMS["fuzz"].parts]
    assert len({seed + job for seed in seeds for job in range(2)}) == 2 * len(seeds)


def test_every_program_has_a_place_on_the_page() -> None:
    assert tuple(PROGRAMS) == reliability.NAMES
    (programs,) = [programs for _, marks, _, programs in pages.PAGES if marks == "reliability"]
    assert programs == tuple(f"reliability/{name}" for name in PROGRAMS)


def test_goals_of_kept_results_are_those_of_the_programs() -> None:
    for name, program in PROGRAMS.items():
        result = reliability.read(reliability.FOLDER / f"{name}.json")
        assert (result.goal, result.parts) == (program.goal, len(program.parts)), (
            f"python -m tests.stress {name}"
        )


def test_counts_of_the_fuzzer() -> None:
    text = "20 payloads, 13 combinations, 4 kernels, seed 5, 3.5 s\n"
    text += "  none   9 decoded, 0 rejected\n  topk   11 decoded, 5 rejected\n"
    assert fuzz.parse_output(text) == {
        "payloads": 20,
        "combinations": 13,
        "kernels": 4,
        "families": {"none": {"payloads": 9, "rejected": 0}, "topk": {"payloads": 11, "rejected": 5}},
    }
    with pytest.raises(ValueError, match="no counts in its output: 'ERROR: AddressSanitizer'"):
        fuzz.parse_output("ERROR: AddressSanitizer")


def test_counts_of_torchs_suite() -> None:
    rows = [
        {"ranks": 2, "verdict": "passed", "gloo": {"verdict": "passed"}},
        {"ranks": 2, "verdict": "passed", "gloo": {"verdict": "failed"}},
        {"ranks": 2, "verdict": "failed", "gloo": {"verdict": "passed"}},
        {"ranks": 2, "verdict": "skipped"},
    ]
    counts, failures = PROGRAMS["torch_suite"].counts({"rows": rows, "faults": ["a fault"]})
    expected: Counts = {
        "tests": 4,
        "2 ranks: tests": 4,
        "2 ranks: Gloo passes": 2,
        "2 ranks: dtcomm passes": 2,
        "2 ranks: Gloo alone passes": 1,
        "2 ranks: dtcomm alone passes": 1,
        "2 ranks: both skip": 1,
        "2 ranks: both fail": 0,
    }
    assert (counts, failures) == (expected, ["a fault"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "NAME: nothing is unknown; expected one of fuzz, operations"),
        (["--parts", "1"], "--parts: needs the name of one program"),
        (["soak", "--parts", "2"], r"--parts: \[2\] do not exist; soak has parts 1 to 1"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert re.search(message, capsys.readouterr().err)


def test_nothing_is_kept_of_a_changed_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.conditions, "changed_files", lambda **_: ["dtcomm/work.py"])
    with pytest.raises(SystemExit, match=r"nothing would be kept.*dtcomm/work.py"):
        command.main(["limits"])


@pytest.mark.slow
def test_a_part_runs_in_a_process_and_is_kept_elsewhere(tmp_path: Path) -> None:
    assert command.main(["rendezvous", "--short", "--out", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "rendezvous.json").read_text(encoding="utf-8"))
    assert reliability.from_dict(document).verdict == "**short run only**"
    assert document["entries"][0]["counts"]["seeds"] == 200
