"""Local tasks: what one rank computes by itself before and after a sum in a representation that the ranks agree on.

Reproducible sums (codec ``exact``) measure each block's exponent, quantize to the agreed exponents and dequantize the
sum; an audited one adds checksums. Sums at shared random positions (``randk:positions=shared``) gather values before
the sum and scatter them after it. `dtcomm.collectives` makes these tasks.

Every function here returns a :class:`LocalTask`. Tasks on CPU tensors run in the C++ kernels (csrc/cpu/kernels.h,
``LocalKernels``), called directly or by the engine between two operations; with the reference kernels they run in
numpy. Tasks on CUDA tensors run in torch (``local_tasks_torch``) and never wait for the device. All give the same
bits. Tensors are contiguous, on one device and of the right size: callers have checked them and keep them alive
until the task has run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from dtcomm import _C
from dtcomm.codecs import Codec, Exact, RandK
from dtcomm.codecs.base import ELEMENT_TYPES
from dtcomm.kernels import counter_rng, dispatch, local_tasks_torch
from dtcomm.kernels.reference import reproducible, sparse
from dtcomm.kernels.reference.floats import Floats, canonical, get, put

ALL_RANKS = 0xFFFFFFFF  # the rank number in keys that all ranks share
AUDIT_OK = _C.AUDIT_OK
AUDIT_RUN = _C.AUDIT_RUN


@dataclass(frozen=True, kw_only=True)
class LocalTask:
    """One task of one rank; calling it runs it.

    native: what the engine runs; None for CUDA tensors.
    fallback: runs the task in numpy (CPU tensors, reference kernels) or torch (CUDA tensors).
    codec: decides which kernels can run the task.
    tensors: all tensors of the task, kept alive with it.
    """

    native: _C.NativeTask | None
    fallback: Callable[[], None]
    codec: Codec
    tensors: tuple[torch.Tensor | None, ...]

    def __call__(self) -> None:
        """Run the task in this thread. Raises ValueError if the forced kernel cannot run it."""
        if self.native is None:
            self.fallback()
            return
        first = next(tensor for tensor in self.tensors if tensor is not None)
        kernel = dispatch.kernel_for(self.codec, "tensor", first)
        if kernel == dispatch.REFERENCE:
            with np.errstate(all="ignore"):
                self.fallback()
        else:
            self.native.run(kernel)


def _task(
    codec: Codec,
    tensors: tuple[torch.Tensor | None, ...],
    *,
    native: Callable[[], _C.NativeTask],
    reference: Callable[[], None],
    device: Callable[[], None],
) -> LocalTask:
    """A task with the implementation for the device of the first tensor."""
    assert tensors[0] is not None
    if tensors[0].is_cpu:
        return LocalTask(native=native(), fallback=reference, codec=codec, tensors=tensors)
    return LocalTask(native=None, fallback=device, codec=codec, tensors=tensors)


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
    return _task(
        codec,
        (x, residual, exponents),
        native=lambda: _C.task_measure_exponents(
            codec.native(), *_contribution(x, residual), exponents.data_ptr()
        ),
        reference=lambda: _store(exponents, reproducible.measure(codec, _sum_of(x, residual))),
        device=partial(local_tasks_torch.measure_exponents, codec, x, residual, exponents),
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
        total, agreed = _sum_of(x, residual), exponents.numpy()
        integers = reproducible.to_codes(codec, ranks, total, agreed)
        _store(codes, integers)
        if residual is not None:
            put(residual, reproducible.lost(codec, ranks, total, integers, agreed, get(residual)))

    return _task(
        codec,
        (x, residual, exponents, codes),
        native=lambda: _C.task_quantize_to_exponents(
            codec.native(), ranks, *_contribution(x, residual), exponents.data_ptr(), codes.data_ptr()
        ),
        reference=reference,
        device=partial(local_tasks_torch.quantize_to_exponents, codec, ranks, x, residual, exponents, codes),
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
        if verdict is None or int(verdict) == AUDIT_OK:
            put(out, reproducible.from_codes(codec, ranks, codes.numpy(), exponents.numpy(), divisor))

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
            0 if verdict is None else verdict.data_ptr(),
        ),
        reference=reference,
        device=partial(local_tasks_torch.dequantize, codec, ranks, codes, exponents, divisor, out, verdict),
    )


def audit_checksums(codec: Exact, codes: torch.Tensor, sums: torch.Tensor) -> LocalTask:
    """``sums`` (int64) <- one checksum per AUDIT_RUN integers. Checksums of a sum are the sums of the checksums."""
    return _task(
        codec,
        (codes, sums),
        native=lambda: _C.task_audit_checksums(codec.bits, codes.data_ptr(), codes.numel(), sums.data_ptr()),
        reference=lambda: _store(sums, reproducible.audit(codes.numpy()).view(np.int64)),
        device=partial(local_tasks_torch.audit_checksums, codes, sums),
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
    compare = partial(
        local_tasks_torch.audit_verdict,
        codec,
        expected_sums,
        actual_sums,
        exponents,
        exponents_again,
        verdict,
    )
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
        reference=compare,
        device=compare,
    )


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
        taken, taken_residual, updated = sparse.gather(
            codec, key, offset, get(x), None if residual is None else get(residual)
        )
        put(values, canonical(taken))
        if residual is not None and value_residual is not None:
            put(value_residual, taken_residual)
            put(residual, updated)

    return _task(
        codec,
        (x, residual, values, value_residual),
        native=lambda: _C.task_gather_values(
            codec.native(),
            key,
            offset,
            *_contribution(x, residual),
            values.data_ptr(),
            0 if value_residual is None else value_residual.data_ptr(),
        ),
        reference=reference,
        device=partial(
            local_tasks_torch.gather_values, codec, key, offset, x, residual, values, value_residual
        ),
    )


def scatter_values(
    codec: RandK, key: int, offset: int, scaled: bool, values: torch.Tensor, out: torch.Tensor
) -> LocalTask:
    """``out`` <- the values at their positions and zeros elsewhere; a granule whose first value is NaN becomes NaN.

    ``scaled``: multiply by elements / kept elements, which makes the result an unbiased estimate.
    """
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
        reference=lambda: put(out, sparse.scatter(codec, key, offset, scaled, get(values), out.numel())),
        device=partial(local_tasks_torch.scatter_values, codec, key, offset, scaled, values, out),
    )


def restore_residual(
    codec: RandK, key: int, offset: int, value_residual: torch.Tensor, residual: torch.Tensor
) -> LocalTask:
    """The residual at the positions that were sent <- ``value_residual``."""
    return _task(
        codec,
        (residual, value_residual),
        native=lambda: _C.task_restore_residual(
            codec.native(), key, offset, value_residual.data_ptr(), residual.numel(), residual.data_ptr()
        ),
        reference=lambda: put(
            residual, sparse.restore_residual(codec, key, offset, get(value_residual), get(residual))
        ),
        device=partial(local_tasks_torch.restore_residual, codec, key, offset, value_residual, residual),
    )


def _contribution(x: torch.Tensor, residual: torch.Tensor | None) -> tuple[int, int, int, int]:
    """The arguments of a native ``Contribution``: address, dtype, residual's address, elements."""
    return (
        x.data_ptr(),
        ELEMENT_TYPES[x.dtype],
        0 if residual is None else residual.data_ptr(),
        x.numel(),
    )


def _sum_of(x: torch.Tensor, residual: torch.Tensor | None) -> Floats:
    return get(x) if residual is None else canonical(get(x) + get(residual))


def _store(tensor: torch.Tensor, values: reproducible.Codes) -> None:
    tensor.numpy()[:] = values
