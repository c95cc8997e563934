"""What ``dtcomm codecs`` found: rows, as a table and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from dtcomm.cli.codecs import error as codecs_error
from dtcomm.cli.codecs import speed as codecs_speed
from dtcomm.cli.codecs.error import Error
from dtcomm.cli.codecs.samples import Sample
from dtcomm.cli.codecs.speed import OnDevice, Speed
from dtcomm.codecs import Codec
from dtcomm.kernels import available, current
from dtcomm.measure import gpu_info
from dtcomm.measure.kernel_workloads import REDUCED_PAYLOADS

VERSION = 1
SUM = f"reduce {REDUCED_PAYLOADS}"  # the reduction whose share of the memory floor the table shows


@dataclass(frozen=True, kw_only=True)
class Row:
    """Results of one codec.

    ``errors`` are by sample name, ``tensors`` by tensor name for samples of several tensors. ``no_speed`` says why the
    speed is missing although it was requested, for example because a device has no kernel.
    """

    spec: str
    family: str
    bits_per_element: float
    block: int
    speed: Speed | None
    errors: dict[str, Error]
    tensors: dict[str, Error] = field(default_factory=dict)
    no_speed: str = ""


def bits_per_element(codec: Codec) -> float:
    """Return the bits per element of a long fp32 tensor, including scales, positions and padding."""
    return 8 * codec.wire_bytes(codec.granularity) / codec.granularity


def measure(
    codecs: Sequence[Codec],
    samples: Sequence[Sample],
    size: int | None,
    step: Callable[[str], None],
    device: OnDevice | None = None,
) -> list[Row]:
    """Return a row for each codec.

    Args:
        codecs: The codecs.
        samples: Inputs for the errors, which do not depend on the machine since all kernels produce the same bytes.
        size: Bytes of fp32 for the speed; None to skip it.
        step: Called with each codec's spec before it is measured.
        device: Measures the speed of a GPU; None for one CPU core.
    """
    rows = []
    for codec in codecs:
        step(str(codec))
        speed: Speed | str | None = None
        if size is not None:
            speed = codecs_speed.measure(codec, size) if device is None else device.measure(codec, size)
        measured = {sample.name: codecs_error.measure(codec, sample) for sample in samples}
        rows.append(
            Row(
                spec=str(codec),
                family=codec.name,
                bits_per_element=bits_per_element(codec),
                block=codecs_error.comparison_block(codec),
                speed=None if isinstance(speed, str) else speed,
                no_speed=speed if isinstance(speed, str) else "",
                errors={name: total for name, (total, _) in measured.items()},
                tensors={
                    name: error
                    for _, parts in measured.values()
                    for name, error in (parts.items() if len(parts) > 1 else ())
                },
            )
        )
    return rows


def as_dict(rows: Sequence[Row], size: int | None, gpu_facts: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return JSON values; speeds in GB/s of fp32, missing values null, and facts about the measured GPU."""
    return {
        "version": VERSION,
        "kernel": current() if gpu_facts is None else ", ".join(available("cuda")),
        "speed_bytes": size,
        "device": gpu_facts,
        "versions": gpu_info.versions(),
        "codecs": [_row(row) for row in rows],
    }


def _row(row: Row) -> dict[str, Any]:
    document = {
        "codec": row.spec,
        "family": row.family,
        "bits_per_element": row.bits_per_element,
        "block": row.block,
        "encode_gbps": None if row.speed is None else round(row.speed.encode, 3),
        "decode_gbps": None if row.speed is None else round(row.speed.decode, 3),
        "errors": {name: asdict(error) for name, error in row.errors.items()},
    }
    if row.speed is not None and row.speed.of_floor:
        document["of_floor"] = {verb: round(share, 4) for verb, share in row.speed.of_floor.items()}
    if row.no_speed:
        document["no_speed"] = row.no_speed
    if row.tensors:
        document["tensors"] = {name: asdict(error) for name, error in row.tensors.items()}
    return document


def show(rows: Sequence[Row], console: Console, size: int | None, device: str = "") -> None:
    """Print the table and its legend; ``device`` is the name of the measured GPU."""
    samples = list(rows[0].errors)
    detailed = samples[-1]  # the user's tensors if any, else the hardest sample
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("codec", overflow="fold")  # on a narrow terminal names are folded, not numbers
    heads = ["bits per\nelement", "block"]
    heads += [] if size is None else ["encode\nGB/s", "decode\nGB/s"]
    heads += ["of floor:\nencode", "\ndecode", f"\n{SUM}"] if size is not None and device else []
    heads += [f"error on\n{name}" for name in samples] + ["worst\nblock", "1 - cosine"]
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        error = row.errors[detailed]
        cells = [f"{row.bits_per_element:.3g}", str(row.block)]
        if row.speed is None and size is not None:
            cells += ["-"] * (5 if device else 2)
        if row.speed is not None:
            cells += [f"{row.speed.encode:.3g}", f"{row.speed.decode:.3g}"]
        if row.speed is not None and device:
            cells += [f"{row.speed.of_floor[verb]:.2f}" for verb in ("encode", "decode", SUM)]
        cells += [_number(row.errors[name].relative_l2) for name in samples]
        cells += [
            _number(error.worst_block),
            _number(None if error.cosine is None else max(0.0, 1 - error.cosine)),
        ]
        table.add_row(row.spec, *cells)
    console.print(table)
    speed = "" if size is None else f"GB/s: fp32, one core, {size / 2**20:g} MiB, kernel {current()}. "
    if size is not None and device:
        speed = (
            f"GB/s: fp32, {device}, {size / 2**20:g} MiB. Of floor: the time of a "
            "device copy of the bytes that the kernel must read and write, over the kernel's time. "
        )
    legend = (
        f"error: |x - y| / |x| of input and decoded output, with fixed seeds. {speed}"
        f"Worst block and cosine: on {detailed}; blocks are the codec's, or of 32 elements if it has none."
    )
    console.print(textwrap.fill(legend, width=110), highlight=False)
    for row in rows:
        if row.no_speed:
            console.print(f"no speed of {row.spec}: {row.no_speed}", highlight=False, markup=False)


def show_tensors(rows: Sequence[Row], console: Console) -> None:
    """Print one line for each tensor of the user's file and each codec."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("tensor", overflow="fold")
    table.add_column("codec", overflow="fold")
    for head in ("elements", "bits per\nelement", "error", "worst\nblock", "1 - cosine"):
        table.add_column(head, justify="right", no_wrap=True)
    for name in rows[0].tensors:
        for row in rows:
            error = row.tensors[name]
            table.add_row(
                name if row is rows[0] else "",
                row.spec,
                f"{error.numel:,}",
                f"{8 * error.wire_bytes / error.numel:.3g}",
                _number(error.relative_l2),
                _number(error.worst_block),
                _number(None if error.cosine is None else max(0.0, 1 - error.cosine)),
            )
    console.print(table)


def _number(value: float | None) -> str:
    """Return three significant digits, or a dash for a missing value."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    return f"{value:.2e}" if value < 1e-3 else f"{value:.3g}"
