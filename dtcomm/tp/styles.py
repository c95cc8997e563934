"""torch's parallel styles with compressed communication: drop-in for `parallelize_module` plans.

    parallelize_module(model, mesh, {"up": dtcomm.tp.ColwiseParallel(backward_codec="int8"),
                                     "down": dtcomm.tp.RowwiseParallel(codec="int4")})

Layouts are torch's own. What a codec cannot carry (shards of different sizes, which DTensor pads) is refused, and with
codec none left to torch.
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
from dtcomm.codecs import codec as parse
from dtcomm.tp import functional
from dtcomm.tp.comm_config import Wire, wire

Layouts = Sequence[Placement]


class _Compressed:
    """The arguments that the styles have besides torch's."""

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        codec: str | Codec = "none",
        backward_codec: str | Codec = "none",
        algorithm: str = "auto",
        latency: bool = True,
    ) -> None:
        super().__init__(  # type: ignore[call-arg]
            input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output
        )
        self.codec, self.backward_codec, self.algorithm = parse(codec), parse(backward_codec), algorithm
        self.latency = latency

    def _wire(self, mesh: DeviceMesh) -> Wire:
        return wire(
            self.codec, self.backward_codec, algorithm=self.algorithm, group=mesh, latency=self.latency
        )


class RowwiseParallel(_Compressed, torch_styles.RowwiseParallel):
    """torch's RowwiseParallel; the sum of the partial outputs travels in `codec`, its gradient, where the output is
    scattered, in `backward_codec`."""

    def _prepare_output_fn(  # type: ignore[override]
        self,
        output_layouts: Layouts,
        use_local_output: bool,
        mod: torch.nn.Module,
        outputs: Any,
        device_mesh: DeviceMesh,
    ) -> Any:
        over = self._wire(device_mesh)
        (wanted,), (placed,) = output_layouts, outputs.placements
        if not isinstance(placed, Partial) or not possible(wanted, outputs.shape, over, "output_layouts"):
            # What travels here, if anything, is not ours.
            return super()._prepare_output_fn(  # type: ignore[no-untyped-call]
                output_layouts, use_local_output, mod, outputs, device_mesh
            )
        local = outputs.to_local(grad_placements=[Replicate()])
        mask = getattr(placed, "mask_buffer", None)
        if mask is not None:  # of a sharded embedding: rows that other ranks have
            local = functional.differentiable(_Masked, local, mask.data.unsqueeze(-1))
            mask.release_mask()
        if isinstance(wanted, Shard):
            y = functional.reduce_scatter_to_ranks(local, over, wanted.dim)
        else:
            y = functional.reduce_from_ranks(local, over)
        return y if use_local_output else DTensor.from_local(y, device_mesh, [wanted], run_check=False)


class ColwiseParallel(_Compressed, torch_styles.ColwiseParallel):
    """torch's ColwiseParallel; a sharded input is gathered in `codec`, the sum of the gradients of a replicated one
    travels in `backward_codec`."""

    def _prepare_input_fn(  # type: ignore[override]
        self,
        input_layouts: Layouts,
        desired_input_layouts: Layouts,
        mod: torch.nn.Module,
        inputs: Any,
        device_mesh: DeviceMesh,
    ) -> Any:
        over = self._wire(device_mesh)
        x = inputs[0]
        (given,) = x.placements if isinstance(x, DTensor) else input_layouts
        whole = list(x.shape)
        if isinstance(given, Shard) and not isinstance(x, DTensor):
            whole[given.dim] *= over.ranks
        ours = x.is_floating_point() and possible(given, whole, over, "input_layouts")
        if not ours:
            return super()._prepare_input_fn(  # type: ignore[no-untyped-call]
                input_layouts, desired_input_layouts, mod, inputs, device_mesh
            )
        if isinstance(x, DTensor):
            x = x.to_local(grad_placements=[given])
        dim = given.dim if isinstance(given, Shard) else None
        return replicated(x, over, dim, device_mesh)


def replicated(x: torch.Tensor, over: Wire, dim: int | None, mesh: DeviceMesh) -> Any:
    """A local tensor that all ranks have, or their parts joined along ``dim``, as a replicated DTensor."""
    return functional.differentiable(_Replicated, x, over, dim, mesh)


class _Masked(torch.autograd.Function):
    """Rows that other ranks have are zeros; the gradient passes whole, as DTensor's embedding wants it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(mask, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class _Replicated(torch.autograd.Function):
    """A local tensor, or the ranks' parts joined, as a replicated DTensor; the gradient's sum over ranks is ours."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, over: Wire, dim: int | None, mesh: DeviceMesh) -> Any:
        ctx.over, ctx.dim = over, dim
        local = x.view_as(x) if dim is None else functional.joined(x, over, dim)
        return DTensor.from_local(local.detach(), mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (placed,) = gradient.placements
        if not isinstance(placed, Partial):
            # Nobody's share but the whole, which all ranks have.
            full = gradient.redistribute(placements=[Replicate()]).to_local()
            x = full if ctx.dim is None else functional.own_part(full, ctx.over, ctx.dim)
        elif ctx.dim is None:
            x = functional.summed(gradient.to_local(), ctx.over, backward=True)
        else:
            x = functional.summed_part(gradient.to_local(), ctx.over, ctx.dim, backward=True)
        return x, None, None, None


def possible(placement: Placement, shape: Sequence[int], over: Wire, argument: str) -> bool:
    """Can our collectives do it? ValueError where a codec asks for it and they cannot."""
    if isinstance(placement, Replicate):
        return True
    if isinstance(placement, Shard) and shape[placement.dim] % over.ranks == 0:
        return True
    if str(over.codec) == "none" and str(over.backward_codec) == "none":
        return False
    raise ValueError(
        f"{argument}: {placement!r} of a tensor of shape {tuple(shape)} over {over.ranks} ranks cannot be compressed; "
        "valid: Replicate(), or a Shard whose dimension divides among the ranks"
    )
