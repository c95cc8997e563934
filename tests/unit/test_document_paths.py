"""The files and folders that documents name exist, and every example prints its help without ranks."""

from __future__ import annotations

import pkgutil
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "bench" / "README.md"]
# `dtcomm/env.py`, `csrc/codec/*.h`, `tests/unit`; not `dtcomm/cli/<command>/`.
PATH = re.compile(r"`((?:dtcomm|csrc|tests|bench|docs|examples|cmake)/[\w./*-]*)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_paths_exist(page: Path) -> None:
    missing = [
        name
        for name in PATH.findall(page.read_text(encoding="utf-8"))
        if not any(ROOT.glob(name.rstrip("/")))
    ]
    assert not missing


# `dtcomm.planner.plan_links(...)`, but no names of files.
NAME = re.compile(r"(?<![\w/])dtcomm(?:\.[a-z]\w+)+(?:\.\w+)*(?=[(`])")


def missing_names(text: str) -> list[str]:
    """Return the names of dtcomm in a page that do not exist; modules that need another package count as existing."""
    missing = []
    for name in sorted(set(NAME.findall(text))):
        try:
            pkgutil.resolve_name(name)
        except AttributeError:
            missing.append(name)
        except ModuleNotFoundError as error:
            missing += [name] if f"{error.name}".startswith("dtcomm") else []
    return missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_functions_exist(page: Path) -> None:
    assert missing_names(page.read_text(encoding="utf-8")) == []


def test_names_that_do_not_exist_are_found() -> None:
    text = "`dtcomm.all_reduce`, `dtcomm.planner.no_such(x)`, `dtcomm.no.such`, dtcomm/dtcomm.json`"
    assert missing_names(text) == ["dtcomm.no.such", "dtcomm.planner.no_such"]


SCRIPTS = [path for path in sorted((ROOT / "examples").glob("*.py")) if "__main__" in path.read_text()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_examples_print_help_without_ranks(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(script), run_name="__main__")
    assert end.value.code == 0 and capsys.readouterr().out.startswith("usage:")


def test_nobody_is_told_to_install_a_package_that_is_not_ours() -> None:
    """The project is not published: a package of this name may belong to another project."""
    told = re.compile(r"pip install (?:-\S+ )*[\"'`]?dtcomm(?![\w.]*/)")
    assert told.search("pip install --force-reinstall dtcomm[triton]") and not told.search("pip install .")
    sources = [
        path for folder in ("dtcomm", "tests", "bench", "examples") for path in (ROOT / folder).rglob("*.py")
    ]
    files = [*PAGES, *ROOT.glob("*.py"), *sources]
    own = Path(__file__)
    wrong = [path for path in files if path != own and told.search(path.read_text(encoding="utf-8"))]
    assert len(files) > 500 and not wrong, wrong


def flags_of_commands() -> dict[str, set[str]]:
    """Return the flags of each command, as the reference lists them."""
    text = (ROOT / "docs/reference/command-line.md").read_text(encoding="utf-8")
    sections = re.split(r"^## (dtcomm[\w -]*)$", text, flags=re.MULTILINE)[1:]
    return {
        name: set(re.findall(r"`(--?[\w-]+)", section))
        for name, section in zip(sections[::2], sections[1::2])
    }


def unknown_flags(text: str) -> list[str]:
    """Return what commands of dtcomm in a page's code blocks and cells have that the reference does not list."""
    known, found = flags_of_commands(), []
    code = re.findall(r"```.*?```|`dtcomm [^`]+`", text.replace("\\\n", " "), flags=re.DOTALL)
    for line in "\n".join(code).splitlines():
        match = re.search(r"(?:-m |\$ |^ *|`)(dtcomm (?:[a-z]+ )+.*)", line.partition("#")[0])
        names = [name for name in known if match and f"{match[1]} ".startswith(f"{name} ")]
        if match and names:
            command = re.split(r"[&|;`]|train\.py", match[1])[0]
            flags = set(re.findall(r"(?<= )--?[a-zA-Z][\w-]*", command))
            found += [f"{max(names, key=len)}: {flag}" for flag in flags - known[max(names, key=len)]]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_have_flags_that_exist(page: Path) -> None:
    assert unknown_flags(page.read_text(encoding="utf-8")) == []


def test_flags_that_do_not_exist_are_found() -> None:
    page = (
        "```sh\n$ dtcomm plan step --model 1B --memory 2\n```\nor `dtcomm tune --no-such`, `dtcomm tune -o x`"
    )
    assert sorted(unknown_flags(page)) == ["dtcomm plan step: --memory", "dtcomm tune: --no-such"]
