"""How many floating-point operations a step of training takes: counted on the meta device, or by formula."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dtcomm.extensions.jobs.hardware import DEVICES, find_device
from dtcomm.profiling.timeline import tensors_of


def count_flops(model: nn.Module, *inputs: Any, backward: bool = True, **options: Any) -> int:
    """Count the FLOPs of a step by running the model on the meta device, which computes nothing and needs no memory.

    Matrix products, convolutions and attention are counted, as `torch.utils.flop_counter` does; the model itself is not
    run. Count before the model's layers are cut over ranks or wrapped: these communicate.

    Args:
        model: The dense model.
        *inputs: What its forward pass takes; tensors stand for their shapes alone.
        backward: Count the backward pass too. Default: True.
        **options: Keyword arguments of the forward pass.

    Returns:
        The FLOPs for these inputs; a multiplication and an addition are 2.

    Raises:
        TypeError: ``model`` is not a module.
        RuntimeError: The model's forward pass depends on values, which tensors on the meta device have not; use
            `transformer_flops`.

    Example:
        >>> import torch
        >>> from dtcomm.extensions.extras import count_flops
        >>> count_flops(torch.nn.Linear(64, 32), torch.empty(8, 64), backward=False)
        32768
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    twins: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        for parameter in model.parameters()
    }
    twins |= {id(buffer): buffer.detach().to("meta") for buffer in model.buffers()}
    twin = copy.deepcopy(model, twins)
    try:
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
            output = twin(*_on_meta(inputs), **_on_meta(options))
            if backward:
                results = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
                torch.autograd.backward(results, [torch.empty_like(tensor) for tensor in results])
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise RuntimeError(
            f"model: {type(model).__name__} does not run on the meta device ({error}); use transformer_flops"
        ) from error
    return int(counter.get_total_flops())


def transformer_flops(
    parameters: float,
    tokens: float,
    *,
    layers: int = 0,
    width: int = 0,
    length: int = 0,
    causal: bool = False,
) -> float:
    """Return the FLOPs of a training step of a transformer by the formula of PaLM (arXiv:2204.02311, appendix B).

    They are 6 for each parameter and token, and 12 · layers · width · length for each token's attention; half of that
    if causal attention computes no masked products. Recomputed activations do not count.

    Args:
        parameters: Parameters that take part in products: of a mixture of experts those that a token meets; without
            the embedding table, unless it is the output layer too.
        tokens: Tokens of the step.
        layers: Number of layers with attention. Default: 0, no attention.
        width: Heads times the size of a head. Default: 0.
        length: Tokens of a sequence. Default: 0.
        causal: Whether masked products are left out. Default: False.

    Returns:
        The FLOPs of forward and backward pass.

    Raises:
        ValueError: An argument is negative.

    Example:
        >>> from dtcomm.extensions.extras import transformer_flops
        >>> transformer_flops(1e9, 1000) / 1e12
        6.0
    """
    values = {"parameters": parameters, "tokens": tokens, "layers": layers, "width": width, "length": length}
    for name, value in values.items():
        if value < 0:
            raise ValueError(f"{name}: expected 0 or more, got {value}")
    attention = 12 * layers * width * length * (0.5 if causal else 1.0)
    return tokens * (6 * parameters + attention)


def peak_flops(device: str | torch.device | None = None, dtype: str = "bf16") -> float:
    """Return the peak FLOP/s of a device's matrix products, from the planner's table.

    Args:
        device: ``"a100"``, ``"h100"``, ``"h200"`` or ``"b200"``, or a CUDA device, of which the name is looked up;
            None: the current one. Default: None.
        dtype: ``"fp32"``, ``"tf32"``, ``"bf16"`` or ``"fp16"``. Default: ``"bf16"``.

    Returns:
        FLOP/s, without sparsity.

    Raises:
        ValueError: The table has no such device or dtype; pass the peak as a number then.

    Example:
        >>> from dtcomm.extensions.extras import peak_flops
        >>> peak_flops("h100") / 1e12
        989.4
    """
    if not isinstance(device, str) or ":" in device or device == "cuda":
        if not torch.cuda.is_available():
            text = "pass a name, such as 'h100', or the peak FLOP/s"
            raise ValueError(f"device: there is no CUDA device here; {text}")
        full_name = torch.cuda.get_device_name(device).lower()
        device = next((name for name in DEVICES if name in full_name), full_name)
    try:
        return find_device(device).peak_flops(dtype)
    except ValueError as error:
        raise ValueError(str(error).replace("compute: ", f"dtype: {device}: ")) from None


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("meta")
    if isinstance(value, dict):
        return {key: _on_meta(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_meta(part) for part in value)
    return value
