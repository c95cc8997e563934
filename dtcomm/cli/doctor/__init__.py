"""Command ``dtcomm doctor``: check this machine and run a self-test of the engine.

It prints one line per check: ``ok``, ``note`` (works, with a remark) or ``FAIL``. The exit status is 1 if a check
failed. ``--json`` prints the same with all details.

Under torchrun it measures the bandwidth and latency between the ranks of the job instead, on any number of hosts, and
names a slow or failed host, rank or link (`dtcomm.cli.doctor.network`).

``dtcomm doctor --flight DIR`` reads the flight records that ranks wrote when an operation failed (DTCOMM_FLIGHT_DIR)
and prints a diagnosis of each communicator.
"""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from collections.abc import Callable

from dtcomm.cli import LAUNCHER
from dtcomm.cli.doctor import checks, flight, network
from dtcomm.cli.doctor.checks import FAIL, Check
from dtcomm.runtime import emulated_link

EPILOG = """\
Under torchrun (torchrun --nnodes 2 --nproc-per-node 8 ... -m dtcomm doctor) the links between the ranks of the job are
measured instead: bandwidth and latency of pairs of ranks, inside hosts and between them. A slow or failed host, rank or
link is named."""


def main(argv: list[str]) -> int:
    """Run every check and print the report; return 0, or 1 if a check failed."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.flight is not None:
        return flight.report(options.flight, as_json=options.json)
    if all(name in os.environ for name in LAUNCHER):
        return _measure_job(options)
    if options.expect:
        parser.error(
            "--expect: links are measured between the ranks of a job; start it with torchrun or dtcomm launch"
        )
    results = [
        _guarded("versions", checks.versions),
        _guarded("build", checks.build),
        _guarded("kernels", checks.kernels),
        _guarded("cuda", checks.cuda),
        _guarded("ucx", checks.ucx),
        _guarded("cores", lambda: checks.cores(options.nproc)),
        _guarded("variables", checks.variables),
    ]
    # If a check failed, every rank would only repeat the same failure.
    if not any(check.status == FAIL for check in results):
        results.append(_guarded("engine", lambda: checks.engine(options.nproc)))
    return _report(results, as_json=options.json)


def _measure_job(options: argparse.Namespace) -> int:
    """Measure as a rank of a job; rank 0 prints the report and returns 1 if a check failed."""
    results = network.main(options.expect, options.json)
    if results is None:
        return 0
    results.insert(0, _guarded("ucx", checks.ucx))
    status = _report(results, as_json=options.json)
    if not options.json:
        print("\n".join(network.table(results[-1])))
    return status


def _report(results: list[Check], *, as_json: bool) -> int:
    healthy = all(check.status != FAIL for check in results)
    if as_json:
        print(json.dumps({"ok": healthy, "checks": [check.as_dict() for check in results]}, indent=2))
    else:
        print("\n".join(_line(check) for check in results))
    return 0 if healthy else 1


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    """Run a check; an exception becomes a failed check."""
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
    parser = argparse.ArgumentParser(
        prog="dtcomm doctor",
        description="Check this machine and the engine, or, under torchrun, the links between the ranks of a job.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--nproc", type=_ranks, default=2, help="number of ranks of the self-test (default 2)"
    )
    parser.add_argument(
        "--expect",
        metavar="LINK",
        type=_links,
        default="",
        help="under torchrun: the least rate and the largest latency of a link, 9gbit,100us or"
        " inside=50gbit,20us;between=9gbit,100us; a link that misses them is a failure",
    )
    parser.add_argument("--flight", metavar="DIR", help="read the flight records of a failed run instead")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _links(text: str) -> str:
    try:
        emulated_link.parse(text, "--expect")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _ranks(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 64:
        raise argparse.ArgumentTypeError(f"{value} ranks: expected 1 to 64")
    return value
