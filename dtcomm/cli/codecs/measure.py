"""Measurements of ``dtcomm codecs``: the size, error and speed of a codec.

The error is computed in float64, on random distributions with fixed seeds and on a user's tensors. The speed is that
of one core, timed by the thread's CPU clock, or of a GPU, timed by CUDA events around replays of a graph that uses
several sets of buffers, so that neither launch latency nor caches are measured. `measure_codecs` measures a list of
codecs.
"""

from __future__ import annotations

import math
import pickle
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dtcomm.codecs import Codec
from dtcomm.codecs.base import FLOAT_TYPES
from dtcomm.kernels import counter_rng
from dtcomm.kernels.ops import decode, encode
from dtcomm.measure import Clock, make_clock, median_seconds
from dtcomm.measure.memory_floor import KernelWorkload, KernelWorkloads, TimedCopy, buffer_sets_for

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
    """Error of the decoded values y for inputs x: |x - y| / |x|, the same of the worst block, and the cosine.

    A value is None if it does not exist; a tensor of zeros has no relative error.
    """

    numel: int
    wire_bytes: int
    relative_l2: float | None
    worst_block: float | None
    cosine: float | None


@dataclass
class _ErrorSums:
    """Sums over elements in float64."""

    numel: int = 0
    wire_bytes: int = 0
    input: float = 0.0  # sum of x^2
    output: float = 0.0  # sum of y^2
    both: float = 0.0  # sum of x y
    lost: float = 0.0  # sum of (x - y)^2
    worst: float = 0.0  # largest |x - y|^2 / |x|^2 of a block

    def add(self, other: _ErrorSums) -> None:
        self.numel += other.numel
        self.wire_bytes += other.wire_bytes
        self.input += other.input
        self.output += other.output
        self.both += other.both
        self.lost += other.lost
        self.worst = _larger(self.worst, other.worst)

    def _cosine(self) -> float | None:
        if self.input and not self.lost:
            return 1.0  # the division would round
        return _finite(_ratio(self.both, math.sqrt(self.input) * math.sqrt(self.output)))

    def error(self) -> Error:
        return Error(
            numel=self.numel,
            wire_bytes=self.wire_bytes,
            relative_l2=_root(self.lost, self.input),
            worst_block=_finite(math.sqrt(self.worst)),
            cosine=self._cosine(),
        )


def measure_error(codec: Codec, sample: Sample) -> tuple[Error, dict[str, Error]]:
    """Return the error on the whole sample and on each of its tensors, which are encoded separately."""
    total = _ErrorSums()
    by_tensor = {}
    for name, x in sample.tensors.items():
        sums = _error_sums(codec, x)
        total.add(sums)
        by_tensor[name] = sums.error()
    return total.error(), by_tensor


def comparison_block(codec: Codec) -> int:
    """Return the elements of a block of `worst_block`: the codec's block, a granule of a sparse codec, otherwise 32."""
    if codec.in_python or codec.variable_length:
        return BLOCK
    layout = codec.layout()
    if layout.kept:
        return layout.granule
    return BLOCK if codec.elementwise else layout.block


def _error_sums(codec: Codec, x: torch.Tensor) -> _ErrorSums:
    payload = encode(codec, x, key=KEY)
    before = x.numpy().astype(np.float64)
    after = decode(codec, payload, x.numel()).numpy().astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        lost = before - after
        return _ErrorSums(
            numel=x.numel(),
            wire_bytes=payload.numel(),
            input=float(np.square(before).sum()),
            output=float(np.square(after).sum()),
            both=float((before * after).sum()),
            lost=float(np.square(lost).sum()),
            worst=_worst_block(before, lost, comparison_block(codec)),
        )


def _worst_block(x: npt.NDArray[np.float64], lost: npt.NDArray[np.float64], block: int) -> float:
    """Return the largest share of its energy that a block loses; zero blocks that stay zero lose nothing."""
    pad = (0, -len(x) % block)
    energy, gone = (np.square(np.pad(values, pad)).reshape(-1, block).sum(axis=1) for values in (x, lost))
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where((energy == 0) & (gone == 0), 0.0, gone / energy)
    return float(shares.max(initial=0.0))


def _larger(a: float, b: float) -> float:
    """Return the larger value, or NaN if one is NaN."""
    return a if a > b or a != a else b


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.nan


def _root(lost: float, energy: float) -> float | None:
    ratio = _ratio(lost, energy)
    return None if not math.isfinite(ratio) else math.sqrt(ratio)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


#: Seconds for encoding and for decoding, unless the fewest calls take longer.
SPEED_SECONDS = 0.03
FEWEST_CALLS = 3
REPLAYS = 5


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Speed in GB/s (1e9 bytes) of fp32 data.

    ``of_floor`` has, for each GPU workload, the time of a device copy of the bytes it must move over its own time.
    """

    encode: float
    decode: float
    of_floor: dict[str, float] = field(default_factory=dict)


class OnDevice:
    """Measures the speed of a device; tests set ``clock`` and the bytes ``copied`` by the memory-floor copy."""

    def __init__(
        self, device: torch.device, clock: Clock | None = None, copied: int = TimedCopy.LARGE
    ) -> None:
        self._device, self._clock = device, clock or make_clock(device)
        self._copy = TimedCopy(device, self._clock, copied)

    def measure(self, codec: Codec, size: int) -> Speed | str:
        """Return the median speed for ``size`` bytes of fp32, or why the device has no kernel for the codec."""
        if codec.variable_length:
            return f"codec {str(codec)!r} has no kernels for CUDA tensors"
        numel = max(1, size // 4)
        try:
            workloads = KernelWorkloads(codec, numel, buffer_sets_for(numel), self._device)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            return str(error)
        rates, shares = {}, {}
        for workload in (workloads.encode(), workloads.decode(), *workloads.reductions()):
            seconds = self._seconds(workload, workloads.sets)
            rates[workload.name] = 4 * numel / seconds / 1e9
            self._copy.time(REPLAYS)
            shares[workload.name] = workload.bytes_moved / self._copy.bytes_per_second(reset=True) / seconds
        return Speed(encode=rates["encode"], decode=rates["decode"], of_floor=shares)

    def _seconds(self, workload: KernelWorkload, sets: int) -> float:
        def all_sets() -> None:
            for turn in range(sets):
                workload.run(turn)

        replay = self._clock.graph(all_sets, 1)
        return max(median_seconds(self._clock, replay, REPLAYS, sets, queued_before=replay), 1e-9)


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
    """Return the bits per element of a long fp32 tensor, including scales, positions and padding.

    Of a codec whose payloads have a length that depends on the data: those of the first distribution.
    """
    if codec.variable_length:
        (x,) = distributions()[0].tensors.values()
        return 8 * encode(codec, x).numel() / x.numel()
    return 8 * codec.wire_bytes(codec.granularity) / codec.granularity


def measure_codecs(
    codecs: Sequence[Codec],
    samples: Sequence[Sample],
    size: int | None,
    step: Callable[[str], None],
    device: OnDevice | None = None,
) -> list[CodecRow]:
    """Return a row for each codec; errors do not depend on the machine, since all kernels produce the same bytes.

    ``size`` is the bytes of fp32 for the speed, None to skip it. ``step`` is called with each codec's spec before it is
    measured. ``device`` measures the speed of a GPU; None: of one CPU core.
    """
    rows = []
    for codec in codecs:
        step(str(codec))
        speed: Speed | str | None = None
        if size is not None:
            speed = measure_speed(codec, size) if device is None else device.measure(codec, size)
        measured = {sample.name: measure_error(codec, sample) for sample in samples}
        rows.append(
            CodecRow(
                spec=str(codec),
                family=codec.name,
                bits_per_element=bits_per_element(codec),
                block=comparison_block(codec),
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
