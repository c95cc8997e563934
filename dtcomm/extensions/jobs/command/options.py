"""The command line of ``dtcomm plan``, parsed by `flags` and checked: `parse` returns `PlanOptions`."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from dtcomm import codecs
from dtcomm.cli import series, split_codecs
from dtcomm.cli.perf.collectives import ALIASES, DTYPES
from dtcomm.compress.spec import needs_feedback
from dtcomm.extensions.jobs import hardware, training_model
from dtcomm.extensions.jobs.across_sites import WideArea
from dtcomm.extensions.jobs.command.flags import (
    EPILOG,
    TRAINING_DTYPES,
    TrainingModel,
    add_flags,
    find_port,
    link_rates,
)
from dtcomm.extensions.jobs.hardware import System, not_one_of
from dtcomm.extensions.jobs.layout import RECOMPUTE, SCHEDULES, Job
from dtcomm.extensions.jobs.models import PRESETS, ModelShape
from dtcomm.extensions.jobs.search import FIXABLE
from dtcomm.planner import LinkRates
from dtcomm.planner.links import read_json
from dtcomm.system import allowed_cores

BATCH_TOKENS = 4 * 2**20  # of a step, if --batch is not given: that of Llama 2, and of Llama 3 at its start
RAILS, FAT_TREE = "rails", "fat-tree"
#: Hosts below one leaf switch, if --leaf-hosts is not given: with rails each of a leaf's 32 ports is another host's.
LEAF_HOSTS = {RAILS: 32, FAT_TREE: 4}
WAN_CODECS = ["int8", "int4"]
SCHEMES = ("powersgd", "dgc", "ef21", "diana", "auto")  # of dtcomm.ddp, which are no codecs of messages


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """A whole job to plan, checked. ``job`` is that of one site if ``wide_area`` is not None."""

    job: Job
    fixed: dict[str, Any]
    wide_area: WideArea | None


@dataclass(frozen=True, kw_only=True)
class LinksOptions:
    """Unlike links to plan, checked: ``rates`` are those between ranks, ``sizes`` the bytes of a message."""

    rates: LinkRates
    codecs: Sequence[str]
    sizes: Sequence[int]
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What to estimate, checked. ``parameters`` is the codec of the parameters that FSDP gathers."""

    collective: str
    system: System
    sizes: list[int]
    codecs: list[str]
    parameters: str
    algorithms: list[str]
    dtype: torch.dtype
    model: TrainingModel | None
    job: JobOptions | None
    memory: training_model.ModelSize | None
    record: Path | None
    table: Path | None
    plot: Path | None
    json: str | None
    links: LinksOptions | None = None


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage of 30 flags before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (`{self.prog} --help` lists all flags)\n")


def parse(argv: list[str] | None) -> PlanOptions:
    """Parse a command line; exits with status 2 and a line that names the flag if one is wrong."""
    parser = _Parser(
        prog="dtcomm plan",
        description="Predict the time of a collective, a training step or a whole job, and the gain of codecs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser)
    flags = re.findall(r"--[\w-]+", parser.format_help())
    for flag in (word.partition("=")[0] for word in argv or () if word.startswith("--")):
        if not any(known.startswith(flag) for known in flags):  # before its value is taken for the collective
            parser.error(f"{flag}: no such flag; step_ms and its like are keys of --model")
    return _checked(parser, parser.parse_args(argv))


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
    shape = None
    if isinstance(arguments.model, ModelShape):
        shape, arguments.model = arguments.model, None
    _refuse_beside_jobs(fail, arguments, shape)
    _refuse_combinations(fail, arguments)
    for spec in split_codecs(arguments.codec or []):
        if spec.partition(":")[0] in SCHEMES:
            fail(
                f"--codec {spec}: not modelled, because its messages follow the shapes of the parameters or the steps "
                "before; plan with a codec of as many bits, or measure it with dtcomm.ddp.compress(model, ...)"
            )
    try:
        specs = [str(codecs.codec(spec)) for spec in split_codecs(arguments.codec or ["int8"])]
        parameters = str(codecs.codec(arguments.parameters or "none"))
    except ValueError as error:
        fail(error)
    datatype = (arguments.datatype or "float").lower()
    dtype = ALIASES.get(datatype, datatype)
    if dtype not in DTYPES:
        fail(f"-d: {not_one_of(arguments.datatype, [*DTYPES, *ALIASES])}")
    smallest = 2**20 if arguments.minbytes is None else arguments.minbytes
    largest = 2**30 if arguments.maxbytes is None else arguments.maxbytes
    if largest < smallest:
        fail(f"-e {largest}: less than -b {smallest}")
    links = None
    try:
        rates = None if arguments.links is None else _links(arguments)
        system = _system(arguments)
        factor = 8 if arguments.stepfactor is None else arguments.stepfactor
        sizes = series(smallest, largest, arguments.stepbytes or 0, 1 if arguments.stepbytes else factor)
        if arguments.model is not None:
            arguments.model.compute_seconds(system.device)
        job = _job(arguments, shape, system, specs) if shape is not None else None
    except ValueError as error:
        fail(error)
    if rates is not None:
        links = LinksOptions(rates=rates, codecs=specs, sizes=sizes, dtype=DTYPES[dtype])
    given = {
        name: getattr(arguments, name) for name in ("model", "memory", "record", "table", "plot", "json")
    }
    return PlanOptions(
        collective=arguments.collective or "all_reduce", system=system, sizes=sizes, codecs=specs,
        parameters=parameters,
        algorithms=[name for text in arguments.algorithm or ["auto"] for name in text.split(",")],
        dtype=DTYPES[dtype], job=job, links=links, **given,
    )  # fmt: skip


STEP_COLLECTIVES = {"model": ("all_reduce", "reduce_scatter"), "record": ("all_reduce",)}


def _refuse_combinations(fail: Callable[[object], NoReturn], arguments: argparse.Namespace) -> None:
    """Refuse what would otherwise be ignored."""
    what = [name for name in ("model", "record", "memory") if getattr(arguments, name) is not None]
    if len(what) > 1:
        fail(f"--{what[0]} and --{what[1]}: give one of them")
    chosen = what[0] if what else ""
    where = {"model": "bucket= and layers= of --model", "record": "the record"}.get(chosen, "the model")
    for flag, name in (("-b", "minbytes"), ("-e", "maxbytes"), ("-i", "stepbytes"), ("-f", "stepfactor")):
        if chosen and getattr(arguments, name) is not None:
            fail(f"{flag}: not valid with --{chosen}: the sizes follow from {where}")
    if chosen in ("model", "memory") and arguments.datatype is not None:
        fail(f"-d: not valid with --{chosen}; valid: --{chosen} …,dtype={arguments.datatype}")
    if chosen == "memory":
        for name in ("collective", "codec", "algorithm", "table", "plot"):
            if getattr(arguments, name):
                flag = arguments.collective if name == "collective" else f"--{name}"
                fail(f"{flag}: not valid with --memory, which shows every stage and every form of residuals")
    if chosen == "model" and arguments.model.feedback == "loco" and arguments.collective != "reduce_scatter":
        fail("--model: feedback: 'loco' is FSDP's; valid with all_reduce: none, fp32, bf16, int8")
    valid = STEP_COLLECTIVES.get(chosen, ())
    if valid and arguments.collective not in (None, *valid):
        steps = {
            "all_reduce": "all_reduce (DDP: gradients in buckets)",
            "reduce_scatter": "reduce_scatter (FSDP: gradients are reduce-scattered, parameters gathered twice)",
        }
        listed = " or ".join(steps[name] for name in valid)
        fail(f"{arguments.collective}: no training step of --{chosen} consists of it; valid: {listed}")
    if chosen == "model" and arguments.collective == "reduce_scatter" and arguments.algorithm:
        fail("--algorithm: not valid with reduce_scatter --model: a step of FSDP is planned with auto")
    if arguments.parameters is not None and (chosen, arguments.collective) != ("model", "reduce_scatter"):
        fail(
            "--parameters: only FSDP gathers parameters; valid with reduce_scatter --model. "
            "The codec of gradients is --codec"
        )


JOB_FLAGS = (*FIXABLE, "seq", "batch", "dtype", "scores", "trainable", "sites", "wan", "rtt", "every")
#: Flags of the other plans that would be ignored.
OTHERS = (
    "collective", "minbytes", "maxbytes", "stepbytes", "stepfactor", "datatype", "algorithm", "parameters", "memory",
    "record", "table",
)  # fmt: skip


def _refuse_beside_jobs(
    fail: Callable[[object], NoReturn], arguments: argparse.Namespace, shape: ModelShape | None
) -> None:
    if shape is None:
        for name in JOB_FLAGS:
            if getattr(arguments, name):
                models = f"--model with {', '.join(PRESETS)}, or with params= alone"
                fail(f"--{name.replace('_', '-')}: only valid for a whole job: {models}")
        return
    for name in OTHERS:
        if getattr(arguments, name):
            given = arguments.collective if name == "collective" else f"--{name}"
            if name == "datatype":
                fail(f"-d: not valid for a whole job; valid: --dtype {arguments.datatype}")
            hint = "; for a step of data parallelism give tokens= or step_ms= in --model"
            hint = hint if name == "collective" else ""
            fail(f"{given}: not valid for a whole job (--model {shape.name}){hint}")
    if (arguments.sites is None) != (arguments.wan is None):
        fail("--sites and --wan: give both, for example --sites 2 --wan 1gbit")
    for name in ("rtt", "every"):
        if arguments.wan is None and getattr(arguments, name) is not None:
            fail(f"--{name}: only valid with --sites and --wan")


#: Flags that would be ignored beside --links.
BESIDE_LINKS = (
    "system", "between", "topology", "device", "hosts", "ranks", "nics", "algorithm", "model", "memory", "record",
    "parameters", "plot", "fabric", "leaf_hosts", "oversubscription",
)  # fmt: skip


def _links(arguments: argparse.Namespace) -> LinkRates:
    for name in BESIDE_LINKS:
        if getattr(arguments, name):
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag}: not valid with --links, which describes the system")
    if arguments.collective not in (None, "all_reduce"):
        raise ValueError(f"{arguments.collective}: --links plans an all_reduce")
    if Path(arguments.links).is_file() and (arguments.per_host or arguments.inside):
        raise ValueError("--per-host and --inside: not valid with a file of links between ranks")
    port = find_port("inside", arguments.inside or "memory")
    inside = port.gbytes * 8, port.latency_us + port.message_us
    try:
        return link_rates(arguments.links, arguments.per_host or 1, inside)
    except ValueError as error:
        raise ValueError(f"--links: {error}") from None


def _system(arguments: argparse.Namespace) -> System:
    sources = [name for name in ("system", "inside", "topology") if getattr(arguments, name) is not None]
    if len(sources) > 1:
        raise ValueError(f"--{sources[0]} and --{sources[1]}: give one of them")
    if arguments.topology is not None:
        system = hardware.system_from_dict(read_json(arguments.topology))
    elif arguments.inside is not None or (arguments.between is not None and arguments.system is None):
        inside, between = arguments.inside or "memory", arguments.between or arguments.inside
        find_port("inside", inside), find_port("between", between)
        system = hardware.system_from_links(inside, between, arguments.device, arguments.nics or 1)
    else:
        system = hardware.find_system(arguments.system or "local")
        if arguments.between is not None:
            between = find_port("between", arguments.between)
            system = replace(system, between=between, nics=arguments.nics or 1)
    if arguments.device is not None:
        system = replace(system, device=hardware.find_device(arguments.device), implied_device=False)
    if arguments.nics is not None:
        system = replace(system, nics=arguments.nics)
    system = _with_fabric(arguments, system)
    hosts, per_host = _hosts_and_ranks_per_host(arguments, system)
    if arguments.between is not None and hosts == 1:
        raise ValueError(
            f"--between {arguments.between}: all {per_host} ranks are on one host; valid with --hosts 2 or more, or a "
            "--per-host below --ranks"
        )
    if arguments.cores is not None and system.device.generation:
        device = system.device.name
        raise ValueError(f"--cores {arguments.cores}: only valid for CPU ranks; the device is {device}")
    system = replace(system, hosts=hosts, per_host=per_host, cores=arguments.cores or system.cores)
    if system.name != "local" or system.device.generation:
        return system
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30 / per_host
    cores = arguments.cores or len(allowed_cores())
    return replace(system, cores=cores, device=replace(system.device, memory_gib=memory_gib))


def _with_fabric(arguments: argparse.Namespace, system: System) -> System:
    """Return the system with the switches that the flags describe."""
    fabric, leaf, over = arguments.fabric, arguments.leaf_hosts, arguments.oversubscription
    if fabric is not None and fabric.lower() not in LEAF_HOSTS:
        raise ValueError(f"--fabric: {not_one_of(fabric, LEAF_HOSTS)}")
    if fabric is None and leaf is None and over is None:
        return system
    leaf = leaf or LEAF_HOSTS[(fabric or FAT_TREE).lower()]
    over = system.oversubscription if over is None else over
    try:
        return replace(system, leaf_hosts=leaf, oversubscription=over)
    except ValueError as error:
        raise ValueError(f"--{error}") from None


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


def _job(
    arguments: argparse.Namespace, shape: ModelShape, system: System, specs: Sequence[str]
) -> JobOptions:
    """Return the job that the flags describe; ``specs`` are the codecs to try."""
    device = system.device
    if not device.tflops:
        raise ValueError(
            f"--model {shape.name}: no peak FLOP/s is known for the device {device.name}: a whole job needs "
            "--system or --device of a GPU. For a step of data parallelism give tokens=, those of a rank in a step "
            "(for example tokens=8192), or step_ms="
        )
    default = "bf16" if "bf16" in dict(device.tflops) else "fp16"
    name = (arguments.dtype or default).lower()
    if name not in TRAINING_DTYPES:
        raise ValueError(f"--dtype: {not_one_of(name, TRAINING_DTYPES)}")
    seq = arguments.seq or shape.context
    if shape.positions and seq > shape.positions:
        raise ValueError(f"--seq {seq}: {shape.name} has positions for {shape.positions} tokens")
    sites = arguments.sites or 1
    batch = arguments.batch or system.ranks * sites
    while not arguments.batch and 2 * batch * seq <= BATCH_TOKENS:
        batch *= 2  # a power of two times the ranks divides among most layouts
    if batch % sites:
        raise ValueError(f"--batch {batch}: does not divide among {sites} sites")
    valid = {"stage": training_model.STAGES, "schedule": SCHEDULES, "recompute": RECOMPUTE}
    values = {field: getattr(arguments, field) for field in FIXABLE}
    fixed = {
        field: value.lower() if isinstance(value, str) else value
        for field, value in values.items()
        if value is not None
    }
    for field, names in valid.items():
        if fixed.get(field, names[0]) not in names:
            raise ValueError(f"--{field}: {not_one_of(values[field], names)}")
    wide_area = None
    if arguments.wan is not None:
        rtt = 75.0 if arguments.rtt is None else arguments.rtt
        port = find_port("wan", arguments.wan)
        wide_area = WideArea(sites=sites, port=port, rtt_ms=rtt, every=arguments.every or 100)
    feedback = tuple(spec for spec in specs if needs_feedback(codecs.codec(spec)))
    own: dict[str, Any] = {
        "batch": batch // sites, "seq": seq, "dtype": TRAINING_DTYPES[name], "flash": not arguments.scores,
        "trainable": arguments.trainable,
    }  # fmt: skip
    try:
        job = Job(model=shape, system=system, feedback=feedback, **own)
    except ValueError as error:
        flag = "" if str(error).startswith("trainable") else f"dtype {name}: "
        raise ValueError(f"--{flag}{error}") from None
    return JobOptions(job=job, fixed=fixed, wide_area=wide_area)
