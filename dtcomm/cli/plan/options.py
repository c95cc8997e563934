"""Command-line arguments of ``dtcomm plan``, parsed into checked `Options`."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from dtcomm import algorithms, codecs
from dtcomm.cli._sizes import count_argument, parse_size, series, size_argument
from dtcomm.cli.perf.collectives import ALIASES, DTYPES
from dtcomm.planner import hardware, memory_model
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
class Model:
    """A training step: ``params`` gradients of ``dtype`` in buckets of ``bucket_bytes``, and ``step_ms`` of compute."""

    params: float
    step_ms: float
    dtype: torch.dtype = torch.float32
    bucket_bytes: int = 25 * 2**20


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to estimate, checked."""

    collective: str
    system: System
    sizes: list[int]
    codecs: list[str]
    algorithms: list[str]
    dtype: torch.dtype
    model: Model | None
    memory: memory_model.ModelSize | None
    record: Path | None
    table: Path | None
    plot: Path | None
    json: str | None


def parse(argv: list[str] | None) -> Options:
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
    where = parser.add_argument_group("the system")
    of = where.add_argument
    of("--system", metavar="NAME", choices=list(hardware.SYSTEMS),
        help=f"{', '.join(hardware.SYSTEMS)}: nodes of 8 GPUs, each with a port; or local (this machine)")  # fmt: skip
    of(
        "--inside",
        metavar="LINK",
        help=f"each rank's link inside its host: {', '.join(hardware.PORTS)}, or N gbit",
    )
    of("--between", metavar="LINK", help="a host's link to other hosts, from the same list")
    of(
        "--topology",
        metavar="FILE",
        type=Path,
        help="a JSON file that describes the system; docs/guides/planning.md has an example",
    )
    of(
        "--device",
        metavar="NAME",
        choices=list(hardware.DEVICES),
        help="device that encodes, if the link does not imply it",
    )
    of("--hosts", metavar="N", type=count_argument(1), help="hosts (default 1)")
    of(
        "--per-host",
        metavar="N",
        type=count_argument(1),
        help="ranks per host (default 8 on GPUs, 2 for local)",
    )
    of(
        "--ranks",
        metavar="N",
        type=count_argument(1),
        help="total number of ranks, instead of --hosts or --per-host",
    )
    of(
        "--nics",
        metavar="N",
        type=count_argument(1),
        help="network ports of a host (default 8 with --system, 1 with --between)",
    )
    of(
        "--table",
        metavar="FILE",
        type=Path,
        help="table of `dtcomm tune` (default: the user's table, for local)",
    )
    what = parser.add_argument_group("what to estimate")
    ask = what.add_argument
    ask(
        "-b",
        "--minbytes",
        metavar="SIZE",
        type=size_argument(1),
        default=2**20,
        help="smallest size (default 1M)",
    )
    ask(
        "-e",
        "--maxbytes",
        metavar="SIZE",
        type=size_argument(1),
        default=2**30,
        help="largest size (default 1G)",
    )
    ask("-i", "--stepbytes", metavar="SIZE", type=size_argument(1), help="step between sizes, instead of -f")
    ask(
        "-f",
        "--stepfactor",
        metavar="N",
        type=count_argument(1),
        default=8,
        help="factor between sizes (default 8)",
    )
    ask("-d", "--datatype", metavar="TYPE", default="float", help="of the tensor (default float)")
    ask(
        "--codec",
        metavar="SPEC",
        action="append",
        default=[],
        help="codec to compare with none; may be repeated (default int8)",
    )
    ask("--algorithm", metavar="NAME", action="append", default=[],
        help="auto: the fastest for each codec; all: a row for each; or names (default auto)")  # fmt: skip
    ask("--model", metavar="K=V,…", type=_model,
        help="estimate a training step: params=7e9,step_ms=900[,dtype=bf16][,bucket=25M]")  # fmt: skip
    ask("--memory", metavar="K=V,…", type=_memory,
        help="estimate the memory of a model instead: params=7e9[,layers=32][,dtype=bf16][,states=2]")  # fmt: skip
    ask("--record", metavar="FILE", type=Path,
        help="replay a run's bucket-ready times (written by state.record of dtcomm.ddp) on this system")  # fmt: skip
    out = parser.add_argument_group("output")
    out.add_argument(
        "--plot", metavar="FILE", type=Path, nargs="?", const=Path("plan.png"), help="plot the estimates"
    )
    out.add_argument(
        "--json", "-J", metavar="FILE", nargs="?", const="-", help="JSON: to FILE, or instead of tables"
    )
    given = parser.parse_args(argv)
    return _checked(parser, given)


def _checked(parser: argparse.ArgumentParser, given: argparse.Namespace) -> Options:
    def fail(text: object) -> NoReturn:
        parser.error(str(text))

    for name in ("plot", "json"):
        path = getattr(given, name)
        if path not in (None, "-") and not Path(path).absolute().parent.is_dir():
            fail(f"--{name} {path}: there is no folder {Path(path).parent}")
    for name in ("table", "record", "topology"):
        path = getattr(given, name)
        if path is not None and not path.is_file():
            fail(f"--{name} {path}: there is no such file")
    try:
        chosen = [str(codecs.codec(spec)) for spec in given.codec or ["int8"]]
    except ValueError as error:
        fail(error)
    dtype = ALIASES.get(given.datatype, given.datatype)
    if dtype not in DTYPES:
        fail(f"-d {given.datatype}: want one of {', '.join([*DTYPES, *ALIASES])}")
    if given.maxbytes < given.minbytes:
        fail(f"-e {given.maxbytes}: less than -b {given.minbytes}")
    try:
        where = _system(given)
        sizes = series(
            given.minbytes, given.maxbytes, given.stepbytes or 0, 1 if given.stepbytes else given.stepfactor
        )
    except ValueError as error:
        fail(error)
    return Options(
        collective=given.collective,
        system=where,
        sizes=sizes,
        codecs=chosen,
        algorithms=[name for text in given.algorithm or ["auto"] for name in text.split(",")],
        dtype=DTYPES[dtype],
        model=given.model,
        memory=given.memory,
        record=given.record,
        table=given.table,
        plot=given.plot,
        json=given.json,
    )


def _system(given: argparse.Namespace) -> System:
    named = [n for n in ("system", "inside", "topology") if getattr(given, n) is not None]
    if len(named) > 1:
        raise ValueError(f"--{named[0]} and --{named[1]}: give one of them")
    if given.topology is not None:
        found = hardware.system_from_dict(hardware.read_json(given.topology))
    elif given.inside is not None or (given.between is not None and given.system is None):
        inside, between = given.inside or "memory", given.between or given.inside
        found = hardware.system_from_links(inside, between, given.device, given.nics or 1)
    else:
        found = hardware.find_system(given.system or "local")
        if given.between is not None:
            found = replace(found, between=hardware.find_port(given.between), nics=given.nics or 1)
    if given.device is not None:
        found = replace(found, device=hardware.DEVICES[given.device])
    if given.nics is not None:
        found = replace(found, nics=given.nics)
    hosts, per_host = _shape(given, found)
    cores = len(os.sched_getaffinity(0)) if found.name == "local" else found.cores
    return replace(found, hosts=hosts, per_host=per_host, cores=cores)


def _shape(given: argparse.Namespace, found: System) -> tuple[int, int]:
    hosts, per_host, ranks = given.hosts, given.per_host, given.ranks
    if ranks is None:
        return hosts or found.hosts, per_host or found.per_host
    if hosts and per_host and hosts * per_host != ranks:
        raise ValueError(f"--ranks {ranks}: {hosts} hosts of {per_host} are {hosts * per_host}")
    if per_host is None:
        per_host = ranks // hosts if hosts else min(ranks, found.per_host)
    if per_host < 1 or ranks % per_host or (hosts and hosts * per_host != ranks):
        raise ValueError(f"--ranks {ranks}: does not divide into hosts of {max(per_host, 1)}")
    return ranks // per_host, per_host


def _model(text: str) -> Model:
    fields: dict[str, Any] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        try:
            match key.strip():
                case "params" | "step_ms":
                    fields[key.strip()] = float(value)
                    if not 0 < fields[key.strip()] < 1e18:
                        raise ValueError
                case "dtype":
                    fields["dtype"] = DTYPES[ALIASES.get(value, value)]
                case "bucket":
                    fields["bucket_bytes"] = max(1, parse_size(value))
                case _:
                    raise argparse.ArgumentTypeError(f"{key!r} is not one of params, step_ms, dtype, bucket")
        except (ValueError, KeyError):
            raise argparse.ArgumentTypeError(f"{part!r}: not a value for {key}") from None
    if missing := {"params", "step_ms"} - set(fields):
        raise argparse.ArgumentTypeError(f"no {sorted(missing)[0]}=")
    return Model(**fields)


def _memory(text: str) -> memory_model.ModelSize:
    fields: dict[str, Any] = {}
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        try:
            match key:
                case "params":
                    fields[key] = float(value)
                    if not 0 < fields[key] < 1e18:
                        raise ValueError
                case "layers":
                    fields[key] = count_argument(1)(value)
                case "states":
                    fields[key] = 0 if value == "0" else count_argument(1)(value)
                case "dtype":
                    fields["itemsize"] = DTYPES[ALIASES.get(value, value)].itemsize
                case "bucket":
                    fields["bucket_bytes"] = max(1, parse_size(value))
                case _:
                    raise argparse.ArgumentTypeError(
                        f"{key!r} is not one of params, layers, dtype, states, bucket"
                    )
        except (ValueError, KeyError):
            raise argparse.ArgumentTypeError(f"{part!r}: not a value for {key}") from None
    if "params" not in fields:
        raise argparse.ArgumentTypeError("no params=")
    return memory_model.ModelSize(**fields)
