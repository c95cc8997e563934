"""Results are medians of several runs on one commit and processor, and runs under unfit conditions are not kept."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from bench.common import conditions, output, pages, runs


class Tree:
    """A folder for results and runs, with settable conditions, in place of this checkout's."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.commit, self.changed, self.others = "aaaa", list[str](), 0.0
        self.results = folder / "results"
        monkeypatch.setattr(output, "RESULTS", self.results)
        monkeypatch.setattr(output, "RUNS", folder / "build" / "runs")
        monkeypatch.setattr(conditions, "code_commit", lambda: self.commit)
        monkeypatch.setattr(conditions, "changed_files", lambda: self.changed)
        monkeypatch.setattr(conditions.ProcessorTime, "others", lambda _: self.others)
        monkeypatch.delenv(output.UNFIT, raising=False)

    def kept(self, name: str = "program") -> dict[str, Any]:
        """Return the kept result."""
        result: dict[str, Any] = json.loads((self.results / f"{name}.json").read_text(encoding="utf-8"))
        return result


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    return Tree(tmp_path, monkeypatch)


def result(microseconds: float, size: int = 1024, **more: Any) -> dict[str, Any]:
    verdict = "PASS" if microseconds < 10 else "MISS"
    timing = {"median_us": microseconds, "quartiles_us": [microseconds - 1, microseconds + 1]}
    return {"rows": [{"bytes": size, "contestants": {"dtcomm": timing}, "verdict": verdict}], **more}


def test_figures_are_medians_of_all_runs_of_a_commit(tree: Tree) -> None:
    for microseconds in (9.0, 30.0, 8.0):
        output.write("program", result(microseconds))
    kept = tree.kept()
    assert kept["rows"] == [
        {
            "bytes": 1024,
            "contestants": {
                "dtcomm": {"median_us": 9.0, "median_us_range": [8.0, 30.0], "quartiles_us": [8.0, 10.0]}
            },
            "verdict": "PASS",
        }
    ]
    assert [entry["commit"] for entry in kept["measurements"]] == ["aaaa"] * 3
    assert set(kept["measurements"][0]) == {"date", "commit", "processor", "load", "other_processes_cores"}
    assert "median of 3 runs of commit aaaa" in pages.provenance(kept)


def test_runs_of_other_rows_do_not_count_twice(tree: Tree) -> None:
    for size in (1024, 2048, 1024, 2048):
        output.write("program", result(9.0, size))
    assert "median of 2 runs of commit aaaa" in pages.provenance(tree.kept())
    output.write("program", result(9.0, 4096))
    assert "median of 1 to 2 runs of commit aaaa" in pages.provenance(tree.kept())


def test_a_run_of_another_commit_replaces_all_earlier_ones(tree: Tree) -> None:
    for microseconds in (9.0, 8.0):
        output.write("program", result(microseconds))
    tree.commit = "bbbb"
    output.write("program", result(50.0))
    kept = tree.kept()
    assert kept["rows"] == output.summary(result(50.0))["rows"], "worse, and kept"
    assert len(kept["measurements"]) == 1
    assert "`program`: one run of commit bbbb" in pages.provenance(kept)


def test_results_of_other_processors_stay(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    for commit, processor, microseconds in [
        ("aaaa", "AMD EPYC", 9.0),
        ("bbbb", "Intel(R) Xeon(R) Processor", 8.0),
        ("bbbb", "Intel(R) Xeon(R) Processor", 7.0),
    ]:
        tree.commit = commit
        monkeypatch.setattr(conditions, "processor", lambda name=processor: name)
        output.write("program", result(microseconds))
    assert [path.name for path in (tree.results / "other_processors").iterdir()] == ["program.amd-epyc.json"]
    latest, other = map(pages.provenance, output.all_processors("program"))
    assert latest.startswith("`program`: median of 2 runs of commit bbbb") and "Intel" in latest
    assert other.startswith("`program`: one run of commit aaaa") and "AMD EPYC" in other

    tree.commit = "cccc"
    monkeypatch.setattr(conditions, "processor", lambda: "AMD EPYC")
    output.write("program", result(6.0))
    assert [path.name for path in (tree.results / "other_processors").iterdir()] == [
        "program.intel-xeon.json"
    ]
    assert len(output.all_processors("program")) == 2


def test_quick_runs_are_not_mixed_with_others(tree: Tree) -> None:
    output.write("program", result(9.0, quick=False))
    with pytest.raises(output.NotKept, match="a quick run has fewer repetitions"):
        output.write("program", result(8.0, quick=True))
    output.write("program", result(8.0, mtu=9000))
    assert len(tree.kept()["measurements"]) == 1


def test_wrong_results_are_not_kept_and_the_worst_run_counts(tree: Tree) -> None:
    output.write("program", result(9.0, rows_checked=[{"name": "a", "wrong": {"dtcomm": 0, "gloo": 0}}]))
    for wrong in (2, {"dtcomm": 0, "gloo": 1}, ["rank 1 has other bits"]):
        with pytest.raises(output.NotKept, match=r"[12] results were wrong"):
            output.write("program", result(9.0, rows_checked=[{"name": "a", "wrong": wrong}]))
    merged = runs.merge(
        [{"errors": {"int8": error, "none": 0.0}, "wrong": int(error)} for error in (1.0, 3.0, 2.0)]
    )
    assert merged == {"errors": {"int8": 3.0, "none": 0.0}, "wrong": 3}


def test_rows_that_some_runs_measured_say_how_many(tree: Tree) -> None:
    output.write("program", result(9.0))
    output.write("program", result(9.5))
    output.write("program", result(70.0, size=65536))
    assert [(row["bytes"], row["measurements"]) for row in tree.kept()["rows"]] == [(1024, 2), (65536, 1)]


@pytest.mark.parametrize(
    ("changed", "others", "reason"),
    [(["dtcomm/work.py"], 0.0, "dtcomm/work.py"), ([], 0.8, "other processes used 0.80 cores")],
)
def test_a_changed_tree_and_a_loaded_machine_are_refused(
    tree: Tree,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    changed: list[str],
    others: float,
    reason: str,
) -> None:
    output.write("program", result(9.0))
    tree.changed, tree.others = changed, others
    with pytest.raises(output.NotKept, match=reason):
        output.write("program", result(8.0))
    assert len(tree.kept()["measurements"]) == 1
    aside = json.loads((tmp_path / "build" / "not_kept" / "program.json").read_text(encoding="utf-8"))
    assert aside["rows"][0]["contestants"]["dtcomm"]["median_us"] == 8.0

    elsewhere = output.write("program", result(8.0), tmp_path / "mine.json")
    assert reason in json.loads(elsewhere.read_text(encoding="utf-8"))["measurements"][0]["unfit"][0]

    monkeypatch.setenv(output.UNFIT, "1")
    output.write("program", result(8.0))
    assert len(tree.kept()["measurements"]) == 1, "unfit runs are not mixed with others"
    assert reason in pages.provenance(tree.kept())


def test_figures_of_fewer_than_three_repetitions_are_refused(tree: Tree) -> None:
    def rows(*repetitions: int) -> dict[str, Any]:
        return {"rows": [{"bytes": count, "median_us": 9.0, "repetitions": count} for count in repetitions]}

    with pytest.raises(output.NotKept, match="repetitions of a figure: 2, fewer than 3"):
        output.write("program", rows(9, 2, 5))
    output.write("program", rows(9, 2, 5), timed=False)
    output.write("program", rows(9, 3, 5))
    assert "unfit" not in tree.kept()["measurements"][0]


def test_results_without_times_are_replaced_and_resumed(tree: Tree) -> None:
    tree.others = 1.5  # does not matter
    for loss in (2.5, 2.4):
        output.write("program", {"runs": {"int8": {"loss": loss}}}, timed=False)
    path = tree.results / "program.json"
    assert output.resumable(path)["runs"] == {"int8": {"loss": 2.4}}
    tree.commit = "bbbb"
    assert output.resumable(path) == {}
    assert output.resumable(tree.results / "absent.json") == {}


def test_rows_that_cannot_be_told_apart_are_an_error(tree: Tree, tmp_path: Path) -> None:
    rows = [{"colour": "red", "median_us": 1.0}, {"colour": "blue", "median_us": 2.0}]
    with pytest.raises(ValueError, match=r"result.rows: 2 rows have \{\}; add the field"):
        output.write("program", {"rows": rows})
    aside = json.loads((tmp_path / "build" / "not_kept" / "program.json").read_text(encoding="utf-8"))
    assert aside["rows"] == rows, "the run is not lost"


def test_merging_of_what_is_not_a_number() -> None:
    assert runs.merge(["PASS", "MISS"]) == "MISS"
    assert runs.merge([True, False]) is False
    assert runs.merge(["int8", "int4", "int8"]) == "int8"
    assert runs.merge([None, 3.0, 5.0]) == 4.0
    assert runs.merge([None, None, 5.0]) is None
    assert runs.merge([{"time": 3, "time_range": [2, 4]}, {"time": 1, "time_range": [0, 3]}]) == {
        "time": 2,
        "time_range": [0, 4],
    }


def test_documents_and_results_do_not_change_the_code_commit(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True)

    def put(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")

    git("init", "-q")
    pages_only = ("bench/results/program.json", "bench/training/some_page.py", "docs/page.md", "README.md")
    for name in ("code.py", *pages_only):
        put(name, "1")
    git("add", ".")
    git("commit", "-qm", "all")
    commit = conditions.code_commit(tmp_path)
    for name in pages_only:
        put(name, "2")
    assert conditions.changed_files(tmp_path) == []
    git("commit", "-qam", "results")
    assert conditions.code_commit(tmp_path) == commit
    put("code.py", "2\n")
    assert conditions.changed_files(tmp_path) == ["code.py"]
    git("commit", "-qam", "code")
    assert (code := conditions.code_commit(tmp_path)) != commit
    put("code.py", '"""A docstring."""\n\n2  # two\n')
    assert conditions.changed_files(tmp_path) == ["code.py"]
    git("commit", "-qam", "docstring")
    assert conditions.code_commit(tmp_path) == code
    put("code.cpp", "// a comment")
    git("add", ".")
    git("commit", "-qm", "new file")
    assert conditions.code_commit(tmp_path) != code


BARE = '''
import os
class A:
    x = """two

    lines"""
    def f(self):
        return ("#"
                "b")
    def g(self):
        return 0
'''
DESCRIBED = '''"""Module."""
# A comment.
import os  # for the system


class A:
    """Class.

    Two paragraphs.
    """

    x = """two

    lines"""

    def f(self):
        """Return ä."""
        return ("#"  # a mark

                "b")

    def g(self):
        # Nothing.
        return 0
'''


def test_docstrings_comments_and_empty_lines_are_no_code() -> None:
    assert conditions.python_code(DESCRIBED) == conditions.python_code(BARE)
    for before, after in [
        ("import os", "import re"),
        ("two\n\n", "two\n"),
        ('"#"', '"##"'),
        ("    return 0", "return 0"),
    ]:
        assert conditions.python_code(BARE.replace(before, after)) != conditions.python_code(BARE)
    assert conditions.python_code("x = (") == "x = ("


def test_the_checksum_of_code_depends_on_names_and_contents(tmp_path: Path) -> None:
    def checksum() -> str:
        return conditions.code_checksum(["*.py", "native/**/*"], tmp_path)

    def put(name: str, text: str) -> str:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
        return checksum()

    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(FileNotFoundError, match="native"):
        checksum()
    first = put("native/a.cpp", "int x;")
    assert put("a.py", '"""Module."""\n\nx = 1  # one\n') == first
    assert put("other.txt", "text") == first
    assert put("a.py", "x = 2\n") != first
    assert put("a.py", "x = 1\n") == first
    assert put("native/a.cpp", "int x; // one") != first
    assert put("native/a.cpp", "int x;") == first
    assert put("native/b/b.cpp", "") != first


def _work(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_work_of_children_is_not_that_of_others() -> None:
    start = conditions.ProcessorTime.now()
    if start is None:
        pytest.skip("no /proc")
    child = multiprocessing.get_context("fork").Process(target=_work, args=(0.6,))
    child.start()
    alive = start
    while child.is_alive() and alive is not None and alive.own - start.own <= 0.1:
        time.sleep(0.01)
        alive = conditions.ProcessorTime.now()
    assert child.is_alive()  # its work counts before it has ended
    child.join()
    ended = conditions.ProcessorTime.now()
    assert ended is not None
    assert ended.own - start.own > 0.5
    assert ended.everyone - start.everyone > 0.5
