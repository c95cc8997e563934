"""``dtcomm doctor``: what dtcomm found on this machine, and whether its engine works.

One line per check: ``ok``, ``note`` (works, but something is worth knowing) or ``FAIL``. The exit status is 1 where
a check failed. ``--json`` prints the same with all details.

``dtcomm doctor --flight DIR`` reads what ranks wrote when an operation failed (DTCOMM_FLIGHT_DIR) and says in a
sentence for each communicator who is missing what.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Callable

from dtcomm.cli.doctor import engine, flight, machine
from dtcomm.cli.doctor.report import FAIL, Check


def main(argv: list[str]) -> int:
    """Run every check and print the report; 0 where none failed, 1 otherwise."""
    options = _parser().parse_args(argv)
    if options.flight is not None:
        return flight.report(options.flight, as_json=options.json)
    checks = [
        _guarded("versions", machine.versions),
        _guarded("build", machine.build),
        _guarded("kernels", machine.kernels),
        _guarded("cuda", machine.cuda),
        _guarded("cores", lambda: machine.cores(options.nproc)),
        _guarded("variables", machine.variables),
    ]
    # Without a working core the ranks could only say the same once more each.
    if not any(check.status == FAIL for check in checks):
        checks.append(_guarded("engine", lambda: engine.engine(options.nproc)))
    healthy = all(check.status != FAIL for check in checks)
    if options.json:
        print(json.dumps({"ok": healthy, "checks": [check.as_dict() for check in checks]}, indent=2))
    else:
        print("\n".join(_line(check) for check in checks))
    return 0 if healthy else 1


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    """A doctor reports what is broken: whatever a check raises is its result."""
    try:
        return check()
    except Exception as error:
        return Check(name=name, status=FAIL, summary=f"{type(error).__name__}: {error}")


def _line(check: Check) -> str:
    head = f"{check.status:<5} {check.name:<10} "
    return textwrap.fill(
        check.summary,
        width=110,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dtcomm doctor", description="Check this machine and the engine.")
    parser.add_argument("--nproc", type=_ranks, default=2, help="ranks of the self-test (default 2)")
    parser.add_argument("--flight", metavar="DIR", help="read the flight records of a failed run instead")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _ranks(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 64:
        raise argparse.ArgumentTypeError(f"{value} ranks: give 1 to 64")
    return value
