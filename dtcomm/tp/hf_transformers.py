"""Styles for transformers' own tensor parallelism, so that a ``tp_plan`` can name ours.

dtcomm.tp.hf_transformers.register("int8", backward_codec="int8")          # once, before the model is made
plan = {"model.layers.*.mlp.up_proj": "colwise_int8", "model.layers.*.mlp.down_proj": "rowwise_int8", …}
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from dtcomm.codecs import Codec, codec
from dtcomm.tp import functional
from dtcomm.tp.comm_config import Wire, wire
from dtcomm.tp.styles import replicated


class Styles(NamedTuple):
    """The names that a ``tp_plan`` can use."""

    rowwise: str
    colwise: str


def register(
    spec: str | Codec,
    name: str = "",
    *,
    backward_codec: str | Codec = "none",
    algorithm: str = "auto",
    latency: bool = True,
) -> Styles:
    """Register the styles ``rowwise_<name>`` and ``colwise_<name>`` (by default the codec's spec); returns the names.

    They are transformers' own "rowwise" with the sum of the partial outputs in a codec, and "colwise" with the sum of
    the input's gradients in `backward_codec`. RuntimeError where the installed transformers has no such registry, or
    one of another shape.
    """
    forward, back = codec(spec), codec(backward_codec)
    try:
        module: Any = importlib.import_module("transformers.distributed.tensor_parallel")
        bases: tuple[Any, Any] = module.RowwiseParallel, module.ColwiseParallel
        styles: Any = module.ALL_PARALLEL_STYLES
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"transformers: no registry of parallel styles in this version ({error})"
        ) from None
    hooks = ("transform_inputs_pre_forward", "transform_output_post_forward", "should_use_local_tensors")
    if not all(hasattr(base, hook) for base in bases for hook in hooks):
        raise RuntimeError("transformers: the styles of this version are of another shape")

    def over(mesh: Any) -> Wire:
        group = mesh if mesh.ndim == 1 else mesh["tp"]
        return wire(forward, back, algorithm=algorithm, group=group, latency=latency)

    full = Styles(f"rowwise_{name or forward}", f"colwise_{name or forward}")
    styles.register(full.rowwise, _rowwise(bases[0], over, full.rowwise)())
    styles.register(full.colwise, _colwise(bases[1], over)())
    return full


def _rowwise(base: Any, over: Callable[[Any], Wire], name: str) -> Any:
    class Rowwise(base):  # type: ignore[misc]
        """The partial outputs are summed by dtcomm."""

        def transform_output_post_forward(self, module: Any, output: Any, mesh: Any) -> Any:
            if not isinstance(self.output_layouts, Replicate):
                raise ValueError(f"{name}: output_layouts must be Replicate()")
            local = output.to_local(grad_placements=[Replicate()]) if isinstance(output, DTensor) else output
            y = functional.reduce_from_ranks(local, over(mesh))
            bias = module._parameters.get("bias")
            if bias is not None and not isinstance(output, DTensor):
                # The local product leaves the bias out; DTensor's has it once.
                y = y + (bias.to_local() if isinstance(bias, DTensor) else bias)
            return y if self.use_local_output else DTensor.from_local(y, mesh, [Replicate()], run_check=False)

    return Rowwise


def _colwise(base: Any, over: Callable[[Any], Wire]) -> Any:
    class Colwise(base):  # type: ignore[misc]
        """The gradients of the input are summed by dtcomm."""

        def transform_inputs_pre_forward(self, module: Any, args: Any, kwargs: Any, mesh: Any) -> Any:
            x, *rest = args
            if not torch.is_grad_enabled():
                return super().transform_inputs_pre_forward(module, args, kwargs, mesh)
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, mesh, [self.input_layouts], run_check=False)
            if x.placements != (Replicate(),):
                x = x.redistribute(placements=[Replicate()])
            x = replicated(x.to_local(grad_placements=[Replicate()]), over(mesh), None, mesh)
            if self.should_use_local_tensors(module):
                x = x.to_local(grad_placements=[Partial()])
            return (x, *rest), kwargs

    return Colwise


def from_folder(
    folder: str | Path, text: str, *, batches: int, size: int, length: int
) -> tuple[Any, list[torch.Tensor]]:
    """A causal language model of a local folder, and so many batches [size, length + 1] of tokens of the text.

    RuntimeError where transformers is not installed; ValueError where the folder has no such model or tokenizer, or the
    text is too short.
    """
    try:
        module: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise RuntimeError(f"transformers: {error}; pip install transformers") from None
    try:
        model = module.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        tokenizer = module.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: no causal language model with a tokenizer: {error}") from None
    return model, cut(torch.tensor(tokenizer(text)["input_ids"]), batches=batches, size=size, length=length)


def cut(tokens: torch.Tensor, *, batches: int, size: int, length: int) -> list[torch.Tensor]:
    """Evenly spaced windows of a run of tokens, [size, length + 1] each. ValueError where it is too short."""
    if len(tokens) < length + 1:
        raise ValueError(f"text: {len(tokens)} tokens are less than one window of {length + 1}")
    starts = torch.linspace(0, len(tokens) - length - 1, batches * size).long()
    windows = tokens[starts[:, None] + torch.arange(length + 1)]
    return [windows[at : at + size] for at in range(0, len(windows), size)]
