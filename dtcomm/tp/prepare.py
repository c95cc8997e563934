"""torch's styles that lay activations out anew between modules, with what they move compressed.

parallelize_module(block, mesh, {
    "norm": dtcomm.tp.SequenceParallel(codec="int8"),
    "attention": dtcomm.tp.PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate(), codec="int8", backward_codec="int8"),
})
"""

from __future__ import annotations

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
from dtcomm.tp.styles import possible, replicated


class _Laid:
    """The arguments that the styles have besides torch's."""

    def __init__(
        self,
        *arguments: Any,
        codec: str | Codec = "none",
        backward_codec: str | Codec = "none",
        algorithm: str = "auto",
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.codec, self.backward_codec, self.algorithm = parse(codec), parse(backward_codec), algorithm

    def _lay(self, x: Any, given: Placement, wanted: Placement, mesh: DeviceMesh, argument: str) -> Any:
        """A tensor laid out as ``given`` (a DTensor knows itself), as a DTensor laid out as ``wanted``."""
        laid = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, (given,), run_check=False)
        over = wire(self.codec, self.backward_codec, algorithm=self.algorithm, group=mesh)
        return moved(laid, wanted, over, argument)


def moved(x: Any, wanted: Placement, over: Wire, argument: str) -> Any:
    """A DTensor with another placement; ValueError naming ``argument`` where a codec cannot carry what moves."""
    (given,), mesh = x.placements, x.device_mesh
    if given == wanted:
        return x
    plain = str(over.codec) == str(over.backward_codec) == "none"
    between = isinstance(given, Shard) and isinstance(wanted, Shard)
    if between and not plain:
        raise ValueError(
            f"{argument}: {given!r} to {wanted!r} cannot be compressed; valid: from or to Replicate(), from Partial()"
        )
    split = given if isinstance(given, Shard) else wanted
    ours = x.is_floating_point() and not between and not isinstance(wanted, Partial)
    if not ours or not possible(split, x.shape, over, argument):
        return x.redistribute(placements=(wanted,))
    if isinstance(given, Shard):
        return replicated(x.to_local(grad_placements=[given]), over, given.dim, mesh)
    local = x.to_local(grad_placements=[Replicate()])
    if not isinstance(given, Partial):
        assert isinstance(wanted, Shard)  # Replicate to Replicate is nothing to do
        y = functional.split_to_ranks(local, over, wanted.dim)
    elif isinstance(wanted, Shard):
        y = functional.reduce_scatter_to_ranks(local, over, wanted.dim)
    else:
        y = functional.reduce_from_ranks(local, over)
    return DTensor.from_local(y, mesh, [wanted], run_check=False)


class PrepareModuleInput(_Laid, torch_styles.PrepareModuleInput):
    """torch's PrepareModuleInput; what a new layout moves travels in `codec`, its gradient in `backward_codec`."""

    def _prepare_input_arg(
        self, input: Any, mesh: DeviceMesh, input_layout: Placement | None, desired_layout: Placement | None
    ) -> Any:
        if input_layout is None:
            return input
        wanted = input_layout if desired_layout is None else desired_layout
        laid = self._lay(input, input_layout, wanted, mesh, "input_layouts")
        return laid.to_local() if self.use_local_output else laid


class PrepareModuleOutput(_Laid, torch_styles.PrepareModuleOutput):
    """torch's PrepareModuleOutput; what a new layout moves travels in `codec`, its gradient in `backward_codec`."""

    def _prepare_out_fn(self, outputs: Any, device_mesh: DeviceMesh) -> Any:
        given = outputs if isinstance(outputs, tuple) else (outputs,)
        if len(given) != len(self.output_layouts):
            raise ValueError(
                f"output_layouts: {len(self.output_layouts)} for a module that returned {len(given)} outputs"
            )
        made = []
        for out, layout, wanted in zip(given, self.output_layouts, self.desired_output_layouts, strict=True):
            if layout is not None:
                out = self._lay(out, layout, wanted, device_mesh, "output_layouts")
                out = out.to_local() if self.use_local_output else out
            made.append(out)
        return made[0] if len(made) == 1 else tuple(made)


class SequenceParallel(_Laid, torch_styles.SequenceParallel):
    """torch's SequenceParallel; an input that is not scattered along the sequence yet is, in `codec`."""

    def _prepare_input_fn(  # type: ignore[override]
        self, sequence_sharding: tuple[Shard], mod: torch.nn.Module, inputs: Any, device_mesh: DeviceMesh
    ) -> Any:
        x, (wanted,) = inputs[0], sequence_sharding
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"input of {type(mod).__name__}: expected a tensor, got {type(x).__name__}")
        return self._lay(x, wanted, wanted, device_mesh, "sequence_dim")
