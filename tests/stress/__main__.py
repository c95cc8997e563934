"""Run all stress programs, or one, for a limited time with a fresh seed; the exit status is the result.

python -m tests.stress [--minutes 45] [--program NAME] [--seed S] [--list]

The time is divided equally among the programs. Every run draws a new seed and prints it. A program that fails prints
the command that repeats it; the exit status is 1 then, and 0 if all passed.
"""

from __future__ import annotations

import argparse
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from bench.common import report
from tests.stress import DETAILS

EXTRA_SECONDS = 300.0  # for a program to build, start and end; one that takes longer hangs


@dataclass(frozen=True, kw_only=True)
class Program:
    """One stress program.

    Attributes:
        module: Its module in ``tests``.
        shows: What it shows, in a few words.
        arguments: Return its arguments for a seed and a number of seconds.
    """

    module: str
    shows: str
    arguments: Callable[[int, float], list[object]]

    def command(self, seed: int, seconds: float, details: str) -> list[str]:
        """Return the command of a run, without the interpreter."""
        arguments = [*self.arguments(seed, seconds), "--json", details]
        return ["-m", f"tests.{self.module}", *map(str, arguments)]


def _minutes(seconds: float) -> float:
    return round(seconds / 60, 2)


def _torch_suite(seed: int, seconds: float) -> list[object]:
    """Choose a number of ranks and a share of torch's tests; all tests on one number of ranks take 25 minutes."""
    shares = max(1, round(1500 / seconds))
    share = 1 + seed // 3 % shares
    return ["--world-size", 2 + seed % 3, "--peer-on", "all", "--share", share, shares]


def _limits(seed: int, seconds: float) -> list[object]:
    """Choose all cases, which take five minutes and 20 GB, or those that take a minute."""
    return [] if seconds >= 300 else ["--cases", "alignment", "ranks", "--ranks", 8]


PROGRAMS: dict[str, Program] = {
    "fuzz": Program(
        module="stress.fuzz",
        shows="damaged payloads of every codec under AddressSanitizer",
        arguments=lambda seed, seconds: ["--seed", seed, "--payloads", int(8000 * seconds)],
    ),
    "operations": Program(
        module="stress.bit_identity",
        shows="random operations have the same bits on all ranks, and the exact sum",
        arguments=lambda seed, seconds: [
            *("--seed", seed, "--minutes", _minutes(seconds), "--operations", 10**9)
        ],
    ),
    "soak": Program(
        module="stress.soak",
        shows="ranks are killed and restarted by torchrun, nothing grows",
        arguments=lambda seed, seconds: ["--seed", seed, "--minutes", _minutes(seconds), "--life", 10, 60],
    ),
    "campaign": Program(
        module="stress.campaign",
        shows="a fault in every phase: who is named, how soon, what is left behind",
        arguments=lambda seed, seconds: ["--seed", seed, "--minutes", _minutes(seconds)],
    ),
    "torch_suite": Program(
        module="stress.torch_suite", shows="torch's own tests on backend dtcomm", arguments=_torch_suite
    ),
    "elastic": Program(
        module="extensions.stress.elastic",
        shows="elastic ranks are killed, leave and join while the others train",
        arguments=lambda seed, seconds: ["--seed", seed, "--minutes", _minutes(seconds)],
    ),
    "rendezvous": Program(
        module="stress.rendezvous",
        shows="interleavings of the rendezvous on 2 to 4 ranks",
        arguments=lambda seed, seconds: ["--first", seed, "--seeds", int(80 * seconds)],
    ),
    "limits": Program(
        module="stress.limits",
        shows="2^31 elements, 32 ranks, 1,000 groups, unaligned tensors",
        arguments=_limits,
    ),
}


def run(name: str, seed: int, seconds: float) -> bool:
    """Run one program in a process of its own; return whether it passed, and print how to repeat it if not."""
    command = PROGRAMS[name].command(seed, seconds, str(DETAILS / f"{name}.json"))
    print(f"== {name}, seed {seed}, {seconds:.0f} s", flush=True)
    started = time.monotonic()
    try:
        status: object = subprocess.run(
            [sys.executable, *command], check=False, cwd=report.ROOT, timeout=3 * seconds + EXTRA_SECONDS
        ).returncode
    except subprocess.TimeoutExpired:
        status = "timeout"
    print(
        f"== {name}: {'passed' if status == 0 else f'FAILED ({status})'}, {time.monotonic() - started:.0f} s"
    )
    if status != 0:
        print(f"== to repeat it: {shlex.join(['python', *command])}", flush=True)
    return status == 0


def main(arguments: list[str] | None = None) -> int:
    """Run the programs; return how many failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.stress",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=45, help="for all programs together")
    parser.add_argument("--program", choices=list(PROGRAMS), help="only this one")
    parser.add_argument("--seed", type=int, help="instead of a new one")
    parser.add_argument("--list", action="store_true", help="print the programs")
    options = parser.parse_args(arguments)
    if options.list:
        for name, program in PROGRAMS.items():
            print(f"{name:12} {program.shows}")
        return 0
    if options.minutes <= 0:
        parser.error("--minutes must be above 0")
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    names = [options.program] if options.program else list(PROGRAMS)
    failed = [name for name in names if not run(name, seed, 60 * options.minutes / len(names))]
    print(
        f"seed {seed}: {len(names) - len(failed)} of {len(names)} programs passed; failed: {failed or 'none'}"
    )
    return len(failed)


if __name__ == "__main__":
    sys.exit(main() > 0)
