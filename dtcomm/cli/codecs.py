"""Command ``dtcomm codecs``: the size, error and speed of each codec, on random samples and on your own tensors.

The error is computed in float64, on random distributions with fixed seeds and on a user's tensors. The speed is that
of one core, timed by the thread's CPU clock. `measure_codecs` measures a list of codecs.
"""

from __future__ import annotations

import argparse
import itertools
import math
import pickle
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console

from dtcomm import measure as device_info
from dtcomm.cli import count_argument, new_table, show_progress, size_argument, split_codecs, write_json
from dtcomm.cli.perf.args import add_import_argument, import_modules
from dtcomm.codecs import Codec, codec, names
from dtcomm.codecs.base import FLOAT_TYPES
from dtcomm.codecs.spec import TIERS, VARIABLE_LENGTH, tier
from dtcomm.kernels import counter_rng, current
from dtcomm.kernels.ops import decode, encode

VERSION = 1  # of the JSON
WIDTH = 112  # least columns of the table; a narrower terminal wraps its lines
PIPE_WIDTH = 400  # columns if the output is not a terminal
#: Options shown in addition to the defaults, by codec name; a space separates variants.
VARIANTS = {
    "bf16": "round=stochastic",
    "int8": "block=256 symmetric=false round=stochastic",
    "int4": "block=128 symmetric=false round=stochastic rotate=hadamard spikes=1 "
    "block=128,rotate=hadamard block=128,spikes=1",
    "int3": "symmetric=false rotate=hadamard block=128,rotate=hadamard block=128,spikes=1",
    "int2": "symmetric=false symmetric=false,rotate=hadamard symmetric=false,spikes=1 "
    "block=128,symmetric=false,rotate=hadamard block=128,symmetric=false,spikes=1",
    "fp8_e4m3": "round=stochastic",
    "fp8_e3m4": "round=stochastic",
    "mxfp8": "element=e5m2",
    "mxfp4": "rotate=hadamard",
    "intv": "width=4",
    "sign": "rotate=hadamard",
    "topk": "ratio=0.1 ratio=0.1,values=int8",
    "randk": "ratio=0.1 positions=shared",
    "exact": "bits=16",
}


#: Elements of each distribution; with as many, another seed changes an error by less than one percent.
NUMEL = 1 << 18


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Flat fp32 tensors that are encoded separately and whose errors are added; ``name`` is the column head."""

    name: str
    tensors: dict[str, torch.Tensor]


def distributions(numel: int = NUMEL) -> list[Sample]:
    """Return the samples, which are the same on every machine.

    They are Gaussian, Laplace (peaked, like many gradients) and Student's t with 3 degrees of freedom, whose tails are
    so heavy that its fourth moment does not exist. All have mean zero.
    """
    drawn = {
        "Gaussian": np.random.default_rng(1).standard_normal(numel),
        "Laplace": np.random.default_rng(2).laplace(size=numel),
        "Student-t": np.random.default_rng(3).standard_t(3, size=numel),
    }
    return [
        Sample(name=name, tensors={name: torch.from_numpy(x.astype(np.float32))}) for name, x in drawn.items()
    ]


def load_sample(path: Path) -> Sample:
    """Read the floating-point tensors of a ``.npy`` or ``.pt`` file without executing code in it.

    A ``.pt`` file holds a tensor, or dicts and lists of tensors such as a state dict. ValueError if there are none.
    """
    if not path.is_file():
        raise ValueError(f"--tensor {path}: no such file")
    try:
        content = _read_file(path)
    except pickle.UnpicklingError:
        raise ValueError(
            f"--tensor {path}: holds other objects than tensors, or is damaged; expected a tensor, or dicts and lists "
            "of tensors, saved with torch.save"
        ) from None
    except Exception as error:  # unpickling arbitrary bytes may raise any exception
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"--tensor {path}: cannot be read: {reason[0]}") from None
    tensors = dict(_tensors(content, ""))
    if not tensors:
        raise ValueError(
            f"--tensor {path}: has no floating-point tensor; expected dense fp64, fp32, fp16 or bf16"
        )
    return Sample(name=path.name, tensors=tensors)


def _read_file(path: Path) -> Any:
    if path.suffix == ".npy":
        return np.load(path, allow_pickle=False)
    return torch.load(path, map_location="cpu", weights_only=True)


def _tensors(content: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every floating-point tensor with at least one element, named by its keys."""
    if isinstance(content, np.ndarray):
        if not np.issubdtype(content.dtype, np.floating):
            return
        content = torch.from_numpy(np.ascontiguousarray(content, dtype=np.float32))
    if isinstance(content, torch.Tensor):
        if (
            content.layout == torch.strided
            and content.dtype in (*FLOAT_TYPES, torch.float64)
            and content.numel()
        ):
            yield name or "tensor", content.detach().to(torch.float32).reshape(-1).contiguous()
    elif isinstance(content, dict):
        for key, value in content.items():
            yield from _tensors(value, f"{name}.{key}" if name else str(key))
    elif isinstance(content, list | tuple):
        for number, value in enumerate(content):
            yield from _tensors(value, f"{name}.{number}" if name else str(number))


#: Key of every encoding, so that stochastic rounding is the same in every run.
KEY = counter_rng.mix_key(1, 0, 0)

#: Elements of the blocks of `worst_block` for codecs without blocks.
BLOCK = 32


@dataclass(frozen=True, kw_only=True)
class Error:
    """Error of the decoded values y for inputs x: |x - y| / |x|, and the same of the worst block.

    A value is None if it does not exist; a tensor of zeros has no relative error.
    """

    numel: int
    wire_bytes: int
    relative_l2: float | None
    worst_block: float | None


def measure_error(codec: Codec, sample: Sample) -> Error:
    """Return the error on a sample, whose tensors are encoded separately."""
    energy = gone = worst = np.float64(0.0)
    wire_bytes = 0
    with np.errstate(all="ignore"):  # a codec may overflow, or a tensor be zero
        for x in sample.tensors.values():
            payload = encode(codec, x, key=KEY)
            wire_bytes += payload.numel()
            before = x.numpy().astype(np.float64)
            lost = before - decode(codec, payload, x.numel()).numpy().astype(np.float64)
            energy, gone = energy + np.square(before).sum(), gone + np.square(lost).sum()
            worst = np.maximum(worst, _worst_block(before, lost, comparison_block(codec)))
        errors = [math.sqrt(share) if np.isfinite(share) else None for share in (gone / energy, worst)]
    numel = sum(x.numel() for x in sample.tensors.values())
    return Error(numel=numel, wire_bytes=wire_bytes, relative_l2=errors[0], worst_block=errors[1])


def comparison_block(codec: Codec) -> int:
    """Return the elements of a block of `worst_block`: the codec's block, a granule of a sparse codec, otherwise 32."""
    if codec.in_python or codec.variable_length:
        return BLOCK
    layout = codec.layout()
    if layout.kept:
        return layout.granule
    return BLOCK if codec.elementwise else layout.block


def _worst_block(x: npt.NDArray[np.float64], lost: npt.NDArray[np.float64], block: int) -> np.float64:
    """Return the largest share of its energy that a block loses; zero blocks that stay zero lose nothing."""
    pad = (0, -len(x) % block)
    energy, gone = (np.square(np.pad(values, pad)).reshape(-1, block).sum(axis=1) for values in (x, lost))
    return np.float64(np.where((energy == 0) & (gone == 0), 0.0, gone / energy).max(initial=0.0))


#: Seconds for encoding and for decoding, unless the fewest calls take longer.
SPEED_SECONDS = 0.03
FEWEST_CALLS = 3


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Speed in GB/s (1e9 bytes) of fp32 data."""

    encode: float
    decode: float


def measure_speed(codec: Codec, size: int, seconds: float = SPEED_SECONDS) -> Speed:
    """Return the median speed for ``size`` bytes of fp32 in reused buffers."""
    x = torch.randn(max(1, size // 4), generator=torch.Generator().manual_seed(0))
    memory = torch.empty(codec.wire_bytes(x.numel()), dtype=torch.uint8)
    payload = encode(codec, x, key=KEY, out=memory)
    out = torch.empty_like(x)
    bytes_ = x.numel() * 4
    return Speed(
        encode=bytes_ / _median_cpu_seconds(lambda: encode(codec, x, key=KEY, out=memory), seconds) / 1e9,
        decode=bytes_
        / _median_cpu_seconds(lambda: decode(codec, payload, x.numel(), out=out), seconds)
        / 1e9,
    )


def _median_cpu_seconds(call: Callable[[], object], seconds: float) -> float:
    """Return the median CPU seconds of one call, which exclude other threads on this core."""
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < FEWEST_CALLS or time.perf_counter() < end:
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return max(statistics.median(times), 1e-9)


@dataclass(frozen=True, kw_only=True)
class CodecRow:
    """Results of one codec; ``errors`` are by sample name."""

    spec: str
    family: str
    bits_per_element: float
    block: int
    speed: Speed | None
    errors: dict[str, Error]


def bits_per_element(codec: Codec) -> float:
    """Return the bits per element of a long fp32 tensor, including scales, positions and padding.

    Of a codec whose payloads have a length that depends on the data: those of the first distribution.
    """
    if codec.variable_length:
        (x,) = distributions()[0].tensors.values()
        return 8 * encode(codec, x).numel() / x.numel()
    return 8 * codec.wire_bytes(codec.granularity) / codec.granularity


def measure_codecs(
    codecs: Sequence[Codec], samples: Sequence[Sample], size: int | None, step: Callable[[str], None]
) -> list[CodecRow]:
    """Return a row for each codec; errors do not depend on the machine, since all kernels produce the same bytes.

    ``size`` is the bytes of fp32 for the speed, None to skip it. ``step`` is called with each codec's spec before it is
    measured.
    """
    rows = []
    for each in codecs:
        step(str(each))
        rows.append(
            CodecRow(
                spec=str(each),
                family=each.name,
                bits_per_element=bits_per_element(each),
                block=comparison_block(each),
                speed=None if size is None else measure_speed(each, size),
                errors={sample.name: measure_error(each, sample) for sample in samples},
            )
        )
    return rows


def default_codecs() -> list[Codec]:
    """Return the codecs that are shown if the user names none: all, with `VARIANTS`, and those of ``--import``.

    They are sorted by tier, and within the first one as it lists them.
    """
    variants = [(name, options) for name in names() for options in ("", *VARIANTS.get(name, "").split())]
    fixed = [codec(f"{name}:{options}" if options else name) for name, options in variants]
    order = [spec for specs in TIERS.values() for spec in specs]
    first = [codec(spec) for spec in next(iter(TIERS.values()))]
    rest = sorted(
        [*fixed, *VARIABLE_LENGTH.values()],
        key=lambda one: (list(TIERS).index(tier(str(one))), _position(order, str(one))),
    )
    return [*first, *(one for one in rest if one not in first)]


def _position(order: Sequence[str], spec: str) -> int:
    """Return where the name of a codec stands in ``order``; the end if it does not."""
    name = spec.partition(":")[0]
    return order.index(name) if name in order else len(order)


def select_codecs(only: Sequence[Codec], also: Sequence[Codec]) -> list[Codec]:
    """Return ``only``, or the default codecs if it is empty, followed by ``also``, without duplicates."""
    return list(dict.fromkeys([*(only or default_codecs()), *also]))


def main(argv: list[str] | None = None) -> int:
    """Run the command; return 0, or 2 if a file is wrong."""
    options = _parse(argv)
    try:
        samples = distributions(options.numel) + [load_sample(path) for path in options.tensor]
    except ValueError as error:
        print(f"dtcomm codecs: {error}", file=sys.stderr)
        return 2
    codecs = select_codecs(options.codec, options.also)
    size = None if options.no_speed else options.size
    number = itertools.count(1)

    def step(spec: str) -> None:
        show_progress(f"{next(number)} of {len(codecs)}: {spec}")

    rows = measure_codecs(codecs, samples, size, step)
    show_progress()
    if write_json(as_dict(rows, size), options.json):
        console = Console()
        console = Console(width=max(console.width, WIDTH) if console.is_terminal else PIPE_WIDTH)
        print_table(rows, console, size)
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dtcomm codecs",
        description="Measure the size, error and speed of each codec.",
        epilog="docs/guides/codecs.md says when to use which codec.",
    )
    add = parser.add_argument
    add_import_argument(add)
    add("--codec", metavar="SPEC", action="append", default=[],
        help="show only this codec; repeated or a,b")  # fmt: skip
    add("--also", metavar="SPEC", action="append", default=[],
        help="show this codec in addition; repeated or a,b")  # fmt: skip
    add("--tensor", metavar="FILE", type=Path, action="append", default=[],
        help="also measure the error on the tensors of a .pt or .npy file; may be repeated")  # fmt: skip
    add("--no-speed", action="store_true", help="do not measure speed")
    add("--size", metavar="SIZE", type=size_argument(4), default=4 << 20,
        help="bytes of fp32 for the speed measurement (default 4M; K, M and G are powers of 1024)")  # fmt: skip
    add("--numel", metavar="N", type=count_argument(1), default=NUMEL,
        help=f"elements of each distribution (default {NUMEL})")  # fmt: skip
    add("--json", metavar="FILE", nargs="?", const="-", help="write JSON: to FILE, or instead of the table")
    options = parser.parse_args(argv)
    try:
        import_modules(options.imports)
    except ValueError as error:
        parser.error(str(error))
    for name in ("codec", "also"):
        try:
            setattr(options, name, [codec(spec) for spec in split_codecs(getattr(options, name))])
        except ValueError as error:
            parser.error(f"argument --{name}: {error}")
    if options.json not in (None, "-") and not Path(options.json).absolute().parent.is_dir():
        parser.error(f"--json {options.json}: there is no folder {Path(options.json).parent}")
    return options


def as_dict(rows: Sequence[CodecRow], size: int | None) -> dict[str, Any]:
    """Return JSON values; speeds in GB/s of fp32, missing values null."""
    return {
        "version": VERSION,
        "kernel": current(),
        "speed_bytes": size,
        "versions": device_info.versions(),
        "codecs": [_row(row) for row in rows],
    }


def _row(row: CodecRow) -> dict[str, Any]:
    return {
        "codec": row.spec,
        "tier": tier(row.spec),
        "family": row.family,
        "bits_per_element": row.bits_per_element,
        "block": row.block,
        "encode_gbps": None if row.speed is None else round(row.speed.encode, 3),
        "decode_gbps": None if row.speed is None else round(row.speed.decode, 3),
        "errors": {name: asdict(error) for name, error in row.errors.items()},
    }


def print_table(rows: Sequence[CodecRow], console: Console, size: int | None) -> None:
    """Print the table and its legend."""
    samples = list(rows[0].errors)
    detailed = samples[-1]  # the user's tensors if any, else the hardest sample
    heads = ["bits per\nelement", "block"]
    heads += [] if size is None else ["encode\nGB/s", "decode\nGB/s"]
    heads += [f"error on\n{name}" for name in samples] + ["worst\nblock"]
    # On a narrow terminal names are folded, not numbers.
    table = new_table(["~codec", *(f">{head}" for head in heads)], plain=True)
    titles = {row.spec: tier(row.spec) for row in rows}
    headed = [title for title, _ in itertools.groupby(titles.values())]
    shown = "" if 1 < len(headed) == len(set(headed)) else None  # codecs that the user named may alternate
    for row in rows:
        if shown is not None and titles[row.spec] != shown:
            shown = titles[row.spec]
            table.add_row(f"[bold]{shown}[/bold]")
        cells = [f"{row.bits_per_element:.3g}", str(row.block)]
        if row.speed is not None:
            cells += [f"{row.speed.encode:.3g}", f"{row.speed.decode:.3g}"]
        cells += [_number(row.errors[name].relative_l2) for name in samples]
        table.add_row(row.spec, *cells, _number(row.errors[detailed].worst_block))
    console.print(table)
    speed = "" if size is None else f"GB/s: fp32, one core, {size / 2**20:g} MiB, kernel {current()}. "
    legend = (
        f"error: |x - y| / |x| of input and decoded output, with fixed seeds. {speed}"
        f"Worst block: on {detailed}; blocks are the codec's, or of 32 elements if it has none."
    )
    console.print(textwrap.fill(legend, width=110), highlight=False)


def _number(value: float | None) -> str:
    """Return three significant digits, or a dash for a missing value."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    return f"{value:.2e}" if value < 1e-3 else f"{value:.3g}"
