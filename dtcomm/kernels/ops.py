"""The verbs: floats into payloads, payloads into floats and into sums, each in one pass over memory.

Tensors are contiguous, of any shape, and those of a call on one device, the CPU or a CUDA device (there a call is
queued on torch's current stream); they are read and written in memory order. Every verb takes an `out`: at tens of
megabytes a fresh allocation costs more than the encoding, so hot paths reuse their buffers.

Results have no gradient: what a verb is given is taken as if detached. `dtcomm.kernels.custom_op_library` has the verbs
as torch operators, which they become by themselves under torch.compile, and `quantize`, which lets gradients through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from dtcomm.codecs import Codec
from dtcomm.codecs import codec as parse
from dtcomm.codecs.base import FLOAT_TYPES
from dtcomm.kernels import checks, cpu, dispatch, reference
from dtcomm.kernels.dispatch import available, current, use
from dtcomm.kernels.types import Combine

__all__ = ["available", "current", "decode", "encode", "reduce", "reduce_encode", "use"]


def encode(
    codec: Codec | str,
    x: torch.Tensor,
    key: int = 0,
    offset: int = 0,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    decoded: torch.Tensor | None = None,
) -> torch.Tensor:
    """The payload of `x`: uint8, ``codec.wire_bytes(x.numel(), x.dtype)`` bytes.

    `key` and `offset` (the index of x's first element in the caller's tensor) choose the random numbers of
    stochastic rounding. `residual` (float32, as many elements) is added to x and becomes what the encoding
    lost; where that is no number it stays as it was. `decoded` receives what the payload decodes to; it may
    be `x`.

    Raises TypeError or ValueError naming the argument.
    """
    if torch.compiler.is_compiling():
        from dtcomm.kernels import custom_op_library

        return custom_op_library.compiled_encode(codec, x, key, offset, residual, out, decoded)
    codec = parse(codec)
    x = checks.tensor("x", x)
    dtype = checks.element_type("x", codec, x.dtype)
    payload = _payload_out(out, codec, x.numel(), dtype, x)
    call = Combine(
        codec=codec,
        numel=x.numel(),
        dtype=dtype,
        local=x,
        residual=_residual(residual, x.numel(), dtype, x),
        key=checks.word("key", key),
        offset=checks.word("offset", offset),
        payload_out=payload,
        out=None if decoded is None else checks.floats("decoded", decoded, x.numel(), dtype, like=x),
    )
    _run(call, "x", x)
    return payload


def decode(
    codec: Codec | str,
    payload: torch.Tensor,
    numel: int,
    dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The `numel` elements of `payload` as a tensor of `dtype`, which for `none` is also their type in the
    payload.

    `out`, where given, has `numel` elements of `dtype`. Raises TypeError or ValueError naming the argument.
    """
    if torch.compiler.is_compiling():
        from dtcomm.kernels import custom_op_library

        return custom_op_library.compiled_decode(codec, payload, numel, dtype, out)
    codec = parse(codec)
    numel = checks.count("numel", numel)
    checks.element_type("dtype", codec, dtype)
    payload = checks.payload("payload", payload, codec, numel, dtype)
    checks.require_valid_payload(codec, [payload], numel)
    if out is None:
        out = payload.new_empty(numel, dtype=dtype)
    else:
        checks.floats("out", out, numel, dtype, like=payload)
    if numel == 0:
        return out
    run_decode(dispatch.kernel_for(codec, "payload", payload), codec, payload, numel, dtype, out)
    return out


def reduce(
    codec: Codec | str,
    payloads: Sequence[torch.Tensor],
    numel: int,
    local: torch.Tensor | None = None,
    position: int | None = None,
    divisor: int = 1,
    out: torch.Tensor | None = None,
    *,
    op: str = "sum",
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The sum of `payloads`, in that order, as `numel` floats; `local` stands before ``payloads[position]``.

    The sum is taken in float32 (other types of `none`: in their own), divided by `divisor` and rounded once
    to the type of `out`. `dtype` is the type of the tensor that is reduced: by default local's, else out's,
    else float32; local and out are of that type or float32 (a running sum). `position` is last by default.
    `op` min and max: `none`, `fp16` and `bf16`; NaN wins. Raises TypeError or ValueError naming the argument.
    """
    if torch.compiler.is_compiling():
        from dtcomm.kernels import custom_op_library

        return custom_op_library.compiled_reduce(
            codec, payloads, numel, local, position, divisor, out, op, dtype
        )
    call, name, first = _reduction(codec, payloads, numel, local, position, divisor, op, dtype, out)
    if out is None:
        out = first.new_empty(numel, dtype=call.dtype)
    else:
        checks.floats("out", out, numel, call.dtype, *_running(call.dtype), like=first)
    _run(replace(call, out=out), name, first)
    return out


def reduce_encode(
    codec: Codec | str,
    payloads: Sequence[torch.Tensor],
    numel: int,
    local: torch.Tensor | None = None,
    position: int | None = None,
    divisor: int = 1,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    op: str = "sum",
    dtype: torch.dtype | None = None,
    key: int = 0,
    offset: int = 0,
    decoded: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`reduce`, encoded again: returns the payload of the (divided) sum.

    `residual` is added to `local` (or stands at `position` in its place) and becomes the error of the new
    encoding times `divisor`, so that it can be added to this rank's contribution to the next sum. `decoded`
    receives what the payload decodes to; `out` is the payload. Raises TypeError or ValueError naming the
    argument.
    """
    if torch.compiler.is_compiling():
        from dtcomm.kernels import custom_op_library

        return custom_op_library.compiled_reduce_encode(
            codec, payloads, numel, local, position, divisor, residual, out, op, dtype, key, offset, decoded
        )
    call, name, first = _reduction(codec, payloads, numel, local, position, divisor, op, dtype, decoded)
    dtype = call.dtype
    if decoded is not None:
        checks.floats("decoded", decoded, numel, dtype, *_running(dtype), like=first)
    payload = _payload_out(out, call.codec, numel, dtype, first)
    call = replace(
        call,
        residual=_residual(residual, numel, dtype, first),
        key=checks.word("key", key),
        offset=checks.word("offset", offset),
        payload_out=payload,
        out=decoded,
    )
    _run(call, name, first)
    return payload


def _reduction(
    codec: Codec | str,
    payloads: Sequence[torch.Tensor],
    numel: int,
    local: torch.Tensor | None,
    position: int | None,
    divisor: int,
    op: str,
    dtype: torch.dtype | None,
    floats: torch.Tensor | None,
) -> tuple[Combine, str, torch.Tensor]:
    """The part of a call that both reductions share, and the term that decides on the device, with its name."""
    codec = parse(codec)
    numel = checks.count("numel", numel)
    if dtype is None:
        known = [tensor.dtype for tensor in (local, floats) if isinstance(tensor, torch.Tensor)]
        dtype = known[0] if known else torch.float32
    checks.element_type("dtype", codec, dtype)
    if not payloads and local is None:
        raise ValueError("payloads: expected at least one payload or a local tensor, got none")
    last = len(payloads)
    position = last if position is None else checks.count("position", position)
    if position > last:
        raise ValueError(f"position: expected 0 to {last}, got {position}")
    first: torch.Tensor | None = None
    checked = []
    for i, payload in enumerate(payloads):
        checked.append(checks.payload(f"payloads[{i}]", payload, codec, numel, dtype, first))
        first = checked[0]
    if local is not None:
        checks.floats("local", local, numel, dtype, *_running(dtype), like=first)
    call = Combine(
        codec=codec,
        numel=numel,
        dtype=dtype,
        payloads=tuple(checked),
        local=local,
        position=position,
        divisor=checks.divisor(divisor, dtype),
        op=checks.operation(codec, op),
    )
    if first is not None:
        return call, "payloads[0]", first
    assert local is not None
    return call, "local", local


def _run(call: Combine, name: str, first: torch.Tensor) -> None:
    """Run `call` on the device of its argument `first`, called `name`."""
    if call.numel == 0:
        return
    checks.require_valid_payload(call.codec, call.payloads, call.numel)
    run_combine(dispatch.kernel_for(call.codec, name, first), call)


def run_combine(kernel: str, call: Combine) -> None:
    """Run a call that has been checked with the kernel of that name, which can run it."""
    if kernel == dispatch.REFERENCE:
        reference.combine(call)
    elif kernel in dispatch.CUDA_KERNELS:
        dispatch.load_backend(kernel).combine(call)
    else:
        cpu.combine(kernel, call)


def run_decode(
    kernel: str, codec: Codec, payload: torch.Tensor, numel: int, dtype: torch.dtype, out: torch.Tensor
) -> None:
    """The same for a decoding: the payload into `out`."""
    if kernel == dispatch.REFERENCE:
        reference.decode(codec, payload, numel, dtype, out)
    elif kernel in dispatch.CUDA_KERNELS:
        dispatch.load_backend(kernel).decode(codec, payload, numel, dtype, out)
    else:
        cpu.decode(kernel, codec, payload, numel, dtype, out)


def _running(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The type of a running sum of `dtype`, where that is another one."""
    return (torch.float32,) if dtype in FLOAT_TYPES else ()


def _residual(
    residual: torch.Tensor | None, numel: int, dtype: torch.dtype, like: torch.Tensor
) -> torch.Tensor | None:
    if residual is None:
        return None
    if dtype not in FLOAT_TYPES:
        raise TypeError(f"residual: {dtype} is summed as itself and loses nothing; expected None")
    return checks.floats("residual", residual, numel, torch.float32, like=like)


def _payload_out(
    out: torch.Tensor | None, codec: Codec, numel: int, dtype: torch.dtype, like: torch.Tensor
) -> torch.Tensor:
    if out is None:
        return like.new_empty(codec.wire_bytes(numel, dtype), dtype=torch.uint8)
    return checks.payload("out", out, codec, numel, dtype, like)
