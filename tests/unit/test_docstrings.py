"""Every public name is explained: a summary, each argument, the result, and examples that run.

Public is what the pages of the API document (`API` in docs/api_pages.py). Examples run on one rank, with ``torch``,
``dist`` and ``dtcomm`` imported.
"""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtcomm
from tests.support.structure import reference

# Functions that must also show an example: what users call first.
WITH_EXAMPLES = ("dtcomm", "dtcomm.ddp", "dtcomm.fsdp", "dtcomm.tp", "dtcomm.local_sgd", "dtcomm.codecs")


def public_methods(name: str, cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Return the public methods that a class defines itself."""
    for key, value in vars(cls).items():
        function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if not key.startswith("_") and inspect.isfunction(function):
            yield f"{name}.{key}", function


OBJECTS = dict(reference().public())
METHODS = {
    name: value
    for key, cls in OBJECTS.items()
    if inspect.isclass(cls)
    for name, value in public_methods(key, cls)
}


def parameters(value: Any) -> list[str]:
    """Return the names of the arguments that a caller passes."""
    if (
        inspect.isclass(value)
        and "__init__" not in vars(value)
        and not hasattr(value, "__dataclass_fields__")
    ):
        return []
    signature = inspect.signature(value)
    return [name for name in signature.parameters if name not in ("self", "cls") and not name.startswith("_")]


def documented_names(text: str) -> set[str]:
    """The names under ``Args:``, ``Attributes:`` and ``Options:``, which may be several of one kind: ``a, b: ...``."""
    names: set[str] = set()
    for section in re.findall(r"^(?:Args|Attributes|Options):\n((?:[ ]+.*\n?|\n)+)", text, re.MULTILINE):
        indent = re.match(r"\s*", section)
        prefix = indent.group(0) if indent else ""
        for line in section.splitlines():
            match = re.match(rf"{prefix}(\*{{0,2}}\w+(?:, \*{{0,2}}\w+)*)(?: \(.*?\))?:", line)
            if match:
                names |= {name.strip().lstrip("*") for name in match.group(1).split(",")}
    return names


def defects_of(name: str, value: Any) -> list[str]:
    """Return the defects of the docstring of a public function or class."""
    text = inspect.getdoc(value) or ""
    if not text:
        return ["no docstring"]
    lines = text.splitlines()
    texts = [] if lines[0].rstrip().endswith((".", ":")) or len(lines) > 1 else ["the summary is no sentence"]
    missing = [parameter for parameter in parameters(value) if parameter not in documented_names(text)]
    if missing:
        texts.append(f"Args: {', '.join(missing)} not documented")
    if inspect.isfunction(value):
        result = inspect.signature(value).return_annotation
        if result not in (None, "None", inspect.Signature.empty) and not re.search(
            r"^(Returns|Yields):", text, re.M
        ):
            texts.append("Returns: missing")
        if name.rpartition(".")[0] in WITH_EXAMPLES and not re.search(r"^Examples?:", text, re.M):
            texts.append("Example: missing")
    return texts


@pytest.mark.parametrize("name", sorted(OBJECTS))
def test_public_names_are_documented(name: str) -> None:
    assert not defects_of(name, OBJECTS[name])


@pytest.mark.parametrize("name", sorted(METHODS))
def test_public_methods_are_documented(name: str) -> None:
    text = inspect.getdoc(METHODS[name]) or ""
    assert text, "no docstring"
    if re.search(r"^Args:", text, re.M):
        missing = set(parameters(METHODS[name])) - documented_names(text)
        assert not missing, f"Args: {', '.join(sorted(missing))} not documented"


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one rank, for the examples."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


EXAMPLES = [name for name, value in {**OBJECTS, **METHODS}.items() if ">>>" in (inspect.getdoc(value) or "")]


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name: str, one_rank: None) -> None:
    value = {**OBJECTS, **METHODS}[name]
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE, verbose=False)
    finder = doctest.DocTestFinder(recurse=False)
    output: list[str] = []
    for example in finder.find(value, name, globs={"dtcomm": dtcomm, "torch": torch, "dist": dist}):
        runner.run(example, out=output.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(output)


def test_an_incomplete_docstring_is_noticed() -> None:
    def incompletely_documented(tensor: int, op: str) -> int:
        """Reduce a tensor.

        Args:
            tensor: The tensor.
        """
        return tensor

    assert defects_of("dtcomm.poor", incompletely_documented) == [
        "Args: op not documented",
        "Returns: missing",
        "Example: missing",
    ]
