"""Styles for transformers' own tensor parallelism, so that a ``tp_plan`` can name ours.

dtcomm.tp.transformers.register("int8")          # once, before the model is made
plan = {"model.layers.*.mlp.down_proj": "rowwise_int8", …}
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from dtcomm.codecs import Codec, codec
from dtcomm.tp import functional
from dtcomm.tp.wire import wire


def register(spec: str | Codec, name: str = "", *, algorithm: str = "direct") -> str:
    """Register the style ``rowwise_<name>`` (by default the codec's spec) and return its name.

    It is transformers' "rowwise" with the sum of the partial outputs in a codec. RuntimeError where the installed
    transformers has no such registry, or one of another shape.
    """
    which = codec(spec)
    try:
        module: Any = importlib.import_module("transformers.distributed.tensor_parallel")
        base: Any = module.RowwiseParallel
        styles: Any = module.ALL_PARALLEL_STYLES
        shaped = hasattr(base, "transform_output_post_forward") and hasattr(base, "should_use_local_tensors")
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"transformers: no registry of parallel styles in this version ({error})"
        ) from None
    if not shaped:
        raise RuntimeError("transformers: the styles of this version are of another shape")

    class Rowwise(base):  # type: ignore[misc]
        """The partial outputs are summed by dtcomm."""

        def transform_output_post_forward(self, module: Any, output: Any, mesh: Any) -> Any:
            group = mesh if mesh.ndim == 1 else mesh["tp"]
            if not isinstance(self.output_layouts, Replicate):
                raise ValueError(f"rowwise_{which}: output_layouts must be Replicate()")
            local = output.to_local(grad_placements=[Replicate()]) if isinstance(output, DTensor) else output
            y = functional.reduce_from_ranks(local, wire(which, algorithm=algorithm, group=group))
            bias = module._parameters.get("bias")
            if bias is not None and not isinstance(output, DTensor):
                # The local product leaves the bias out; DTensor's has it once.
                y = y + (bias.to_local() if isinstance(bias, DTensor) else bias)
            return y if self.use_local_output else DTensor.from_local(y, mesh, [Replicate()], run_check=False)

    full = f"rowwise_{name or which}"
    styles.register(full, Rowwise())
    return full


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
