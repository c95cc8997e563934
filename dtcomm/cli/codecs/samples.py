"""Inputs of ``dtcomm codecs``: three random distributions with fixed seeds, and a user's tensors from a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dtcomm.codecs.base import FLOAT_TYPES

#: Elements of each distribution; with as many, another seed changes an error by less than one percent.
NUMEL = 1 << 18


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Flat fp32 tensors that are encoded separately and whose errors are added; ``name`` is the column head."""

    name: str
    tensors: dict[str, torch.Tensor]


def distributions(numel: int = NUMEL) -> list[Sample]:
    """Return the samples, which are the same on every machine.

    They are Gaussian, Laplace (peaked, like many gradients) and Student's t with 3 degrees of freedom, whose tails are
    so heavy that its fourth moment does not exist. All have mean zero.
    """
    drawn = {
        "Gaussian": np.random.default_rng(1).standard_normal(numel),
        "Laplace": np.random.default_rng(2).laplace(size=numel),
        "Student-t": np.random.default_rng(3).standard_t(3, size=numel),
    }
    return [
        Sample(name=name, tensors={name: torch.from_numpy(x.astype(np.float32))}) for name, x in drawn.items()
    ]


def load(path: Path) -> Sample:
    """Read the floating-point tensors of a ``.npy`` or ``.pt`` file without executing code in it.

    A ``.pt`` file holds a tensor, or dicts and lists of tensors such as a state dict.

    Raises:
        ValueError: The file cannot be read or has no floating-point tensor.
    """
    if not path.is_file():
        raise ValueError(f"--tensor {path}: no such file")
    try:
        content = _read(path)
    except Exception as error:  # unpickling arbitrary bytes may raise any exception
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"--tensor {path}: cannot be read: {reason[0]}") from None
    tensors = dict(_tensors(content, ""))
    if not tensors:
        raise ValueError(
            f"--tensor {path}: has no floating-point tensor; expected dense fp64, fp32, fp16 or bf16"
        )
    return Sample(name=path.name, tensors=tensors)


def _read(path: Path) -> Any:
    if path.suffix == ".npy":
        return np.load(path, allow_pickle=False)
    return torch.load(path, map_location="cpu", weights_only=True)


def _tensors(content: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every floating-point tensor with at least one element, named by its keys."""
    if isinstance(content, np.ndarray):
        if not np.issubdtype(content.dtype, np.floating):
            return
        content = torch.from_numpy(np.ascontiguousarray(content, dtype=np.float32))
    if isinstance(content, torch.Tensor):
        if (
            content.layout == torch.strided
            and content.dtype in (*FLOAT_TYPES, torch.float64)
            and content.numel()
        ):
            yield name or "tensor", content.detach().to(torch.float32).reshape(-1).contiguous()
    elif isinstance(content, dict):
        for key, value in content.items():
            yield from _tensors(value, f"{name}.{key}" if name else str(key))
    elif isinstance(content, list | tuple):
        for number, value in enumerate(content):
            yield from _tensors(value, f"{name}.{number}" if name else str(number))
