"""The flags of ``dtcomm perf``, with their help."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

from dtcomm.cli import _sizes
from dtcomm.cli.perf import placement
from dtcomm.cli.perf.backends import registry
from dtcomm.cli.perf.collectives import COLLECTIVES, DTYPES
from dtcomm.measure.exact_inputs import OPS

EPILOG = """\
reading the table
  time is per operation, of the slowest rank (-a); out-of-place all_reduce, broadcast and reduce are a copy and the
  operation, since torch.distributed has them in place only; all_to_all and sendrecv (every rank to the next) are
  out of place only. algbw is size / time, GB = 1e9 bytes; size is that of all shards where there is one for every
  rank. busbw is algbw times 2(n-1)/n for all_reduce, (n-1)/n for reduce_scatter, all_gather, gather, scatter and
  all_to_all, 1 for broadcast, reduce and sendrecv: what the slowest link carries if every byte takes the shortest
  way. So it compares between rank counts; it can exceed a wire's speed where bytes do not cross that wire
  (shared memory), or where a codec sends fewer: both count uncompressed bytes. wire(B) is what was really sent,
  by the rank that sends most.
  #wrong counts elements that differ from the exact result, on all ranks; under a lossy codec, those outside the
  codec's error bound (all of them if the mean error is too large, or if ranks differ in a bit). maxerr is
  max|error| / max|result|, meanerr is mean|error| / mean|result|. ratio is the median time of the reference
  (gloo, or else the last row of a size) over this row's, in place; with --compare, "vs gloo", "vs mpi" and so on are
  that peer's median over this row's. Open MPI is called from C, by processes of its own; its results are not checked.
on GPUs
  times are the device's own, between events on the stream, and the host waits once a batch; -C is the CPU time that
  queueing takes. With -G time is a replay's over its calls (-n of them, or fewer where a sum in place would overflow).
  moved says what moved the bytes: fused (dtcomm's kernels over peer memory), nccl, gloo (through the host's memory),
  symm_mem; why it is not fused stands below the table. floor, of virtual ranks, is the share of the memory floor: the
  time that a device copy, timed in turn, takes for the bytes that all ranks must read and write, over the kernel's.
differences from nccl-tests: -w is 5, -a is 3 (max), -g and -t are --nproc.
exit status: 0, or 1 where a value is wrong, or 2 where the arguments are, or a rank failed.
"""


def parser() -> argparse.ArgumentParser:
    """Of a command line; what belongs together is checked by ``perf_options``."""
    made = argparse.ArgumentParser(
        prog="dtcomm perf",
        usage=f"dtcomm perf {{{','.join(COLLECTIVES)}}} [options]",
        description="Measure one collective and check its results, with nccl-tests' flags and columns.",
        epilog=EPILOG,
        formatter_class=_Help,
    )
    add = made.add_argument
    add("collective", nargs="?", choices=tuple(COLLECTIVES), help="with --schedule: what that does")
    size = _named(_sizes.parse_size)
    add("-b", "--minbytes", type=size, default="32M", metavar="SIZE", help="smallest size (1K, 64M, ...)")
    add("-e", "--maxbytes", type=size, default="32M", metavar="SIZE", help="largest size")
    add("-i", "--stepbytes", type=size, default="1M", metavar="SIZE", help="step between sizes")
    add(
        "-f",
        "--stepfactor",
        type=_count(2),
        default=0,
        metavar="N",
        help="factor between sizes, instead of -i",
    )
    add("-n", "--iters", type=_count(1), default=20, metavar="N", help="timed operations")
    add("-w", "--warmup_iters", type=_count(0), default=5, metavar="N", help="operations before those")
    add(
        "-m", "--agg_iters", type=_count(1), default=1, metavar="N", help="started together in each iteration"
    )
    add(
        "-N",
        "--run_cycles",
        type=_count(0),
        default=1,
        metavar="N",
        help="go through the sizes N times; 0: for ever",
    )
    add(
        "-c", "--check", type=_count(0), default=1, metavar="N", help="check results N times, with new values"
    )
    add("-o", "--op", default="sum", metavar="OP", help=f"{', '.join(OPS)}, some of them, or all")
    add(
        "-d", "--datatype", default="float", metavar="TYPE", help=f"{', '.join(DTYPES)}, some of them, or all"
    )
    add("-r", "--root", type=_root, default="0", metavar="RANK", help="where there is one, or all in turn")
    add("-a", "--average", type=int, choices=(0, 1, 2, 3), default=3, help="report rank 0, mean, min or max")
    add(
        "-z",
        "--blocking",
        type=int,
        choices=(0, 1),
        default=0,
        help="1: barrier (untimed) before each operation",
    )
    add("-C", "--report_cputime", action="store_true", help="CPU time instead of time")
    add("-I", "--per_iter", action="store_true", help="statistics over iterations, slowest rank of each")
    add("-O", "--out_of_place", type=int, choices=(0, 1), default=1, help="0: in place only")
    add(
        "-G",
        "--cudagraph",
        type=_count(0),
        default=0,
        metavar="N",
        help="capture the -n operations as one CUDA graph and time N replays of it",
    )
    add("-T", "--timeout", type=float, default=600.0, metavar="S", help="of one operation, in seconds")
    own = made.add_argument_group("not in nccl-tests")
    add = own.add_argument
    add(
        "--codec",
        action="append",
        metavar="SPEC",
        help="none, fp16, int8:block=64, ...; repeated or a,b (none)",
    )
    add(
        "--algorithm", action="append", metavar="NAME", help="auto, direct, ring, ...; repeated or a,b (auto)"
    )
    add(
        "--schedule",
        metavar="FILE",
        help="a schedule of your own, as `print(schedule)` writes it: proved, then measured",
    )
    add("--backend", action="append", metavar="NAME", help=registry.HELP)
    add(
        "--compare",
        action="append",
        metavar="NAME",
        help=f"{', '.join(registry.PEERS)}, or several (a,b): measured beside ours in turn, with a column of "
        "ratios each",
    )
    add(
        "--device",
        choices=placement.DEVICES,
        help="where the tensors are (cuda where torch sees a GPU and all named backends have CUDA tensors, else cpu)",
    )
    add(
        "--virtual",
        type=_count(1),
        default=0,
        metavar="N",
        help="N virtual ranks on one GPU, each call one launch of the fused kernels, with its share of the memory "
        "floor; --device emulator runs their source on the CPU",
    )
    add(
        "--nproc",
        type=_count(1),
        default=None,
        metavar="N",
        help="local ranks to start; torchrun's, where it runs this (2, or as many as --schedule is for; with GPUs "
        "one for each)",
    )
    add(
        "--pin",
        action=argparse.BooleanOptionalAction,
        help="a core for each rank, and for dtcomm's threads (where there are enough)",
    )
    add("-J", "--json", metavar="FILE", help="also write JSON; - writes only that, to stdout")
    add("--csv", metavar="FILE", help="also write CSV; - writes only that, to stdout")
    add(
        "--plot",
        metavar="FILE",
        help="also draw busbw against size, a line for each variant, and the time up to 64K (needs matplotlib)",
    )
    return made


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Defaults beside each flag, the epilog as it is written."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, argparse.SUPPRESS):
            return action.help
        return super()._get_help_string(action)


def _named(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """``convert`` whose ValueError argparse shows, instead of the function's name."""

    def checked(text: str) -> Any:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def _count(least: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not re.fullmatch(r"\d+", text) or int(text) < least:
            raise ValueError(f"{text!r} is not a whole number of {least} or more")
        return int(text)

    return _named(convert)


def _root(text: str) -> str:
    if text not in ("all", "-1") and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a rank nor all")
    return "all" if text == "-1" else text
