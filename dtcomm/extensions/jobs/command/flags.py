"""Flags of the subcommands of ``dtcomm plan``: their names, their help, and what their texts stand for."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dtcomm import algorithms
from dtcomm.cli import count_argument, parse_size, size_argument
from dtcomm.cli.perf.collectives import ALIASES, DTYPES
from dtcomm.extensions.jobs import hardware, training_model
from dtcomm.extensions.jobs.hardware import not_one_of
from dtcomm.extensions.jobs.layout import RECOMPUTE, SCHEDULES, STAGES
from dtcomm.extensions.jobs.models import PRESETS, ModelShape, find_model, is_preset, model_of_size

DEFAULT_MFU = 0.4  # of large language models on A100s and H100s; Llama 3's report has 38 to 43 %
MAX_LAYERS = 100_000
TRAINING_DTYPES = {
    **dict.fromkeys(("fp32", "float", "float32"), torch.float32),
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "half", "float16"), torch.float16),
}
COMPUTE_OF_DTYPE = {torch.float32: "tf32", torch.bfloat16: "bf16", torch.float16: "fp16"}
COMPUTE_TYPES = ("fp32", "tf32", "bf16", "fp16")
STRATEGIES = ("ddp", "fsdp")


@dataclass(frozen=True, kw_only=True)
class TrainingModel:
    """A training step of data parallelism, on each rank; docs/guides/planning.md has a table of the fields.

    None stands for a default: `DEFAULT_MFU`, the type of tensor cores for ``dtype``, and all parameters as
    ``trainable``. One of ``tokens`` and ``step_ms`` is not None.
    """

    params: float
    tokens: float | None = None
    step_ms: float | None = None
    mfu: float | None = None
    compute: str | None = None
    dtype: torch.dtype = torch.float32
    bucket_bytes: int = training_model.BUCKET_BYTES
    layers: int = 32
    trainable: float | None = None

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.step_ms is None):
            given = "both" if self.tokens is not None else "neither"
            raise ValueError(
                "give tokens=, those of a rank in a step (for example 7B,tokens=8192), or step_ms=, the milliseconds "
                f"that a rank computes in a step; got {given}"
            )
        for name in ("mfu", "compute"):
            if self.step_ms is not None and getattr(self, name) is not None:
                raise ValueError(f"{name}: only valid with tokens=, not with step_ms=")
        if self.learning > self.params:
            raise ValueError(f"trainable: expected at most params, {self.params:g}, got {self.learning:g}")
        if self.layers > MAX_LAYERS:
            raise ValueError(f"layers: expected at most {MAX_LAYERS}, got {self.layers}")
        if not 0 < self.utilization <= 1:
            raise ValueError(f"mfu: expected over 0 and up to 1, got {self.utilization:g}")

    @property
    def learning(self) -> float:
        """``trainable`` or its default."""
        return self.params if self.trainable is None else self.trainable

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
        """FLOPs of a rank in a step: 4 for each parameter and token, 2 more if it learns. None without ``tokens``."""
        return None if self.tokens is None else (4 * self.params + 2 * self.learning) * self.tokens

    def compute_seconds(self, device: hardware.Device) -> float:
        """Return the seconds of computing in a step."""
        if self.step_ms is not None:
            return self.step_ms * 1e-3
        assert self.flops is not None
        try:
            return self.flops / (self.utilization * device.peak_flops(self.compute_type))
        except ValueError as error:
            raise ValueError(f"--model: tokens: {error}; give step_ms= instead") from None


def add_collective(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``dtcomm plan collective``."""
    number, size, names = count_argument(1), size_argument(1), list(algorithms.collectives())
    parser.add_argument("collective", metavar="COLLECTIVE", nargs="?", default="all_reduce", choices=names,
        type=_name_of(names), help=f"{', '.join(names)} (default all_reduce)")  # fmt: skip
    _add_system(parser, cpus=True)
    group = parser.add_argument_group("what to estimate")
    _add_codec(group)
    _add_algorithm(group)
    _add_rows(group, (
        ("-b --minbytes", "SIZE", size, "smallest size (default 1M)"),
        ("-e --maxbytes", "SIZE", size, "largest size (default 1G)"),
        ("-i --stepbytes", "SIZE", size, "step between sizes, instead of -f"),
        ("-f --stepfactor", "N", number, "factor between sizes (default 8)"),
        ("-d --datatype", "TYPE", _datatype, "of the tensor (default float)"),
    ))  # fmt: skip
    parser.set_defaults(minbytes=2**20, maxbytes=2**30, stepfactor=8, datatype=torch.float32)
    _add_output(parser)


def add_step(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``dtcomm plan step``."""
    parser.add_argument("strategy", metavar="ddp|fsdp", nargs="?", choices=STRATEGIES, type=_name_of(STRATEGIES),
        help="ddp all-reduces gradients in buckets; fsdp gathers the parameters of each layer twice and "
        "reduce-scatters its gradients (default ddp)")  # fmt: skip
    keys = (
        f"[trainable=20M] [mfu={DEFAULT_MFU}] [compute={'|'.join(COMPUTE_TYPES)}] [dtype=fp32|bf16|fp16] [bucket=25M] "
        "[layers=32]"
    )
    parser.add_argument_group("the model").add_argument("--model", metavar="K=V,…", type=_model, required=True,
        help=f"params=7B and tokens=8192 (of a rank and step) or step_ms=900; {keys}")  # fmt: skip
    _add_system(parser, cpus=True)
    group = parser.add_argument_group("what to compare")
    _add_codec(group)
    _add_algorithm(group)
    group.add_argument("--parameters", metavar="SPEC", help="codec of what fsdp gathers (default none)")
    _add_output(parser)


def add_job(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``dtcomm plan job``."""
    _add_layouts(parser)
    parser.set_defaults(sites=1, wan=None)


def add_sites(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``dtcomm plan sites``: those of a job, and the links between sites."""
    group = parser.add_argument_group("the sites")
    group.add_argument("--wan", metavar="LINK", type=_link, required=True,
        help="a site's link to the others, as for --between")  # fmt: skip
    _add_rows(group, (
        ("--sites", "N", count_argument(2), "sites of --hosts each (default 2)"),
        ("--rtt", "MS", float, "round trip between sites in milliseconds (default 75)"),
        ("--every", "H", count_argument(1), "inner steps of DiLoCo (default 100)"),
    ))  # fmt: skip
    _add_layouts(parser)
    parser.set_defaults(sites=2, rtt=75.0, every=100)


def _add_layouts(parser: argparse.ArgumentParser) -> None:
    """Add a model, its system, and what fixes parts of its layout."""
    number = count_argument(1)
    group = parser.add_argument_group("the job")
    group.add_argument("--model", metavar="NAME", type=_shape, required=True,
        help=f"{', '.join(PRESETS)}; or params=70B[,layers=80]")  # fmt: skip
    _add_rows(group, (
        ("--seq", "N", number, "tokens of a sequence (default: the model's)"),
        ("--batch", "N", number, "sequences over all ranks (default: 4 Mi tokens)"),
        ("--dtype", "TYPE", _argument(_dtype), "bf16 (default; fp16 on V100), fp16, fp32"),
        ("--trainable", "N", _argument(parse_count), "parameters that learn, as with LoRA (default: all)"),
    ))  # fmt: skip
    group.add_argument("--scores", action="store_true", help="attention stores its scores: no fused kernel")
    _add_codec(group)
    _add_rows(parser.add_argument_group("fix a part of the layout, which is searched otherwise"), (
        ("--dp", "N", number, "data-parallel replicas"),
        ("--tp", "N", number, "ranks of tensor parallelism"),
        ("--pp", "N", number, "pipeline stages"),
        ("--cp", "N", number, "ranks of context parallelism"),
        ("--ep", "N", number, "ranks of expert parallelism"),
        ("--stage", "NAME", _name_of(STAGES), f"what is sharded: {', '.join(STAGES)}"),
        ("--schedule", "NAME", _name_of(SCHEDULES), f"of the pipeline: {', '.join(SCHEDULES)}"),
        ("--micro-batch", "N", number, "sequences of a micro-batch"),
        ("--recompute", "NAME", _name_of(RECOMPUTE), f"in backward: {', '.join(RECOMPUTE)}"),
    ))  # fmt: skip
    _add_system(parser, cpus=False)
    _add_output(parser)


def _add_system(parser: argparse.ArgumentParser, *, cpus: bool) -> None:
    """Add what describes hosts and links; ``cpus`` adds what only CPU ranks have."""
    number = count_argument(1)
    systems = ", ".join(name for name in hardware.SYSTEMS if name != "local")
    links = ", ".join(name for name in hardware.PORTS if not name.endswith("gbit"))
    group = parser.add_argument_group("the system")
    _add_rows(group, (
        ("--system", "NAME", _name_of(hardware.SYSTEMS), f"{systems}; or local (this machine)"),
        ("--inside", "LINK", _link, f"a rank's link in its host: {links}, or N gbit"),
        ("--between", "LINK", _link, "a host's link to other hosts, from the same list"),
        ("--topology", "FILE", existing_file, "JSON of a system, as docs/guides/planning.md has"),
        ("--device", "NAME", _device, "a name of --system, cpu, or NAME,memory=24G,bf16=165T,bandwidth=1008G"),
        ("--hosts", "N", number, "hosts (default 1)"),
        ("--per-host", "N", number, "ranks per host (default 8 on GPUs, 2 for local)"),
        ("--ranks", "N", number, "of all hosts, instead of --hosts or --per-host"),
        ("--nics", "N", number, "network ports of a host"),
        ("--leaf-hosts", "N", number, "hosts below a leaf switch, such as 4 of a fat tree and 32 with rails"),
        ("--oversubscription", "X", float, "by how much links above the leaves are too few"),
    ))  # fmt: skip
    if cpus:
        _add_rows(group, (
            ("--cores", "N", number, "cores of a host of CPU ranks (default: its ranks)"),
            ("--table", "FILE", existing_file, "of `dtcomm tune` (default: the user's, for local)"),
        ))  # fmt: skip
    else:
        parser.set_defaults(cores=None)


def _add_codec(group: Any) -> None:
    group.add_argument(
        "--codec",
        metavar="SPEC",
        action="append",
        help="compared with none: a,b or repeated (default int8)",
    )


def _add_algorithm(group: Any) -> None:
    group.add_argument("--algorithm", metavar="NAME", action="append",
        help="auto (default): the fastest; all; or names")  # fmt: skip


def _add_output(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("output").add_argument
    add("--json", "-J", metavar="FILE", type=_file_to_write, nargs="?", const="-",
        help="JSON: to FILE, or instead of tables")  # fmt: skip


def _add_rows(group: Any, rows: Sequence[tuple[str, str, Callable[[str], Any], str]]) -> None:
    """Add flags, each by its names, its metavar, the type of its value and its help."""
    for names, metavar, kind, text in rows:
        group.add_argument(*names.split(), metavar=metavar, type=kind, help=text)


def existing_file(text: str) -> Path:
    """Return the path of a file that a flag names."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text}: there is no such file")
    return Path(text)


def _file_to_write(text: str) -> str:
    if text != "-" and not Path(text).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {Path(text).parent}")
    return text


def _datatype(text: str) -> torch.dtype:
    name = ALIASES.get(text.lower(), text.lower())
    if name not in DTYPES:
        raise argparse.ArgumentTypeError(not_one_of(text, [*DTYPES, *ALIASES]))
    return DTYPES[name]


def _name_of(valid: Iterable[str]) -> Callable[[str], str]:
    """Return an argparse type for one of some names, in any case."""
    names = list(valid)

    def convert(text: str) -> str:
        if text.lower() not in names:
            raise argparse.ArgumentTypeError(not_one_of(text, names))
        return text.lower()

    return convert


def _argument(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return an argparse type whose errors have the text of the converter's."""

    def checked(text: str) -> Any:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(re.sub("^(device|link|model): ", "", str(error))) from None

    return checked


@_argument
def _device(text: str) -> str:
    hardware.find_device(text)
    return text


@_argument
def _link(text: str) -> str:
    hardware.find_port(text)
    return text


@_argument
def _shape(text: str) -> ModelShape:
    """A model of a whole job: a name, or ``params=70B``, also as ``70B`` and with ``layers=80``."""
    name = text.strip().lower().removeprefix("model=")
    if is_preset(name) or ("=" not in name and not re.match(r"\d", name)):
        return find_model(name)
    keys = [part.partition("=")[0].strip() for part in name.split(",") if "=" in part]
    if step_key := next((key for key in keys if key in STEP_KEYS and key not in JOB_KEYS), None):
        raise ValueError(f"{step_key}=: a key of `dtcomm plan step`; valid for a job: {', '.join(JOB_KEYS)}")
    values = _key_values(text, JOB_KEYS)
    return model_of_size(values["params"], values.get("layers"))


@_argument
def _model(text: str) -> TrainingModel:
    return TrainingModel(**_key_values(text, STEP_KEYS))


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
                keys = ", ".join(converters)
                raise argparse.ArgumentTypeError(f"{part!r}: expected KEY=VALUE; keys: {keys}")
            key, value = "params", part.strip()
        if key not in converters:
            raise argparse.ArgumentTypeError(not_one_of(key, converters))
        name, convert = converters[key]
        if name in values:
            raise argparse.ArgumentTypeError(f"{key}: given twice")
        try:
            values[name] = convert(value)
        except (argparse.ArgumentTypeError, ValueError) as error:
            name_alone = "" if equals else "; the name of a model stands alone, in `dtcomm plan job`"
            raise argparse.ArgumentTypeError(f"{key}: {error}{name_alone}") from None
    if "params" not in values:
        raise argparse.ArgumentTypeError("no params=, the number of parameters, for example params=7B")
    return values


COUNT_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def parse_count(text: str) -> float:
    """Return a number of parameters or tokens, with an optional unit K, M, B or T (powers of 1000)."""
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


#: The keys of ``--model`` for a whole job and for a step: the field of each, and what converts its value.
JOB_KEYS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "params": ("params", parse_count), "layers": ("layers", count_argument(1)),
}  # fmt: skip
STEP_KEYS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "params": ("params", parse_count), "tokens": ("tokens", parse_count), "step_ms": ("step_ms", _positive),
    "mfu": ("mfu", _positive), "compute": ("compute", _name_of(COMPUTE_TYPES)), "dtype": ("dtype", _dtype),
    "bucket": ("bucket_bytes", _bucket_bytes), "layers": ("layers", count_argument(1)),
    "trainable": ("trainable", parse_count),
}  # fmt: skip
