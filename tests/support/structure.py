"""Counts that say how large the core is and how its parts depend on each other: `python -m tests.support.structure`.

Tests hold what must be zero (circles of imports, private names of torch outside `torch_compat`); the other counts are
for the reader. `--list KEY` prints the places behind one count.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
SMALL_LINES = 60
MANY_ARGUMENTS = 10
COMPAT = "dtcomm/torch_compat.py"


def python_files(*folders: str) -> list[Path]:
    """Return the Python files below `folders`, which are relative to the repository."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def line_count(paths: Iterable[Path]) -> int:
    """Return the lines of all `paths` together."""
    return sum(path.read_bytes().count(b"\n") for path in paths)


def is_extension(path: Path) -> bool:
    """Say whether `path` belongs to dtcomm.extensions or to its tests."""
    return "extensions" in path.relative_to(ROOT).parts


def long_signatures(paths: Iterable[Path]) -> list[str]:
    """Return the functions that take `MANY_ARGUMENTS` arguments or more; overloads are not counted."""
    found = []
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            if any("overload" in ast.unparse(decorator) for decorator in node.decorator_list):
                continue
            arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            if arguments[:1] in (["self"], ["cls"]):
                del arguments[0]
            if len(arguments) >= MANY_ARGUMENTS:
                found.append(f"{_relative(path)}:{node.lineno} {node.name} ({len(arguments)})")
    return found


def module_imports(name: str, text: str, modules: frozenset[str], *, is_package: bool) -> set[str]:
    """Return the modules of `modules` that a module imports, imports inside functions included.

    Imports for types alone count too: a reader follows them. A package counts as imported only where a name is taken
    that is no module of it.
    """
    package = name.split(".") if is_package else name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{stem}.{alias.name}"
                found.add(inner if inner in modules else stem)
    return (found & modules) - {name}


def import_graph(paths: Iterable[Path]) -> dict[str, set[str]]:
    """Return module → modules of the same set that it imports; native modules count by their stubs."""
    names = {}
    for path in paths:
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    known = frozenset(names)
    return {
        name: module_imports(name, path.read_text(), known, is_package=path.name == "__init__.py")
        for name, path in names.items()
    }


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the sets of modules that import each other, directly or through others (Tarjan, SIAM J. Comput. 1972)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def connect(node: str) -> None:
        index[node] = lowest[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                connect(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in stack:
                lowest[node] = min(lowest[node], index[other])
        if lowest[node] == index[node]:
            position = stack.index(node)
            component = stack[position:]
            del stack[position:]
            if len(component) > 1 or node in graph.get(node, ()):
                found.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            connect(node)
    return found


_PRIVATE = re.compile(r"_[A-Za-z]\w*$")


def _own_private_names(trees: Iterable[ast.AST]) -> set[str]:
    """Return the private names that our own sources define or assign."""
    names = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                root = node.value
                if isinstance(root, ast.Name) and root.id in ("self", "cls"):
                    names.add(node.attr)
    return {name for name in names if _PRIVATE.match(name)}


def private_torch_names(
    paths: Iterable[Path], stubs: Iterable[Path] = (), texts: dict[Path, str] | None = None
) -> Iterator[str]:
    """Yield the places that use a private name of torch: an import, or an attribute that no source of ours defines.

    ``texts`` replaces what some of the paths contain.
    """
    trees = {path: ast.parse((texts or {}).get(path) or path.read_text()) for path in paths}
    own = _own_private_names(trees.values())
    own |= _own_private_names(ast.parse(path.read_text()) for path in stubs)
    standard = {
        "_exit",
        "_asdict",
        "_replace",
        "_fields",
        "_make",
        "_getframe",
        "_name_",
        "_value_",
        "_actions",
    }
    for path, tree in trees.items():
        for node in ast.walk(tree):
            name = ""
            if isinstance(node, ast.Attribute) and _PRIVATE.match(node.attr):
                chain = ast.unparse(node)
                foreign = node.attr not in own | standard
                from_torch = re.match(r"(torch|dist|c10d|distributed_c10d)\.", chain)
                of_dtcomm = isinstance(node.value, ast.Name) and node.value.id == "dtcomm"
                if (foreign or from_torch) and not of_dtcomm:
                    name = chain
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                private = [a.name for a in node.names if _PRIVATE.match(a.name)]
                if private or any(_PRIVATE.match(part) for part in (node.module or "").split(".")):
                    name = f"{node.module}: {', '.join(a.name for a in node.names)}"
            elif isinstance(node, ast.Import):
                private = [a.name for a in node.names if re.match(r"torch\..*\b_[a-z]", a.name)]
                name = ", ".join(private)
            elif (
                isinstance(node, ast.Call)
                and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr")
                and len(node.args) > 1
                and isinstance(node.args[1], ast.Constant)
                and isinstance(node.args[1].value, str)
                and _PRIVATE.match(node.args[1].value)
                and node.args[1].value not in own
            ):
                name = f"{node.func.id}(…, {node.args[1].value!r})"  # type: ignore[attr-defined]
            elif (
                isinstance(node, ast.Subscript)
                and isinstance(node.slice, ast.Constant)
                and isinstance(node.slice.value, str)
                and _PRIVATE.match(node.slice.value)
                and re.match(r"vars\((?!self)|(?!self\.).*\.__dict__$", ast.unparse(node.value))
            ):
                name = ast.unparse(node)
            if name and not name.startswith(("torch.ops.dtcomm", "sys.", "os.")):
                yield f"{_relative(path)}:{node.lineno}: {name}"


def reference() -> ModuleType:
    """Return the program that writes the reference pages, docs/reference_pages.py."""
    if str(ROOT / "docs") not in sys.path:
        sys.path.append(str(ROOT / "docs"))
    return importlib.import_module("reference_pages")


def public_names() -> list[str]:
    """Return the names of the core that the pages of the API document."""
    return sorted(name for name in reference().public() if not name.startswith("dtcomm.extensions"))


def places() -> dict[str, list[str]]:
    """Return count → the places behind it."""
    files = python_files("dtcomm")
    core = [path for path in files if not is_extension(path)]
    stubs = sorted((ROOT / "dtcomm").rglob("*.pyi"))
    return {
        "modules of the core": [_relative(path) for path in core],
        "modules of extensions": [_relative(path) for path in files if is_extension(path)],
        f"modules under {SMALL_LINES} lines": [
            _relative(path) for path in core if line_count([path]) < SMALL_LINES
        ],
        "circles of imports": [" -> ".join(circle) for circle in circles(import_graph([*files, *stubs]))],
        f"functions with {MANY_ARGUMENTS} arguments or more": long_signatures(core),
        "public names in the reference": public_names(),
        "files with private names of torch": sorted(
            {place.split(":")[0] for place in private_torch_names(files, stubs)}
        ),
    }


def counts() -> dict[str, int]:
    """Return what the command prints."""
    found = {key: len(value) for key, value in places().items()}
    core = [path for path in python_files("dtcomm") if not is_extension(path)]
    extensions = [path for path in python_files("dtcomm") if is_extension(path)]
    tests = python_files("tests")
    bench = [path for path in (ROOT / "bench").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    found["lines of the core"] = line_count(core)
    found["lines of extensions"] = line_count(extensions)
    found["lines of bench, all files"] = line_count(bench)
    found["lines of tests of the core"] = line_count(path for path in tests if not is_extension(path))
    found["lines of tests of extensions"] = line_count(path for path in tests if is_extension(path))
    found["lines of C++ and CUDA"] = line_count(p for p in (ROOT / "csrc").rglob("*") if p.is_file())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--list", metavar="KEY", help="print the places behind the count that contains KEY")
    options = parser.parse_args()
    if options.list:
        for key, value in places().items():
            if options.list in key:
                print(f"{key}: {len(value)}", *value, sep="\n  ")
    elif options.json:
        print(json.dumps(counts(), indent=1))
    else:
        for key, value in counts().items():
            print(f"{key:<40} {value:>7,}")


if __name__ == "__main__":
    main()
