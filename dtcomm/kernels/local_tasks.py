"""Local tasks: what one rank computes by itself before and after a sum in a representation that the ranks agree on.

Reproducible sums (codec ``exact``) measure each block's exponent, quantize to the agreed exponents and dequantize the
sum; an audited one adds checksums. Sums at shared random positions (``randk:positions=shared``) gather values before
the sum and scatter them after it. Correctly rounded sums measure ranges of bits, split elements into digits and round
the digits' sums. `dtcomm.collectives` makes these tasks.

Every function here returns a :class:`LocalTask`. Tasks on CPU tensors run in the C++ kernels (csrc/cpu/kernels.h,
``LocalKernels``), called directly or by the engine between two operations. Tasks on CUDA tensors, and with the
reference kernels, run in operators of torch and never wait for the device; those of rounded sums run in CUDA kernels
and, with the reference kernels, in numpy. All give the same bits. Tensors are contiguous, on one device and of the
right size: callers have checked them, and keep them alive until the task has run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from dtcomm import _C
from dtcomm.codecs import Codec, Exact, RandK
from dtcomm.codecs.base import ELEMENT_TYPES
from dtcomm.codecs.cast import RoundedExact
from dtcomm.kernels import counter_rng, dispatch
from dtcomm.kernels.calls import address
from dtcomm.kernels.reference import reproducible, rounded_sum
from dtcomm.kernels.reference.floats import get, put
from dtcomm.kernels.reference.reproducible import NAN_BLOCK
from dtcomm.kernels.reference.sparse import ROUNDS, positions
from dtcomm.streams import copy_to_device

ALL_RANKS = 0xFFFFFFFF  # the rank number in keys that all ranks share
AUDIT_OK = _C.AUDIT_OK
AUDIT_RUN = _C.AUDIT_RUN
ROUNDED = RoundedExact()
_MASK32 = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class LocalTask:
    """One task of one rank; calling it runs it.

    native: what the engine runs; None for CUDA tensors.
    reference: runs the task without native kernels: on CUDA tensors, without waiting for the device, and for the
        reference kernels on CPU tensors.
    codec: decides which kernels can run the task.
    tensors: all tensors of the task, kept alive with it.
    """

    native: _C.NativeTask | None
    reference: Callable[[], None]
    codec: Codec
    tensors: tuple[torch.Tensor | None, ...]

    def __call__(self) -> None:
        """Run the task in this thread. Raises ValueError if the forced kernel cannot run it."""
        first = next(tensor for tensor in self.tensors if tensor is not None)
        if self.native is None or not first.is_cpu:
            self.reference()
            return
        kernel = dispatch.kernel_for(self.codec, "tensor", first)
        if kernel == dispatch.REFERENCE:
            with np.errstate(all="ignore"):
                self.reference()
        else:
            self.native.run(kernel)


def _task(
    codec: Codec,
    tensors: tuple[torch.Tensor | None, ...],
    *,
    native: Callable[[], _C.NativeTask],
    reference: Callable[[], None],
) -> LocalTask:
    """A task; ``native`` makes what the engine runs, of CPU tensors."""
    assert tensors[0] is not None
    of_engine = native() if tensors[0].is_cpu else None
    return LocalTask(native=of_engine, reference=reference, codec=codec, tensors=tensors)


def shared_key(seed: int) -> int:
    """The key from which all ranks draw the same positions in a call with this seed."""
    return _C.mix_key(seed, ALL_RANKS, 0)


def consistency_key(key: int, flags: Sequence[bool]) -> int:
    """A hash of the key and the flags, which ranks compare: it differs if any of them differs."""
    return counter_rng.absorb(key, *flags)


def measure_exponents(
    codec: Exact, x: torch.Tensor, residual: torch.Tensor | None, exponents: torch.Tensor
) -> LocalTask:
    """``exponents`` (uint8, one per block) <- the exponents of the blocks of x + residual."""

    def reference() -> None:
        size = _rows(_tensor_sum(x, residual), codec.block).view(torch.int32) & 0x7FFFFFFF
        top = size.amax(1)
        measured = torch.where((top > 0) & (top >> 23 == 0), 1, top >> 23)
        exponents.copy_(torch.where(top >= 0x7F800000, NAN_BLOCK, measured))

    return _task(
        codec,
        (x, residual, exponents),
        native=lambda: _C.task_measure_exponents(
            codec.native(), *_contribution(x, residual), exponents.data_ptr()
        ),
        reference=reference,
    )


def quantize_to_exponents(
    codec: Exact,
    ranks: int,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    exponents: torch.Tensor,
    codes: torch.Tensor,
) -> LocalTask:
    """``codes`` <- x + residual as integers that leave room for a sum over ``ranks`` ranks.

    ``residual`` becomes the quantization error; in blocks with NaN or Inf it stays.
    """

    def reference() -> None:
        digits = codec.digits(ranks)
        largest = 2.0**digits - 1
        total, unit = _tensor_sum(x, residual).double(), _units(codec, digits, exponents, x.numel())
        bad = _in_nan_block(codec, exponents, x.numel())
        integers = torch.where(bad, 0.0, (total / unit).clamp(-largest, largest).round())
        codes.copy_(integers)
        if residual is not None:
            residual.copy_(torch.where(bad, residual, (total - integers * unit).float()))

    return _task(
        codec,
        (x, residual, exponents, codes),
        native=lambda: _C.task_quantize_to_exponents(
            codec.native(), ranks, *_contribution(x, residual), exponents.data_ptr(), codes.data_ptr()
        ),
        reference=reference,
    )


def dequantize(
    codec: Exact,
    ranks: int,
    codes: torch.Tensor,
    exponents: torch.Tensor,
    divisor: int,
    out: torch.Tensor,
    verdict: torch.Tensor | None = None,
) -> LocalTask:
    """``out`` <- the values of the integers, divided; ``out`` stays if there is a verdict other than AUDIT_OK."""

    def reference() -> None:
        unit = _units(codec, codec.digits(ranks), exponents, out.numel())
        values = (codes.double() * unit / divisor).float()
        values = _narrow(
            torch.where(_in_nan_block(codec, exponents, out.numel()), float("nan"), values), out.dtype
        )
        out.copy_(values if verdict is None else torch.where(verdict == AUDIT_OK, values, out))

    return _task(
        codec,
        (out, codes, exponents, verdict),
        native=lambda: _C.task_dequantize(
            codec.native(),
            ranks,
            codes.data_ptr(),
            exponents.data_ptr(),
            out.numel(),
            divisor,
            ELEMENT_TYPES[out.dtype],
            out.data_ptr(),
            address(verdict),
        ),
        reference=reference,
    )


def audit_checksums(codec: Exact, codes: torch.Tensor, sums: torch.Tensor) -> LocalTask:
    """``sums`` (int64) <- one checksum per AUDIT_RUN integers. Checksums of a sum are the sums of the checksums."""

    def reference() -> None:
        weights = counter_rng.mix32(torch.arange(codes.numel(), device=codes.device)) * 2 + 1
        terms = weights * codes.long()
        sums.copy_(_rows(terms, AUDIT_RUN).sum(1))

    return _task(
        codec,
        (codes, sums),
        native=lambda: _C.task_audit_checksums(codec.bits, codes.data_ptr(), codes.numel(), sums.data_ptr()),
        reference=reference,
    )


def audit_verdict(
    codec: Exact,
    numel: int,
    expected_sums: torch.Tensor,
    actual_sums: torch.Tensor,
    exponents: torch.Tensor,
    exponents_again: torch.Tensor,
    verdict: torch.Tensor,
) -> LocalTask:
    """``verdict`` (one int64) <- AUDIT_OK, or which run of AUDIT_RUN elements is wrong.

    Run r is reported as 2r if its checksums differ and as 2r + 1 if its exponents, measured twice, differ. The first
    wrong run counts, exponents before checksums.
    """

    def reference() -> None:
        differ = _rows((exponents != exponents_again).int(), max(1, AUDIT_RUN // codec.block)).any(1)
        runs = 2 * torch.arange(expected_sums.numel(), device=expected_sums.device)
        # A block that is larger than a run counts for the run in which it begins, as in the C++ kernel.
        missing = max(0, expected_sums.numel() - differ.numel())
        differ = torch.nn.functional.pad(differ, (0, missing))[: expected_sums.numel()]
        checksums = torch.where(expected_sums != actual_sums, runs, AUDIT_OK)
        wrong = torch.where(differ, runs + 1, checksums)
        verdict.copy_(torch.cat([wrong, wrong.new_full((1,), AUDIT_OK)]).amin().reshape(1))

    return _task(
        codec,
        (expected_sums, actual_sums, exponents, exponents_again, verdict),
        native=lambda: _C.task_audit_verdict(
            expected_sums.data_ptr(),
            actual_sums.data_ptr(),
            exponents.data_ptr(),
            exponents_again.data_ptr(),
            numel,
            codec.block,
            verdict.data_ptr(),
        ),
        reference=reference,
    )


class SumRange(NamedTuple):
    """The range of bits of each block of a correctly rounded sum, on which the ranks agreed (uint8, one per block).

    ``ends`` says where the digits of each block end, from `placed`; CUDA tensors need it once the ranks have agreed.
    """

    ranks: int
    tops: torch.Tensor
    lows: torch.Tensor
    ends: torch.Tensor | None = None

    def native(self) -> tuple[int, int, int]:
        return self.ranks, self.tops.data_ptr(), self.lows.data_ptr()

    def of(self, first: int, numel: int) -> SumRange:
        """The ranges of elements from ``first`` on, which begins a block."""
        blocks = slice(first // rounded_sum.BLOCK, -(-(first + numel) // rounded_sum.BLOCK))
        ends = None if self.ends is None else self.ends[blocks]
        return SumRange(self.ranks, self.tops[blocks], self.lows[blocks], ends)

    def split(self, blocks: Sequence[int]) -> list[SumRange]:
        """The ranges of so many blocks each."""
        firsts = itertools.accumulate(blocks[:-1], initial=0)
        size = rounded_sum.BLOCK
        return [self.of(first * size, count * size) for first, count in zip(firsts, blocks, strict=True)]

    def placed(self) -> SumRange:
        """The same ranges with what the tasks of CUDA tensors need; ranges on the CPU need nothing."""
        if self.tops.is_cpu:
            return self
        return self._replace(ends=dispatch.cuda_kernels().ends_of_digits(self))

    def count_digits(self, parts: int = 1) -> list[int]:
        """How many integers the digits of each of so many equal parts of the blocks are. The ranges are on the CPU."""
        return _C.count_digits(*self.native(), self.tops.numel(), parts)


def measure_digits(x: torch.Tensor, to: SumRange, finite_only: bool) -> LocalTask:
    """The range of bits of each block of ``to`` <- that of x.

    Elements that are not finite are left out with ``finite_only``; else they make the block's top NAN_BLOCK.
    """

    def reference() -> None:
        for tensor, values in zip((to.tops, to.lows), rounded_sum.measure(get(x), finite_only), strict=True):
            _store(tensor, values)

    return _rounded_task(
        (x, to.tops, to.lows),
        on_device=lambda: dispatch.cuda_kernels().measure_digits(x, to, finite_only),
        native=lambda: _C.task_measure_digits(
            x.data_ptr(), ELEMENT_TYPES[x.dtype], x.numel(), finite_only, *to.native()[1:]
        ),
        reference=reference,
    )


def split_digits(
    agreed: SumRange, x: torch.Tensor, finite: bool, digits: torch.Tensor, offsets: Sequence[int] = (0,)
) -> LocalTask:
    """``digits`` (int32) <- the digits of equal parts of x, each from its offset on. ``finite``: all elements are.

    If there are several parts, they are whole blocks.
    """

    def reference() -> None:
        part = x.numel() // len(offsets)
        for i, offset in enumerate(offsets):
            _, tops, lows, _ = agreed.of(i * part, part)
            made = rounded_sum.split(agreed.ranks, tops.numpy(), lows.numpy(), get(x[i * part :][:part]))
            _store(digits[offset : offset + len(made)], made)

    return _rounded_task(
        (x, *agreed[1:], digits),
        on_device=lambda: dispatch.cuda_kernels().split_digits(agreed, x, digits, offsets),
        native=lambda: _C.task_split_digits(
            *agreed.native(),
            x.data_ptr(),
            ELEMENT_TYPES[x.dtype],
            x.numel(),
            finite,
            digits.data_ptr(),
            offsets,
        ),
        reference=reference,
    )


def round_digits(agreed: SumRange, digits: torch.Tensor, divisor: int, out: torch.Tensor) -> LocalTask:
    """``out`` <- the value of the digits' sums, divided, rounded once to the type of ``out``."""

    def reference() -> None:
        tops, lows, narrower = agreed.tops.numpy(), agreed.lows.numpy(), out.dtype != torch.float32
        put(
            out,
            rounded_sum.rounded(agreed.ranks, tops, lows, digits.numpy(), out.numel(), divisor, narrower),
        )

    return _rounded_task(
        (out, *agreed[1:], digits),
        on_device=lambda: dispatch.cuda_kernels().round_digits(agreed, digits, divisor, out),
        native=lambda: _C.task_round_digits(
            *agreed.native(),
            digits.data_ptr(),
            out.numel(),
            divisor,
            ELEMENT_TYPES[out.dtype],
            out.data_ptr(),
        ),
        reference=reference,
    )


def sum_rounded(
    terms: torch.Tensor, divisor: int = 1, run: Callable[[LocalTask], None] = LocalTask.__call__
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the terms, [terms, elements] of fp32, fp16 or bf16, as their ranks would; ``run`` runs a task.

    Returns the correctly rounded sums, divided, and the digits of each term. A sum of elements that are not all finite
    is NaN or Inf, in any order that of the floating-point standard.
    """
    finite = bool(terms.isfinite().all())
    blocks = -(-terms.shape[1] // rounded_sum.BLOCK)
    ranges = torch.empty(2, len(terms), blocks, dtype=torch.uint8, device=terms.device)
    for x, tops, lows in zip(terms, *ranges, strict=True):
        run(measure_digits(x, SumRange(len(terms), tops, lows), not finite))
    ranges = ranges.amax(dim=1)
    agreed = SumRange(len(terms), *ranges).placed()
    count = SumRange(len(terms), *ranges.cpu()).count_digits()
    digits = torch.empty(len(terms), *count, dtype=torch.int32, device=terms.device)
    for x, own in zip(terms, digits, strict=True):
        run(split_digits(agreed, x, finite, own))
    out = torch.empty_like(terms[0])
    run(round_digits(agreed, digits.sum(0, dtype=torch.int32), divisor, out))
    if not finite:
        other = torch.where(terms.isfinite(), 0, terms).sum(0)
        out = torch.where(terms.isfinite().all(0), out, other)
    return out, digits


def _rounded_task(
    tensors: tuple[torch.Tensor | None, ...],
    *,
    native: Callable[[], _C.NativeTask],
    reference: Callable[[], None],
    on_device: Callable[[], None],
) -> LocalTask:
    """A task of a correctly rounded sum; ``on_device`` runs it on CUDA tensors. Raises if no kernel can."""
    assert tensors[0] is not None
    if tensors[0].is_cpu:
        return _task(ROUNDED, tensors, native=native, reference=reference)
    dispatch.kernel_for(ROUNDED, "tensor", tensors[0])
    return LocalTask(native=None, reference=on_device, codec=ROUNDED, tensors=tensors)


def gather_values(
    codec: RandK,
    key: int,
    offset: int,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    values: torch.Tensor,
    value_residual: torch.Tensor | None,
) -> LocalTask:
    """``values`` <- the elements of x at the positions drawn from ``key``.

    ``offset`` is the index of x's first element in the caller's tensor. With a residual, ``value_residual`` <- the
    residual at the positions, and all elements of x are added to the residual: `restore_residual` sets those that
    were sent. In a granule with NaN or Inf all values are NaN and the residual stays.
    """

    def reference() -> None:
        indices = _value_indices(codec, key, offset, x)
        floats = x.float()
        total = _tensor_sum(x, residual)
        finite = torch.isfinite(_rows(total, codec.layout().granule)).all(1)
        taken = floats.index_select(0, indices)
        values.copy_(
            torch.where(
                _repeat_rows(finite, codec.layout().kept, codec.kept_in(x.numel())), taken, float("nan")
            )
        )
        if residual is not None and value_residual is not None:
            value_residual.copy_(residual.index_select(0, indices))
            residual.copy_(torch.where(_per_element(codec, finite, x.numel()), total, residual))

    return _task(
        codec,
        (x, residual, values, value_residual),
        native=lambda: _C.task_gather_values(
            codec.native(),
            key,
            offset,
            *_contribution(x, residual),
            values.data_ptr(),
            address(value_residual),
        ),
        reference=reference,
    )


def scatter_values(
    codec: RandK, key: int, offset: int, scaled: bool, values: torch.Tensor, out: torch.Tensor
) -> LocalTask:
    """``out`` <- the values at their positions and zeros elsewhere; a granule whose first value is NaN becomes NaN.

    ``scaled``: multiply by elements / kept elements, which makes the result an unbiased estimate.
    """

    def reference() -> None:
        numel, layout = out.numel(), codec.layout()
        whole = numel // layout.granule
        firsts = values[: whole * layout.kept].view(whole, layout.kept)[:, 0]
        scaled_values = values
        if scaled:
            factor = torch.full_like(values, layout.granule / layout.kept)
            if rest := numel % layout.granule:
                factor[whole * layout.kept :] = rest / layout.kept_of(rest)
            scaled_values = values * factor
        if numel % layout.granule:
            firsts = torch.cat([firsts, values[whole * layout.kept :][:1]])
        result = torch.zeros(numel, dtype=torch.float32, device=out.device)
        result.index_copy_(0, _value_indices(codec, key, offset, out), scaled_values)
        bad = _per_element(codec, torch.isnan(firsts), numel)
        out.copy_(_narrow(torch.where(bad, float("nan"), result), out.dtype))

    return _task(
        codec,
        (out, values),
        native=lambda: _C.task_scatter_values(
            codec.native(),
            key,
            offset,
            scaled,
            values.data_ptr(),
            out.numel(),
            ELEMENT_TYPES[out.dtype],
            out.data_ptr(),
        ),
        reference=reference,
    )


def restore_residual(
    codec: RandK, key: int, offset: int, value_residual: torch.Tensor, residual: torch.Tensor
) -> LocalTask:
    """The residual at the positions that were sent <- ``value_residual``."""

    def reference() -> None:
        residual.index_copy_(0, _value_indices(codec, key, offset, residual), value_residual)

    return _task(
        codec,
        (residual, value_residual),
        native=lambda: _C.task_restore_residual(
            codec.native(), key, offset, value_residual.data_ptr(), residual.numel(), residual.data_ptr()
        ),
        reference=reference,
    )


def _contribution(x: torch.Tensor, residual: torch.Tensor | None) -> tuple[int, int, int, int]:
    """The arguments of a native ``Contribution``: address, dtype, residual's address, elements."""
    return x.data_ptr(), ELEMENT_TYPES[x.dtype], address(residual), x.numel()


def _store(tensor: torch.Tensor, values: reproducible.Codes) -> None:
    tensor.numpy()[:] = values


# Parts of the tasks in operators of torch.


def _tensor_sum(x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    return x.float() if residual is None else x.float() + residual


def _narrow(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values in a type; every NaN has the bits of torch's own, which a conversion may not keep."""
    return values.to(dtype).masked_fill_(values.isnan(), float("nan"))


def _rows(x: torch.Tensor, length: int) -> torch.Tensor:
    """`x` in rows of `length` elements, padded with zeros."""
    return torch.nn.functional.pad(x, (0, -x.numel() % length)).view(-(-x.numel() // length), length)


def _units(codec: Exact, digits: int, exponents: torch.Tensor, numel: int) -> torch.Tensor:
    """The unit of each element, a power of two made from its bits."""
    units = (exponents.long() - 126 - digits + 1023 << 52).view(torch.float64)
    return _repeat_rows(units, codec.block, numel)


def _in_nan_block(codec: Exact, exponents: torch.Tensor, numel: int) -> torch.Tensor:
    return _repeat_rows(exponents == NAN_BLOCK, codec.block, numel)


def _per_element(codec: RandK, granules: torch.Tensor, numel: int) -> torch.Tensor:
    return _repeat_rows(granules, codec.layout().granule, numel)


def _repeat_rows(rows: torch.Tensor, length: int, numel: int) -> torch.Tensor:
    """Each element repeated `length` times, cut to `numel` elements."""
    return rows[:, None].expand(-1, length).reshape(-1)[:numel]


def _value_indices(codec: RandK, key: int, offset: int, like: torch.Tensor) -> torch.Tensor:
    """The indices of the kept values of a tensor like `like`, in order: `positions` of all granules at once."""
    layout, numel = codec.layout(), like.numel()
    whole, rest = divmod(numel, layout.granule)
    bits = layout.granule.bit_length() - 1  # whole granules have 2**bits elements, so no position is outside
    first = counter_rng.absorb(key, counter_rng.GOLDEN_RATIO)
    starts = torch.arange(whole, device=like.device) * layout.granule
    keys = _absorb(_signed(first) + starts + offset)
    low, high = keys & _MASK32, keys >> 32 & _MASK32
    mix = counter_rng.mix32
    words: list[torch.Tensor] = [
        mix((low + mix((high + j) & _MASK32)) & _MASK32)[:, None] for j in range(ROUNDS + 1)
    ]
    indices = torch.arange(layout.kept, device=like.device).expand(whole, layout.kept)
    for word in words[:ROUNDS]:
        indices = indices * (word & 0xFFFF | 1) + (word >> 16) & (1 << bits) - 1
        indices = indices ^ indices >> (bits + 1) // 2
    indices = (indices + (words[ROUNDS] * layout.granule >> 32)) % layout.granule
    result = (indices + starts[:, None]).flatten()
    if not rest:
        return result
    last_key = counter_rng.absorb(first, offset + whole * layout.granule)
    last = torch.from_numpy(positions(last_key, rest, layout.kept_of(rest))) + whole * layout.granule
    return torch.cat([result, copy_to_device(last, like.device)])


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _absorb(h: torch.Tensor) -> torch.Tensor:
    """`counter_rng.absorb` of one word that was added already, in 64 bits that wrap."""
    h = (h ^ (h >> 30 & (1 << 34) - 1)) * _signed(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> 27 & (1 << 37) - 1)) * _signed(0x94D049BB133111EB)
    return h ^ (h >> 31 & (1 << 33) - 1)
