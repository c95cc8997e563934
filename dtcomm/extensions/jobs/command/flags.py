"""Flags of ``dtcomm plan``: their names, their help, and what their texts stand for."""

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
from dtcomm.extensions.jobs import hardware, training_model
from dtcomm.extensions.jobs.hardware import not_one_of
from dtcomm.extensions.jobs.layout import RECOMPUTE, SCHEDULES
from dtcomm.extensions.jobs.models import PRESETS, ModelShape, find_model, is_preset, model_of_size
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
    """A training step of data parallelism, on each rank; docs/guides/planning.md has a table of the fields.

    None stands for a default: `DEFAULT_MFU`, the type of tensor cores for ``dtype``, DDP's or FSDP's ``feedback``, and
    all parameters as ``trainable``. One of ``tokens`` and ``step_ms`` is not None.
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
    trainable: float | None = None

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


LINKS_USAGE = (
    "A-B=RATE[:ROUND_TRIP], of sites or hosts numbered from 0, such as "
    "0-1=1gbit:75ms,0-2=500mbit:40ms,1-2=1gbit:90ms"
)
_RATES = {"gbit": 1.0, "mbit": 1e-3}
_TIMES = {"us": 1.0, "ms": 1e3, "s": 1e6}
_LINK = re.compile(
    r"(?P<a>\d+)-(?P<b>\d+)=(?P<rate>\d+(?:\.\d+)?)(?P<unit>gbit|mbit)(?::(?P<time>\d+(?:\.\d+)?)(?P<of>us|ms|s))?"
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags to a parser."""
    number, size = count_argument(1), size_argument(1)
    collectives = list(algorithms.collectives())
    systems = ", ".join(name for name in hardware.SYSTEMS if name != "local")
    add = parser.add_argument
    add("collective", nargs="?", type=_name_of(collectives),
        help=f"{', '.join(collectives)} (default all_reduce)")  # fmt: skip
    _add_rows(parser.add_argument_group("the system"), (
        ("--system", "NAME", _name_of(hardware.SYSTEMS), f"{systems}: nodes of 8 GPUs, or workstations of one; or "
         "local (this machine)"),
        ("--inside", "LINK", str, f"each rank's link inside its host: {', '.join(hardware.PORTS)}, or N gbit"),
        ("--between", "LINK", str, "a host's link to other hosts, from the same list"),
        ("--topology", "FILE", Path, "a JSON file that describes the system; docs/guides/planning.md has an example"),
        ("--device", "NAME", _device, f"{', '.join(hardware.DEVICES)}, or NAME,memory=24G,bf16=165T,bandwidth=1008G: "
         "what computes and encodes"),
        ("--hosts", "N", number, "hosts (default 1)"),
        ("--per-host", "N", number, "ranks per host (default 8 on GPUs, 2 for local)"),
        ("--ranks", "N", number, "total number of ranks, instead of --hosts or --per-host"),
        ("--nics", "N", number, "network ports of a host (default: the system's; 1 with --between)"),
        ("--cores", "N", number, "cores of a host, on which its CPU ranks compute and communicate (default: one for "
         "each rank; for local, this machine's)"),
        ("--table", "FILE", Path, "table of `dtcomm tune` (default: the user's table, for local)"),
        ("--links", "LINKS", str, f"unlike links instead: {LINKS_USAGE}; --per-host ranks in each site, joined by "
         "--inside; or a FILE, such as a report of `dtcomm doctor --json`. Shows the hierarchy and the codec of each "
         "link"),
    ))  # fmt: skip
    workload = parser.add_argument_group("what to estimate")
    add = workload.add_argument
    append: dict[str, Any] = {"action": "append", "default": []}
    add(
        "--codec", metavar="SPEC", **append, help="codec to compare with none; repeated or a,b (default int8)"
    )
    add("--algorithm", metavar="NAME", **append,
        help="auto: the fastest for each codec; all: a row for each; or names (default auto)")  # fmt: skip
    _add_rows(workload, (
        ("-b --minbytes", "SIZE", size, "smallest size (default 1M)"),
        ("-e --maxbytes", "SIZE", size, "largest size (default 1G)"),
        ("-i --stepbytes", "SIZE", size, "step between sizes, instead of -f"),
        ("-f --stepfactor", "N", number, "factor between sizes (default 8)"),
        ("-d --datatype", "TYPE", str, "of the tensor, or of a record's gradients (default float)"),
        ("--model", "K=V,…", _model, f"a whole job: {', '.join(PRESETS)}, or params=70B alone. Or a step of data "
         "parallelism: params=7B and tokens=8192 (of a rank and step) or step_ms=900; "
         f"[trainable=20M] [mfu={DEFAULT_MFU}] [compute={'|'.join(COMPUTE_TYPES)}] [dtype=fp32|bf16|fp16] "
         f"[bucket=25M] [layers=32] [feedback={'|'.join(FEEDBACKS)}]"),
        ("--parameters", "SPEC", str, "codec of the parameters that FSDP gathers, with reduce_scatter --model "
         "(default none)"),
        ("--memory", "K=V,…", _memory,
         "estimate the memory of a model instead: params=7B[,layers=32][,dtype=bf16][,states=2][,trainable=20M]"
         "[,tokens=8192]"),
        ("--record", "FILE", Path,
         "replay a run's bucket-ready times (written by state.record of dtcomm.ddp) on this system"),
    ))  # fmt: skip
    jobs = parser.add_argument_group("whole jobs (--model NAME, or --model params=N alone)")
    jobs.add_argument("--scores", action="store_true", help="attention stores its scores: no fused kernel")
    _add_rows(jobs, (
        ("--seq", "N", number, "tokens of a sequence (default: the model's)"),
        ("--batch", "N", number,
         "sequences of a step, over all ranks (default: 4 Mi tokens, at least one for each rank)"),
        ("--dtype", "TYPE", str, "of parameters and activations: bf16 (default; fp16 on V100), fp16, fp32"),
        ("--dp", "N", number, "fix the data-parallel replicas"),
        ("--tp", "N", number, "fix the ranks of tensor parallelism"),
        ("--pp", "N", number, "fix the pipeline stages"),
        ("--cp", "N", number, "fix the ranks of context parallelism"),
        ("--ep", "N", number, "fix the ranks of expert parallelism"),
        ("--stage", "NAME", str, f"fix what data parallelism shards: {', '.join(training_model.STAGES)}"),
        ("--schedule", "NAME", str, f"fix the pipeline's schedule: {', '.join(SCHEDULES)}"),
        ("--micro-batch", "N", number, "fix the sequences of a micro-batch"),
        ("--recompute", "NAME", str, f"fix what backward computes again: {', '.join(RECOMPUTE)}"),
        ("--trainable", "N", _argument(parse_count), "parameters that learn, such as LoRA's: 20M (default: all)"),
        ("--fabric", "NAME", str, "rails or fat-tree: 32 or 4 hosts below a leaf switch (with any plan)"),
        ("--leaf-hosts", "N", number, "hosts below a leaf switch"),
        ("--oversubscription", "X", float, "by how much links above the leaves are too few"),
        ("--sites", "N", count_argument(2), "sites of --hosts each, joined by --wan"),
        ("--wan", "LINK", str, "a site's link to the others, as for --between"),
        ("--rtt", "MS", float, "round trip between sites in milliseconds (default 75)"),
        ("--every", "H", number, "inner steps of DiLoCo (default 100)"),
    ))  # fmt: skip
    add = parser.add_argument_group("output").add_argument
    add("--plot", metavar="FILE", type=Path, nargs="?", const=Path("plan.png"), help="plot the estimates")
    add("--json", "-J", metavar="FILE", nargs="?", const="-", help="JSON: to FILE, or instead of tables")


def _add_rows(group: Any, rows: Sequence[tuple[str, str, Callable[[str], Any], str]]) -> None:
    """Add flags, each by its names, its metavar, the type of its value and its help."""
    for names, metavar, kind, text in rows:
        group.add_argument(*names.split(), metavar=metavar, type=kind, help=text)


def find_port(flag: str, link: str) -> hardware.Port:
    """Return the port that a flag names; ValueError names the flag and lists the links."""
    try:
        return hardware.find_port(link)
    except ValueError as error:
        raise ValueError(f"--{flag}: {str(error).removeprefix('link: ')}") from None


def link_rates(text: str, per_host: int, inside: tuple[float, float]) -> LinkRates:
    """Return the links that a flag describes: `LINKS_USAGE`, or a file that `LinkRates.of` reads, of links of ranks.

    ``per_host`` and ``inside``, (Gbit/s, microseconds), are those of the ranks of a site; not used with a file.
    """
    path = Path(text)
    if path.is_file():
        return LinkRates.of(read_json(path))
    links: dict[tuple[int, int], tuple[float, float]] = {}
    for part in text.lower().replace(" ", "").split(","):
        match = _LINK.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is not a link, and {text!r} is no file; expected {LINKS_USAGE}")
        pair = int(match["a"]), int(match["b"])
        if pair in links or pair[::-1] in links:
            raise ValueError(f"{match['a']}-{match['b']}: given twice")
        one_way = float(match["time"] or 0) * _TIMES[match["of"] or "us"] / 2
        links[pair] = float(match["rate"]) * _RATES[match["unit"]], one_way
    return LinkRates.between_sites(links, per_host, inside)


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
            raise argparse.ArgumentTypeError(str(error).removeprefix("device: ")) from None

    return checked


@_argument
def _device(text: str) -> str:
    hardware.find_device(text)
    return text


@_argument
def _model(text: str) -> TrainingModel | ModelShape:
    if is_preset(text.strip()):
        return find_model(text.strip())
    keys = [part.partition("=") for part in text.lower().split(",")]
    if any("=" in text and key.strip() == "model" for key, _, _ in keys) or (
        len(keys) == 1 and "=" not in text and not re.match(r"\s*\d", text)
    ):
        return find_model(text.lower().removeprefix("model="))
    if {key.strip() for key, equals, _ in keys if equals} <= {"params", "layers"}:
        shape = {"params": ("params", parse_count), "layers": ("layers", count_argument(1))}
        values = _key_values(text, shape)
        return model_of_size(values["params"], values.get("layers"))
    converters = {
        "params": ("params", parse_count), "tokens": ("tokens", parse_count), "step_ms": ("step_ms", _positive),
        "mfu": ("mfu", _positive), "compute": ("compute", _name_of(COMPUTE_TYPES)), "dtype": ("dtype", _dtype),
        "bucket": ("bucket_bytes", _bucket_bytes), "layers": ("layers", count_argument(1)),
        "feedback": ("feedback", _name_of(FEEDBACKS)), "trainable": ("trainable", parse_count),
    }  # fmt: skip
    return TrainingModel(**_key_values(text, converters))


def _memory(text: str) -> training_model.ModelSize:
    converters = {
        "params": ("params", parse_count), "layers": ("layers", count_argument(1)),
        "dtype": ("itemsize", lambda value: _dtype(value).itemsize), "states": ("states", count_argument(0)),
        "trainable": ("trainable", parse_count), "tokens": ("tokens", parse_count),
        "bucket": ("bucket_bytes", _bucket_bytes),
    }  # fmt: skip
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
            name_alone = "" if equals else "; the name of a model stands alone, without KEY=VALUE"
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
