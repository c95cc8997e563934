"""The verbs: encode floats into payloads, decode payloads, and reduce payloads to floats or to a new payload.

Each verb is one pass over memory. Tensors are contiguous, of any shape, and read in memory order; those of one call
are on one device. Calls on a CUDA device are queued on torch's current stream. Every verb takes an output tensor: at
tens of megabytes a fresh allocation costs more than the encoding, so hot paths reuse their buffers.

Results have no gradient; arguments are used as if detached. Under `torch.compile` the verbs become the operators
`torch.ops.dtcomm.*` (see `custom_ops`). :func:`quantize` passes gradients through.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtcomm.codecs import Codec
from dtcomm.kernels import eager
from dtcomm.kernels.dispatch import available, current, use

__all__ = ["available", "current", "decode", "encode", "quantize", "reduce", "reduce_encode", "use"]


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
    """Encode a tensor.

    Args:
        codec: A codec or its spec string, such as "int8" or "topk:ratio=0.01".
        x: The tensor; fp32, fp16 or bf16 (any type for codec "none"), contiguous, of any shape.
        key: Key of the random numbers (stochastic rounding, positions of randk); 64 bits.
        offset: Index of x's first element in the caller's tensor, which is the counter of the random numbers.
        residual: float32, as many elements as x. It is added to x and overwritten with the error of the encoding;
            where that is not finite it stays.
        out: uint8, ``codec.wire_bytes(x.numel(), x.dtype)`` elements; default: a new tensor.
        decoded: A tensor of x's type and size that receives what the payload decodes to; it may be x itself.

    Returns:
        The payload: `out`, or a new tensor.

    Raises:
        TypeError: An argument has the wrong type; the message names it.
        ValueError: An argument has the wrong size, device or value; the message names it.

    Example:
        >>> import torch, dtcomm
        >>> payload = dtcomm.encode("int8", torch.tensor([1.0, -0.5, 0.25]))
        >>> payload.dtype, payload.numel()
        (torch.uint8, 48)
        >>> dtcomm.decode("int8", payload, 3)
        tensor([ 0.9999, -0.5039,  0.2520])
    """
    if torch.compiler.is_compiling():
        from dtcomm.kernels import custom_ops

        return custom_ops.compiled_encode(codec, x, key, offset, residual, out, decoded)
    return eager.encode(codec, x, key, offset, residual, out, decoded)


def decode(
    codec: Codec | str,
    payload: torch.Tensor,
    numel: int,
    dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode a payload.

    Args:
        codec: The codec that encoded the payload, or its spec string.
        payload: uint8, ``codec.wire_bytes(numel, dtype)`` elements.
        numel: Elements of the tensor that was encoded. Numbers whose payloads have one size are not told apart.
        dtype: The type of the result. For codec "none" also the type of the elements in the payload.
        out: `numel` elements of `dtype`; default: a new tensor.

    Returns:
        The decoded elements: `out`, or a new tensor of shape [numel].

    Raises:
        TypeError: An argument has the wrong type; the message names it.
        ValueError: An argument has the wrong size, device or value; the message names it.
        PayloadCorrupt: The payload holds positions that no encoder writes.

    Example:
        >>> import torch, dtcomm
        >>> payload = dtcomm.encode("sign", torch.tensor([3.0, -1.0]))
        >>> dtcomm.decode("sign", payload, 2)
        tensor([ 2., -2.])
    """
    if torch.compiler.is_compiling():
        from dtcomm.kernels import custom_ops

        return custom_ops.compiled_decode(codec, payload, numel, dtype, out)
    return eager.decode(codec, payload, numel, dtype, out)


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
    """Reduce payloads, and optionally a tensor that is not encoded, to floats.

    The sum is taken in order in float32 (types of "none" that are no such floats: in their own type), divided, and
    rounded once to the type of the result.

    Args:
        codec: The codec of the payloads, or its spec string.
        payloads: The encoded terms, each of `numel` elements, in the order of the sum.
        numel: Elements of every term.
        local: A term of `dtype` or float32 that is not encoded.
        position: The local term stands before ``payloads[position]``; default: last.
        divisor: Divides the result; at least 1.
        out: `numel` elements of `dtype` or float32; default: a new tensor of `dtype`.
        op: "sum"; codecs none, fp16 and bf16 also take "min" and "max", in which NaN wins.
        dtype: The type of the reduced tensor; default: local's, else out's, else float32.

    Returns:
        The result: `out`, or a new tensor of shape [numel].

    Raises:
        TypeError: An argument has the wrong type; the message names it.
        ValueError: An argument has the wrong size, device or value; the message names it.
        PayloadCorrupt: A payload holds positions that no encoder writes.

    Example:
        >>> import torch
        >>> from dtcomm.kernels import ops
        >>> payloads = [ops.encode("fp16", torch.full((2,), float(rank))) for rank in range(3)]
        >>> ops.reduce("fp16", payloads, 2, divisor=3)
        tensor([1., 1.])
    """
    if torch.compiler.is_compiling():
        from dtcomm.kernels import custom_ops

        return custom_ops.compiled_reduce(codec, payloads, numel, local, position, divisor, out, op, dtype)
    return eager.reduce(codec, payloads, numel, local, position, divisor, out, op, dtype)


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
    """Reduce payloads as :func:`reduce` does and encode the result, in one pass.

    Args:
        codec: The codec of the payloads and of the result, or its spec string.
        payloads: The encoded terms, each of `numel` elements, in the order of the sum.
        numel: Elements of every term.
        local: A term of `dtype` or float32 that is not encoded.
        position: The local term stands before ``payloads[position]``; default: last.
        divisor: Divides the result before it is encoded; at least 1.
        residual: float32, `numel` elements. It is added to `local`, or takes its place, and is overwritten with the
            error of the new encoding times `divisor`: what this rank has to add to its next contribution.
        out: uint8, ``codec.wire_bytes(numel, dtype)`` elements; default: a new tensor.
        op: "sum"; codecs none, fp16 and bf16 also take "min" and "max", in which NaN wins.
        dtype: The type of the reduced tensor; default: local's, else decoded's, else float32.
        key: Key of the random numbers; 64 bits.
        offset: Index of the first element in the caller's tensor, which is the counter of the random numbers.
        decoded: `numel` elements of `dtype` or float32; receives what the result decodes to.

    Returns:
        The payload of the result: `out`, or a new tensor.

    Raises:
        TypeError: An argument has the wrong type; the message names it.
        ValueError: An argument has the wrong size, device or value; the message names it.
        PayloadCorrupt: A payload holds positions that no encoder writes.

    Example:
        >>> import torch
        >>> from dtcomm.kernels import ops
        >>> payloads = [ops.encode("bf16", torch.full((2,), float(rank))) for rank in range(3)]
        >>> ops.decode("bf16", ops.reduce_encode("bf16", payloads, 2), 2)
        tensor([3., 3.])
    """
    if torch.compiler.is_compiling():
        from dtcomm.kernels import custom_ops

        return custom_ops.compiled_reduce_encode(
            codec, payloads, numel, local, position, divisor, residual, out, op, dtype, key, offset, decoded
        )
    return eager.reduce_encode(
        codec, payloads, numel, local, position, divisor, residual, out, op, dtype, key, offset, decoded
    )


def quantize(codec: Codec | str, x: torch.Tensor, key: int = 0, offset: int = 0) -> torch.Tensor:
    """decode(encode(x)) in one pass, differentiable: the gradient of the result is passed to x unchanged.

    It is for training with a codec's error in the graph (a straight-through estimator).

    Args:
        codec: A codec or its spec string.
        x: The tensor; of a type that the codec takes, contiguous, of any shape.
        key: Key of the random numbers; 64 bits.
        offset: Index of x's first element in the caller's tensor.

    Returns:
        A new tensor of the shape and type of x.

    Raises:
        TypeError: An argument has the wrong type; the message names it.
        ValueError: An argument has the wrong size, device or value; the message names it.

    Example:
        >>> import torch
        >>> from dtcomm.kernels import ops
        >>> x = torch.tensor([1.0, 0.3], requires_grad=True)
        >>> y = ops.quantize("int4", x)
        >>> y.sum().backward()
        >>> y.detach(), x.grad
        (tensor([0.9980, 0.2852]), tensor([1., 1.]))
    """
    from dtcomm.kernels import custom_ops

    return custom_ops.compiled_quantize(codec, x, key, offset)
