"""The import rules between the parts, as tables, and the checkers that apply them to the sources.

Each checker takes a file's path and text and returns violations as lines, so that tests can plant some.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ANY = frozenset({"*"})  # every part but `extensions`
LEAVES = frozenset({"errors", "env", "arguments", "system", "torch_compat"})


def _may(parts: str = "", libraries: str = "") -> tuple[frozenset[str], frozenset[str]]:
    return frozenset(parts.split()), frozenset(libraries.split())


# Integrations take typing_extensions, which torch needs too, for the types of their options.
_INTEGRATION = _may("profiling compress collectives codecs kernels streams work", "torch typing_extensions")

# part of dtcomm → (parts it may import besides itself and the leaves, libraries besides the standard one)
PYTHON_RULES: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "errors": _may(),
    "env": _may(),
    "arguments": _may(),
    "system": _may(),
    # Every private name of torch: a leaf.
    "torch_compat": _may("", "torch"),
    "schedule": _may(),
    "algorithms": _may("schedule"),
    "codecs": _may("", "torch"),
    # Streams and events of CPU and CUDA: a leaf.
    "streams": _may("", "torch"),
    # Handles of asynchronous operations: executors return them, and collectives and integrations combine them.
    "work": _may("streams _C", "torch"),
    "kernels": _may("codecs streams _C _cuda", "torch numpy triton"),
    "runtime": _may("schedule codecs kernels streams work _C _cuda _emulator", "torch numpy"),
    "planner": _may("schedule algorithms codecs streams", "torch"),
    # typing_extensions, which torch needs too, for types alone.
    "collectives": _may(
        "planner runtime algorithms schedule codecs kernels streams work", "torch typing_extensions"
    ),
    "profiling": _may("planner collectives runtime streams work", "torch rich"),
    "compress": _may("profiling collectives planner kernels codecs streams work _C", "torch"),
    # Hooks in training frameworks, which are imported when an object of theirs is passed.
    "frameworks": _may("compress profiling", "torch fsspec transformers"),
    # tp: it says which parameters are shards.
    "ddp": _may(
        "frameworks local_sgd tp planner profiling compress collectives codecs kernels streams work",
        "torch typing_extensions",
    ),
    "fsdp": _may(
        "frameworks tp profiling compress collectives codecs kernels streams work", "torch typing_extensions"
    ),
    "tp": _may(
        "planner profiling compress collectives codecs kernels streams work",
        "torch transformers typing_extensions",
    ),
    "context_parallel": _INTEGRATION,
    "moe": _INTEGRATION,
    "pipeline": _INTEGRATION,
    # Several integrations on one device mesh.
    "mesh": _may("tp collectives", "torch typing_extensions"),
    "local_sgd": _may("frameworks tp compress collectives kernels streams work", "torch typing_extensions"),
    # Not part of the core: no other part may import it. `dtcomm.cli.main` loads its commands by name.
    "extensions": (
        ANY,
        frozenset(
            {"torch", "numpy", "rich", "matplotlib", "torchft", "fsspec", "safetensors", "vllm", "zstandard"}
        ),
    ),
    "backend": _may("compress collectives runtime codecs kernels streams work", "torch"),
    # Called by torch before any part of torch may be imported.
    "_torch_backend_entry": _may("backend"),
    "launch": (ANY, frozenset({"torch", "numpy"})),
    "measure": (ANY, frozenset({"torch", "numpy"})),
    "cli": (ANY, frozenset({"torch", "numpy", "rich", "matplotlib"})),
    "__main__": _may("cli"),
    # `dtcomm` itself imports each part when it is first used.
    "__init__": (ANY, frozenset({"torch"})),
    # Stubs of the native modules.
    "_C": _may(),
    "_cuda": _may(),
    "_emulator": _may(),
}


def part_of(path: str) -> str:
    """Return the part of the package that a file belongs to: `schedule` for `dtcomm/schedule/ir.py`."""
    inside = PurePosixPath(path).parts[1:]
    return inside[0] if len(inside) > 1 else PurePosixPath(path).stem


def _imports(tree: ast.AST, package: list[str]) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import, at any depth, including literal `import_module` calls.

    `from a.b import c` yields `a.b.c`, because c may be a module.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join(base + ([node.module] if node.module else []))
            for alias in node.names:
                yield node.lineno, f"{stem}.{alias.name}"
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                target = node.args[0] if node.args else None
                literal = isinstance(target, ast.Constant) and isinstance(target.value, str)
                yield node.lineno, target.value if literal else "<computed>"


def _python_reason(part: str, name: str) -> str:
    """Return why `part` may not import `name`; empty if it may."""
    allowed, libraries = PYTHON_RULES[part]
    top, *parts = name.split(".")
    if top == "<computed>":
        return "" if allowed == ANY else "a computed import hides what it imports"
    if top != "dtcomm":
        known = top in sys.stdlib_module_names or top in libraries
        return "" if known else f"`{part}` may not use the library {top}"
    if not parts or parts[0] not in PYTHON_RULES:
        return "" if allowed == ANY else "modules of the package may not import `dtcomm` itself"
    other = parts[0]
    if other == "extensions" != part:
        return "the core may not import extensions"
    if other == part or other in allowed or allowed == ANY or (other in LEAVES and part not in LEAVES):
        return ""
    return f"`{part}` may not import `{other}`"


def check_python(path: str, text: str) -> list[str]:
    """Return the violations in one file of the package; `path` is relative to the repository root."""
    part = part_of(path)
    if part not in PYTHON_RULES:
        return [f"{path}: no rule covers `{part}`; add it to PYTHON_RULES"]
    package = list(PurePosixPath(path).parts[:-1])
    imports = (
        (line, name, _python_reason(part, name)) for line, name in _imports(ast.parse(text, path), package)
    )
    return [f"{path}:{line}: {name}: {reason}" for line, name, reason in imports if reason]


def check_test(path: str, text: str) -> list[str]:
    """Return the violations in one file of the tests: only those in `tests/extensions` may import an extension."""
    package = list(PurePosixPath(path).parts[:-1])
    if package[:2] == ["tests", "extensions"] or "extensions" not in text:  # most files need not be parsed
        return []
    return [
        f"{path}:{line}: {name}: move this test to tests/extensions"
        for line, name in _imports(ast.parse(text, path), package)
        if re.match(r"(dtcomm|tests)\.extensions\b", name)
    ]


# part of csrc → parts, or single headers, that it may include
CXX_RULES: dict[str, frozenset[str]] = {
    "core": frozenset({"core"}),
    "codec": frozenset({"core", "codec"}),
    "cpu": frozenset({"core", "codec", "cpu"}),
    "cuda": frozenset({"core", "codec", "cuda", "cpu/kernels.h", "engine/program.h"}),
    "net": frozenset({"core", "net"}),
    "engine": frozenset({"core", "codec", "net", "engine", "cpu/kernels.h"}),
    "emulator": frozenset({"core", "codec", "cuda", "emulator"}),
    "python": frozenset(
        {"core", "codec", "cpu", "cuda", "emulator", "engine", "net/ucx.h", "python", "build_info.h"}
    ),
    "tests": frozenset({"core", "codec", "cpu", "cuda", "emulator", "net", "engine", "tests"}),
}

_STANDARD = frozenset(
    """algorithm array atomic cassert cerrno cfloat chrono cinttypes climits cmath condition_variable cstdarg
    cstddef cstdint cstdio cstdlib cstring deque exception functional initializer_list iterator limits list
    map memory mutex new numeric optional queue random set sstream stdexcept string string_view thread tuple
    type_traits unordered_map unordered_set utility variant vector""".split()
)
_STANDARD_ONLY = frozenset({"core", "codec"})
# system headers that only some parts may include
_RESERVED: tuple[tuple[re.Pattern[str], frozenset[str]], ...] = (
    (re.compile(r"(torch|ATen|c10|caffe2)/"), frozenset()),
    (re.compile(r"(Python\.h$|pybind11/|numpy/)"), frozenset({"python"})),
    (re.compile(r"(cuda|cooperative_groups|nccl|nvml|cub/|thrust/|mma\.h)"), frozenset({"cuda"})),
    (re.compile(r"(\w+intrin|cpuid|arm_neon|arm_acle)\.h$"), frozenset({"cpu", "engine"})),
)
_INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>|(\S.*))', re.MULTILINE)


def _cxx_reason(part: str, ours: str, system: str, computed: str, headers: frozenset[str]) -> str:
    """Return why `part` may not include what one #include names; empty if it may."""
    if computed:
        return "a computed include hides what it includes"
    if ours or system in headers:
        name = ours or system
        allowed = name in headers and name.split("/")[0] in CXX_RULES[part]
        return "" if allowed or name in CXX_RULES[part] else f"`{part}` may not include it (named from csrc/)"
    owners = [parts for pattern, parts in _RESERVED if pattern.match(system)]
    if owners:
        return "" if part in owners[0] else f"not in `{part}`"
    standard = system in _STANDARD or part not in _STANDARD_ONLY
    return "" if standard else f"`{part}` is C++17 alone"


def check_cxx(path: str, text: str, headers: frozenset[str]) -> list[str]:
    """Return the violations in one file of csrc; `path` is relative to csrc, `headers` are all files there."""
    part = path.split("/")[0]
    if part not in CXX_RULES:
        return [f"csrc/{path}: no rule covers `{part}`; add it to CXX_RULES"]
    violations = []
    for match in _INCLUDE.finditer(text):
        ours, system, computed = (group or "" for group in match.groups())
        reason = _cxx_reason(part, ours, system, computed, headers)
        if reason:
            line = text.count("\n", 0, match.end()) + 1
            violations.append(f"csrc/{path}:{line}: {ours or system or computed}: {reason}")
    return violations


def python_files(root: Path) -> list[str]:
    """Return the sources and stubs of the package, relative to `root`."""
    paths = [*root.glob("dtcomm/**/*.py"), *root.glob("dtcomm/**/*.pyi")]
    return sorted(path.relative_to(root).as_posix() for path in paths)


def cxx_files(root: Path) -> list[str]:
    """Return every file under csrc, relative to csrc."""
    return sorted(
        path.relative_to(root / "csrc").as_posix() for path in root.glob("csrc/**/*") if path.is_file()
    )
