"""Compressed styles for transformers' own tensor parallelism, and models and text for calibration.

    dtcomm.tp.hf_transformers.register("int8", backward_codec="int8")  # once, before the model is made
    tp_plan = {"model.layers.*.mlp.up_proj": "colwise_int8", "model.layers.*.mlp.down_proj": "rowwise_int8"}

`register` adds styles that a ``tp_plan`` can name. `from_folder` and `cut_windows` are used by ``dtcomm tp calibrate``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from dtcomm.codecs import Codec
from dtcomm.collectives import Algorithm
from dtcomm.tp import functional
from dtcomm.tp.comm_config import CommConfig, parse_codec
from dtcomm.tp.styles import to_replicated


class StyleNames(NamedTuple):
    """The names of the registered styles, for a ``tp_plan``."""

    rowwise: str
    colwise: str


def register(
    codec: str | Codec,
    name: str = "",
    *,
    backward_codec: str | Codec = "none",
    algorithm: Algorithm = "auto",
    latency: bool = True,
) -> StyleNames:
    """Register the styles ``rowwise_<name>`` and ``colwise_<name>`` with transformers.

    They are transformers' own ``rowwise``, with a compressed sum of the partial outputs, and ``colwise``, with a
    compressed sum of the input's gradients.

    Args:
        codec: Codec of the outputs' sum, a spec or a `Codec`.
        name: Ending of the styles' names. Default: the codec's spec.
        backward_codec: Codec of the gradients' sum. Default: ``"none"``.
        algorithm: Algorithm of the sums, see `CommConfig`. Default: ``"auto"``.
        latency: Send small messages uncompressed where that is predicted to be faster. Default: True.

    Returns:
        The names of both styles.

    Raises:
        RuntimeError: The installed transformers has no registry of parallel styles, or one with another interface.

    Example::

        names = dtcomm.tp.hf_transformers.register("int8")
        tp_plan = {"layers.*.mlp.up_proj": names.colwise, "layers.*.mlp.down_proj": names.rowwise}
    """
    forward, backward = parse_codec(codec), parse_codec(backward_codec, "backward_codec")
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
        raise RuntimeError("transformers: the parallel styles of this version have another interface")

    def comm_config_for(mesh: Any) -> CommConfig:
        group = mesh if mesh.ndim == 1 else mesh["tp"]
        return CommConfig.of(forward, backward, algorithm=algorithm, group=group, latency=latency)

    names = StyleNames(f"rowwise_{name or forward}", f"colwise_{name or forward}")
    styles.register(names.rowwise, _rowwise_style(bases[0], comm_config_for, names.rowwise)())
    styles.register(names.colwise, _colwise_style(bases[1], comm_config_for)())
    return names


def _rowwise_style(base: Any, comm_config_for: Callable[[Any], CommConfig], name: str) -> Any:
    class Rowwise(base):  # type: ignore[misc]
        """transformers' rowwise style, with the partial outputs summed by dtcomm."""

        def transform_output_post_forward(self, module: Any, output: Any, mesh: Any) -> Any:
            if not isinstance(self.output_layouts, Replicate):
                raise ValueError(f"{name}: output_layouts must be Replicate()")
            local = output.to_local(grad_placements=[Replicate()]) if isinstance(output, DTensor) else output
            y = functional.reduce_from_ranks(local, comm_config_for(mesh))
            bias = module._parameters.get("bias")
            if bias is not None and not isinstance(output, DTensor):
                # The local product has no bias yet; DTensor's product contains it once.
                y = y + (bias.to_local() if isinstance(bias, DTensor) else bias)
            return y if self.use_local_output else DTensor.from_local(y, mesh, [Replicate()], run_check=False)

    return Rowwise


def _colwise_style(base: Any, comm_config_for: Callable[[Any], CommConfig]) -> Any:
    class Colwise(base):  # type: ignore[misc]
        """transformers' colwise style, with the gradients of the input summed by dtcomm."""

        def transform_inputs_pre_forward(self, module: Any, args: Any, kwargs: Any, mesh: Any) -> Any:
            x, *rest = args
            if not torch.is_grad_enabled():
                return super().transform_inputs_pre_forward(module, args, kwargs, mesh)
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, mesh, [self.input_layouts], run_check=False)
            if x.placements != (Replicate(),):
                x = x.redistribute(placements=[Replicate()])
            x = to_replicated(x.to_local(grad_placements=[Replicate()]), comm_config_for(mesh), None, mesh)
            if self.should_use_local_tensors(module):
                x = x.to_local(grad_placements=[Partial()])
            return (x, *rest), kwargs

    return Colwise


def from_folder(
    folder: str | Path, text: str, *, batches: int, size: int, length: int
) -> tuple[Any, list[torch.Tensor]]:
    """Load a causal language model from a local folder and cut a text into `cut_windows`; nothing is downloaded.

    RuntimeError if transformers is not installed; ValueError if the folder has no such model or tokenizer, or the text
    is too short.
    """
    try:
        module: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise RuntimeError(f"transformers: {error}; pip install transformers") from None
    if not Path(folder).is_dir():
        raise ValueError(f"MODEL: {str(folder)!r} is no folder with a model, and no package.module:function")
    try:
        model = module.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        tokenizer = module.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: no causal language model with a tokenizer: {error}") from None
    return model, cut_windows(
        torch.tensor(tokenizer(text)["input_ids"]), batches=batches, size=size, length=length
    )


def cut_windows(tokens: torch.Tensor, *, batches: int, size: int, length: int) -> list[torch.Tensor]:
    """Cut evenly spaced windows from integers [n]: ``batches`` tensors [size, length + 1].

    A window of ``length + 1`` tokens has ``length`` that have a next one to predict.
    """
    if len(tokens) < length + 1:
        raise ValueError(f"text: {len(tokens)} tokens are fewer than one window of {length + 1}")
    starts = torch.linspace(0, len(tokens) - length - 1, batches * size).long()
    windows = tokens[starts[:, None] + torch.arange(length + 1)]
    return [windows[start : start + size] for start in range(0, len(windows), size)]
