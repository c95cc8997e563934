"""The generated reference pages contain every variable, every public argument and every flag of the command line."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest

import dtcomm
from dtcomm import env
from dtcomm.cli import main as cli
from dtcomm.codecs.spec import CODECS
from tests.support.structure import public_names, reference

ROOT = Path(__file__).parents[2]
BUILD_SCRIPTS = (ROOT / "setup.py", ROOT / "CMakeLists.txt", ROOT / "Makefile", ROOT / ".ci" / "run")


MOST_PUBLIC_NAMES = 150


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    return reference()


def variables_read(path: Path) -> Iterator[str]:
    """The names of the environment variables that a Python file reads."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            owner, called = ast.unparse(node.func.value), node.func.attr
            reads = called == "getenv" or (
                owner.endswith("environ") and called in ("get", "pop", "setdefault")
            )
            name = node.args[0]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
            reads, name = True, node.slice
        else:
            continue
        if reads and isinstance(name, ast.Constant) and isinstance(name.value, str):
            yield name.value


@pytest.mark.parametrize("name", reference().PAGES)
def test_committed_pages_are_those_of_the_code(pages: ModuleType, name: str) -> None:
    committed = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
    same = committed == pages.text_of(name)
    assert same, f"docs/reference/{name} differs from the code: run `make reference` and commit the page"


def test_every_page_of_the_api_is_generated(pages: ModuleType) -> None:
    committed = {f"api/{path.name}" for path in (ROOT / "docs" / "reference" / "api").iterdir()}
    assert committed == {name for name in pages.PAGES if name.startswith("api/")}


def test_public_names_are_few() -> None:
    names = public_names()
    assert 100 < len(names) <= MOST_PUBLIC_NAMES, "cut names that no page and no example uses"


def test_every_variable_is_on_the_page(pages: ModuleType) -> None:
    page = pages.environment() + pages.environment_debug()
    for name, variable in env.VARIABLES.items():
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert all(f"`{choice}`" in row for choice in variable.choices)
        assert ("Equal on all ranks" in row) == variable.shared
    assert all(f"| `{name}` |" in page for name in env.EXTERNAL)


def test_every_variable_that_the_sources_read_is_registered() -> None:
    known = {*env.VARIABLES, *env.EXTERNAL}
    read = {name for path in (ROOT / "dtcomm").rglob("*.py") for name in variables_read(path)}
    for path in (ROOT / "csrc").rglob("*.*"):
        read |= set(re.findall(r'getenv\("(\w+)"\)', path.read_text(encoding="utf-8")))
    for path in BUILD_SCRIPTS:
        text = path.read_text(encoding="utf-8")
        read |= {
            name
            for pair in re.findall(r"ENV\{(\w+)\}|(?<![-\w])(DTCOMM_\w+)=", text)
            for name in pair
            if name
        }
    setup = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    read |= {
        node.value
        for node in ast.walk(setup)
        if isinstance(node, ast.Constant) and re.fullmatch(r"DTCOMM_\w+", str(node.value))
    }
    # Options of CMake and a macro, which are no environment variables.
    read -= {"DTCOMM_OUTPUT_DIR", "DTCOMM_PYTHON", "DTCOMM_ISA"}
    assert not read - known, f"add them to dtcomm/env.py: {sorted(read - known)}"
    # The other way round: no variable is left over that nothing reads.
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "dtcomm").rglob("*.py"))
    unread = [name for name in env.EXTERNAL if name != "CUDAARCHS" and text.count(f'"{name}"') < 2]
    assert not unread


def test_every_public_argument_is_explained(pages: ModuleType) -> None:
    options = pages.options()
    callables = pages.public()
    functions = {name for name in dtcomm.__all__ if inspect.isfunction(getattr(dtcomm, name))}
    assert {f"dtcomm.{name}" for name in functions} | set(pages.INTEGRATIONS) < callables.keys()
    for page, (_, names) in pages.API.items():
        text = pages.api_page(page)
        sections = {part.partition("\n")[0]: part for part in re.split(r"^#+ ", text, flags=re.MULTILINE)}
        for name, value in importlib.import_module("api_pages").public_callables(names):
            for key in pages.option_parameters(value):
                arguments = sections[name].partition("**Arguments**")[2].partition("\n**")[0]
                (row,) = re.findall(rf"^- (?:[^:]*, )?`{key}`(?:, [^:]*)?: .+", arguments, re.MULTILINE)
                if "options.md#options-of-" in row:
                    assert re.search(rf"^\| `{key}` \|.*\| \S.* \|$", options, re.MULTILINE), (name, key)
                elif before := re.search(r"as for \[`([\w.]+)`\]", row):
                    assert f"`{key}`" in sections[before[1]].partition("**Arguments**")[2], (name, key)
    page = options
    for name, entry in CODECS.items():
        section = page.partition("\n## Codecs\n")[2].partition(f"`{name}`")[2].partition("\n###")[0]
        assert all(f"| `{option}` |" in section for option in entry.options()), name


def test_every_flag_is_on_the_page(pages: ModuleType) -> None:
    page = pages.command_line()
    parsers = pages.parsers()
    assert {f"dtcomm {name}" for name in cli.COMMANDS} <= {parser.prog for parser in parsers}
    for parser in parsers:
        section = page.partition(f"## {parser.prog}\n")[2].partition("\n## ")[0]
        assert section.strip()
        for action in parser._actions:
            if "--help" in action.option_strings:  # every command has it, as the page says
                continue
            assert all(f"`{flag}" in section for flag in action.option_strings), (
                parser.prog,
                action.option_strings,
            )


def test_what_has_no_description_is_an_error(pages: ModuleType) -> None:
    def function(documented: int, forgotten: str = "x") -> None:
        """Do something.

        Args:
            documented: A number
                of a size.
        """

    assert pages.documented(function) == {"documented": "A number of a size."}
    with pytest.raises(pages.Undocumented, match=r"somewhere.function: argument 'forgotten'"):
        pages.argument_meanings("somewhere.function", function)
    with (
        mock.patch.dict(env.VARIABLES, {"DTCOMM_NEW": env.Variable(default="", meaning=" ")}),
        pytest.raises(pages.Undocumented, match="DTCOMM_NEW has no meaning"),
    ):
        pages.environment_debug()
    parser = argparse.ArgumentParser(prog="dtcomm new")
    parser.add_argument("--forgotten")
    with (
        mock.patch.object(pages, "parsers", lambda: [parser]),
        pytest.raises(pages.Undocumented, match="dtcomm new: --forgotten has no help"),
    ):
        pages.command_line()


def test_text_of_docstrings_becomes_markdown(pages: ModuleType) -> None:
    assert pages.cell("a | b_c, ``d|_e`` and *f*") == r"a \| b\_c, ``d\|_e`` and \*f\*"
