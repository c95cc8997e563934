"""torch's parallel styles with compressed communication: drop-in replacements in `parallelize_module` plans.

    parallelize_module(model, mesh, {
        "up": dtcomm.tp.ColwiseParallel(backward_codec="int8"),
        "down": dtcomm.tp.RowwiseParallel(codec="int4"),
        "norm": dtcomm.tp.SequenceParallel(codec="int8"),
        "attention": dtcomm.tp.PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate(), codec="int8", backward_codec="int8"),
    })

Layouts are torch's own. Redistributions that dtcomm cannot carry (shards of different sizes, which DTensor pads) raise
ValueError if a codec was asked for, and are left to torch with codec ``none``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import parallel as torch_styles
from torch.distributed.tensor.placement_types import Placement

from dtcomm.codecs import Codec
from dtcomm.collectives import Algorithm
from dtcomm.torch_compat import autograd_apply
from dtcomm.tp import functional
from dtcomm.tp.comm_config import CommConfig, parse_codec

Layouts = Sequence[Placement]


class _LinearStyle:
    """The arguments that `RowwiseParallel` and `ColwiseParallel` have beyond torch's."""

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        codec: str | Codec = "none",
        backward_codec: str | Codec = "none",
        algorithm: Algorithm = "auto",
        latency: bool = True,
    ) -> None:
        super().__init__(  # type: ignore[call-arg]
            input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output
        )
        self.codec, self.backward_codec = parse_codec(codec), parse_codec(backward_codec, "backward_codec")
        self.algorithm = algorithm
        self.latency = latency

    def _comm_config(self, mesh: DeviceMesh) -> CommConfig:
        return CommConfig.of(
            self.codec, self.backward_codec, algorithm=self.algorithm, group=mesh, latency=self.latency
        )


class RowwiseParallel(_LinearStyle, torch_styles.RowwiseParallel):
    """torch's RowwiseParallel (for nn.Linear and nn.Embedding) with a compressed sum of the partial outputs.

    Args:
        input_layouts: As torch's. Default: ``Shard(-1)``.
        output_layouts: As torch's. Default: ``Replicate()``.
        use_local_output: Return a local tensor instead of a DTensor. Default: True.
        codec: Codec of the sum, a spec or a `Codec`. Default: ``"none"``.
        backward_codec: Codec of the gathered gradient where the output is scattered. Default: ``"none"``.
        algorithm: Algorithm of the sum, see `CommConfig`. Default: ``"auto"``.
        latency: Send small messages uncompressed where that is predicted to be faster. Default: True.

    Raises:
        ValueError: When the module runs: a codec was asked for, and the output cannot be cut evenly over the ranks.

    Example::

        parallelize_module(mlp, mesh, {"down": dtcomm.tp.RowwiseParallel(codec="int8")})
    """

    def _prepare_output_fn(  # type: ignore[override]
        self,
        output_layouts: Layouts,
        use_local_output: bool,
        mod: torch.nn.Module,
        outputs: Any,
        device_mesh: DeviceMesh,
    ) -> Any:
        comm = self._comm_config(device_mesh)
        (target,), (source,) = output_layouts, outputs.placements
        if not isinstance(source, Partial) or not can_carry(target, outputs.shape, comm, "output_layouts"):
            return super()._prepare_output_fn(  # type: ignore[no-untyped-call]
                output_layouts, use_local_output, mod, outputs, device_mesh
            )
        local = outputs.to_local(grad_placements=[Replicate()])
        mask = getattr(source, "mask_buffer", None)
        if mask is not None:  # a sharded embedding masks the tokens of other ranks
            local = autograd_apply(_MaskRows, local, mask.data.unsqueeze(-1))
            mask.release_mask()
        if isinstance(target, Shard):
            y = functional.reduce_scatter_to_ranks(local, comm, target.dim)
        else:
            y = functional.reduce_from_ranks(local, comm)
        return y if use_local_output else DTensor.from_local(y, device_mesh, [target], run_check=False)


class ColwiseParallel(_LinearStyle, torch_styles.ColwiseParallel):
    """torch's ColwiseParallel (for nn.Linear and nn.Embedding) with compressed input gathers and gradient sums.

    Args:
        input_layouts: As torch's. Default: ``Replicate()``.
        output_layouts: As torch's. Default: ``Shard(-1)``.
        use_local_output: Return a local tensor instead of a DTensor. Default: True.
        codec: Codec of the gather of a sharded input, a spec or a `Codec`. Default: ``"none"``.
        backward_codec: Codec of the sum of the input's gradients. Default: ``"none"``.
        algorithm: Algorithm of that sum, see `CommConfig`. Default: ``"auto"``.
        latency: Send small messages uncompressed where that is predicted to be faster. Default: True.

    Raises:
        ValueError: When the module runs: a codec was asked for, and the input cannot be cut evenly over the ranks.

    Example::

        parallelize_module(mlp, mesh, {"up": dtcomm.tp.ColwiseParallel(backward_codec="int8")})
    """

    def _prepare_input_fn(  # type: ignore[override]
        self,
        input_layouts: Layouts,
        desired_input_layouts: Layouts,
        mod: torch.nn.Module,
        inputs: Any,
        device_mesh: DeviceMesh,
    ) -> Any:
        comm = self._comm_config(device_mesh)
        x = inputs[0]
        (source,) = x.placements if isinstance(x, DTensor) else input_layouts
        full_shape = list(x.shape)
        if isinstance(source, Shard) and not isinstance(x, DTensor):
            full_shape[source.dim] *= comm.world_size
        if not (x.is_floating_point() and can_carry(source, full_shape, comm, "input_layouts")):
            return super()._prepare_input_fn(  # type: ignore[no-untyped-call]
                input_layouts, desired_input_layouts, mod, inputs, device_mesh
            )
        if isinstance(x, DTensor):
            x = x.to_local(grad_placements=[source])
        dim = source.dim if isinstance(source, Shard) else None
        return to_replicated(x, comm, dim, device_mesh)


class _LayoutStyle:
    """The arguments that the styles which change layouts have beyond torch's."""

    def __init__(
        self,
        *args: Any,
        codec: str | Codec = "none",
        backward_codec: str | Codec = "none",
        algorithm: Algorithm = "auto",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.codec, self.backward_codec = parse_codec(codec), parse_codec(backward_codec, "backward_codec")
        self.algorithm = algorithm

    def _redistribute(
        self, x: Any, source: Placement, target: Placement, mesh: DeviceMesh, argument: str
    ) -> Any:
        """Return ``x`` as a DTensor with the placement ``target``; a local tensor has the placement ``source``."""
        tensor = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, (source,), run_check=False)
        comm = CommConfig.of(self.codec, self.backward_codec, algorithm=self.algorithm, group=mesh)
        return redistribute(tensor, target, comm, argument)


class PrepareModuleInput(_LayoutStyle, torch_styles.PrepareModuleInput):
    """torch's PrepareModuleInput with compressed redistribution of the inputs.

    Args:
        *args: As torch's.
        **kwargs: As torch's: ``input_layouts``, ``desired_input_layouts``, ``use_local_output`` and so on.
        codec: Codec of what the redistribution sends, a spec or a `Codec`. Default: ``"none"``.
        backward_codec: Codec of its gradient. Default: ``"none"``.
        algorithm: Algorithm of sums, see `CommConfig`. Default: ``"auto"``.

    Raises:
        ValueError: When the module runs: a codec was asked for, and it cannot carry the redistribution.
    """

    def _prepare_input_arg(
        self, input: Any, mesh: DeviceMesh, input_layout: Placement | None, desired_layout: Placement | None
    ) -> Any:
        if input_layout is None:
            return input
        target = input_layout if desired_layout is None else desired_layout
        result = self._redistribute(input, input_layout, target, mesh, "input_layouts")
        return result.to_local() if self.use_local_output else result


class PrepareModuleOutput(_LayoutStyle, torch_styles.PrepareModuleOutput):
    """torch's PrepareModuleOutput with compressed redistribution of the outputs.

    Args:
        *args: As torch's.
        **kwargs: As torch's: ``output_layouts``, ``desired_output_layouts``, ``use_local_output``.
        codec: Codec of what the redistribution sends, a spec or a `Codec`. Default: ``"none"``.
        backward_codec: Codec of its gradient. Default: ``"none"``.
        algorithm: Algorithm of sums, see `CommConfig`. Default: ``"auto"``.

    Raises:
        ValueError: When the module runs: a codec was asked for, and it cannot carry the redistribution.
    """

    def _prepare_out_fn(self, outputs: Any, device_mesh: DeviceMesh) -> Any:
        tensors = outputs if isinstance(outputs, tuple) else (outputs,)
        if len(tensors) != len(self.output_layouts):
            raise ValueError(
                f"output_layouts: {len(self.output_layouts)} layouts for a module that returned "
                f"{len(tensors)} outputs"
            )
        results = []
        for tensor, source, target in zip(
            tensors, self.output_layouts, self.desired_output_layouts, strict=True
        ):
            if source is not None:
                tensor = self._redistribute(tensor, source, target, device_mesh, "output_layouts")
                tensor = tensor.to_local() if self.use_local_output else tensor
            results.append(tensor)
        return results[0] if len(results) == 1 else tuple(results)


class SequenceParallel(_LayoutStyle, torch_styles.SequenceParallel):
    """torch's SequenceParallel; an input that is not yet sharded along the sequence is redistributed in ``codec``.

    Args:
        *args: As torch's.
        **kwargs: As torch's: ``sequence_dim`` and ``use_local_output``.
        codec: Codec of what the redistribution sends, a spec or a `Codec`. Default: ``"none"``.
        backward_codec: Codec of its gradient. Default: ``"none"``.
        algorithm: Algorithm of sums, see `CommConfig`. Default: ``"auto"``.

    Raises:
        ValueError: When the module runs: its input is not a tensor, or a codec was asked for and cannot carry it.
    """

    def _prepare_input_fn(  # type: ignore[override]
        self, sequence_sharding: tuple[Shard], mod: torch.nn.Module, inputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        x, (target,) = inputs[0], sequence_sharding
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"input of {type(mod).__name__}: expected a tensor, got {type(x).__name__}")
        return self._redistribute(x, target, target, device_mesh, "sequence_dim")


def redistribute(x: Any, target: Placement, comm: CommConfig, argument: str) -> Any:
    """Return the DTensor ``x`` with the placement ``target``, communicated in the codecs of ``comm``.

    ValueError, which names ``argument``, if a codec was asked for and it cannot carry the redistribution.
    """
    (source,), mesh = x.placements, x.device_mesh
    if source == target:
        return x
    uncompressed = str(comm.codec) == str(comm.backward_codec) == "none"
    between_shards = isinstance(source, Shard) and isinstance(target, Shard)
    if between_shards and not uncompressed:
        raise ValueError(
            f"{argument}: {source!r} to {target!r} cannot be compressed; "
            "valid: from or to Replicate(), from Partial()"
        )
    sharded = source if isinstance(source, Shard) else target
    supported = x.is_floating_point() and not between_shards and not isinstance(target, Partial)
    if not supported or not can_carry(sharded, x.shape, comm, argument):
        return x.redistribute(placements=(target,))
    if isinstance(source, Shard):
        return to_replicated(x.to_local(grad_placements=[source]), comm, source.dim, mesh)
    local = x.to_local(grad_placements=[Replicate()])
    if not isinstance(source, Partial):
        assert isinstance(target, Shard)  # Replicate to Replicate has returned above
        y = functional.split_to_ranks(local, comm, target.dim)
    elif isinstance(target, Shard):
        y = functional.reduce_scatter_to_ranks(local, comm, target.dim)
    else:
        y = functional.reduce_from_ranks(local, comm)
    return DTensor.from_local(y, mesh, [target], run_check=False)


def to_replicated(x: torch.Tensor, comm: CommConfig, dim: int | None, mesh: DeviceMesh) -> Any:
    """Return a replicated DTensor: of the ranks' shards gathered along ``dim``, or, if None, of a replicated ``x``."""
    return autograd_apply(_ToReplicated, x, comm, dim, mesh)


def can_carry(placement: Placement, shape: Sequence[int], comm: CommConfig, argument: str) -> bool:
    """Return whether dtcomm's collectives can redistribute a tensor of this full shape from or to ``placement``.

    ValueError, which names ``argument``, if they cannot and a codec was asked for.
    """
    if isinstance(placement, Replicate):
        return True
    if isinstance(placement, Shard) and shape[placement.dim] % comm.world_size == 0:
        return True
    if str(comm.codec) == "none" and str(comm.backward_codec) == "none":
        return False
    raise ValueError(
        f"{argument}: {placement!r} of a tensor of shape {tuple(shape)} over {comm.world_size} ranks cannot be "
        "compressed; valid: Replicate(), or a Shard whose dimension is divisible by the number of ranks"
    )


class _MaskRows(torch.autograd.Function):
    """Zeros the rows of tokens that other ranks store; the gradient passes unmasked, as DTensor's embedding expects."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(mask, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class _ToReplicated(torch.autograd.Function):
    """`to_replicated`; the gradient is summed over the ranks by dtcomm."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comm: CommConfig, dim: int | None, mesh: DeviceMesh) -> Any:
        ctx.comm, ctx.dim = comm, dim
        local = x.view_as(x) if dim is None else functional.all_gather(x, comm, dim)
        return DTensor.from_local(local.detach(), mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (placement,) = gradient.placements
        if not isinstance(placement, Partial):
            # The gradient is complete on all ranks already: there is nothing to sum.
            full = gradient.redistribute(placements=[Replicate()]).to_local()
            dx = full if ctx.dim is None else functional.split(full, ctx.comm, ctx.dim)
        elif ctx.dim is None:
            dx = functional.all_reduce(gradient.to_local(), ctx.comm, backward=True)
        else:
            dx = functional.reduce_scatter(gradient.to_local(), ctx.comm, ctx.dim, backward=True)
        return dx, None, None, None
