"""Command-line arguments of ``dtcomm plan``, parsed into checked `PlanOptions`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from dtcomm import algorithms, codecs
from dtcomm.cli._sizes import count_argument, parse_size, series, size_argument
from dtcomm.cli.perf.collectives import ALIASES, DTYPES
from dtcomm.planner import hardware, training_model
from dtcomm.planner.hardware import System

EPILOG = """\
examples
  dtcomm plan all_reduce --system h100 --hosts 2 --per-host 8 -b 1M -e 8G -f 8 --codec int8
  dtcomm plan all_reduce --inside nvlink4 --between 400gbit --hosts 4 --codec int8 --codec int4 --plot plan.png
  dtcomm plan all_reduce --system a100 --hosts 16 --model params=7e9,step_ms=900 --codec int4
  dtcomm plan --system h100 --hosts 2 --memory params=7e9,layers=32,dtype=bf16
  dtcomm plan all_reduce --inside memory --between 1gbit --hosts 2 --per-host 1 --record steps.json --codec int8

Without a codec GPUs use NCCL, which is modelled with its published constants. Payloads of a codec follow dtcomm's
schedules, which are simulated. docs/guides/planning.md describes the models and their accuracy.
algbw and busbw count uncompressed bytes, as nccl-tests does; GB is 1e9 bytes, K, M and G are powers of 1024."""


@dataclass(frozen=True, kw_only=True)
class TrainingModel:
    """A training step: ``params`` gradients of ``dtype`` in buckets of ``bucket_bytes``, and ``step_ms`` of compute."""

    params: float
    step_ms: float
    dtype: torch.dtype = torch.float32
    bucket_bytes: int = 25 * 2**20


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What to estimate, checked."""

    collective: str
    system: System
    sizes: list[int]
    codecs: list[str]
    algorithms: list[str]
    dtype: torch.dtype
    model: TrainingModel | None
    memory: training_model.ModelSize | None
    record: Path | None
    table: Path | None
    plot: Path | None
    json: str | None


def parse(argv: list[str] | None) -> PlanOptions:
    """Parse a command line; exits with status 2 and a line that names the flag if one is wrong."""
    parser = argparse.ArgumentParser(
        prog="dtcomm plan",
        description="Predict the time of a collective on a system, and the gain of codecs and algorithms.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("collective", nargs="?", default="all_reduce", choices=algorithms.collectives(),
        help="default all_reduce")  # fmt: skip
    system = parser.add_argument_group("the system")
    add = system.add_argument
    add("--system", metavar="NAME", choices=list(hardware.SYSTEMS),
        help=f"{', '.join(hardware.SYSTEMS)}: nodes of 8 GPUs, each with a port; or local (this machine)")  # fmt: skip
    add(
        "--inside",
        metavar="LINK",
        help=f"each rank's link inside its host: {', '.join(hardware.PORTS)}, or N gbit",
    )
    add("--between", metavar="LINK", help="a host's link to other hosts, from the same list")
    add(
        "--topology",
        metavar="FILE",
        type=Path,
        help="a JSON file that describes the system; docs/guides/planning.md has an example",
    )
    add(
        "--device",
        metavar="NAME",
        choices=list(hardware.DEVICES),
        help="device that encodes, if the link does not imply it",
    )
    add("--hosts", metavar="N", type=count_argument(1), help="hosts (default 1)")
    add(
        "--per-host",
        metavar="N",
        type=count_argument(1),
        help="ranks per host (default 8 on GPUs, 2 for local)",
    )
    add(
        "--ranks",
        metavar="N",
        type=count_argument(1),
        help="total number of ranks, instead of --hosts or --per-host",
    )
    add(
        "--nics",
        metavar="N",
        type=count_argument(1),
        help="network ports of a host (default 8 with --system, 1 with --between)",
    )
    add(
        "--table",
        metavar="FILE",
        type=Path,
        help="table of `dtcomm tune` (default: the user's table, for local)",
    )
    workload = parser.add_argument_group("what to estimate")
    add = workload.add_argument
    add(
        "-b",
        "--minbytes",
        metavar="SIZE",
        type=size_argument(1),
        default=2**20,
        help="smallest size (default 1M)",
    )
    add(
        "-e",
        "--maxbytes",
        metavar="SIZE",
        type=size_argument(1),
        default=2**30,
        help="largest size (default 1G)",
    )
    add("-i", "--stepbytes", metavar="SIZE", type=size_argument(1), help="step between sizes, instead of -f")
    add(
        "-f",
        "--stepfactor",
        metavar="N",
        type=count_argument(1),
        default=8,
        help="factor between sizes (default 8)",
    )
    add("-d", "--datatype", metavar="TYPE", default="float", help="of the tensor (default float)")
    add(
        "--codec",
        metavar="SPEC",
        action="append",
        default=[],
        help="codec to compare with none; may be repeated (default int8)",
    )
    add("--algorithm", metavar="NAME", action="append", default=[],
        help="auto: the fastest for each codec; all: a row for each; or names (default auto)")  # fmt: skip
    add("--model", metavar="K=V,…", type=_model,
        help="estimate a training step: params=7e9,step_ms=900[,dtype=bf16][,bucket=25M]")  # fmt: skip
    add("--memory", metavar="K=V,…", type=_memory,
        help="estimate the memory of a model instead: params=7e9[,layers=32][,dtype=bf16][,states=2]")  # fmt: skip
    add("--record", metavar="FILE", type=Path,
        help="replay a run's bucket-ready times (written by state.record of dtcomm.ddp) on this system")  # fmt: skip
    output = parser.add_argument_group("output")
    output.add_argument(
        "--plot", metavar="FILE", type=Path, nargs="?", const=Path("plan.png"), help="plot the estimates"
    )
    output.add_argument(
        "--json", "-J", metavar="FILE", nargs="?", const="-", help="JSON: to FILE, or instead of tables"
    )
    arguments = parser.parse_args(argv)
    return _checked(parser, arguments)


def _checked(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> PlanOptions:
    def fail(text: object) -> NoReturn:
        parser.error(str(text))

    for name in ("plot", "json"):
        path = getattr(arguments, name)
        if path not in (None, "-") and not Path(path).absolute().parent.is_dir():
            fail(f"--{name} {path}: there is no folder {Path(path).parent}")
    for name in ("table", "record", "topology"):
        path = getattr(arguments, name)
        if path is not None and not path.is_file():
            fail(f"--{name} {path}: there is no such file")
    try:
        specs = [str(codecs.codec(spec)) for spec in arguments.codec or ["int8"]]
    except ValueError as error:
        fail(error)
    dtype = ALIASES.get(arguments.datatype, arguments.datatype)
    if dtype not in DTYPES:
        fail(f"-d {arguments.datatype}: want one of {', '.join([*DTYPES, *ALIASES])}")
    if arguments.maxbytes < arguments.minbytes:
        fail(f"-e {arguments.maxbytes}: less than -b {arguments.minbytes}")
    try:
        system = _system(arguments)
        sizes = series(
            arguments.minbytes,
            arguments.maxbytes,
            arguments.stepbytes or 0,
            1 if arguments.stepbytes else arguments.stepfactor,
        )
    except ValueError as error:
        fail(error)
    return PlanOptions(
        collective=arguments.collective,
        system=system,
        sizes=sizes,
        codecs=specs,
        algorithms=[name for text in arguments.algorithm or ["auto"] for name in text.split(",")],
        dtype=DTYPES[dtype],
        model=arguments.model,
        memory=arguments.memory,
        record=arguments.record,
        table=arguments.table,
        plot=arguments.plot,
        json=arguments.json,
    )


def _system(arguments: argparse.Namespace) -> System:
    sources = [name for name in ("system", "inside", "topology") if getattr(arguments, name) is not None]
    if len(sources) > 1:
        raise ValueError(f"--{sources[0]} and --{sources[1]}: give one of them")
    if arguments.topology is not None:
        system = hardware.system_from_dict(hardware.read_json(arguments.topology))
    elif arguments.inside is not None or (arguments.between is not None and arguments.system is None):
        inside, between = arguments.inside or "memory", arguments.between or arguments.inside
        system = hardware.system_from_links(inside, between, arguments.device, arguments.nics or 1)
    else:
        system = hardware.find_system(arguments.system or "local")
        if arguments.between is not None:
            system = replace(system, between=hardware.find_port(arguments.between), nics=arguments.nics or 1)
    if arguments.device is not None:
        system = replace(system, device=hardware.DEVICES[arguments.device])
    if arguments.nics is not None:
        system = replace(system, nics=arguments.nics)
    hosts, per_host = _hosts_and_ranks_per_host(arguments, system)
    cores = len(os.sched_getaffinity(0)) if system.name == "local" else system.cores
    return replace(system, hosts=hosts, per_host=per_host, cores=cores)


def _hosts_and_ranks_per_host(arguments: argparse.Namespace, system: System) -> tuple[int, int]:
    hosts, per_host, ranks = arguments.hosts, arguments.per_host, arguments.ranks
    if ranks is None:
        return hosts or system.hosts, per_host or system.per_host
    if hosts and per_host and hosts * per_host != ranks:
        raise ValueError(f"--ranks {ranks}: {hosts} hosts of {per_host} are {hosts * per_host}")
    if per_host is None:
        per_host = ranks // hosts if hosts else min(ranks, system.per_host)
    if per_host < 1 or ranks % per_host or (hosts and hosts * per_host != ranks):
        raise ValueError(f"--ranks {ranks}: does not divide into hosts of {max(per_host, 1)}")
    return ranks // per_host, per_host


def _model(text: str) -> TrainingModel:
    converters = {
        "params": ("params", _positive),
        "step_ms": ("step_ms", _positive),
        "dtype": ("dtype", _dtype),
        "bucket": ("bucket_bytes", _bucket_bytes),
    }
    return TrainingModel(**_key_values(text, converters, required=("params", "step_ms")))


def _memory(text: str) -> training_model.ModelSize:
    converters = {
        "params": ("params", _positive),
        "layers": ("layers", count_argument(1)),
        "dtype": ("itemsize", lambda value: _dtype(value).itemsize),
        "states": ("states", count_argument(0)),
        "bucket": ("bucket_bytes", _bucket_bytes),
    }
    return training_model.ModelSize(**_key_values(text, converters, required=("params",)))


def _key_values(
    text: str, converters: Mapping[str, tuple[str, Callable[[str], Any]]], required: Sequence[str]
) -> dict[str, Any]:
    """Parse ``key=value,...``; ``converters`` has the field and the converter of each key."""
    values: dict[str, Any] = {}
    for part in text.split(","):
        key, _, value = (word.strip() for word in part.partition("="))
        if key not in converters:
            raise argparse.ArgumentTypeError(f"{key!r} is not one of {', '.join(converters)}")
        name, convert = converters[key]
        try:
            values[name] = convert(value)
        except (ValueError, KeyError):
            raise argparse.ArgumentTypeError(f"{part!r}: not a value for {key}") from None
    for key in required:
        if key not in values:
            raise argparse.ArgumentTypeError(f"no {key}=")
    return values


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < 1e18:
        raise ValueError
    return number


def _dtype(text: str) -> torch.dtype:
    return DTYPES[ALIASES.get(text, text)]


def _bucket_bytes(text: str) -> int:
    return max(1, parse_size(text))
