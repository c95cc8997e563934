"""python -m bench [--full]: run the comparisons that the README cites and print the README's table.

Without ``--full`` the short versions run (a few minutes) and write under build/bench, so that the committed results
stay unchanged. Stress programs are in tests/stress.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from bench import all_reduce, ddp_hook
from bench.common.native import BUILD
from bench.common.readme import readme

PROGRAMS: dict[str, Callable[[list[str]], dict[str, Any]]] = {
    "all_reduce": all_reduce.main,
    "ddp_hook": ddp_hook.main,
}


def main() -> None:
    """Run the programs and print the README's table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="full repetitions, kept in bench/results")
    parser.add_argument("--only", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
    options = parser.parse_args()
    results = {}
    for name in options.only:
        arguments = [] if options.full else ["--quick", "--json", str(BUILD / "results" / f"{name}.json")]
        results[name] = PROGRAMS[name](arguments)
    if "all_reduce" in results:
        print("\n" + readme(results["all_reduce"]))


if __name__ == "__main__":
    main()
