"""Launches the Triton kernels of a call: tile size, codec constants, sums of more payloads than a launch takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from dtcomm.codecs import Bf16, Codec, Fp16
from dtcomm.kernels.calls import CallGroup, Combine, EpilogueCall, Runner
from dtcomm.kernels.triton import rules_of
from dtcomm.kernels.triton.kernels import (
    LANES,
    ROWS,
    add_terms,
    combine_blocks,
    combine_casts,
    norm_rows,
    quantize_groups,
)

INTERPRETED = bool(triton.knobs.runtime.interpret)
# Elements per program: enough loads in flight per thread, and enough programs for small tensors.
TILE = 2048
MAX_PAYLOADS = 8  # per launch: each number of payloads is compiled separately
WIRES = {Fp16.family: tl.float16, Bf16.family: tl.bfloat16}
WORD = 0xFFFFFFFF


def prepare(group: CallGroup, device: torch.device) -> Runner | None:
    """None: these kernels take single calls."""
    return None


def combine(call: Combine) -> None:
    """Run one call (see :class:`Combine`), queued on torch's current stream of its tensors' device."""
    payloads, position, local, residual = call.payloads, call.position, call.local, call.residual
    for name, payload in (
        *((f"payloads[{i}]", payload) for i, payload in enumerate(payloads)),
        ("out", call.payload_out),
    ):
        if payload is not None and payload.data_ptr() % 16:
            raise ValueError(
                f"{name}: kernel 'triton' needs payloads aligned to 16 bytes, got {payload.data_ptr():#x}"
            )
    tensors = (call.local, residual, call.payload_out, call.out, *payloads)
    device = next(tensor.device for tensor in tensors if tensor is not None)
    with on_device(device):
        before = None
        while len(payloads) > MAX_PAYLOADS:
            running = torch.empty(call.numel, dtype=torch.float32, device=device)
            terms, payloads = payloads[:MAX_PAYLOADS], payloads[MAX_PAYLOADS:]
            if position < MAX_PAYLOADS:
                _launch(call, terms, before, local, residual, position, out=running)
                local = residual = None
            else:
                _launch(call, terms, before, None, None, 0, out=running)
                position -= MAX_PAYLOADS
            before = running
        _launch(
            call,
            payloads,
            before,
            local,
            residual,
            position,
            divisor=call.divisor,
            error=call.residual,
            payload_out=call.payload_out,
            out=call.out,
        )


def decode(codec: Codec, payload: torch.Tensor, numel: int, dtype: torch.dtype, out: torch.Tensor) -> None:
    """`out` <- the `numel` elements of the payload."""
    combine(Combine(codec=codec, numel=numel, dtype=dtype, payloads=(payload,), out=out))


def _launch(
    call: Combine,
    payloads: tuple[torch.Tensor, ...],
    before: torch.Tensor | None,
    local: torch.Tensor | None,
    residual: torch.Tensor | None,
    position: int,
    *,
    divisor: int = 1,
    error: torch.Tensor | None = None,
    payload_out: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> None:
    """One launch: sum `before` and the terms, and write the outputs that are given (error, payload_out, out)."""
    if local is None and residual is None:
        position = 0  # without a local term the position is irrelevant: compile one kernel
    tensors = (
        payloads,
        before,
        local,
        residual,
        error,
        payload_out,
        out,
        call.numel,
        float(np.float32(divisor)),
    )
    rules = rules_of(call.codec)
    tile = TILE if rules is None else max(TILE, rules.granule)
    # Every product is rounded: `enable_fp_fusion` would let the assembler fuse a * b + c.
    options: dict[str, Any] = {"num_warps": tile // 512, "enable_fp_fusion": False}
    grid = (-(-call.numel // tile),)
    random = (call.key & WORD, call.key >> 32, call.offset)
    if rules is None:
        wire, stochastic = WIRES[call.codec.family], getattr(call.codec, "round", "nearest") == "stochastic"
        combine_casts[grid](
            *tensors, *random, wire, stochastic, call.op, position, divisor != 1, tile, **options
        )
    else:
        combine_blocks[grid](*tensors, *random, rules, position, divisor != 1, tile, **options)


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Make `device` torch's current device, where Triton launches; silence numpy's warnings in the interpreter."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            yield
    else:
        with np.errstate(all="ignore"):
            yield


def run_epilogue(sums: torch.Tensor, call: EpilogueCall) -> None:
    """``out`` [..., features] <- (sums + bias) + addend, then its norm, on torch's current stream."""
    out = call.out
    features, numel = out.shape[-1], out.numel()
    options: dict[str, Any] = {"enable_fp_fusion": False}
    with on_device(out.device):
        if call.adds:
            grid = (-(-numel // TILE),)
            add_terms[grid](sums, call.bias, call.addend, out, numel, features, TILE, num_warps=4, **options)
        if not call.has_norm:
            return
        norm_out = torch.empty_like(out) if call.norm_out is None else call.norm_out
        rows = numel // features
        norm_rows[(-(-rows // ROWS),)](
            out, call.weight, norm_out, rows, features, call.eps, ROWS, LANES, num_warps=2, **options
        )
        if call.codes is not None and call.scales is not None:
            groups = call.scales.numel()
            codes, to_int8 = call.codes.view(torch.uint8), call.codes.dtype == torch.int8
            quantize_groups[(-(-groups // ROWS),)](
                norm_out,
                codes,
                call.scales,
                groups,
                numel // groups,
                to_int8,
                ROWS,
                LANES,
                num_warps=2,
                **options,
            )
