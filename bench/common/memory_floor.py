"""The memory floor of a kernel: the time a device copy takes for the bytes that the kernel must read and write.

`time_calls` times a call on a device. `TimedCopy` is that copy. `KernelWorkloads` are codec kernels with the bytes
that they must move.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch

from dtcomm.codecs import Codec
from dtcomm.kernels import dispatch
from dtcomm.kernels.calls import Combine
from dtcomm.kernels.eager import run_combine, run_decode
from dtcomm.measure import Clock, Run


def time_calls(clock: Clock, run: Run, calls: int = 1, queued_before: Run | None = None) -> float:
    """Return the seconds of one call, where ``run`` makes ``calls`` calls on the current stream.

    ``queued_before`` is queued first and not timed. While the device executes it the host runs ahead, so that launch
    latency on an idle device is not measured.
    """
    if queued_before is not None:
        queued_before()
    begin = clock.record()
    run()
    end = clock.record()
    clock.synchronize()
    return clock.seconds(begin, end) / calls


class TimedCopy:
    """A copy of ``nbytes`` that is timed repeatedly between other measurements, since device clocks drift."""

    LARGE: ClassVar[int] = 1 << 30  # larger than any cache

    def __init__(self, device: torch.device, clock: Clock, nbytes: int = LARGE) -> None:
        self._buffers = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._clock = clock
        self._times: list[float] = []
        self.run()  # untimed: the first copy touches cold pages
        clock.synchronize()

    def time(self, repeats: int = 1) -> None:
        """Time the copy ``repeats`` more times."""
        self._times += [time_calls(self._clock, self.run, queued_before=self.run) for _ in range(repeats)]

    def bytes_per_second(self, reset: bool = False) -> float:
        """Return the median of bytes read and written per second since the start or the last reset."""
        rate = 2 * self._buffers[0].nbytes / max(statistics.median(self._times), 1e-12)
        if reset:
            self._times = []
        return rate

    def run(self) -> None:
        """Queue the copy once."""
        self._buffers[1].copy_(self._buffers[0])


REDUCED_PAYLOADS = 8  # payloads added by a reduction


class KernelWorkload(NamedTuple):
    """A kernel call: ``run(index)`` queues it on buffer set ``index``; it moves ``bytes_moved`` bytes."""

    name: str
    bytes_moved: int
    run: Callable[[int], None]


class KernelWorkloads:
    """Kernel workloads of a codec on fp32 tensors of ``numel`` elements, with ``sets`` buffer sets on a device.

    Kernels are called as collectives call them, without the argument checks of ``dtcomm.kernels.ops``. The host does
    not wait for the device, so that a CUDA graph can capture the calls. RuntimeError or ValueError if the device has no
    kernels, or none for the codec.
    """

    CACHE: ClassVar[int] = 256 << 20  # bytes; all buffer sets together must exceed this

    def __init__(self, codec: Codec, numel: int, sets: int, device: torch.device) -> None:
        self._codec, self._numel, self.sets = codec, numel, sets
        self._kernel = dispatch.kernel_for(codec, "codec", torch.empty(0, device=device))
        wire = codec.wire_bytes(numel)
        self._x = [torch.randn(numel, device=device) for _ in range(sets)]
        self._out = [torch.zeros(numel, device=device) for _ in range(sets)]
        self._payload_sets = [self._empty_payloads(wire, REDUCED_PAYLOADS, device) for _ in range(sets)]
        self._encoded = self._empty_payloads(wire, sets, device)
        for x, payloads in zip(self._x, self._payload_sets, strict=True):
            for payload in payloads:
                self._combine(local=x, payload_out=payload)

    def encode(self) -> KernelWorkload:
        """Return the workload that encodes a tensor into a payload."""
        return KernelWorkload("encode", self._floats + self._wire, self._encode)

    def decode(self) -> KernelWorkload:
        """Return the workload that decodes a payload into a tensor."""
        return KernelWorkload("decode", self._wire + self._floats, self._decode)

    def reductions(self) -> Iterator[KernelWorkload]:
        """Yield the workloads that reduce payloads, reduce and re-encode, and encode with error feedback."""
        bytes_moved = REDUCED_PAYLOADS * self._wire + self._floats
        yield KernelWorkload(f"reduce {REDUCED_PAYLOADS}", bytes_moved, self._reduce)
        name = f"reduce_encode {REDUCED_PAYLOADS - 1} + local"
        yield KernelWorkload(name, bytes_moved, self._reduce_encode)
        # The residual is read and written; the `out` tensors serve as residuals.
        for tensor in self._out:
            tensor.zero_()
        bytes_moved = 3 * self._floats + self._wire
        yield KernelWorkload("encode with residual", bytes_moved, self._encode_with_residual)

    @property
    def _wire(self) -> int:
        return self._codec.wire_bytes(self._numel)

    @property
    def _floats(self) -> int:
        return 4 * self._numel

    def _empty_payloads(self, wire: int, count: int, device: torch.device) -> list[torch.Tensor]:
        return [torch.empty(wire, dtype=torch.uint8, device=device) for _ in range(count)]

    def _encode(self, i: int) -> None:
        self._combine(local=self._x[i], payload_out=self._encoded[i])

    def _decode(self, i: int) -> None:
        payload, out = self._payload_sets[i][0], self._out[i]
        run_decode(self._kernel, self._codec, payload, self._numel, torch.float32, out)

    def _reduce(self, i: int) -> None:
        self._combine(payloads=tuple(self._payload_sets[i]), out=self._out[i])

    def _reduce_encode(self, i: int) -> None:
        payloads = tuple(self._payload_sets[i][1:])
        self._combine(payloads=payloads, local=self._x[i], payload_out=self._encoded[i])

    def _encode_with_residual(self, i: int) -> None:
        self._combine(local=self._x[i], residual=self._out[i], payload_out=self._encoded[i])

    def _combine(self, **fields: Any) -> None:
        task = Combine(codec=self._codec, numel=self._numel, dtype=torch.float32, **fields)
        run_combine(self._kernel, task)


def buffer_sets_for(numel: int) -> int:
    """Return how many buffer sets are needed so that no run finds its fp32 input in a cache."""
    return max(2, min(8, KernelWorkloads.CACHE // (4 * numel) + 1))
