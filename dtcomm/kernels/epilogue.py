"""The epilogue of a summed activation: decode, add the bias, add the residual stream, take its RMS norm.

As separate operators these are four passes over memory. Here a row is decoded into the cache and everything else is
done there. On CUDA tensors Triton adds bias and residual in one pass and takes the norm in a second one, with the
same bits as on the CPU. `dtcomm.tp` calls this module; an all-reduce takes an :class:`EpilogueTask`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dtcomm import _C
from dtcomm.codecs import Codec
from dtcomm.codecs import codec as parse
from dtcomm.codecs.base import ELEMENT_TYPES, FLOAT_TYPES
from dtcomm.kernels import checks, dispatch, ops, triton
from dtcomm.kernels.local_tasks import LocalTask
from dtcomm.kernels.reference import epilogue as reference

UNCOMPRESSED = parse("none")


def epilogue(
    codec: Codec | str,
    runs: Sequence[tuple[torch.Tensor, int]],
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    norm_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode payloads into ``out``, add bias and residual, and take the RMS norm of the result.

    All tensors have the type of ``out`` and are on its device. Sums and products are taken in fp32; ``out`` and
    ``norm_out`` are each rounded once.

    Args:
        codec: The codec of the payloads.
        runs: Pairs of a payload and its number of elements. Joined, they are the elements of ``out``.
        out: fp32, fp16 or bf16 [..., features].
        bias: [features], added to every row.
        residual: Of the shape of ``out``, added after the bias; may be ``out`` itself.
        weight: [features], multiplied into ``norm_out``; needs ``norm_out``.
        eps: Added to the mean square of a row before the root is taken.
        norm_out: Of the shape of ``out``; receives each row over the root of its mean square.

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
    _check(which, out, bias, residual, weight, norm_out)
    if sum(numel for _, numel in runs) != out.numel():
        raise ValueError(
            f"runs: hold {sum(numel for _, numel in runs)} elements, out {tuple(out.shape)} has {out.numel()}"
        )
    payloads = [
        checks.payload(f"runs[{at}]", payload, which, numel, which.wire_bytes(numel, out.dtype))
        for at, (payload, numel) in enumerate(runs)
    ]
    for payload, (_, numel) in zip(payloads, runs, strict=True):
        checks.require_valid_payload(which, [payload], numel)
    if out.numel() == 0:
        return out
    if _by_triton(out):
        sums = _decoded(which, runs, out, bias is not None or residual is not None)
        triton.run_epilogue(sums, out, bias, residual, weight, eps, norm_out)
        return out
    if dispatch.current() == dispatch.REFERENCE:
        reference.epilogue(which, runs, out, bias, residual, weight, eps, norm_out)
        return out
    _C.epilogue(
        dispatch.native_kernel(),
        which.native(),
        [(payload.data_ptr(), numel) for payload, (_, numel) in zip(payloads, runs, strict=True)],
        out.shape[-1],
        ELEMENT_TYPES[out.dtype],
        _address(bias),
        _address(residual),
        out.data_ptr(),
        _address(weight),
        eps,
        _address(norm_out),
    )
    return out


@dataclass(frozen=True, kw_only=True)
class EpilogueTask(LocalTask):
    """The epilogue of a tensor that is summed uncompressed; made by :func:`epilogue_task`.

    Calling it runs it, on CUDA tensors on the current stream. An operation that takes it may fuse it into its kernels.

    Attributes:
        native: The task of the C++ engine; None for CUDA tensors.
        fallback: Runs the task without the engine.
        codec: The codec of the sum: uncompressed.
        tensors: All tensors of the task.
        out: The sum, which becomes ``out + bias + residual``.
        bias: One element for each column of ``out``, or None.
        residual: A tensor of the shape of ``out``, or None.
        weight: The weight of the RMS norm, one element for each column, or None for no norm.
        eps: The epsilon of the RMS norm.
        norm_out: Receives the normed sum, or None.
    """

    out: torch.Tensor
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    weight: torch.Tensor | None
    eps: float
    norm_out: torch.Tensor | None

    def __call__(self) -> None:
        if not _by_triton(self.out):
            super().__call__()
        elif self.out.numel():
            triton.run_epilogue(
                self.out, self.out, self.bias, self.residual, self.weight, self.eps, self.norm_out
            )

    def norm(self) -> EpilogueTask | None:
        """The norm alone, for kernels that add bias and residual themselves; None if there is no norm."""
        if self.norm_out is None:
            return None
        return epilogue_task(self.out, weight=self.weight, eps=self.eps, norm_out=self.norm_out)


def epilogue_task(
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    norm_out: torch.Tensor | None = None,
) -> EpilogueTask:
    """The epilogue of the sum that an operation leaves in ``out``, as a task for that operation.

    The native engine runs it on each piece of the sum while that is in the cache. A fused all-reduce on CUDA devices
    adds bias and residual in its own kernel.

    Args:
        out: The tensor that the operation writes; fp32, fp16 or bf16 [..., features].
        bias: [features], added to every row.
        residual: Of the shape of ``out``, added after the bias; must not be ``out``.
        weight: [features], multiplied into ``norm_out``; needs ``norm_out``.
        eps: Added to the mean square of a row before the root is taken.
        norm_out: Of the shape of ``out``; receives each row over the root of its mean square.

    Returns:
        The task. Callers keep the tensors unchanged until the operation is complete.

    Raises:
        TypeError: A tensor has the wrong type; the message names it.
        ValueError: A tensor has the wrong size, layout or device; the message names it.

    Example:
        Add a bias to a sum while it is received::

            dtcomm.all_reduce(y, epilogue=epilogue_task(y, bias=bias))
    """
    _check(UNCOMPRESSED, out, bias, residual, weight, norm_out)
    others = (bias, residual, weight, norm_out)

    def by_reference() -> None:
        payload = torch.zeros(UNCOMPRESSED.wire_bytes(out.numel(), out.dtype), dtype=torch.uint8)
        sums = out.view(-1).view(torch.uint8)
        payload[: sums.numel()] = sums
        reference.epilogue(UNCOMPRESSED, [(payload, out.numel())], out, bias, residual, weight, eps, norm_out)

    native = _C.task_epilogue(
        out.numel(),
        out.shape[-1] or 1,
        ELEMENT_TYPES[out.dtype],
        _address(bias),
        _address(residual),
        out.data_ptr(),
        _address(weight),
        eps,
        _address(norm_out),
    )
    return EpilogueTask(
        native=native,
        fallback=by_reference,
        codec=UNCOMPRESSED,
        tensors=(out, *others),
        out=out,
        bias=bias,
        residual=residual,
        weight=weight,
        eps=eps,
        norm_out=norm_out,
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
    return device.type == "cpu" or (device.type == "cuda" and triton.installed())


def _by_triton(out: torch.Tensor) -> bool:
    return not out.is_cpu or dispatch.current() == dispatch.TRITON


def _decoded(
    codec: Codec, runs: Sequence[tuple[torch.Tensor, int]], out: torch.Tensor, adds: bool
) -> torch.Tensor:
    """The decoded runs: in a temporary tensor if something is added before rounding, else in ``out``."""
    dtype = torch.float32 if adds and codec.name != "none" else out.dtype
    sums = torch.empty(out.numel(), dtype=dtype, device=out.device) if adds else out.view(-1)
    at = 0
    for payload, numel in runs:
        ops.decode(codec, payload, numel, dtype, out=sums[at : at + numel])
        at += numel
    return sums


def _check(
    codec: Codec,
    out: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    norm_out: torch.Tensor | None,
) -> None:
    checks.floats("out", out, out.numel(), *FLOAT_TYPES)
    checks.element_type("out", codec, out.dtype)
    if out.ndim == 0:
        raise ValueError("out: expected [..., features], got no dimension")
    for name, tensor in (("bias", bias), ("weight", weight)):
        if tensor is not None:
            checks.floats(name, tensor, out.shape[-1], out.dtype, like=out)
    for name, tensor in (("residual", residual), ("norm_out", norm_out)):
        if tensor is not None:
            checks.floats(name, tensor, out.numel(), out.dtype, like=out)
    if weight is not None and norm_out is None:
        raise ValueError("weight: needs norm_out, which was not given")


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
