"""The kernels' verbs on buffers that are used in turn, with the bytes that each must read and write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch

from dtcomm.codecs import Codec
from dtcomm.kernels import dispatch
from dtcomm.kernels.ops import combine_by, decode_by
from dtcomm.kernels.types import Combine

PAYLOADS = 8  # of a sum


class Verb(NamedTuple):
    """``run(set)`` queues it on one of the sets of buffers; ``moved`` counts bytes."""

    name: str
    moved: int
    run: Callable[[int], None]


class Verbs:
    """The verbs of a codec on fp32 tensors of ``numel`` elements, on ``sets`` sets of buffers of a device.

    Kernels are called as a collective calls them, without the checks of ``dtcomm.kernels.ops``: on a device nothing
    waits for the host, and a graph may capture it. RuntimeError or ValueError where no kernel there runs the codec.
    """

    CACHE: ClassVar[int] = 256 << 20  # bytes that buffers used in turn must exceed together

    def __init__(self, codec: Codec, numel: int, sets: int, device: torch.device) -> None:
        self._codec, self._numel, self.sets = codec, numel, sets
        self._kernel = dispatch.for_call(codec, "codec", torch.empty(0, device=device))
        wire = codec.wire_bytes(numel)
        self._x = [torch.randn(numel, device=device) for _ in range(sets)]
        self._out = [torch.zeros(numel, device=device) for _ in range(sets)]
        self._sent = [self._payloads(wire, PAYLOADS, device) for _ in range(sets)]
        self._made = self._payloads(wire, sets, device)
        for x, sent in zip(self._x, self._sent, strict=True):
            for payload in sent:
                self._combine(local=x, payload_out=payload)

    def encode(self) -> Verb:
        """A tensor into a payload."""
        return Verb("encode", self._floats + self._wire, self._encode)

    def decode(self) -> Verb:
        """A payload into a tensor."""
        return Verb("decode", self._wire + self._floats, self._decode)

    def sums(self) -> Iterator[Verb]:
        """Payloads into a tensor, and with a tensor into a payload; an encoding that keeps what it lost."""
        yield Verb(f"reduce {PAYLOADS}", PAYLOADS * self._wire + self._floats, self._reduce)
        moved = PAYLOADS * self._wire + self._floats
        yield Verb(f"reduce_encode {PAYLOADS - 1} + local", moved, self._reduce_encode)
        # The residual is read and rewritten; `out` stands in for it.
        for tensor in self._out:
            tensor.zero_()
        yield Verb("encode with residual", 3 * self._floats + self._wire, self._encode_with_residual)

    @property
    def _wire(self) -> int:
        return self._codec.wire_bytes(self._numel)

    @property
    def _floats(self) -> int:
        return 4 * self._numel

    def _payloads(self, wire: int, count: int, device: torch.device) -> list[torch.Tensor]:
        return [torch.empty(wire, dtype=torch.uint8, device=device) for _ in range(count)]

    def _encode(self, i: int) -> None:
        self._combine(local=self._x[i], payload_out=self._made[i])

    def _decode(self, i: int) -> None:
        decode_by(self._kernel, self._codec, self._sent[i][0], self._numel, torch.float32, self._out[i])

    def _reduce(self, i: int) -> None:
        self._combine(payloads=tuple(self._sent[i]), out=self._out[i])

    def _reduce_encode(self, i: int) -> None:
        self._combine(payloads=tuple(self._sent[i][1:]), local=self._x[i], payload_out=self._made[i])

    def _encode_with_residual(self, i: int) -> None:
        self._combine(local=self._x[i], residual=self._out[i], payload_out=self._made[i])

    def _combine(self, **what: Any) -> None:
        combine_by(self._kernel, Combine(codec=self._codec, numel=self._numel, dtype=torch.float32, **what))


def sets_for(numel: int) -> int:
    """So many sets that no run finds its fp32 input in a cache."""
    return max(2, min(8, Verbs.CACHE // (4 * numel) + 1))
