"""The arguments of ``dtcomm perf``: nccl-tests' flags, and what is not in nccl-tests."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dtcomm.algorithms import available
from dtcomm.cli import perf_backends, sizes
from dtcomm.cli.perf_collectives import ALIASES, COLLECTIVES, DTYPES
from dtcomm.codecs import codec
from dtcomm.testing.exact import OPS

CHOOSERS = ("auto", "direct")

EPILOG = """\
reading the table
  time is per operation, of the slowest rank (-a); out-of-place all_reduce and broadcast are a copy and the
  operation, since torch.distributed has them in place only. algbw is size / time, GB = 1e9 bytes; size is that
  of all shards for reduce_scatter and all_gather. busbw is algbw times 2(n-1)/n for all_reduce, (n-1)/n for
  reduce_scatter and all_gather, 1 for broadcast: what the slowest link carries if every byte takes the shortest
  way. So it compares between rank counts; it can exceed a wire's speed where bytes do not cross that wire
  (shared memory), or where a codec sends fewer: both count uncompressed bytes. wire(B) is what was really sent,
  by the rank that sends most.
  #wrong counts elements that differ from the exact result, on all ranks; under a lossy codec, those outside the
  codec's error bound (all of them if the mean error is too large, or if ranks differ in a bit). maxerr is
  max|error| / max|result|, meanerr is mean|error| / mean|result|. ratio is the median time of the reference
  (gloo, or else the last row of a size) over this row's, in place.
differences from nccl-tests: -w is 5, -a is 3 (max), -g and -t are --nproc; -G is for GPUs.
exit status: 0, or 1 where a value is wrong, or 2 where the arguments are, or a rank failed.
"""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to do a collective: rows of a size are compared over these."""

    backend: str
    codec: str = "none"
    algorithm: str = "auto"

    def __str__(self) -> str:
        return f"{self.backend} {self.codec} {self.algorithm}"

    def refusal(self, datatype: str, op: str) -> str | None:
        """Why this cannot do ``op`` on ``datatype``, or None."""
        layout = codec(self.codec)
        if DTYPES[datatype] not in layout.dtypes:
            takes = ", ".join(name for name, dtype in DTYPES.items() if dtype in layout.dtypes)
            return f"-d {datatype}: codec {self.codec} takes {takes}"
        if op in ("min", "max") and op not in layout.operations:
            return f"-o {op}: codec {self.codec} takes {', '.join(layout.operations)}, avg"
        if op == "avg" and not DTYPES[datatype].is_floating_point:
            return f"-o avg: {datatype} has no average"
        return None


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure, checked: see the parser's help for the fields that bear the names of flags."""

    collective: str
    minbytes: int
    maxbytes: int
    stepbytes: int
    stepfactor: int
    iters: int
    warmup_iters: int
    agg_iters: int
    run_cycles: int
    check: int
    ops: tuple[str, ...]
    datatypes: tuple[str, ...]
    root: int | None
    average: int
    blocking: int
    report_cputime: bool
    per_iter: bool
    out_of_place: bool
    variants: tuple[Variant, ...]
    nproc: int
    pin: bool | None
    timeout: float
    quiet: bool
    json: str | None
    csv: str | None

    @property
    def backends(self) -> list[str]:
        """Their names, each once."""
        return list(dict.fromkeys(variant.backend for variant in self.variants))

    @property
    def sizes(self) -> list[int]:
        return sizes.series(self.minbytes, self.maxbytes, self.stepbytes, self.stepfactor)


def parse(argv: list[str]) -> Options:
    """Options of a command line; exits with status 2 and one line on stderr where it is wrong."""
    parser = _parser()
    given = parser.parse_args(argv)
    try:
        return _options(given)
    except (ValueError, TypeError) as error:
        parser.error(str(error))


def _options(given: argparse.Namespace) -> Options:
    collective = COLLECTIVES[given.collective]
    if given.minbytes > given.maxbytes:
        raise ValueError(f"-b {given.minbytes} is larger than -e {given.maxbytes}")
    if given.cudagraph:
        raise ValueError("-G: CUDA graphs need a GPU, and these collectives run on the CPU")
    sizes.series(
        given.minbytes, given.maxbytes, given.stepbytes, given.stepfactor
    )  # raises where they are odd
    variants = tuple(_variants(given))
    ops = OPS if given.op == "all" else tuple(given.op.split(","))
    if unknown := set(ops) - set(OPS):
        raise ValueError(f"-o {sorted(unknown)[0]!r} is not one of {', '.join(OPS)}, all")
    names = tuple(DTYPES) if given.datatype == "all" else tuple(given.datatype.split(","))
    datatypes = tuple(ALIASES.get(name, name) for name in names)
    if strange := set(datatypes) - set(DTYPES):
        raise ValueError(f"-d {sorted(strange)[0]!r} is not one of {', '.join(DTYPES)}, all")
    ops = ops if collective.reduces else ("none",)
    for variant in variants:
        refusals = [variant.refusal(datatype, op) for datatype in datatypes for op in ops]
        if None not in refusals:
            raise ValueError(refusals[0])
    fields = {name: value for name, value in vars(given).items() if name in Options.__dataclass_fields__}
    fields |= {
        "ops": ops,
        "datatypes": datatypes,
        "root": None if given.root == "all" else int(given.root),
        "out_of_place": bool(given.out_of_place),
        "quiet": "-" in (given.json, given.csv),
        "variants": variants,
    }
    return Options(**fields)


def _variants(given: argparse.Namespace) -> list[Variant]:
    backends = [name for part in given.backend or ["native"] for name in part.split(",")]
    codecs = [str(codec(spec)) for spec in given.codec or ["none"]]
    algorithms = [name for part in given.algorithm or ["auto"] for name in part.split(",")]
    valid = (*CHOOSERS, *available(given.collective))
    if wrong := [name for name in algorithms if name not in valid]:
        raise ValueError(f"--algorithm {wrong[0]!r} is not one of {', '.join(valid)}")
    variants: list[Variant] = []
    for name in backends:
        if perf_backends.find(name).plain:
            variants.append(Variant(backend=name, algorithm="own"))
        else:
            variants += [Variant(backend=name, codec=c, algorithm=a) for c in codecs for a in algorithms]
    if all(variant.algorithm == "own" for variant in variants) and codecs != ["none"]:
        raise ValueError(f"--codec {codecs[0]!r}: {', '.join(backends)} sends tensors as they are")
    return list(dict.fromkeys(variants))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dtcomm perf",
        usage=f"dtcomm perf {{{','.join(COLLECTIVES)}}} [options]",
        description="Measure one collective and check its results, with nccl-tests' flags and columns.",
        epilog=EPILOG,
        formatter_class=_Help,
    )
    add = parser.add_argument
    add("collective", choices=tuple(COLLECTIVES))
    size = _named(sizes.parse_size)
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
    add("-r", "--root", type=_root, default="0", metavar="RANK", help="source of a broadcast, or all in turn")
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
    add("-G", "--cudagraph", type=_count(0), default=0, metavar="N", help="refused unless 0")
    add("-T", "--timeout", type=float, default=600.0, metavar="S", help="of one operation, in seconds")
    own = parser.add_argument_group("not in nccl-tests")
    add = own.add_argument
    add(
        "--codec",
        action="append",
        metavar="SPEC",
        help="none, fp16, int8:block=64, ...; may be repeated (none)",
    )
    add(
        "--algorithm", action="append", metavar="NAME", help="auto, direct, ring, ...; repeated or a,b (auto)"
    )
    add("--backend", action="append", metavar="NAME", help=perf_backends.HELP)
    add(
        "--nproc",
        type=_count(1),
        default=2,
        metavar="N",
        help="local ranks to start; torchrun's, where it runs this",
    )
    add(
        "--pin",
        action=argparse.BooleanOptionalAction,
        help="a core for each rank, and for dtcomm's threads (where there are enough)",
    )
    add("-J", "--json", metavar="FILE", help="also write JSON; - writes only that, to stdout")
    add("--csv", metavar="FILE", help="also write CSV; - writes only that, to stdout")
    return parser


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
