"""Conditions under which a result may be kept: an unchanged tree, and no other process that uses the processor."""

from __future__ import annotations

import ast
import hashlib
import io
import os
import platform
import subprocess
import time
import tokenize
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What figures depend on: anything but kept results, documents, tests, and the modules that write pages.
MEASURED = (
    ".",
    *(
        f":(exclude){path}"
        for path in (
            *("bench/results", "docs", "*.md", "tests/unit", "tests/ranks", ".ci"),
            *("bench/pages.py", "bench/common/pages.py", "bench/common/readme.py", "bench/*/*_page.py"),
        )
    ),
)
FEWEST_REPETITIONS = 3  # of a call that is timed
OTHERS_MOST = 0.25  # cores; an idle system's daemons use less than 0.05
SHORTEST = 0.5  # seconds: the kernel counts in steps of 10 ms


def code_commit(root: Path = ROOT, paths: Sequence[str] = MEASURED) -> str:
    """Return the short hash of the last commit that changed what figures depend on: the code in ``paths``.

    Docstrings and comments of Python are no code, so a commit that changes them alone leaves results valid.
    """
    commits = _git(root, "log", "--format=%h", "--", *paths).split()
    return next((commit for commit in commits if _changes_code(root, commit, paths)), "unknown")


def _changes_code(root: Path, commit: str, paths: Sequence[str]) -> bool:
    """Return whether a commit changes more of ``paths`` than docstrings and comments of Python files."""
    listed = _git(root, "diff-tree", "--root", "--no-commit-id", "--name-only", "-r", commit, "--", *paths)
    return any(
        not path.endswith(".py")
        or python_code(_git(root, "show", f"{commit}:{path}"))
        != python_code(_git(root, "show", f"{commit}^:{path}"))
        for path in listed.splitlines()
    )


def python_code(source: str) -> str:
    """Return Python source without docstrings, comments and empty lines; with a syntax error, as it is.

    It is for comparisons: a class or function may be left without a body.

    Example:
        >>> python_code("x = 1  # one\\n") == python_code("x = 1\\n")
        True
    """
    lines = [line + "\n" for line in source.split("\n")]
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return source
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        row, column = token.start[0] - 1, token.start[1]
        if token.type == tokenize.COMMENT:
            before = lines[row][:column].rstrip()
            lines[row] = before + "\n" if before else ""
        elif token.type == tokenize.NL and not token.line.strip():  # not an empty line of a string
            lines[row] = ""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                first, last = node.body[0].lineno, node.body[0].end_lineno or 0
                lines[first - 1 : last] = [""] * (last - first + 1)
    return "".join(lines)


def code_checksum(patterns: Iterable[str], root: Path = ROOT) -> str:
    """Return a checksum of files and, of those in Python, of their code without docstrings and comments.

    Unlike a commit it does not change when other files do, nor when a commit is rebased.

    Args:
        patterns: Of the files, as `pathlib.Path.glob` takes them.
        root: The folder that the patterns and the names of the files start from.

    Raises:
        FileNotFoundError: No file matches a pattern.
    """
    digest = hashlib.blake2b(digest_size=6)
    for pattern in patterns:
        paths = sorted(path for path in root.glob(pattern) if path.is_file())
        if not paths:
            raise FileNotFoundError(f"{pattern}: no such file below {root}")
        for path in paths:
            contents = path.read_bytes()
            if path.suffix == ".py":
                contents = python_code(contents.decode()).encode()
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + contents)
    return digest.hexdigest()


def changed_files(root: Path = ROOT, paths: Sequence[str] = MEASURED) -> list[str]:
    """Return the tracked files in ``paths`` with changes that are not committed."""
    listed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", *paths)
    return [line.split(maxsplit=1)[1] for line in listed.splitlines()]


def processor() -> str:
    """Return the name of this machine's processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
            return next(names, platform.processor())
    except OSError:
        return platform.processor()


@dataclass(frozen=True)
class ProcessorTime:
    """Seconds of processor time since the machine started: of all processes, and of this one and its descendants.

    What other virtual machines took of this one's processors counts as other processes.
    """

    at: float
    everyone: float
    own: float

    @classmethod
    def now(cls) -> ProcessorTime | None:
        """Return the times of now, or None on systems without ``/proc``."""
        try:
            with open("/proc/stat", encoding="utf-8") as file:
                times = list(map(int, next(file).split()[1:9]))
        except OSError:
            return None
        ticks = os.sysconf("SC_CLK_TCK")
        stolen = times[7]  # by other virtual machines
        return cls(time.monotonic(), (sum(times[:3]) + stolen) / ticks, _own_ticks() / ticks)

    def others(self) -> float | None:
        """Return how many cores other processes have used on average since these times."""
        while (now := self.now()) is not None and now.at - self.at < SHORTEST:
            time.sleep(SHORTEST - (now.at - self.at))
        if now is None:
            return None
        return max(0.0, (now.everyone - self.everyone) - (now.own - self.own)) / (now.at - self.at)


def complaints(changed: list[str], others: float | None, repetitions: int | None = None) -> list[str]:
    """Return why a result cannot be kept; nothing if it can.

    Args:
        changed: Files with changes, see `changed_files`.
        others: Cores that other processes used, see `ProcessorTime.others`; None is not judged.
        repetitions: The fewest of any figure of the result; None is not judged.
    """
    reasons = []
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        reasons.append(f"the tree has changes that are not committed: {', '.join(changed[:3])}{more}")
    if others is not None and others > OTHERS_MOST:
        reasons.append(f"other processes used {others:.2f} cores, more than {OTHERS_MOST}")
    if repetitions is not None and repetitions < FEWEST_REPETITIONS:
        reasons.append(f"repetitions of a figure: {repetitions}, fewer than {FEWEST_REPETITIONS}")
    return reasons


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, check=False)
    return done.stdout.rstrip() if done.returncode == 0 else ""


def _own_ticks() -> int:
    """Return the clock ticks of this process, of its living descendants and of all that any of them waited for."""
    children: dict[int, list[int]] = {}
    used: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # The name, in parentheses, may contain blanks.
            fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        children.setdefault(int(fields[1]), []).append(int(folder.name))
        used[int(folder.name)] = sum(map(int, fields[11:15]))
    total, pending = 0, [os.getpid()]
    while pending:
        process = pending.pop()
        total += used.get(process, 0)
        pending += children.get(process, [])
    return total
