"""The files and folders that documents name exist, and every example prints its help without ranks."""

from __future__ import annotations

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
