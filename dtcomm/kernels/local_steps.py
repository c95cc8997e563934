"""What a rank does on its own around a sum on common ground: measure, put on the grid, take off it, gather, scatter.

Each function makes a :class:`Step`, which runs where it is called, by the kernel that is in use, or inside the native
engine, between two operations; on a device it is `common_there`'s. Tensors are contiguous, on one device and of the
right size: the caller has checked them, and its call keeps them until the step has run. csrc/cpu/kernels.h (``Common``)
says what each computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dtcomm import _C
from dtcomm.codecs import Codec, Exact, RandK
from dtcomm.codecs.base import ELEMENT_TYPES
from dtcomm.kernels import counter_rng, dispatch, local_steps_torch
from dtcomm.kernels.reference import reproducible, shared_randk
from dtcomm.kernels.reference.floats import Floats, canonical, get, put

EVERYBODY = 0xFFFFFFFF  # stands for the rank in keys that all ranks share
SOUND = _C.SOUND
AUDIT_RUN = _C.AUDIT_RUN


@dataclass(frozen=True, kw_only=True)
class Step:
    """One task of one rank. ``native`` is what the engine runs, None on a device; ``held`` are the tensors."""

    native: _C.NativeStep | None
    reference: Callable[[], None]
    codec: Codec
    held: tuple[torch.Tensor | None, ...]

    def __call__(self) -> None:
        """Run it here. Raises ValueError where the kernel that is forced cannot."""
        if self.native is None:
            self.reference()
            return
        first = next(tensor for tensor in self.held if tensor is not None)
        kernel = dispatch.for_call(self.codec, "tensor", first)
        if kernel == dispatch.REFERENCE:
            with np.errstate(all="ignore"):
                self.reference()
        else:
            self.native.run(kernel)


def shared_key(seed: int) -> int:
    """The key that all ranks draw positions from in a call with this seed."""
    return _C.mix_key(seed, EVERYBODY, 0)


def agreed_key(key: int, flags: Sequence[bool]) -> int:
    """A number that differs where the key or any of the flags does."""
    return counter_rng.absorb(key, *flags)


def measure(codec: Exact, x: torch.Tensor, residual: torch.Tensor | None, exponents: torch.Tensor) -> Step:
    """``exponents`` <- those of the blocks of x plus residual."""
    if not x.is_cpu:
        return _there(
            codec, (x, residual, exponents), local_steps_torch.measure, codec, x, residual, exponents
        )
    return Step(
        native=_C.step_measure(codec.native(), *_contribution(x, residual), exponents.data_ptr()),
        reference=lambda: _store(exponents, reproducible.measure(codec, _term(x, residual))),
        codec=codec,
        held=(x, residual, exponents),
    )


def to_grid(
    codec: Exact,
    ranks: int,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    exponents: torch.Tensor,
    codes: torch.Tensor,
) -> Step:
    """``codes`` <- x plus residual as integers with room for ``ranks`` ranks; the residual becomes what that loses."""
    if not x.is_cpu:
        return _there(
            codec,
            (x, residual, exponents, codes),
            local_steps_torch.to_grid,
            codec,
            ranks,
            x,
            residual,
            exponents,
            codes,
        )

    def reference() -> None:
        term, grid = _term(x, residual), exponents.numpy()
        found = reproducible.to_codes(codec, ranks, term, grid)
        _store(codes, found)
        if residual is not None:
            put(residual, reproducible.lost(codec, ranks, term, found, grid, get(residual)))

    return Step(
        native=_C.step_put(
            codec.native(), ranks, *_contribution(x, residual), exponents.data_ptr(), codes.data_ptr()
        ),
        reference=reference,
        codec=codec,
        held=(x, residual, exponents, codes),
    )


def from_grid(
    codec: Exact,
    ranks: int,
    codes: torch.Tensor,
    exponents: torch.Tensor,
    divisor: int,
    out: torch.Tensor,
    verdict: torch.Tensor | None = None,
) -> Step:
    """``out`` <- what the integers stand for, divided; nothing where there is a verdict other than SOUND."""
    if not out.is_cpu:
        return _there(
            codec,
            (out, codes, exponents, verdict),
            local_steps_torch.from_grid,
            codec,
            ranks,
            codes,
            exponents,
            divisor,
            out,
            verdict,
        )

    def reference() -> None:
        if verdict is None or int(verdict) == SOUND:
            put(out, reproducible.from_codes(codec, ranks, codes.numpy(), exponents.numpy(), divisor))

    return Step(
        native=_C.step_take(
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
        codec=codec,
        held=(out, codes, exponents, verdict),
    )


def audit(codec: Exact, codes: torch.Tensor, sums: torch.Tensor) -> Step:
    """``sums`` (int64) <- a checksum of every AUDIT_RUN integers; those of a sum are the sums of theirs."""
    if not codes.is_cpu:
        return _there(codec, (codes, sums), local_steps_torch.audit, codes, sums)
    return Step(
        native=_C.step_audit(codec.bits, codes.data_ptr(), codes.numel(), sums.data_ptr()),
        reference=lambda: _store(sums, reproducible.audit(codes.numpy()).view(np.int64)),
        codec=codec,
        held=(codes, sums),
    )


def judge(
    codec: Exact,
    numel: int,
    sums: torch.Tensor,
    found: torch.Tensor,
    exponents: torch.Tensor,
    again: torch.Tensor,
    verdict: torch.Tensor,
) -> Step:
    """``verdict`` (one int64) <- SOUND, or twice the first run whose checksums differ, plus 1 where it is exponents."""
    if not sums.is_cpu:
        return _there(
            codec,
            (sums, found, exponents, again, verdict),
            local_steps_torch.judge,
            codec,
            sums,
            found,
            exponents,
            again,
            verdict,
        )
    native = _C.step_verdict(
        sums.data_ptr(),
        found.data_ptr(),
        exponents.data_ptr(),
        again.data_ptr(),
        numel,
        codec.block,
        verdict.data_ptr(),
    )

    def reference() -> None:
        blocks = max(1, AUDIT_RUN // codec.block)
        wrong_sums = (sums != found).numpy()
        wrong_blocks = (exponents != again).numpy()
        verdict.fill_(SOUND)
        for run in reversed(range(len(wrong_sums))):
            if wrong_sums[run]:
                verdict.fill_(2 * run)
            if wrong_blocks[run * blocks : (run + 1) * blocks].any():
                verdict.fill_(2 * run + 1)

    return Step(
        native=native, reference=reference, codec=codec, held=(sums, found, exponents, again, verdict)
    )


def gather(
    codec: RandK,
    key: int,
    offset: int,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    values: torch.Tensor,
    owed: torch.Tensor | None,
) -> Step:
    """``values`` <- x at the positions of ``key``, ``offset`` being the index of x's first element.

    With a residual, ``owed`` <- the residual there, and all the rest joins it.
    """
    if not x.is_cpu:
        return _there(
            codec,
            (x, residual, values, owed),
            local_steps_torch.gather,
            codec,
            key,
            offset,
            x,
            residual,
            values,
            owed,
        )

    def reference() -> None:
        found, was_owed, left = shared_randk.gather(
            codec, key, offset, get(x), None if residual is None else get(residual)
        )
        put(values, canonical(found))
        if residual is not None and owed is not None:
            put(owed, was_owed)
            put(residual, left)

    return Step(
        native=_C.step_gather(
            codec.native(),
            key,
            offset,
            *_contribution(x, residual),
            values.data_ptr(),
            0 if owed is None else owed.data_ptr(),
        ),
        reference=reference,
        codec=codec,
        held=(x, residual, values, owed),
    )


def scatter(
    codec: RandK, key: int, offset: int, scaled: bool, values: torch.Tensor, out: torch.Tensor
) -> Step:
    """``out`` <- the values at their positions, zeros elsewhere; ``scaled``: to be right on average."""
    if not out.is_cpu:
        return _there(
            codec, (out, values), local_steps_torch.scatter, codec, key, offset, scaled, values, out
        )
    return Step(
        native=_C.step_scatter(
            codec.native(),
            key,
            offset,
            scaled,
            values.data_ptr(),
            out.numel(),
            ELEMENT_TYPES[out.dtype],
            out.data_ptr(),
        ),
        reference=lambda: put(
            out, shared_randk.scatter(codec, key, offset, scaled, get(values), out.numel())
        ),
        codec=codec,
        held=(out, values),
    )


def settle(codec: RandK, key: int, offset: int, owed: torch.Tensor, residual: torch.Tensor) -> Step:
    """The residual at the positions <- ``owed``."""
    if not residual.is_cpu:
        return _there(codec, (residual, owed), local_steps_torch.settle, codec, key, offset, owed, residual)
    return Step(
        native=_C.step_settle(
            codec.native(), key, offset, owed.data_ptr(), residual.numel(), residual.data_ptr()
        ),
        reference=lambda: put(residual, shared_randk.settle(codec, key, offset, get(owed), get(residual))),
        codec=codec,
        held=(residual, owed),
    )


def _there(codec: Codec, held: tuple[torch.Tensor | None, ...], run: Callable[..., None], *args: Any) -> Step:
    return Step(native=None, reference=functools.partial(run, *args), codec=codec, held=held)


def _contribution(x: torch.Tensor, residual: torch.Tensor | None) -> tuple[int, int, int, int]:
    return (
        x.data_ptr(),
        ELEMENT_TYPES[x.dtype],
        0 if residual is None else residual.data_ptr(),
        x.numel(),
    )


def _term(x: torch.Tensor, residual: torch.Tensor | None) -> Floats:
    return get(x) if residual is None else canonical(get(x) + get(residual))


def _store(to: torch.Tensor, found: reproducible.Codes) -> None:
    to.numpy()[:] = found
