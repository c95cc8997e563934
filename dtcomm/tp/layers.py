"""Layers whose weights are cut over the ranks of a group.

`ColumnParallelLinear`, `RowParallelLinear` and `VocabParallelEmbedding` are Megatron-LM's layers (Shoeybi et al. 2019,
arXiv:1909.08053), with compressed communication. `ParallelExperts` and `ReplicatedModule`, which `dtcomm.tp.compress`
makes, run a dense module's own forward pass with the parameters of this rank, so every way in which it may be computed
works.
"""

from __future__ import annotations

import functools
import math
from typing import Any, TypedDict

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from typing_extensions import Unpack

from dtcomm import torch_compat
from dtcomm.arguments import complete_options, shares_options
from dtcomm.codecs import Codec
from dtcomm.collectives import Algorithm
from dtcomm.collectives.groups import GroupOrMesh
from dtcomm.kernels.epilogue import supports_epilogue
from dtcomm.tp import functional
from dtcomm.tp.comm_config import NONE, CommConfig
from dtcomm.tp.flash_all_reduce import Epilogue, EpilogueResult, Norm
from dtcomm.tp.row_linear import row_linear
from dtcomm.tp.sharded_module import ShardedModule


class LayerOptions(TypedDict, total=False):
    """What both linear layers take.

    Attributes:
        algorithm: Algorithm of the sums, see `CommConfig`. Default: ``"auto"``.
        latency: Send small messages uncompressed where that is predicted to be faster; ``layer.comm.traffic`` counts
            them and gives the reason. Default: True.
        group: Process group or one-dimensional device mesh. Default: all ranks.
        device: Device of the parameters.
        dtype: Data type of the parameters.
    """

    codec: str | Codec
    backward_codec: str | Codec
    algorithm: Algorithm
    latency: bool
    group: GroupOrMesh
    device: Any
    dtype: torch.dtype | None


LAYER_DEFAULTS: LayerOptions = {
    "codec": "none",
    "backward_codec": "none",
    "algorithm": "auto",
    "latency": True,
    "group": None,
    "device": None,
    "dtype": None,
}


def _comm_config(options: LayerOptions) -> CommConfig:
    return CommConfig.of(
        options["codec"],
        options["backward_codec"],
        algorithm=options["algorithm"],
        group=options["group"],
        latency=options["latency"],
    )


class _ParallelLinear(ShardedModule):
    weight: nn.Parameter
    bias: nn.Parameter | None
    in_features: int
    out_features: int
    transposed: bool

    @property
    def matrix(self) -> torch.Tensor:
        """The weight as [out_features, in_features]."""
        return self.weight.t() if self.transposed else self.weight

    def reset_parameters(self) -> None:
        """Initialize as nn.Linear (or Conv1D) does: with the same seed the shards are those of the dense layer."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        self.init_parameters(
            _init_conv1d if self.transposed else lambda name, full: _init_linear(name, full, bound)
        )

    def _register_weight(
        self, rows: int, columns: int, dim: int, device: Any, dtype: torch.dtype | None
    ) -> None:
        """Make the weight's shard [rows, columns], cut along ``dim``, stored as ``transposed`` says."""
        shape = (columns, rows) if self.transposed else (rows, columns)
        self.register_shard("weight", shape, 1 - dim if self.transposed else dim, device, dtype)

    def extra_repr(self) -> str:
        return (
            f"{self.in_features}, {self.out_features}, ranks={self.comm.world_size}, codec={self.comm.codec}"
        )


@shares_options(LAYER_DEFAULTS, LayerOptions)
class ColumnParallelLinear(_ParallelLinear):
    """A linear layer, ``y = x W' + b``, whose output features (the rows of W) are cut over the ranks.

    The input is the same on all ranks. Each rank computes its features of the output and needs no communication for
    that; the gradient of the input is summed over the ranks.

    Args:
        in_features: Size of the last dimension of the input.
        out_features: Size of the last dimension of the dense layer's output; divisible by the number of ranks.
        bias: Add a bias. Default: True.
        codec: Codec of the forward pass: of the output if it is gathered, or of the input with
            ``sequence_parallel``. A spec or a `Codec`. Default: ``"none"``.
        backward_codec: Codec of the sum of the input's gradients. Default: ``"none"``.
        gather_output: Gather the features of all ranks. By default each rank returns its own features.
        sequence_parallel: The input is this rank's part of the sequence, which is gathered first. Default: False.
        sequence_dim: The dimension of the sequence. Default: 1.
        packed: The output consists of this many tensors of equal size side by side (queries, keys and values: 3), or of
            tensors of these sizes. Each is cut over the ranks by itself. Default: 1.
        transposed: Store the weight as [in_features, out_features], as GPT-2's Conv1D does. Default: False.

    Raises:
        ValueError: A size is not divisible by the number of ranks, a codec or algorithm is not valid, or
            ``gather_output`` is combined with ``sequence_parallel``.

    Example::

        up = dtcomm.tp.ColumnParallelLinear(1024, 4096, backward_codec="int8", group=mesh)
        down = dtcomm.tp.RowParallelLinear(4096, 1024, codec="int8", group=mesh)
        y = down(torch.relu(up(x)))  # one compressed sum forward, one backward
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
        packed: int | tuple[int, ...] = 1,
        transposed: bool = False,
        **options: Unpack[LayerOptions],
    ) -> None:
        given = complete_options("dtcomm.tp.ColumnParallelLinear", options, LAYER_DEFAULTS)
        device, dtype = given["device"], given["dtype"]
        super().__init__(_comm_config(given))
        if gather_output and sequence_parallel:
            raise ValueError(
                "gather_output: not valid with sequence_parallel, which keeps the output sharded; choose one"
            )
        self.in_features, self.out_features = in_features, out_features
        self.gather_output = gather_output
        self.sequence_dim = sequence_dim if sequence_parallel else None
        rows = self.comm.shard_size(out_features, "out_features")
        if isinstance(packed, int):
            if packed < 1 or rows % packed:
                raise ValueError(f"packed: {packed} does not divide the {rows} output features of a rank")
        elif sum(packed) != out_features or any(size % self.comm.world_size for size in packed):
            raise ValueError(
                f"packed: expected sizes that add up to the {out_features} output features and are divisible by the "
                f"{self.comm.world_size} ranks, got {packed}"
            )
        self.packed, self.transposed = packed, transposed
        self._register_weight(rows, in_features, 0, device, dtype)
        if bias:
            self.register_shard("bias", (rows,), 0, device, dtype)
        else:
            self.bias = None
        self.reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x W' + b``.

        Args:
            x: [..., in_features]; with ``sequence_parallel`` this rank's part of the sequence.

        Returns:
            [..., out_features / ranks], or [..., out_features] with ``gather_output``.
        """
        if self.sequence_dim is None:
            x = functional.copy_to_ranks(x, self.comm)
        else:
            x = functional.all_gather_from_ranks(x, self.comm, self.sequence_dim)
        y = F.linear(x, self.matrix, self.bias)
        return functional.gather_from_ranks(y, self.comm) if self.gather_output else y


@shares_options(LAYER_DEFAULTS, LayerOptions)
class RowParallelLinear(_ParallelLinear):
    """A linear layer, ``y = x W' + b``, whose input features (the columns of W) are cut over the ranks.

    Each rank multiplies its features; the partial products are summed over the ranks in ``codec``. The bias is
    replicated and added once, after the sum. Under torch.compile the sum is one operator: ``chunks`` is ignored, and
    bias, residual and norm are computed by separate kernels.

    Args:
        in_features: Size of the last dimension of the dense layer's input; divisible by the number of ranks.
        out_features: Size of the last dimension of the output.
        bias: Add a bias. Default: True.
        codec: Codec of the sum, a spec or a `Codec`. Default: ``"none"``.
        backward_codec: Codec of gradients that are gathered: with ``sequence_parallel``, or without
            ``input_is_parallel``. Default: ``"none"``.
        input_is_parallel: The input holds this rank's features, as `ColumnParallelLinear` returns them. Otherwise it
            holds all features, and this rank takes its own. Default: True.
        sequence_parallel: Scatter the output along the sequence. Default: False.
        sequence_dim: The dimension of the sequence. Default: 1.
        chunks: Multiply the tokens in this many chunks, so that the sum of one chunk is communicated while the next is
            multiplied; ``"auto"`` chooses the number (`dtcomm.tp.row_linear`). Default: 1.
        transposed: Store the weight as [in_features, out_features], as GPT-2's Conv1D does. Default: False.

    Raises:
        ValueError: ``in_features`` is not divisible by the number of ranks, or another argument is not valid.

    Example::

        down = dtcomm.tp.RowParallelLinear(4096, 1024, codec="int8", chunks="auto", group=mesh)
        x = down(hidden, residual=x)  # the sum, plus bias, plus the residual stream, in one pass
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
        chunks: int | str = 1,
        transposed: bool = False,
        **options: Unpack[LayerOptions],
    ) -> None:
        given = complete_options("dtcomm.tp.RowParallelLinear", options, LAYER_DEFAULTS)
        device, dtype = given["device"], given["dtype"]
        super().__init__(_comm_config(given))
        if chunks != "auto" and (
            not isinstance(chunks, int) or chunks < 1 or (chunks > 1 and sequence_parallel)
        ):
            raise ValueError(f"chunks: {chunks}; valid: 1 or more, 'auto', and 1 with sequence_parallel")
        self.in_features, self.out_features = in_features, out_features
        self.input_is_parallel = input_is_parallel
        self.sequence_dim = sequence_dim if sequence_parallel else None
        self.chunks, self.transposed = chunks, transposed
        columns = self.comm.shard_size(in_features, "in_features")
        self._register_weight(out_features, columns, 1, device, dtype)
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``x W' + b``, plus the residual stream if one is passed, added in the pass that decodes the sum.

        Args:
            x: [..., in_features / ranks], or [..., in_features] without ``input_is_parallel``.
            residual: Tensor of the output's shape. Default: None.

        Returns:
            [..., out_features]; with ``sequence_parallel`` this rank's part of the sequence.
        """
        return self._forward(x, residual, None).y

    def with_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, eps: float = 1e-6
    ) -> EpilogueResult:
        """Return `forward` and the RMS norm of its result, computed in the same pass over memory.

        Args:
            x: See `forward`.
            residual: See `forward`.
            weight: Weight of the norm, [out_features], or None.
            eps: Added to the mean square. Default: 1e-6.

        Returns:
            A named tuple: ``y``, which is `forward`'s result, and ``normed``, of the same shape.
        """
        return self._forward(x, residual, Norm(weight, eps))

    def _forward(self, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None) -> EpilogueResult:
        if not self.input_is_parallel:
            x = functional.split_to_ranks(x, self.comm)
        if self._decodes_with_epilogue(x, residual, norm):
            return row_linear(x, self.matrix, self.comm, self.chunks, Epilogue(self.bias, residual, norm))
        y = self._sum(x)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        if residual is not None:
            y = y + residual
        return EpilogueResult(y, None if norm is None else F.rms_norm(y, y.shape[-1:], norm.weight, norm.eps))

    def _decodes_with_epilogue(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None
    ) -> bool:
        """Say whether the pass that decodes the sum also adds bias and residual and takes the norm."""
        return (
            self.sequence_dim is None
            and not torch.compiler.is_compiling()
            and not torch.is_autocast_enabled(x.device.type)
            and supports_epilogue(x, self.weight, self.bias, residual, norm and norm.weight)
        )

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' products; with a sequence dimension this rank's part of it."""
        if self.sequence_dim is not None:
            return functional.reduce_scatter_to_ranks(F.linear(x, self.matrix), self.comm, self.sequence_dim)
        if torch.compiler.is_compiling():
            return functional.reduce_from_ranks(F.linear(x, self.matrix), self.comm)
        matrix = self.matrix
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, matrix = x.to(dtype), matrix.to(dtype)
        return row_linear(x, matrix, self.comm, self.chunks, Epilogue()).y


class VocabParallelEmbedding(ShardedModule):
    """An embedding table whose rows are cut over the ranks: each rank stores a contiguous range of the vocabulary.

    A token's vector comes from the one rank that stores it. The ranks' results, all but one of which are zeros, are
    summed in ``codec``.

    Args:
        num_embeddings: Size of the vocabulary; divisible by the number of ranks.
        embedding_dim: Size of the vectors.
        padding_idx: The token whose vector does not learn, as of nn.Embedding. Default: none.
        codec: Codec of the sum, a spec or a `Codec`. Default: ``"none"``.
        algorithm: Algorithm of the sum, see `CommConfig`. Default: ``"auto"``.
        group: Process group or one-dimensional device mesh. Default: all ranks.
        device: Device of the weight.
        dtype: Data type of the weight.

    Raises:
        ValueError: The vocabulary is not divisible by the number of ranks, or another argument is not valid.

    Example::

        embedding = dtcomm.tp.VocabParallelEmbedding(50304, 1024, codec="int8", group=mesh)
        vectors = embedding(tokens)  # [batch, length] -> [batch, length, 1024]
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        padding_idx: int | None = None,
        codec: str | Codec = "none",
        algorithm: Algorithm = "auto",
        group: GroupOrMesh = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(CommConfig.of(codec, algorithm=algorithm, group=group))
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx: expected one of {num_embeddings} tokens, got {padding_idx}")
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        rows = self.comm.shard_size(num_embeddings, "num_embeddings")
        self.first_token = rows * self.comm.rank
        self.register_shard("weight", (rows, embedding_dim), 0, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize as nn.Embedding does: with the same seed the shards are those of the dense module."""
        self.init_parameters(functools.partial(_init_embedding, padding_idx=self.padding_idx))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the vectors of ``tokens``.

        Args:
            tokens: Integers [...], 0 to ``num_embeddings - 1``.

        Returns:
            [..., embedding_dim].

        Raises:
            IndexError: A token is outside the vocabulary (in compiled code: RuntimeError).
        """
        if torch.compiler.is_compiling():  # compiled code cannot raise because of a tensor's values
            in_vocabulary = (tokens >= 0) & (tokens < self.num_embeddings)
            torch_compat.assert_async(in_vocabulary.all(), f"tokens: expected 0 to {self.num_embeddings - 1}")
        elif tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.num_embeddings:
            raise IndexError(f"tokens: expected 0 to {self.num_embeddings - 1}")
        local = tokens - self.first_token
        stored_here = (local >= 0) & (local < len(self.weight))
        padding = None if self.padding_idx is None else self.padding_idx - self.first_token
        if padding is not None and not 0 <= padding < len(self.weight):
            padding = None
        vectors = F.embedding(torch.where(stored_here, local, 0), self.weight, padding)
        return functional.reduce_from_ranks(vectors * stored_here.unsqueeze(-1).to(vectors.dtype), self.comm)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, ranks={self.comm.world_size}, codec={self.comm.codec}"


# --- modules that keep their own forward pass: experts, and norms that all heads have in common ----------------------


class _WrappedModule(ShardedModule):
    """A module that runs the forward pass of another one with its own parameters."""

    def __init__(self, module: nn.Module, comm: CommConfig) -> None:
        super().__init__(comm)
        self.keep_dense(module)
        self.training = module.training

    def _run(self, parameters: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        (dense,) = self._dense
        dense.train(self.training)
        return functional_call(dense, parameters, args, kwargs)

    def extra_repr(self) -> str:
        return f"{type(self._dense[0]).__name__}, ranks={self.comm.world_size}, codec={self.comm.codec}"


class ReplicatedModule(_WrappedModule):
    """A module that every rank has whole and applies to its own features, such as a norm of each head.

    A rank's gradient of the parameters is that of its own features; the gradients are summed over the ranks,
    uncompressed. ValueError, with ``name``, if the module has no parameters of its own, or submodules or buffers.
    """

    def __init__(self, module: nn.Module, comm: CommConfig, name: str) -> None:
        if [*module.children(), *module.buffers()] or not [*module.parameters()]:
            raise ValueError(
                f"plan: {name} is a {type(module).__name__}; the kind replicated expects a module with parameters and "
                "without buffers and submodules, such as a norm"
            )
        super().__init__(module, comm)
        self.load_dense(dict(module.named_parameters()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output."""
        parameters = {
            name: functional.copy_to_ranks(parameter, self.comm)
            for name, parameter in self.named_parameters()
        }
        return self._run(parameters, *args, **kwargs)


class ParallelExperts(_WrappedModule):
    """Experts of transformers whose hidden features are cut over the ranks: every rank has a part of every expert.

    The routing is the same on all ranks. Each rank computes its features of each token's experts, and the weighted
    outputs are summed over the ranks in ``comm.codec``.

    The module has ``gate_up_proj`` [experts, 2 * hidden, width] and ``down_proj`` [experts, width, hidden], and is
    called with tokens [n, width], the experts of each token [n, k] and their weights [n, k]. ValueError, with ``name``,
    if it is not, or if its hidden features are not divisible by the number of ranks.
    """

    def __init__(self, module: nn.Module, comm: CommConfig, name: str) -> None:
        hidden = experts_features(module, name)
        if hidden % comm.world_size:
            raise ValueError(
                f"plan: {name}: the experts' {hidden} hidden features are not divisible by the {comm.world_size} ranks"
            )
        super().__init__(module, comm)
        parameters = dict(module.named_parameters())
        for parameter, dim, packed in (("gate_up_proj", 1, 2), ("down_proj", 2, 1)):
            shape = list(parameters[parameter].shape)
            shape[dim] //= comm.world_size
            self.register_shard(parameter, tuple(shape), dim, "meta", None, packed)
        self.load_dense(parameters)
        if isinstance(getattr(self._dense[0], "intermediate_dim", None), int):
            setattr(self._dense[0], "intermediate_dim", hidden // comm.world_size)  # noqa: B010
        self._hidden = hidden
        # Weights are few, and what they lose changes what the router learns.
        self._weights_comm = CommConfig(
            codec=NONE, backward_codec=NONE, group=comm.group, group_name=comm.group_name
        )

    def dense_module(self) -> nn.Module:
        """As of `ShardedModule`."""
        dense = super().dense_module()
        if isinstance(getattr(dense, "intermediate_dim", None), int):
            setattr(dense, "intermediate_dim", self._hidden)  # noqa: B010
        return dense

    def forward(self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each token's experts, [n, width]."""
        tokens = functional.copy_to_ranks(tokens, self.comm)
        weights = functional.copy_to_ranks(weights, self._weights_comm)
        own = self._run(dict(self.named_parameters()), tokens, experts, weights)
        return functional.reduce_from_ranks(own, self.comm)


def experts_features(module: nn.Module, name: str) -> int:
    """Return the hidden features of each expert of a module that `ParallelExperts` can cut; else ValueError."""
    parameters = {key: tuple(parameter.shape) for key, parameter in module.named_parameters()}
    up, down = parameters.get("gate_up_proj", ()), parameters.get("down_proj", ())
    if len(parameters) == 2 and len(up) == len(down) == 3 and up == (down[0], 2 * down[2], down[1]):
        return down[2]
    raise ValueError(
        f"plan: {name} is a {type(module).__name__}; the kind experts expects a module with the parameters "
        "gate_up_proj [experts, 2 * hidden, width] and down_proj [experts, width, hidden] and no others"
    )


# --- the initial values of dense modules -----------------------------------------------------------------------------


def _init_linear(name: str, full: torch.Tensor, bound: float) -> None:
    if name == "weight":
        nn.init.kaiming_uniform_(full, a=math.sqrt(5))
    else:
        nn.init.uniform_(full, -bound, bound)


def _init_conv1d(name: str, full: torch.Tensor) -> None:
    if name == "weight":
        nn.init.normal_(full, std=0.02)
    else:
        nn.init.zeros_(full)


def _init_embedding(name: str, full: torch.Tensor, padding_idx: int | None) -> None:
    nn.init.normal_(full)
    if padding_idx is not None:
        full[padding_idx].fill_(0)
