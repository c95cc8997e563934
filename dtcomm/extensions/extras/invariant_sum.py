"""Training and layers whose results have the same bits on 1, 2, 4 and 8 ranks.

A sum over ranks has as many terms as there are ranks, so its rounding depends on their number. Here a sum has a fixed
number of *terms*, each of which is computed by itself, in operations whose shapes are the same everywhere. The terms of
all ranks are added as integers and rounded once (codec ``exact:rounded=true``, docs/guides/reproducible-sums.md):

- `sum_microbatches`: the gradients of a fixed number of microbatches (DDP, FSDP2, or one process);
- `fix_terms`: the partial products of tensor-parallel layers, cut along the dimension that is summed;
- `scale_tokens`: the gradients of a norm's weight and bias, which are sums over the tokens of all ranks;
- `sum_terms`: tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from dtcomm.codecs.cast import ROUNDED, RoundedExact
from dtcomm.collectives import all_reduce, reduce_scatter
from dtcomm.collectives.groups import GroupOrMesh, process_group_of
from dtcomm.kernels import local_tasks
from dtcomm.kernels.local_tasks import SumRange
from dtcomm.kernels.reference.reproducible import NAN_BLOCK
from dtcomm.kernels.reference.rounded_sum import BLOCK
from dtcomm.torch_compat import (
    DDPMeshInfo,
    GradBucket,
    ReduceScatter,
    autograd_apply,
    fsdp2_parameter_group,
)
from dtcomm.tp import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, functional
from dtcomm.tp.comm_config import NONE, parse_codec
from dtcomm.tp.flash_all_reduce import EpilogueResult, Norm
from dtcomm.tp.sharded_module import ShardedModule

#: Tokens of one matrix product. torch's products of other numbers of rows may round differently.
ROWS = 64
ALIGNMENT = 64  # bytes: where a matrix starts may decide which instructions multiply it


# --- sums ------------------------------------------------------------------------------------------------------------


def sum_terms(
    terms: Sequence[torch.Tensor],
    count: int,
    *,
    divisor: int = 1,
    group: dist.ProcessGroup | None = None,
    scatter: bool = False,
    alone: bool = False,
) -> torch.Tensor:
    """Return the exact sum of the terms of all ranks, divided and rounded once; a collective.

    Args:
        terms: This rank's terms, at least one: fp32, fp16 or bf16, of the same shape and type on all ranks.
        count: The number of terms of all ranks.
        divisor: What the sum is divided by before it is rounded. Default: 1.
        group: The ranks. Default: all.
        scatter: Return this rank's part of the sum, cut along the first dimension. Default: False.
        alone: All terms are this rank's; nothing is sent. Default: False.
    """
    codec, like = RoundedExact(), terms[0]
    ranks, own = (1, 0) if alone else (dist.get_world_size(group), dist.get_rank(group))
    if like.dtype not in codec.dtypes:
        raise ValueError(f"terms: {codec} does not take {like.dtype}; valid: float32, float16, bfloat16")
    shards, own = (ranks, own) if scatter else (1, 0)
    shape = (len(like) // shards, *like.shape[1:]) if scatter else like.shape
    numel = math.prod(shape)
    if not numel:
        return like.new_empty(shape)
    rows = [term.detach().contiguous().view(shards, numel) for term in terms]

    ranges = torch.zeros(2, shards, -(-numel // BLOCK), dtype=torch.uint8, device=like.device)
    measured = torch.empty_like(ranges)
    for term in rows:
        for shard in range(shards):
            local_tasks.measure_digits(term[shard], SumRange(count, *measured[:, shard]), False)()
        torch.maximum(ranges, measured, out=ranges)
    if ranks > 1:
        all_reduce(ranges, "max", group=group)
    if bool((ranges[0] == NAN_BLOCK).any()):
        finite = [torch.where(term.isfinite(), term, 0) for term in terms]
        total = sum_terms(finite, count, divisor=divisor, group=group, scatter=scatter, alone=alone)
        # The sum of these terms, with zeros for the others, is not rounded.
        special = torch.stack([torch.where(term.isfinite(), 0, term) for term in terms]).sum(0)
        if ranks > 1:
            all_reduce(special, group=group)
        special = special.chunk(shards)[own]
        return torch.where(special.isfinite(), total, special)

    agreed = [SumRange(count, *ranges[:, shard]).placed() for shard in range(shards)]
    on_host = ranges.cpu()
    sizes = [SumRange(count, *on_host[:, shard]).count_digits()[0] for shard in range(shards)]
    total = torch.zeros(shards, max(sizes), dtype=torch.int32, device=like.device)
    for term in rows:
        for shard, size in enumerate(sizes):
            digits = torch.empty(size, dtype=torch.int32, device=like.device)
            local_tasks.split_digits(agreed[shard], term[shard], True, digits)()
            total[shard, :size] += digits
    if ranks > 1 and total.numel():
        reduce_scatter(total[own], total, group=group) if scatter else all_reduce(total, group=group)
    out = like.new_empty(numel)
    local_tasks.round_digits(agreed[own], total[own, : sizes[own]], divisor, out)()
    return out.view(shape)


# --- gradients -------------------------------------------------------------------------------------------------------


def sum_microbatches(model: nn.Module, microbatches: int = 8) -> None:
    """Make gradients the mean over a fixed number of microbatches, with the same bits on every number of ranks.

    Every rank runs ``microbatches / ranks`` backward passes a step, one for each microbatch, without ``no_sync`` or
    ``set_requires_gradient_sync(False)``. Each gradient is kept, and is zero for the model, until the last one: then it
    is the exact mean over all microbatches of all ranks, rounded once. Losses are not divided. The rank keeps
    ``microbatches / ranks`` gradients of the model. With one microbatch a rank, `dtcomm.ddp.compress` and
    `dtcomm.fsdp.compress` with ``"* -> exact:rounded=true"`` give the same bits.

    Args:
        model: A DistributedDataParallel without a communication hook, an FSDP2 module without replicas, or a module
            whose gradients are not summed over ranks (one process, tensor parallelism). Its gradients are fp32, fp16
            or bf16 CPU tensors, and every microbatch uses all parameters.
        microbatches: The number of microbatches of all ranks in a step; a multiple of the number of ranks. Default: 8.

    Raises:
        ValueError: ``microbatches`` or ``model`` is not valid.

    Example::

        dtcomm.extensions.extras.sum_microbatches(model, 8)  # a DistributedDataParallel on 1, 2, 4 or 8 ranks
        for x, y in own_microbatches:
            loss_fn(model(x), y).backward()
        optimizer.step()
    """
    if isinstance(model, DistributedDataParallel):
        kept = _KeptTerms(microbatches, model.process_group)
        model.register_comm_hook(None, lambda _, bucket: _reduce_bucket(kept, bucket))
        return
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        parameters = fsdp2_parameter_group(unit)
        if parameters is None:
            continue
        if isinstance(parameters.mesh_info, DDPMeshInfo):
            raise ValueError("model: its FSDP2 modules have replicas; valid: a one-dimensional mesh")
        reduction = _ReduceScatterTerms(_KeptTerms(microbatches, parameters.mesh_info.shard_process_group))
        unit.set_custom_reduce_scatter(reduction)
        unit.set_all_reduce_hook(reduction.on_one_rank)
    if not units:
        kept = _KeptTerms(microbatches, None, alone=True)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda p: kept.replace(id(p), p.grad)
                )


class _KeptTerms:
    """The gradients of a step's microbatches until the last one, by a key for each tensor."""

    def __init__(self, count: int, group: dist.ProcessGroup | None, alone: bool = False) -> None:
        self.count, self.group, self.ranks = count, group, 1 if alone else dist.get_world_size(group)
        if count < 1 or count % self.ranks:
            raise ValueError(f"microbatches: {count}; valid: a multiple of the {self.ranks} ranks")
        self._terms: dict[int, list[torch.Tensor]] = {}

    def of(self, key: int, term: torch.Tensor) -> list[torch.Tensor]:
        """Keep a term; return all of the step with the last one, before it nothing."""
        if term.is_sparse:
            raise ValueError(
                f"model: a gradient of shape {tuple(term.shape)} is sparse; valid: dense ones, such as those of an "
                "nn.Embedding with sparse=False"
            )
        terms = self._terms.setdefault(key, [])
        terms.append(term.detach().clone())
        return self._terms.pop(key) if len(terms) == self.count // self.ranks else []

    def mean(self, terms: Sequence[torch.Tensor], scatter: bool = False) -> torch.Tensor:
        """Return the mean of the terms of all ranks."""
        options: dict[str, Any] = {"divisor": self.count, "group": self.group, "scatter": scatter}
        mean = sum_terms(terms, self.count, alone=self.ranks == 1, **options)
        return mean.add_(0)  # no -0, which FSDP2 loses where it adds the mean to zeros

    def replace(self, key: int, gradient: torch.Tensor | None) -> None:
        """Replace a gradient that no other rank has: by zeros, or by the mean with the last one."""
        assert gradient is not None
        terms = self.of(key, gradient)
        gradient.copy_(self.mean(terms)) if terms else gradient.zero_()


def _reduce_bucket(kept: _KeptTerms, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's hook. Terms belong to parameters: DDP makes other buckets after the first backward pass."""
    buffer = bucket.buffer()
    gradients = [buffer] if buffer.is_sparse else [gradient.view(-1) for gradient in bucket.gradients()]
    terms = [kept.of(id(p), gradient) for p, gradient in zip(bucket.parameters(), gradients, strict=True)]
    if terms[0]:
        buffer.copy_(kept.mean([torch.cat(step) for step in zip(*terms, strict=True)]))
    else:
        buffer.zero_()
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


class _ReduceScatterTerms(ReduceScatter):
    """The reduce-scatter of one FSDP2 module: of zeros, or of all terms with the last one."""

    def __init__(self, kept: _KeptTerms) -> None:
        self._kept = kept

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        if op != dist.ReduceOp.AVG:
            raise ValueError("model: FSDP2 divides its gradients; valid: fp32 or bf16, no divide factor")
        terms = self._kept.of(0, input_tensor)
        if terms:
            output_tensor.copy_(self._kept.mean(terms, scatter=True))
        else:
            output_tensor.zero_()

    def on_one_rank(self, gradient: torch.Tensor) -> None:
        """FSDP2's hook after the reduce-scatter, which one rank does not call."""
        if self._kept.ranks == 1:
            self._kept.replace(0, gradient)


# --- tensor-parallel layers ------------------------------------------------------------------------------------------


def fix_terms(model: nn.Module, terms: int = 8) -> None:
    """Give a model's tensor-parallel layers the same bits on every number of ranks that divides ``terms``; in place.

    Results, and the gradients of inputs, weights and biases, are then equal with and without sequence parallelism, and
    a token's result does not depend on the other tokens of its batch. Sums over ranks are those of ``terms`` partial
    products, rounded once, whatever codec the layers had. Every product has the same shape everywhere: one of ``terms``
    parts of the features by `ROWS` tokens, which zeros complete. One shape must round equally: the ranks need
    the same processor type, torch build and number of threads.

    Args:
        model: A `dtcomm.tp.RowParallelLinear` or `dtcomm.tp.ColumnParallelLinear`, or a module that contains such
            layers, of fp32, fp16 or bf16 on CPU. `dtcomm.tp.VocabParallelEmbedding` sends uncompressed.
        terms: Number of parts of the dense layers; a multiple of the number of ranks. Default: 8.

    Raises:
        ValueError: ``terms`` does not fit, or the model has other tensor-parallel layers.

    Example::

        layer = dtcomm.tp.RowParallelLinear(1024, 1024)
        dtcomm.extensions.extras.fix_terms(layer)  # the same bits on 1, 2, 4 and 8 ranks
    """
    layers: dict[str, RowParallelLinear | ColumnParallelLinear] = {}
    for name, module in model.named_modules():
        if type(module) in (RowParallelLinear, ColumnParallelLinear):
            layers[name] = module
        elif isinstance(module, ShardedModule) and not isinstance(module, VocabParallelEmbedding):
            raise ValueError(
                f"model: {name} is a {type(module).__name__}; valid: RowParallelLinear, ColumnParallelLinear, "
                "VocabParallelEmbedding"
            )
    for name, layer in layers.items():
        ranks, sizes = layer.comm.world_size, _part_sizes(layer)
        if terms < 1 or terms % ranks or any(size * ranks % terms for size in sizes):
            features = ", ".join(str(size * ranks) for size in sizes)
            raise ValueError(
                f"terms: {terms}; valid: a multiple of the {ranks} ranks that divides the {features} features of {name}"
            )
    rounded = parse_codec(ROUNDED)
    for layer in layers.values():
        own = terms // layer.comm.world_size
        parts = [size // own for size in _part_sizes(layer) for _ in range(own)]
        layer.comm = replace(layer.comm, codec=rounded, backward_codec=rounded)
        kind = _RowOfTerms if isinstance(layer, RowParallelLinear) else _ColumnOfTerms
        vars(layer)["parts"], layer.__class__ = parts, kind
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):  # all terms but one are zeros
            module.comm = replace(module.comm, codec=NONE, backward_codec=NONE)


def _part_sizes(layer: RowParallelLinear | ColumnParallelLinear) -> list[int]:
    """Return the sizes of the tensors that this rank's features consist of, side by side."""
    rows, columns = layer.matrix.shape
    if isinstance(layer, RowParallelLinear):
        return [columns]
    if isinstance(layer.packed, int):
        return [rows // layer.packed] * layer.packed
    return [size // layer.comm.world_size for size in layer.packed]


def scale_tokens(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: GroupOrMesh = None,
    dim: int = 1,
    terms: int = 8,
) -> torch.Tensor:
    """Return ``x * weight + bias``, whose gradients have the same bits on every number of ranks. Differentiable.

    The gradients of weight and bias are sums over the tokens. They are the exact sums, rounded once, of ``terms`` equal
    parts of the sequence; with a group they are the same on all ranks.

    Args:
        x: [..., features], such as the result of ``rms_norm`` without a weight; fp32, fp16 or bf16 on CPU.
        weight: [features].
        bias: [features]. Default: none.
        group: The ranks, each of which has its part of the sequence. Default: ``x`` is the whole sequence.
        dim: The dimension of the sequence. Default: 1.
        terms: The number of parts of the whole sequence; a multiple of the number of ranks. Default: 8.

    Returns:
        A tensor like ``x``.

    Raises:
        ValueError: ``terms`` does not fit the ranks or the sequence.

    Example::

        normed = torch.nn.functional.rms_norm(x, (64,))
        y = dtcomm.extensions.extras.scale_tokens(normed, weight, group=group)
    """
    alone, ranks = group is None, 1
    process_group = None if alone else process_group_of(group, "scale_tokens")
    if not alone:
        ranks = dist.get_world_size(process_group)
    if terms < 1 or terms % ranks or x.shape[dim] * ranks % terms:
        raise ValueError(
            f"terms: {terms}; valid: a multiple of the {ranks} ranks that divides the {x.shape[dim] * ranks} tokens"
        )
    options = {"group": process_group, "alone": alone}
    return autograd_apply(_ScaledTokens, x, weight, bias, dim, terms // ranks, terms, options)  # type: ignore[no-any-return]


class _ScaledTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dim: int,
        own: int,
        terms: int,
        options: dict[str, Any],
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.arguments = dim, own, terms, options
        y = x * weight.to(x.dtype)
        return y if bias is None else y + bias.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dim, own, terms, options = ctx.arguments

        def sum_tokens(gradient: torch.Tensor) -> torch.Tensor:
            parts = [_aligned(part.reshape(-1, part.shape[-1])) for part in gradient.chunk(own, dim)]
            return sum_terms([part.sum(0) for part in parts], terms, **options).to(weight.dtype)

        dbias = sum_tokens(dy) if ctx.needs_input_grad[2] else None
        return dy * weight.to(x.dtype), sum_tokens(dy * x), dbias, None, None, None, None


class _RowOfTerms(RowParallelLinear):
    """A row-parallel layer whose input features are cut into ``parts``."""

    parts: list[int]

    def _forward(self, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None) -> EpilogueResult:
        if not self.input_is_parallel:
            x = functional.split_to_ranks(x, self.comm)
        y = autograd_apply(_ProductOfParts, _cast(x), self.matrix.t(), self.bias, self, True)
        if residual is not None:
            y = y + residual
        return EpilogueResult(y, None if norm is None else F.rms_norm(y, y.shape[-1:], norm.weight, norm.eps))


class _ColumnOfTerms(ColumnParallelLinear):
    """A column-parallel layer whose output features are cut into ``parts``."""

    parts: list[int]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = autograd_apply(_ProductOfParts, _cast(x), self.matrix, self.bias, self, False)
        return functional.gather_from_ranks(y, self.comm) if self.gather_output else y


class _ProductOfParts(torch.autograd.Function):
    """``x @ weight`` summed over the ranks (row), or ``x @ weight.t()``; ``weight`` is [features of this rank, others].

    The layers are each other's transpose: the gradient of a row layer's input is a column layer's product.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        layer: _RowOfTerms | _ColumnOfTerms,
        row: bool,
    ) -> torch.Tensor:
        weight = weight.to(x.dtype)
        x = x if row else _gather(x, layer, backward=False)
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.row = layer, row
        y = _sum(x, weight, layer, backward=False) if row else _wide(x, weight, layer)
        return y if bias is None else y + bias.to(y.dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        if ctx.row:
            cut, whole = x, _gather(dy, ctx.layer, backward=True)
            dx = _wide(whole, weight, ctx.layer)
        else:
            cut, whole = dy, x
            dx = _sum(dy, weight, ctx.layer, backward=True)
        whole = _aligned(whole.reshape(-1, whole.shape[-1]))
        parts = [_aligned(part) for part in torch.split(cut.reshape(len(whole), -1), ctx.layer.parts, 1)]
        dweight = torch.cat([part.t() @ whole for part in parts])
        dbias = whole.sum(0) if ctx.row else torch.cat([part.sum(0) for part in parts])
        return dx, dweight, dbias if ctx.needs_input_grad[2] else None, None, None


def _gather(x: torch.Tensor, layer: _RowOfTerms | _ColumnOfTerms, *, backward: bool) -> torch.Tensor:
    """Return the whole sequence of a tensor whose features are not cut."""
    if layer.sequence_dim is None:
        return x
    return functional.all_gather(x, layer.comm, layer.sequence_dim, backward=backward)


def _wide(x: torch.Tensor, weight: torch.Tensor, layer: _RowOfTerms | _ColumnOfTerms) -> torch.Tensor:
    return torch.cat([_product(x, part.t()) for part in torch.split(weight, layer.parts)], -1)


def _sum(
    x: torch.Tensor, weight: torch.Tensor, layer: _RowOfTerms | _ColumnOfTerms, *, backward: bool
) -> torch.Tensor:
    """Return ``x @ weight`` summed over the ranks, of a sequence that is cut this rank's part."""
    comm, dim, parts = layer.comm, layer.sequence_dim, layer.parts
    pairs = zip(torch.split(x, parts, -1), torch.split(weight, parts), strict=True)
    terms = [_product(*pair) for pair in pairs]
    collective, algorithm = ("all_reduce", comm.algorithm) if dim is None else ("reduce_scatter", "auto")
    comm.traffic.count(collective, terms[0], terms[0].numel(), comm.codec, comm.codec, algorithm, backward)
    if dim is not None:
        dim %= x.ndim
        ranks, length = comm.world_size, comm.shard_size(x.shape[dim], f"dim {dim}")
        shape = (*x.shape[:dim], ranks, length, *terms[0].shape[dim + 1 :])
        terms = [term.view(shape).movedim(dim, 0) for term in terms]
    count, alone = comm.world_size * len(parts), comm.world_size == 1
    total = sum_terms(terms, count, group=comm.group, scatter=dim is not None, alone=alone)
    return total if dim is None else total[0]


def _product(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return ``x @ matrix``, whose rows do not depend on each other: products of `ROWS` tokens each."""
    tokens = x.reshape(-1, x.shape[-1])
    # A weight is copied as it is stored, which is faster, and in the same way on every number of ranks.
    matrix = _aligned(matrix.t()).t() if matrix.stride(0) == 1 else _aligned(matrix)
    blocks = torch.split(F.pad(tokens, (0, 0, 0, -len(tokens) % ROWS)), ROWS)
    y = torch.cat([_aligned(block) @ matrix for block in blocks])
    return y[: len(tokens)].view(*x.shape[:-1], matrix.shape[1])


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Return a contiguous matrix that starts at a multiple of `ALIGNMENT` bytes."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ALIGNMENT else x


def _cast(x: torch.Tensor) -> torch.Tensor:
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
