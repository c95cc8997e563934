"""The epilogue of a summed activation: decode, add the bias, add the stream that layers add to, take its RMS norm.

As separate operators these are four passes over memory. Here a row is decoded into the cache and everything else is
done there, and the normed row may be left quantized for the matrix product that follows. On CUDA tensors Triton adds
bias and addend in one pass, takes the norm in a second one and quantizes it in a third one, with the same bits as on
the CPU. `dtcomm.tp` calls this module; an all-reduce takes an :class:`EpilogueTask`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from dtcomm import _C
from dtcomm.codecs import Codec
from dtcomm.codecs import codec as parse
from dtcomm.codecs.base import ELEMENT_TYPES, FLOAT_TYPES
from dtcomm.kernels import calls, dispatch, ops, reference
from dtcomm.kernels.calls import EpilogueCall, address
from dtcomm.kernels.local_tasks import LocalTask
from dtcomm.kernels.reference.floats import NAN, get, put
from dtcomm.kernels.reference.minifloat import FORMATS

UNCOMPRESSED = parse("none")
#: Element types of a quantized norm.
QUANTIZED_TYPES = (torch.float8_e4m3fn, torch.int8)
_LANES = 16  # partial sums of a row's squares
_E4M3_NAN = 127


@dataclass(frozen=True, kw_only=True, eq=False)
class Quantized:
    """A tensor in 8 bits with scales, as matrix products take it: an element is its value times its group's scale.

    Attributes:
        values: float8_e4m3fn or int8, [..., features].
        scales: fp32, [..., groups]; ``groups`` divides ``features``. A group is ``features / groups`` elements of a row
            in a row: 1 group is a scale for each token, ``features / 128`` are blocks of 128.
    """

    values: torch.Tensor
    scales: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """Return the fp32 tensor that the values and scales stand for."""
        size = self.values.shape[-1] // self.scales.shape[-1]
        grouped = self.values.float().view(*self.scales.shape, size)
        return (grouped * self.scales[..., None]).view(self.values.shape)


def empty_quantized(
    like: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn, group: int | None = None
) -> Quantized:
    """Return memory for the quantized norm of a tensor.

    Args:
        like: The tensor, [..., features].
        dtype: float8_e4m3fn or int8. Default: float8_e4m3fn.
        group: Elements that share a scale; divides ``features``. Default: a row, which is a token.

    Returns:
        Values of the tensor's shape and scales, uninitialised, on its device.

    Raises:
        ValueError: ``dtype`` or ``group`` is not valid.

    Example:
        >>> import torch
        >>> from dtcomm.kernels.epilogue import empty_quantized
        >>> empty_quantized(torch.zeros(4, 256), torch.int8, group=128).scales.shape
        torch.Size([4, 2])
    """
    if dtype not in QUANTIZED_TYPES:
        raise ValueError(f"dtype: expected float8_e4m3fn or int8, got {dtype}")
    features = like.shape[-1]
    size = features if group is None else group
    if size < 1 or features % size:
        raise ValueError(f"group: {size} does not divide the {features} features")
    values = torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)
    scales = torch.empty((*like.shape[:-1], features // size), dtype=torch.float32, device=like.device)
    return Quantized(values=values, scales=scales)


def epilogue(
    codec: Codec | str,
    runs: Sequence[tuple[torch.Tensor, int]],
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    norm_out: torch.Tensor | None = None,
    quantized: Quantized | None = None,
) -> torch.Tensor:
    """Decode payloads into ``out``, add bias and addend, and take the RMS norm of the result.

    All tensors have the type of ``out`` and are on its device. Sums and products are taken in fp32; ``out`` and
    ``norm_out`` are each rounded once.

    Args:
        codec: The codec of the payloads.
        runs: Pairs of a payload and its number of elements. Joined, they are the elements of ``out``.
        out: fp32, fp16 or bf16 [..., features].
        bias: [features], added to every row.
        addend: The stream that layers add to; of the shape of ``out``, added after the bias; may be ``out`` itself.
        weight: [features], multiplied into the norm; needs ``norm_out`` or ``quantized``.
        eps: Added to the mean square of a row before the root is taken.
        norm_out: Of the shape of ``out``; receives each row over the root of its mean square.
        quantized: Receives the norm, as it is in ``norm_out``, over the scale of its group and rounded to nearest even.
            A scale is the group's largest magnitude over 448 (float8_e4m3fn) or 127 (int8), in fp32. A group with a
            non-finite element has the scale NaN. With it ``norm_out`` may be None.

    Returns:
        ``out``.

    Raises:
        TypeError: An argument has the wrong type; the message names it.
        ValueError: An argument has the wrong size, layout or device; the message names it.
        PayloadCorrupt: A payload holds what no encoder writes.

    Example:
        >>> import torch, dtcomm
        >>> from dtcomm.kernels.epilogue import epilogue
        >>> payload = dtcomm.encode("fp16", torch.ones(6))
        >>> epilogue("fp16", [(payload, 6)], torch.empty(2, 3), bias=torch.tensor([1.0, 2.0, 3.0]))
        tensor([[2., 3., 4.],
                [2., 3., 4.]])
    """
    which = parse(codec)
    call = _checked(which, out, bias, addend, weight, eps, norm_out, quantized)
    if sum(numel for _, numel in runs) != out.numel():
        raise ValueError(
            f"runs: hold {sum(numel for _, numel in runs)} elements, out {tuple(out.shape)} has {out.numel()}"
        )
    payloads = [
        calls.payload(f"runs[{at}]", payload, which, numel, which.wire_bytes(numel, out.dtype))
        for at, (payload, numel) in enumerate(runs)
    ]
    for payload, (_, numel) in zip(payloads, runs, strict=True):
        calls.require_valid_payload(which, [payload], numel)
    if out.numel() == 0:
        return out
    if not out.is_cpu:
        _run_triton(_decoded(which, runs, call), call)
    elif dispatch.current() == dispatch.REFERENCE:
        _in_numpy(which, runs, call)
    else:
        addresses = [(payload.data_ptr(), numel) for payload, (_, numel) in zip(payloads, runs, strict=True)]
        _C.epilogue(dispatch.native_kernel(), which.native(), addresses, _native(call))
    return out


@dataclass(frozen=True, kw_only=True)
class EpilogueTask(LocalTask):
    """The epilogue of a tensor that is summed uncompressed; made by :func:`epilogue_task`.

    Calling it runs it, on CUDA tensors on the current stream. An operation that takes it may fuse it into its kernels.

    Attributes:
        native: The task of the C++ engine; None for CUDA tensors.
        reference: Runs the task in numpy, on CUDA tensors in Triton.
        codec: The codec of the sum: uncompressed.
        tensors: All tensors of the task.
        call: The tensors of the epilogue.
    """

    call: EpilogueCall

    def norm(self) -> EpilogueTask | None:
        """The norm alone, for kernels that add bias and addend themselves; None if there is no norm."""
        return _task(replace(self.call, bias=None, addend=None)) if self.call.has_norm else None


def epilogue_task(
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    norm_out: torch.Tensor | None = None,
    quantized: Quantized | None = None,
) -> EpilogueTask:
    """The epilogue of the sum that an operation leaves in ``out``, as a task for that operation.

    The native engine runs it on each piece of the sum while that is in the cache. A fused all-reduce on CUDA devices
    adds bias and addend in its own kernel.

    Args:
        out: The tensor that the operation writes; fp32, fp16 or bf16 [..., features].
        bias: [features], added to every row.
        addend: The stream that layers add to; of the shape of ``out``, added after the bias; must not be ``out``.
        weight: [features], multiplied into the norm; needs ``norm_out`` or ``quantized``.
        eps: Added to the mean square of a row before the root is taken.
        norm_out: Of the shape of ``out``; receives each row over the root of its mean square.
        quantized: Receives the norm in 8 bits, as in :func:`epilogue`. With it ``norm_out`` may be None.

    Returns:
        The task. Callers keep the tensors unchanged until the operation is complete.

    Raises:
        TypeError: A tensor has the wrong type; the message names it.
        ValueError: A tensor has the wrong size, layout or device; the message names it.

    Example:
        Add a bias to a sum while it is received::

            dtcomm.all_reduce(y, epilogue=epilogue_task(y, bias=bias))

        Leave the normed sum in fp8 for the next matrix product::

            x = empty_quantized(y)
            task = epilogue_task(y, addend=stream, weight=norm.weight, quantized=x)
            dtcomm.all_reduce(y, codec="int8", epilogue=task)
    """
    return _task(_checked(UNCOMPRESSED, out, bias, addend, weight, eps, norm_out, quantized))


def _task(call: EpilogueCall) -> EpilogueTask:
    def by_reference() -> None:
        out = call.out
        payload = torch.zeros(UNCOMPRESSED.wire_bytes(out.numel(), out.dtype), dtype=torch.uint8)
        sums = out.view(-1).view(torch.uint8)
        payload[: sums.numel()] = sums
        _in_numpy(UNCOMPRESSED, [(payload, out.numel())], call)

    return EpilogueTask(
        native=_C.task_epilogue(call.out.numel(), _native(call)),
        reference=by_reference if call.out.is_cpu else lambda: _run_triton(call.out, call),
        codec=UNCOMPRESSED,
        tensors=(call.out, call.bias, call.addend, call.weight, call.norm_out, call.codes, call.scales),
        call=call,
    )


def supports_epilogue(*tensors: torch.Tensor | None) -> bool:
    """Whether kernels of this module take these tensors: one float type, one device, and kernels for it installed.

    Args:
        *tensors: The tensors of an epilogue; None stands for one that is absent.

    Returns:
        Whether :func:`epilogue_task` accepts them.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    dtype, device = present[0].dtype, present[0].device
    if dtype not in FLOAT_TYPES or any(
        tensor.dtype != dtype or tensor.device != device for tensor in present
    ):
        return False
    return device.type == "cpu" or (device.type == "cuda" and _triton_installed())


@cache
def _triton_installed() -> bool:
    return find_spec("triton") is not None


def _run_triton(sums: torch.Tensor, call: EpilogueCall) -> None:
    """Run the epilogue of decoded ``sums``, which is fp32 or of the type of ``out``, and may be ``out``.

    Raises RuntimeError if Triton is not installed.
    """
    if not call.out.numel():
        return
    if not _triton_installed():
        raise RuntimeError(
            f"out: on {call.out.device}, where Triton adds bias and addend; install it (pip install triton)"
        )
    from dtcomm.kernels.triton_epilogue import run_epilogue

    run_epilogue(sums, call)


def _decoded(codec: Codec, runs: Sequence[tuple[torch.Tensor, int]], call: EpilogueCall) -> torch.Tensor:
    """The decoded runs: in a temporary tensor if something is added before rounding, else in ``out``."""
    out = call.out
    dtype = torch.float32 if call.adds and codec.name != "none" else out.dtype
    sums = torch.empty(out.numel(), dtype=dtype, device=out.device) if call.adds else out.view(-1)
    at = 0
    for payload, numel in runs:
        ops.decode(codec, payload, numel, dtype, out=sums[at : at + numel])
        at += numel
    return sums


def _checked(
    codec: Codec,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    addend: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    norm_out: torch.Tensor | None,
    quantized: Quantized | None,
) -> EpilogueCall:
    """The arguments as one value. Raises TypeError or ValueError, which name the argument."""
    calls.floats("out", out, out.numel(), *FLOAT_TYPES)
    calls.element_type("out", codec, out.dtype)
    if out.ndim == 0:
        raise ValueError("out: expected [..., features], got no dimension")
    for name, tensor in (("bias", bias), ("weight", weight)):
        if tensor is not None:
            calls.floats(name, tensor, out.shape[-1], out.dtype, like=out)
    for name, tensor in (("addend", addend), ("norm_out", norm_out)):
        if tensor is not None:
            calls.floats(name, tensor, out.numel(), out.dtype, like=out)
    if weight is not None and norm_out is None and quantized is None:
        raise ValueError("weight: needs norm_out or quantized, which were not given")
    call = EpilogueCall(out=out, bias=bias, addend=addend, weight=weight, eps=eps, norm_out=norm_out)
    if quantized is None:
        return call
    values, scales = quantized.values, quantized.scales
    calls.floats("quantized.values", values, out.numel(), *QUANTIZED_TYPES, like=out)
    features, groups = out.shape[-1], scales.shape[-1] if scales.ndim else 0
    if groups < 1 or features % groups:
        raise ValueError(f"quantized.scales: {groups} scales for a row do not divide its {features} features")
    rows = out.numel() // features if features else 0
    calls.floats("quantized.scales", scales, rows * groups, torch.float32, like=out)
    return replace(call, codes=values, scales=scales)


def _native(call: EpilogueCall) -> _C.Epilogue:
    codes, scales = call.codes, call.scales
    return _C.Epilogue(
        features=call.out.shape[-1] or 1,
        dtype=ELEMENT_TYPES[call.out.dtype],
        out=call.out.data_ptr(),
        bias=address(call.bias),
        addend=address(call.addend),
        weight=address(call.weight),
        eps=call.eps,
        norm_out=address(call.norm_out),
        codes=address(codes),
        scales=address(scales),
        groups=1 if scales is None else scales.shape[-1],
        to_int8=codes is not None and codes.dtype == torch.int8,
    )


def _in_numpy(codec: Codec, runs: Sequence[tuple[torch.Tensor, int]], call: EpilogueCall) -> None:
    """The reference of the epilogue: every sum and product is rounded to fp32, in a stated order."""
    out, parts = call.out, []
    for payload, numel in runs:
        part = torch.empty(numel)
        if out.dtype != torch.float32 and codec.name == "none":
            raw = torch.empty(numel, dtype=out.dtype)
            reference.decode(codec, payload, numel, out.dtype, raw)
            part.copy_(raw)
        elif numel:
            reference.decode(codec, payload, numel, torch.float32, part)
        parts.append(part.numpy())
    y: Any = np.concatenate(parts).reshape(-1, out.shape[-1])
    if call.bias is not None:
        y = y + get(call.bias)
    if call.addend is not None:
        y = y + get(call.addend).reshape(y.shape)
    put(out, y.reshape(-1))
    if not call.has_norm:
        return
    y = get(out).reshape(y.shape)
    mean = _squares(y) / np.float32(out.shape[-1])
    scale = np.float32(1) / np.sqrt(mean + np.float32(call.eps))
    with np.errstate(invalid="ignore"):  # an infinite element has the mean Inf: Inf times 0 is NaN
        y = y * scale[:, None]
    if call.weight is not None:
        y = y * get(call.weight)
    norm = torch.empty_like(out) if call.norm_out is None else call.norm_out
    put(norm, y.reshape(-1))
    if call.codes is not None and call.scales is not None:
        _quantize(get(norm), call.codes, call.scales)


def _quantize(x: Any, values: torch.Tensor, scales: torch.Tensor) -> None:
    """Write x over the scale of its group to ``values``, to nearest even; a scale is a group's largest magnitude over
    the largest number of the type of ``values``.
    """
    groups = x.reshape(scales.numel(), -1)
    floating = values.dtype != torch.int8
    finite = np.isfinite(groups).all(axis=1)
    largest = np.float32(448 if floating else 127)
    scale = np.where(finite, np.abs(np.where(finite[:, None], groups, 0)).max(axis=1) / largest, NAN)
    scale = scale.astype(np.float32)
    usable = (scale > 0)[:, None]  # not of zeros, and not NaN
    t = np.divide(groups, scale[:, None], out=np.zeros_like(groups), where=usable)
    if floating:
        codes = np.where(finite[:, None], FORMATS["e4m3"].nearest(t), _E4M3_NAN)
    else:
        codes = np.rint(np.clip(t, -largest, largest)).astype(np.int8).view(np.uint8)
    # What is not representable as a scale counts as zero, as its codes do.
    codes = np.where(usable | ~finite[:, None], codes, 0)
    values.view(torch.uint8).view(-1).copy_(torch.from_numpy(codes.astype(np.uint8).reshape(-1)))
    scales.view(-1).copy_(torch.from_numpy(scale))


def _squares(rows: Any) -> Any:
    """Each row's sum of squares: element i is added to lane i mod 16; lanes are then folded in halves."""
    count, n = rows.shape
    padded = np.zeros((count, -(-n // _LANES) * _LANES), np.float32)
    padded[:, :n] = rows * rows
    lanes = np.zeros((count, _LANES), np.float32)
    for step in range(0, padded.shape[1], _LANES):
        lanes = lanes + padded[:, step : step + _LANES]
    half = _LANES // 2
    while half:
        lanes = lanes[:, :half] + lanes[:, half : 2 * half]
        half //= 2
    return lanes[:, 0]
