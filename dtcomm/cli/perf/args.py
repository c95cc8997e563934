"""Command-line arguments of ``dtcomm perf``: nccl-tests' flags and dtcomm's own, parsed into checked `PerfOptions`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from dtcomm import algorithms, cli
from dtcomm.cli import split_codecs
from dtcomm.cli.perf import placement
from dtcomm.cli.perf.collectives import ALIASES, COLLECTIVES, DTYPES
from dtcomm.cli.perf.libraries import BACKEND_HELP, PEERS, backend_names, find_backend
from dtcomm.cli.perf.placement import CPU, CUDA
from dtcomm.codecs import codec
from dtcomm.measure.exact_inputs import OPS

CHOOSERS = ("auto", "direct")  # values of --algorithm that choose an algorithm themselves

EPILOG = """\
reading the table
  time is per operation, of the slowest rank (-a). all_reduce, broadcast and reduce are in place in torch.distributed;
  out of place they are a copy and the operation. all_to_all and sendrecv (every rank to the next) are out of place
  only. algbw is size / time, with GB = 1e9 bytes; size is that of all shards if every rank has one. busbw is algbw
  times 2(n-1)/n for all_reduce, (n-1)/n for reduce_scatter, all_gather, gather, scatter and all_to_all, 1 for
  broadcast, reduce and sendrecv: what the slowest link carries if every byte takes the shortest path. It is comparable
  between rank counts. It can exceed the speed of a link if bytes do not cross it (shared memory) or if a codec sends
  fewer: both bandwidths count uncompressed bytes. wire(B) is what was sent by the rank that sends most.
  #wrong counts elements that differ from the exact result, on all ranks; with a lossy codec, elements outside the
  codec's error bound (all elements if the mean error is too large or if ranks differ in a bit). maxerr is
  max|error| / max|result|, meanerr is mean|error| / mean|result|. ratio is the median time of the reference
  (gloo, or else the last row of a size) over this row's, in place; with --compare, "vs gloo" and "vs nccl" are
  that peer's median over this row's.
on GPUs
  times are between CUDA events on the stream, and the host waits once per batch; -C reports the CPU time of queueing
  instead. With -G time is a graph replay's divided by its calls (-n, or fewer if a sum in place would overflow).
  moved is what moved the bytes: fused (dtcomm's kernels over peer memory), nccl, gloo (through host memory); the reason
  why it is not fused is printed below the table.
differences from nccl-tests: -w is 5, -a is 3 (max), -g and -t are --nproc.
exit status: 0; 1 if a value is wrong; 2 if an argument is wrong or a rank failed.
"""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A backend, codec and algorithm; the rows of one size are compared over variants."""

    backend: str
    codec: str = "none"
    algorithm: str = "auto"

    def __str__(self) -> str:
        return f"{self.backend} {self.codec} {self.algorithm}"

    def why_unsupported(self, collective: str, datatype: str, op: str) -> str | None:
        """Return why this variant cannot run ``op`` on ``datatype``, or None if it can."""
        if reason := find_backend(self.backend).why_unsupported(collective, datatype, op):
            return reason
        layout = codec(self.codec)
        if DTYPES[datatype] not in layout.dtypes:
            valid = ", ".join(name for name, dtype in DTYPES.items() if dtype in layout.dtypes)
            return f"-d {datatype}: codec {self.codec} takes {valid}"
        if op in ("min", "max") and op not in layout.operations:
            return f"-o {op}: codec {self.codec} takes {', '.join(layout.operations)}, avg"
        if op == "avg" and not DTYPES[datatype].is_floating_point:
            return f"-o avg: {datatype} has no average"
        return None


@dataclass(frozen=True, kw_only=True)
class PerfOptions:
    """What to measure, checked; the parser's help describes the fields named like flags."""

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
    compare: tuple[str, ...]
    nproc: int
    device: str
    device_reason: str
    cudagraph: int
    pin: bool | None
    timeout: float
    quiet: bool
    json: str | None
    plot: str | None
    imports: tuple[str, ...] = ()  # the ranks import them too

    @property
    def on_device(self) -> bool:
        """Whether tensors are on a GPU."""
        return self.device != CPU

    @property
    def backends(self) -> list[str]:
        """Names of the backends, without duplicates."""
        return list(dict.fromkeys(variant.backend for variant in self.variants))

    @property
    def sizes(self) -> list[int]:
        """Sizes in bytes."""
        return cli.series(self.minbytes, self.maxbytes, self.stepbytes, self.stepfactor)


def parse(argv: list[str]) -> PerfOptions:
    """Parse a command line; exits with status 2 and one line on stderr if it is wrong."""
    command = parser()
    namespace = command.parse_args(argv)
    try:
        return _checked_options(namespace)
    except (ValueError, TypeError) as error:
        command.error(str(error))


def add_import_argument(add: Callable[..., object]) -> None:
    """Add the flag ``--import``, whose value `import_modules` takes."""
    add("--import", action="append", default=[], metavar="MODULE", dest="imports",
        help="your module, from the current folder or installed, which calls dtcomm.algorithms.register or "
        "dtcomm.codecs.custom; may be repeated")  # fmt: skip


def import_modules(names: Iterable[str]) -> None:
    """Import the user's modules, which register algorithms and codecs; from the current folder too.

    ValueError if one cannot be imported, or a registration is refused.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for name in names:
        try:
            importlib.import_module(name)
        except (ImportError, ValueError, TypeError) as error:
            raise ValueError(f"--import {name}: {error}") from error


def parser() -> argparse.ArgumentParser:
    """Return the parser of the flags; `parse` checks which of them go together."""
    command = argparse.ArgumentParser(
        prog="dtcomm perf",
        usage=f"dtcomm perf {{{','.join(COLLECTIVES)}}} [options]",
        description="Measure one collective and check its results, with nccl-tests' flags and columns.",
        epilog=EPILOG,
        formatter_class=_HelpFormatter,
    )
    size, count = cli.size_argument, cli.count_argument
    add = command.add_argument

    def number(short: str, name: str, least: int, default: int, text: str) -> None:
        command.add_argument(short, name, type=count(least), default=default, metavar="N", help=text)

    add("collective", choices=tuple(COLLECTIVES), help="what to measure")
    add("-b", "--minbytes", type=size(0), default="32M", metavar="SIZE", help="smallest size (1K, 64M, ...)")
    add("-e", "--maxbytes", type=size(0), default="32M", metavar="SIZE", help="largest size")
    add("-i", "--stepbytes", type=size(0), default="1M", metavar="SIZE", help="step between sizes")
    number("-f", "--stepfactor", 2, 0, "factor between sizes, instead of -i")
    number("-n", "--iters", 1, 20, "timed operations")
    number("-w", "--warmup_iters", 0, 5, "operations before the timed ones")
    number("-m", "--agg_iters", 1, 1, "operations started together per iteration")
    number("-N", "--run_cycles", 0, 1, "repeat all sizes N times; 0: forever")
    number("-c", "--check", 0, 1, "check results N times, with new values")
    add("-o", "--op", default="sum", metavar="OP", help=f"{', '.join(OPS)}, several (a,b), or all")
    add("-d", "--datatype", default="float", metavar="TYPE",
        help=f"{', '.join(DTYPES)}, several (a,b), or all")  # fmt: skip
    add("-r", "--root", type=_root, default="0", metavar="RANK",
        help="root of a rooted collective, or all in turn")  # fmt: skip
    add("-a", "--average", type=int, choices=(0, 1, 2, 3), default=3, help="report rank 0, mean, min or max")
    add("-z", "--blocking", type=int, choices=(0, 1), default=0,
        help="1: untimed barrier before each operation")  # fmt: skip
    add("-C", "--report_cputime", action="store_true", help="report CPU time instead of elapsed time")
    add(
        "-I",
        "--per_iter",
        action="store_true",
        help="minimum, median, p99 and maximum of the iterations of the slowest rank",
    )
    add("-O", "--out_of_place", type=int, choices=(0, 1), default=1, help="0: measure in place only")
    number("-G", "--cudagraph", 0, 0, "capture the -n operations as one CUDA graph and time N replays of it")
    add("-T", "--timeout", type=float, default=600.0, metavar="S",
        help="timeout of one operation, in seconds")  # fmt: skip
    add = command.add_argument_group("not in nccl-tests").add_argument
    add("--codec", action="append", metavar="SPEC",
        help="none, fp16, int8:block=64, ...; repeated or a,b (none)")  # fmt: skip
    add("--algorithm", action="append", metavar="NAME",
        help="auto, direct, ring, ..., or your own (--import); repeated or a,b (auto)")  # fmt: skip
    add_import_argument(add)
    add("--backend", action="append", metavar="NAME", help=BACKEND_HELP)
    add("--compare", action="append", metavar="NAME",
        help=f"{', '.join(PEERS)}, or several (a,b): measured alternately with dtcomm, with a column of ratios "
        "each")  # fmt: skip
    add("--device", choices=placement.DEVICES,
        help="where the tensors are (cuda if torch sees a GPU and all named backends have CUDA tensors, else "
        "cpu)")  # fmt: skip
    add("--nproc", type=count(1), metavar="N",
        help="local ranks to start, unless torchrun started this process (2; with GPUs one for each)")  # fmt: skip
    add("--pin", action=argparse.BooleanOptionalAction,
        help="pin each rank, and dtcomm's threads, to a core (if there are enough cores)")  # fmt: skip
    add("-J", "--json", metavar="FILE", help="also write JSON; - writes only that, to stdout")
    add("--plot", metavar="FILE",
        help="also plot busbw against size, a line for each variant, and the time up to 64K (needs "
        "matplotlib)")  # fmt: skip
    return command


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Prints defaults after each flag and the epilog verbatim."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, argparse.SUPPRESS) or action.default == []:
            return action.help
        return super()._get_help_string(action)


def _root(text: str) -> str:
    if text not in ("all", "-1") and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a rank nor all")
    return "all" if text == "-1" else text


def _checked_options(namespace: argparse.Namespace) -> PerfOptions:
    import_modules(namespace.imports)
    collective = COLLECTIVES[namespace.collective]
    if namespace.minbytes > namespace.maxbytes:
        raise ValueError(f"-b {namespace.minbytes} is larger than -e {namespace.maxbytes}")
    # Raises if the sizes do not grow.
    cli.series(namespace.minbytes, namespace.maxbytes, namespace.stepbytes, namespace.stepfactor)
    compare = tuple(dict.fromkeys(_split_commas(namespace.compare)))
    if unknown := set(compare) - set(PEERS):
        raise ValueError(f"--compare {sorted(unknown)[0]!r} is not one of {', '.join(PEERS)}")
    device, device_reason = _choose_device(namespace, compare)
    if namespace.nproc is None:
        gpus = torch.cuda.device_count() if device == CUDA else 0
        namespace.nproc = max(2, gpus)
    variants = tuple(_variants(namespace, compare, device))
    ops = OPS if namespace.op == "all" else tuple(namespace.op.split(","))
    if unknown := set(ops) - set(OPS):
        raise ValueError(f"-o {sorted(unknown)[0]!r} is not one of {', '.join(OPS)}, all")
    names = tuple(DTYPES) if namespace.datatype == "all" else tuple(namespace.datatype.split(","))
    datatypes = tuple(ALIASES.get(name, name) for name in names)
    if unknown := set(datatypes) - set(DTYPES):
        raise ValueError(f"-d {sorted(unknown)[0]!r} is not one of {', '.join(DTYPES)}, all")
    ops = ops if collective.reduces else ("none",)
    for variant in variants:
        reasons = [
            variant.why_unsupported(collective.name, datatype, op) for datatype in datatypes for op in ops
        ]
        if None not in reasons:
            raise ValueError(reasons[0])
    fields = {
        name: value for name, value in vars(namespace).items() if name in PerfOptions.__dataclass_fields__
    }
    fields |= {
        "ops": ops,
        "datatypes": datatypes,
        "root": None if namespace.root == "all" else int(namespace.root),
        "out_of_place": bool(namespace.out_of_place),
        "quiet": namespace.json == "-",
        "variants": variants,
        "compare": compare,
        "device": device,
        "device_reason": device_reason,
        "imports": tuple(namespace.imports),
    }
    return PerfOptions(**fields)


def _split_commas(texts: list[str] | None) -> list[str]:
    return [name for text in texts or [] for name in text.split(",")]


def _variants(namespace: argparse.Namespace, compare: tuple[str, ...], device: str) -> list[Variant]:
    names = _split_commas(namespace.backend) or ["dtcomm" if device == CUDA else "native"]
    if compare and not any(find_backend(name).supports_codecs for name in names):
        raise ValueError(f"--compare {compare[0]}: --backend {','.join(names)} does not measure dtcomm")
    names += [name for name in compare if name not in names]
    codecs = [str(codec(spec)) for spec in split_codecs(namespace.codec or ["none"])]
    chosen = _split_commas(namespace.algorithm) or ["auto"]
    for name in chosen:
        try:
            if namespace.collective in algorithms.collectives():
                algorithms.require(name, namespace.collective, besides=CHOOSERS)
            elif name != "auto":
                raise ValueError(f"{namespace.collective} has no algorithms")
        except ValueError as error:
            raise ValueError(f"--algorithm {str(error).removeprefix('algorithm: ')}") from None
    variants: list[Variant] = []
    for name in names:
        if not find_backend(name).supports_codecs:
            variants.append(Variant(backend=name, algorithm="own"))
            continue
        for spec in codecs:
            variants += [Variant(backend=name, codec=spec, algorithm=algorithm) for algorithm in chosen]
    if all(variant.algorithm == "own" for variant in variants) and codecs != ["none"]:
        raise ValueError(f"--codec {codecs[0]!r}: {', '.join(names)} sends tensors uncompressed")
    return list(dict.fromkeys(variants))


def _choose_device(namespace: argparse.Namespace, compare: tuple[str, ...]) -> tuple[str, str]:
    """Return the device and, if it was not named, why it was chosen; ValueError names an argument that conflicts."""
    device, reason = namespace.device, ""
    names = [*_split_commas(namespace.backend), *compare]
    if device is None:
        device, reason = _default_device(names)
    if device == CUDA and not placement.cuda_available():
        raise ValueError("--device cuda: torch sees no CUDA device; valid: cpu")
    for name in names:
        if device not in find_backend(name).devices:
            argument = "--compare" if name in compare else "--backend"
            valid = [other for other in backend_names(device) if name not in compare or other in PEERS]
            raise ValueError(
                f"{argument} {name}: has no {device} tensors; valid for {device}: {', '.join(valid)}"
            )
    if namespace.cudagraph and device != CUDA:
        raise ValueError(f"-G {namespace.cudagraph}: CUDA graphs need --device cuda, not {device}")
    if namespace.cudagraph and namespace.blocking:
        raise ValueError(
            f"-z 1: not possible with -G {namespace.cudagraph}; a graph has no barrier between calls"
        )
    return device, reason


def _default_device(names: list[str]) -> tuple[str, str]:
    if not placement.cuda_available():
        return CPU, ""
    if any(CUDA not in find_backend(name).devices for name in names):
        return CPU, "a named backend supports CPU tensors only"
    return CUDA, "torch sees a GPU; --device cpu measures CPU tensors"
