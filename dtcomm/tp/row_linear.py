"""The product of a row-parallel layer: a matrix product whose partial results are summed over the ranks.

    y = x W' summed over the ranks + bias + residual,  normed = RMS norm of y

`row_linear` is the differentiable function that `RowParallelLinear` calls. Its forward pass multiplies the tokens in
chunks: while the sum of one chunk is communicated, the next chunk is multiplied. The epilogue runs in the pass that
decodes the sum. The backward pass is that of the uncompressed function.

``chunks="auto"`` uses one chunk inside a host, whose cores both compute and move the bytes, and between hosts as many
as leave each chunk a payload of `MIN_CHUNK_BYTES`, but at most `MAX_CHUNKS`: small products are less efficient, and a
core that computes also sends. Where the link is so fast that the sum takes less time than the product, one chunk is
quicker (docs/results/sites.md).
"""

from __future__ import annotations

from typing import Any

import torch

from dtcomm.codecs import Codec
from dtcomm.collectives import Work, all_reduce, info
from dtcomm.collectives.groups import supports_two_shot_symmetric
from dtcomm.torch_compat import autograd_apply
from dtcomm.tp.comm_config import SMALL_MESSAGE_BYTES, CommConfig
from dtcomm.tp.flash_all_reduce import Epilogue, EpilogueResult, FlashAllReduce, Norm

MIN_CHUNK_BYTES, MAX_CHUNKS = 512 * 1024, 8


def row_linear(
    x: torch.Tensor, weight: torch.Tensor, comm: CommConfig, chunks: int | str, epilogue: Epilogue
) -> EpilogueResult:
    """Return ``x @ weight.t()`` summed over the ranks of ``comm``, with the epilogue applied. Differentiable.

    ``x`` are this rank's input features, [..., in_features / ranks], and ``weight`` its columns of the weight,
    [out_features, in_features / ranks]. With an epilogue, all tensors must have the same dtype and device. The tokens
    are cut into ``chunks``, a number or ``"auto"``.
    """
    tensors = (x, weight, epilogue.bias, epilogue.residual, epilogue.norm_weight)
    if not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in tensors):
        return _forward(x, weight, comm, chunks, epilogue)
    norm = epilogue.norm
    eps = None if norm is None else norm.eps
    outputs = autograd_apply(RowLinearFunction, *tensors, comm, chunks, eps)
    return EpilogueResult(outputs, None) if norm is None else EpilogueResult(*outputs)


class RowLinearFunction(torch.autograd.Function):
    """The gradient of `row_linear`; compression is straight-through."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor | None,
        comm: CommConfig,
        chunks: int | str,
        eps: float | None,
    ) -> Any:
        weight = weight.to(x.dtype)
        norm = None if eps is None else Norm(norm_weight, eps)
        y, normed = _forward(x, weight, comm, chunks, Epilogue(bias, residual, norm))
        ctx.eps = eps
        ctx.save_for_backward(x, weight, None if normed is None else y, norm_weight)
        return y if normed is None else (y, normed)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, dnormed: torch.Tensor | None = None) -> Any:
        x, weight, y, norm_weight = ctx.saved_tensors
        needs_dx, needs_dweight, needs_dbias, needs_dresidual, needs_dnorm_weight, *_ = ctx.needs_input_grad
        dnorm_weight = None
        if y is not None and dnormed is not None:
            dy_of_norm, dnorm_weight = _rms_norm_backward(dnormed, y, norm_weight, ctx.eps)
            dy = dy + dy_of_norm
        flat = dy.reshape(-1, dy.shape[-1])
        dx = (flat @ weight).view_as(x) if needs_dx else None
        dweight = flat.t() @ x.reshape(-1, x.shape[-1]) if needs_dweight else None
        dbias = flat.sum(0) if needs_dbias else None
        dresidual = dy if needs_dresidual else None
        return dx, dweight, dbias, dresidual, dnorm_weight if needs_dnorm_weight else None, None, None, None


def _rms_norm_backward(
    dnormed: torch.Tensor, y: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of the norm's input ``y`` and of its weight; sums are taken in fp32."""
    wide = y.float()
    inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    unit, gradient = wide * inverse_rms, dnormed.float()
    dweight = None
    if weight is not None:
        dweight = (gradient * unit).reshape(-1, y.shape[-1]).sum(0).to(weight.dtype)
        gradient = gradient * weight.float()
    dy = inverse_rms * (gradient - unit * (gradient * unit).mean(-1, keepdim=True))
    return dy.to(y.dtype), dweight


def _forward(
    x: torch.Tensor, weight: torch.Tensor, comm: CommConfig, chunks: int | str, epilogue: Epilogue
) -> EpilogueResult:
    tokens = x.detach().reshape(-1, x.shape[-1])
    features = len(weight)
    # Of the final shape: autograd refuses to let the caller change a view in place, as models with `y += residual` do.
    result = torch.empty((*x.shape[:-1], features), dtype=x.dtype, device=x.device)
    normed_result = None if epilogue.norm is None else torch.empty_like(result)
    y = result.view(len(tokens), features)
    normed = None if normed_result is None else normed_result.view(len(tokens), features)
    codec = comm.codec_for(y.numel(), y.dtype)
    chunk_count = automatic_chunks(comm, y, codec) if isinstance(chunks, str) else chunks
    ranges = _row_ranges(len(tokens), chunk_count)
    symmetric = comm.algorithm == "two_shot_symmetric" and not codec.lossless(y.dtype)
    algorithm = "two_shot_symmetric" if symmetric else comm.algorithm_for(codec, y.dtype)
    for start, stop in ranges:
        comm.traffic.count("all_reduce", y, (stop - start) * features, codec, comm.codec, algorithm)
    if symmetric and not supports_two_shot_symmetric(y, codec, comm.group):
        _flash_all_reduce_chunks(tokens, weight, comm, ranges, y, normed, epilogue)
    else:
        _all_reduce_chunks(tokens, weight, comm, codec, algorithm, ranges, y, normed, epilogue)
    return EpilogueResult(result, normed_result)


def _flash_all_reduce_chunks(
    tokens: torch.Tensor,
    weight: torch.Tensor,
    comm: CommConfig,
    ranges: list[tuple[int, int]],
    y: torch.Tensor,
    normed: torch.Tensor | None,
    epilogue: Epilogue,
) -> None:
    """Multiply the chunks, and sum each with the symmetric two-shot all-reduce."""
    nonempty = [(start, stop) for start, stop in ranges if start < stop]
    operations = [FlashAllReduce(tokens[start:stop] @ weight.detach().t(), comm) for start, stop in nonempty]
    for operation in operations:
        operation.start_gather()
    for operation, (start, stop) in zip(operations, nonempty, strict=True):
        chunk_normed = None if normed is None else normed[start:stop]
        operation.finish(y[start:stop], chunk_normed, epilogue.rows(start, stop))


def _all_reduce_chunks(
    tokens: torch.Tensor,
    weight: torch.Tensor,
    comm: CommConfig,
    codec: Codec,
    algorithm: str,
    ranges: list[tuple[int, int]],
    y: torch.Tensor,
    normed: torch.Tensor | None,
    epilogue: Epilogue,
) -> None:
    """Multiply the chunks, and sum each with `dtcomm.all_reduce`."""
    # A few tokens are in the cache anyway. For a single term torch's own addition, with the same bits, starts sooner.
    terms = [term for term in (epilogue.bias, epilogue.residual) if term is not None]
    add_at_end = y.is_cpu and y.nbytes <= SMALL_MESSAGE_BYTES and len(terms) == 1 and epilogue.norm is None
    works: list[Work | None] = []
    for start, stop in ranges:
        chunk = y[start:stop]
        torch.mm(tokens[start:stop], weight.detach().t(), out=chunk)
        task = None
        if epilogue and not add_at_end and start < stop:
            chunk_normed = None if normed is None else normed[start:stop]
            task = epilogue.rows(start, stop).task(chunk, chunk_normed)
        works.append(
            all_reduce(
                chunk,
                codec=codec,
                algorithm=algorithm,
                group=comm.group,
                async_op=len(ranges) > 1,
                epilogue=task,
            )
        )
    for work in works:
        if work is not None:
            work.wait()
    if add_at_end:
        y.add_(terms[0].detach().reshape(-1, y.shape[-1]))


def automatic_chunks(comm: CommConfig, y: torch.Tensor, codec: Codec) -> int:
    """Return the number of chunks that ``chunks="auto"`` stands for, for a result ``y`` [tokens, features]."""
    most = min(MAX_CHUNKS, len(y), codec.wire_bytes(y.numel(), y.dtype) // MIN_CHUNK_BYTES)
    return 1 if most <= 1 or info(comm.group)["hosts"] == 1 else most


def _row_ranges(tokens: int, chunks: int) -> list[tuple[int, int]]:
    length = max(1, -(-tokens // chunks))
    return [(start, min(start + length, tokens)) for start in range(0, tokens, length)] or [(0, 0)]
