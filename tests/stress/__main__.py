"""Run the stress programs at full length, in pieces, and keep what they counted.

python -m tests.stress [NAME ...] [--minutes M] [--parts I ...] [--short] [--list] [--out DIR]

Without names all programs run, without --parts all parts that have not passed on this commit. With --minutes no part is
started that would, as planned, end later: call the command again until --list says that nothing is missing. Each part
is kept in bench/results/reliability/NAME.json when it has ended, and `python -m bench.pages` writes
docs/results/reliability.md from these files. What a part wrote in full is in build/stress. --short runs a minute of
each instead; the page says so. Nothing is kept of a tree with changes that are not committed, except in --out.
The exit status is 1 if a part failed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

from bench import reliability
from bench.common import conditions
from bench.reliability import Entry, Kept
from tests.stress import DETAILS
from tests.stress.programs import PROGRAMS, Program

SHORT = 0  # the number of a short run


def kept_result(program: Program, folder: Path) -> Kept:
    """Return the kept result of a program, with the goal and the parts that the program has now."""
    path = folder / f"{program.name}.json"
    return Kept(
        program=program.name,
        what=program.what,
        command=f"python -m tests.stress {program.name}",
        goal=program.goal,
        parts=len(program.parts),
        planned_seconds=sum(part.seconds for part in program.parts),
        entries=reliability.read(path).entries if path.exists() else [],
    )


def run_part(program: Program, number: int) -> Entry:
    """Run one part in a process of its own; return its counts, and its failures."""
    arguments = program.short if number == SHORT else program.parts[number - 1].arguments
    details = DETAILS / f"{program.name}-{number}.json"
    details.parent.mkdir(parents=True, exist_ok=True)
    details.unlink(missing_ok=True)
    command = ["-m", f"tests.stress.{program.modules[0]}", *arguments]
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, *command, "--json", str(details)], check=False, cwd=conditions.ROOT
    )
    counts, failures = dict[str, float](), list[str]()
    if details.exists():
        counts, failures = program.counts(json.loads(details.read_text(encoding="utf-8")))
    if done.returncode != 0 and not failures:
        failures = [f"the program ended with status {done.returncode}"]
    return Entry(
        part=number,
        command=shlex.join(["python", *command]),
        seconds=round(time.monotonic() - started, 1),
        counts=counts,
        failures=failures,
        commit=reliability.tested_commit(program.tested),
    )


def print_parts(folder: Path) -> None:
    """Print for each program its parts, the planned time and what is missing on this commit."""
    for program in PROGRAMS.values():
        kept = kept_result(program, folder)
        missing = kept.missing(reliability.tested_commit(program.tested))
        left = sum(program.parts[number - 1].seconds for number in missing)
        print(
            f"{program.name:12} {len(program.parts):3} parts, {kept.planned_seconds / 60:5.0f} minutes; missing on "
            f"this commit: {len(missing)} parts, {left / 60:.0f} minutes; goal: {program.goal}"
        )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.stress",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PROGRAMS)}; default: all")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start nothing that ends later")
    parser.add_argument(
        "--parts", type=int, nargs="+", help="run these again, from 1; needs the name of one program"
    )
    parser.add_argument("--short", action="store_true", help="a minute of each, which counts towards no goal")
    parser.add_argument("--list", action="store_true", help="print parts, planned times and what is missing")
    parser.add_argument(
        "--out", type=Path, default=reliability.FOLDER, help="instead of bench/results/reliability"
    )
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in PROGRAMS]:
        parser.error(f"NAME: {', '.join(unknown)} is unknown; expected one of {', '.join(PROGRAMS)}")
    if options.parts:
        if len(options.names) != 1 or options.short:
            parser.error("--parts: needs the name of one program, and no --short")
        last = len(PROGRAMS[options.names[0]].parts)
        if wrong := [number for number in options.parts if not 1 <= number <= last]:
            parser.error(f"--parts: {wrong} do not exist; {options.names[0]} has parts 1 to {last}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run what is missing, keep each part; return how many parts failed."""
    options = parse(arguments)
    if options.list:
        print_parts(options.out)
        return 0
    kept_in_tree = options.out.resolve() == reliability.FOLDER.resolve()
    names = options.names or list(PROGRAMS)
    tested = [path for name in names for path in PROGRAMS[name].tested]
    if kept_in_tree and (changed := conditions.complaints(conditions.changed_files(paths=tested), None)):
        raise SystemExit(
            f"tests.stress: nothing would be kept, because {changed[0]}; commit them, or give --out"
        )
    started, failed = time.monotonic(), 0
    for name in names:
        program = PROGRAMS[name]
        commit = reliability.tested_commit(program.tested)
        numbers = [SHORT] if options.short else options.parts
        for number in numbers or kept_result(program, options.out).missing(commit):
            seconds = 60 if number == SHORT else program.parts[number - 1].seconds
            if time.monotonic() - started + seconds > 60 * options.minutes:
                continue
            print(f"== {name}, part {number} of {len(program.parts)}, about {seconds} s", flush=True)
            entry = run_part(program, number)
            if kept_in_tree and reliability.tested_commit(program.tested) != commit:
                raise SystemExit(f"tests.stress: {name}: the tree changed while it ran; the part is not kept")
            kept = kept_result(program, options.out)
            kept.add(entry)
            path = options.out / f"{name}.json"
            reliability.write(kept, path)
            failed += bool(entry.failures)
            print(
                f"== {name}: {entry.counts}, {len(entry.failures)} failures, {entry.seconds} s; {path}",
                flush=True,
            )
    return failed


if __name__ == "__main__":
    sys.exit(main() > 0)
