"""Command-line arguments of ``dtcomm plan``, parsed into checked `PlanOptions`."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from dtcomm import algorithms, codecs
from dtcomm.cli import count_argument, parse_size, series, size_argument, split_codecs
from dtcomm.cli.perf.collectives import ALIASES, DTYPES
from dtcomm.extensions.jobs import (
    PRESETS,
    ModelShape,
    find_model,
    hardware,
    is_preset,
    model_of_size,
    training_model,
)
from dtcomm.extensions.jobs.command import job_options
from dtcomm.extensions.jobs.command.links import USAGE, LinksOptions, rates_of
from dtcomm.extensions.jobs.hardware import System, not_one_of
from dtcomm.planner import LinkRates
from dtcomm.planner.links import read_json

EPILOG = """\
examples
  dtcomm plan all_reduce --system h100 --hosts 2 --per-host 8 -b 1M -e 8G -f 8 --codec int8
  dtcomm plan all_reduce --inside nvlink4 --between 400gbit --hosts 4 --codec int8 --codec int4 --plot plan.png
  dtcomm plan all_reduce --system a100 --hosts 16 --model params=1B,tokens=8192 --codec int4
  dtcomm plan reduce_scatter --system h100 --hosts 8 --model params=70B,layers=80,tokens=8192,dtype=bf16
  dtcomm plan --system h100 --hosts 2 --memory params=7B,layers=32,dtype=bf16
  dtcomm plan --inside memory --between 1gbit --hosts 2 --per-host 1 --record steps.json --codec int8
  dtcomm plan --model llama-70b --system h100 --hosts 8 --seq 8192 --batch 512       # a whole job: the best layout
  dtcomm plan --model llama-8b --system h100 --sites 2 --wan 1gbit --rtt 75 --every 100    # across sites
  dtcomm plan --links 0-1=1gbit:75ms,0-2=500mbit:40ms,1-2=1gbit:90ms --per-host 2 --codec int4      # unlike links

With --model, all_reduce is a step of DDP, which all-reduces gradients in buckets, and reduce_scatter one of FSDP, which
gathers parameters twice and reduce-scatters gradients, layer by layer. In params and tokens K, M, B and T are powers of
1000.

Without a codec GPUs use NCCL, which is modelled with its published constants. Payloads of a codec follow dtcomm's
schedules, which are simulated. docs/guides/planning.md describes the models and their accuracy.
algbw and busbw count uncompressed bytes, as nccl-tests does; GB is 1e9 bytes, K, M and G are powers of 1024."""


DEFAULT_MFU = 0.4  # of large language models on A100s and H100s; Llama 3's report has 38 to 43 %
MAX_LAYERS = 100_000
FEEDBACKS = tuple(training_model.RESIDUAL_BYTES)
TRAINING_DTYPES = {
    **dict.fromkeys(("fp32", "float", "float32"), torch.float32),
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "half", "float16"), torch.float16),
}
COMPUTE_OF_DTYPE = {torch.float32: "tf32", torch.bfloat16: "bf16", torch.float16: "fp16"}
COMPUTE_TYPES = ("fp32", "tf32", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class TrainingModel:
    """A training step of data parallelism, on each rank.

    Args:
        params: The number of parameters.
        tokens: Tokens that a rank processes in a step, or None if ``step_ms`` is known.
        step_ms: Milliseconds of computing in a step, without communication, or None if ``tokens`` are known.
        mfu: With ``tokens``, the share of the device's peak FLOP/s that computing reaches; None: `DEFAULT_MFU`.
        compute: With ``tokens``, the type in which matrix products are computed, one of `COMPUTE_TYPES`; None: that
            of tensor cores for ``dtype``.
        dtype: The type of the gradients, and of the parameters that are sent and computed with.
        bucket_bytes: The size of DDP's buckets.
        layers: The number of FSDP's units.
        feedback: The form in which residuals of error feedback are kept; None: DDP's or FSDP's default.
    """

    params: float
    tokens: float | None = None
    step_ms: float | None = None
    mfu: float | None = None
    compute: str | None = None
    dtype: torch.dtype = torch.float32
    bucket_bytes: int = training_model.BUCKET_BYTES
    layers: int = 32
    feedback: str | None = None

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.step_ms is None):
            given = "both" if self.tokens is not None else "neither"
            raise ValueError(
                "give tokens=, those of a rank in a step (for example tokens=8192), or step_ms=, the milliseconds "
                f"that a rank computes in a step; got {given}"
            )
        for name in ("mfu", "compute"):
            if self.step_ms is not None and getattr(self, name) is not None:
                raise ValueError(f"{name}: only valid with tokens=, not with step_ms=")
        if self.layers > MAX_LAYERS:
            raise ValueError(f"layers: expected at most {MAX_LAYERS}, got {self.layers}")
        if not 0 < self.utilization <= 1:
            raise ValueError(f"mfu: expected over 0 and up to 1, got {self.utilization:g}")

    @property
    def utilization(self) -> float:
        """``mfu`` or its default."""
        return DEFAULT_MFU if self.mfu is None else self.mfu

    @property
    def compute_type(self) -> str:
        """``compute`` or its default."""
        return self.compute or COMPUTE_OF_DTYPE[self.dtype]

    @property
    def flops(self) -> float | None:
        """FLOPs of a rank in a step: 6 for each parameter and token, 2 of them forward. None without ``tokens``."""
        return None if self.tokens is None else 6 * self.params * self.tokens

    def compute_seconds(self, device: hardware.Device) -> float:
        """Return the seconds of computing in a step."""
        if self.step_ms is not None:
            return self.step_ms * 1e-3
        assert self.flops is not None
        try:
            return self.flops / (self.utilization * device.peak_flops(self.compute_type))
        except ValueError as error:
            raise ValueError(f"--model: tokens: {error}; give step_ms= instead") from None


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
    job: job_options.JobOptions | None
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
    add = parser.add_argument
    add("collective", nargs="?", type=_name_of(algorithms.collectives()),
        help=f"{', '.join(algorithms.collectives())} (default all_reduce)")  # fmt: skip
    system = parser.add_argument_group("the system")
    add = system.add_argument
    add("--system", metavar="NAME", type=_name_of(hardware.SYSTEMS),
        help=f"{', '.join(name for name in hardware.SYSTEMS if name != 'local')}: nodes of 8 GPUs; or local (this "
        "machine)")  # fmt: skip
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
        type=_name_of(hardware.DEVICES),
        help=f"{', '.join(hardware.DEVICES)}: what computes and encodes, if the link does not imply it",
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
        help="network ports of a host (default: the system's; 1 with --between)",
    )
    add(
        "--cores",
        metavar="N",
        type=count_argument(1),
        help="cores of a host, on which its CPU ranks compute and communicate (default: one for each rank; for local, "
        "this machine's)",
    )
    add(
        "--table",
        metavar="FILE",
        type=Path,
        help="table of `dtcomm tune` (default: the user's table, for local)",
    )
    add("--links", metavar="LINKS",
        help=f"unlike links instead: {USAGE}; --per-host ranks in each site, joined by --inside; or a FILE, such as "
        "a report of `dtcomm doctor --json`. Shows the hierarchy and the codec of each link")  # fmt: skip
    workload = parser.add_argument_group("what to estimate")
    add = workload.add_argument
    add("-b", "--minbytes", metavar="SIZE", type=size_argument(1), help="smallest size (default 1M)")
    add("-e", "--maxbytes", metavar="SIZE", type=size_argument(1), help="largest size (default 1G)")
    add("-i", "--stepbytes", metavar="SIZE", type=size_argument(1), help="step between sizes, instead of -f")
    add("-f", "--stepfactor", metavar="N", type=count_argument(1), help="factor between sizes (default 8)")
    add("-d", "--datatype", metavar="TYPE", help="of the tensor, or of a record's gradients (default float)")
    add(
        "--codec",
        metavar="SPEC",
        action="append",
        default=[],
        help="codec to compare with none; repeated or a,b (default int8)",
    )
    add("--algorithm", metavar="NAME", action="append", default=[],
        help="auto: the fastest for each codec; all: a row for each; or names (default auto)")  # fmt: skip
    add("--model", metavar="K=V,…", type=_model,
        help=f"a whole job: {', '.join(PRESETS)}, or params=70B alone. "
        "Or a step of data parallelism: params=7B and tokens=8192 (of a rank and step) or step_ms=900; "
        f"[mfu={DEFAULT_MFU}] [compute={'|'.join(COMPUTE_TYPES)}] [dtype=fp32|bf16|fp16] [bucket=25M] [layers=32] "
        f"[feedback={'|'.join(FEEDBACKS)}]")  # fmt: skip
    add("--parameters", metavar="SPEC",
        help="codec of the parameters that FSDP gathers, with reduce_scatter --model (default none)")  # fmt: skip
    add("--memory", metavar="K=V,…", type=_memory,
        help="estimate the memory of a model instead: params=7B[,layers=32][,dtype=bf16][,states=2]")  # fmt: skip
    add("--record", metavar="FILE", type=Path,
        help="replay a run's bucket-ready times (written by state.record of dtcomm.ddp) on this system")  # fmt: skip
    job_options.add(parser)
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
    shape = None
    if isinstance(arguments.model, ModelShape):
        shape, arguments.model = arguments.model, None
    job_options.refuse_combinations(fail, arguments, shape)
    _refuse_combinations(fail, arguments)
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
        if arguments.links is not None:
            links = _links(arguments)
        system = _system(arguments)
        factor = 8 if arguments.stepfactor is None else arguments.stepfactor
        sizes = series(smallest, largest, arguments.stepbytes or 0, 1 if arguments.stepbytes else factor)
        if arguments.model is not None:
            arguments.model.compute_seconds(system.device)
        job = job_options.options_of(arguments, shape, system, specs) if shape is not None else None
    except ValueError as error:
        fail(error)
    return PlanOptions(
        collective=arguments.collective or "all_reduce",
        system=system,
        sizes=sizes,
        codecs=specs,
        parameters=parameters,
        algorithms=[name for text in arguments.algorithm or ["auto"] for name in text.split(",")],
        dtype=DTYPES[dtype],
        model=arguments.model,
        job=job,
        memory=arguments.memory,
        record=arguments.record,
        table=arguments.table,
        plot=arguments.plot,
        json=arguments.json,
        links=None
        if links is None
        else LinksOptions(rates=links, codecs=specs, sizes=sizes, dtype=DTYPES[dtype]),
    )


STEP_COLLECTIVES = {"model": ("all_reduce", "reduce_scatter"), "record": ("all_reduce",)}


def _refuse_combinations(fail: Callable[[object], NoReturn], arguments: argparse.Namespace) -> None:
    """Refuse what would otherwise be ignored."""
    what = [name for name in ("model", "record", "memory") if getattr(arguments, name) is not None]
    if len(what) > 1:
        fail(f"--{what[0]} and --{what[1]}: give one of them")
    chosen = what[0] if what else ""
    sizes = [
        flag
        for flag, name in (("-b", "minbytes"), ("-e", "maxbytes"), ("-i", "stepbytes"), ("-f", "stepfactor"))
        if getattr(arguments, name) is not None
    ]
    if chosen and sizes:
        where = {"model": "bucket= and layers= of --model", "record": "the record"}.get(chosen, "the model")
        fail(f"{sizes[0]}: not valid with --{chosen}: the sizes follow from {where}")
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


#: Flags that would be ignored beside --links.
BESIDE_LINKS = (
    "system", "between", "topology", "device", "hosts", "ranks", "nics", "algorithm", "model", "memory", "record",
    "parameters", "plot", "fabric", "leaf_hosts", "oversubscription",
)  # fmt: skip


def _links(arguments: argparse.Namespace) -> LinkRates:
    for name in BESIDE_LINKS:
        if getattr(arguments, name):
            raise ValueError(
                f"--{name.replace('_', '-')}: not valid with --links, which describes the system"
            )
    if arguments.collective not in (None, "all_reduce"):
        raise ValueError(f"{arguments.collective}: --links plans an all_reduce")
    if Path(arguments.links).is_file() and (arguments.per_host or arguments.inside):
        raise ValueError("--per-host and --inside: not valid with a file of links between ranks")
    port = job_options.find_port("inside", arguments.inside or "memory")
    inside = port.gbytes * 8, port.latency_us + port.message_us
    try:
        return rates_of(arguments.links, arguments.per_host or 1, inside)
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
        for flag, link in (("inside", inside), ("between", between)):
            job_options.find_port(flag, link)
        system = hardware.system_from_links(inside, between, arguments.device, arguments.nics or 1)
    else:
        system = hardware.find_system(arguments.system or "local")
        if arguments.between is not None:
            system = replace(
                system, between=job_options.find_port("between", arguments.between), nics=arguments.nics or 1
            )
    if arguments.device is not None:
        system = replace(system, device=hardware.find_device(arguments.device))
    if arguments.nics is not None:
        system = replace(system, nics=arguments.nics)
    system = job_options.with_fabric(arguments, system)
    hosts, per_host = _hosts_and_ranks_per_host(arguments, system)
    if arguments.between is not None and hosts == 1:
        raise ValueError(
            f"--between {arguments.between}: all {per_host} ranks are on one host; valid with --hosts 2 or more, or a "
            "--per-host below --ranks"
        )
    if arguments.cores is not None and system.device.generation:
        raise ValueError(
            f"--cores {arguments.cores}: only valid for CPU ranks; the device is {system.device.name}"
        )
    system = replace(system, hosts=hosts, per_host=per_host, cores=arguments.cores or system.cores)
    if system.name != "local" or system.device.generation:
        return system
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30 / per_host
    return replace(
        system,
        cores=arguments.cores or len(os.sched_getaffinity(0)),
        device=replace(system.device, memory_gib=memory_gib),
    )


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


def _name_of(valid: Iterable[str]) -> Callable[[str], str]:
    """Return an argparse type for one of some names, in any case."""
    names = list(valid)

    def convert(text: str) -> str:
        if text.lower() not in names:
            raise argparse.ArgumentTypeError(not_one_of(text, names))
        return text.lower()

    return convert


def _model(text: str) -> TrainingModel | ModelShape:
    if is_preset(text.strip()):
        return find_model(text.strip())
    keys = [part.partition("=") for part in text.lower().split(",")]
    if any("=" in text and key.strip() == "model" for key, _, _ in keys) or (
        len(keys) == 1 and "=" not in text and not re.match(r"\s*\d", text)
    ):
        try:
            return find_model(text.lower().removeprefix("model="))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    if {key.strip() for key, equals, _ in keys if equals} <= {"params", "layers"}:
        return _whole_model(text)
    converters = {
        "params": ("params", parse_count),
        "tokens": ("tokens", parse_count),
        "step_ms": ("step_ms", _positive),
        "mfu": ("mfu", _positive),
        "compute": ("compute", _name_of(COMPUTE_TYPES)),
        "dtype": ("dtype", _dtype),
        "bucket": ("bucket_bytes", _bucket_bytes),
        "layers": ("layers", count_argument(1)),
        "feedback": ("feedback", _name_of(FEEDBACKS)),
    }
    try:
        return TrainingModel(**_key_values(text, converters))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _whole_model(text: str) -> ModelShape:
    converters = {"params": ("params", parse_count), "layers": ("layers", count_argument(1))}
    values = _key_values(text, converters)
    try:
        return model_of_size(values["params"], values.get("layers"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _memory(text: str) -> training_model.ModelSize:
    converters = {
        "params": ("params", parse_count),
        "layers": ("layers", count_argument(1)),
        "dtype": ("itemsize", lambda value: _dtype(value).itemsize),
        "states": ("states", count_argument(0)),
        "bucket": ("bucket_bytes", _bucket_bytes),
    }
    return training_model.ModelSize(**_key_values(text, converters))


def _key_values(text: str, converters: Mapping[str, tuple[str, Callable[[str], Any]]]) -> dict[str, Any]:
    """Parse ``params=…,key=value,…``; ``converters`` has the field and the converter of each key.

    The first value may stand alone: it is that of ``params``.
    """
    values: dict[str, Any] = {}
    for index, part in enumerate(text.split(",")):
        key, equals, value = (word.strip() for word in part.partition("="))
        key = key.lower()
        if not equals and key not in converters:
            if index:
                raise argparse.ArgumentTypeError(
                    f"{part!r}: expected KEY=VALUE; keys: {', '.join(converters)}"
                )
            key, value = "params", part.strip()
        if key not in converters:
            raise argparse.ArgumentTypeError(not_one_of(key, converters))
        name, convert = converters[key]
        if name in values:
            raise argparse.ArgumentTypeError(f"{key}: given twice")
        try:
            values[name] = convert(value)
        except (argparse.ArgumentTypeError, ValueError) as error:
            raise argparse.ArgumentTypeError(f"{key}: {error}") from None
    if "params" not in values:
        raise argparse.ArgumentTypeError("no params=, the number of parameters, for example params=7B")
    return values


COUNT_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def parse_count(text: str) -> float:
    """Return a number of parameters or tokens, with an optional unit K, M, B or T (powers of 1000).

    Raises:
        ValueError: ``text`` is not such a number, or is 0.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:E\+?\d+)?)\s*([KMBT]?)", text.strip().upper())
    number = float(match[1]) * COUNT_UNITS[match[2]] if match else 0.0
    if not 1 <= number < 1e18:
        raise ValueError(f"{text!r} is not a number of at least 1; valid: 8192, 350M, 70B, 1.5T, 7e9")
    return number


def count_name(count: float) -> str:
    """Return a count such as ``70B`` or ``8,192``, to four digits."""
    for unit in "TBM":
        if count >= 0.9999 * COUNT_UNITS[unit]:
            return f"{count / COUNT_UNITS[unit]:.4g}{unit}"
    return f"{count:,.0f}"


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e18:
        raise ValueError(f"{text!r} is not a number over 0")
    return number


def _dtype(text: str) -> torch.dtype:
    if text.lower() not in TRAINING_DTYPES:
        raise ValueError(not_one_of(text, TRAINING_DTYPES))
    return TRAINING_DTYPES[text.lower()]


def _bucket_bytes(text: str) -> int:
    return max(1, parse_size(text))
