"""Stores of residuals: the errors of gradient encodings, kept from one reduction of a module to its next.

Prefix ``ef:`` uses `FullResidual`, ``loco:`` uses `LoCoResidual`; both follow the protocol `ResidualStore`.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Protocol

import torch

from dtcomm.codecs import codec
from dtcomm.compress.residuals import Residuals
from dtcomm.kernels import counter_rng
from dtcomm.kernels.ops import decode, encode
from dtcomm.streams import match_device

LOCO_BETA = 0.8
LOCO_RESET_CALLS = 1024
LOCO_CODEC = codec("int8:block=256,round=stochastic")


class ResidualStore(Protocol):
    """Residuals by module."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of calls of each module, for checkpoints."""

    def take(self, module: str, like: torch.Tensor) -> torch.Tensor:
        """Return the flat fp32 residual, which the next encoding adds and overwrites; ``like`` is the gradient."""

    def put(self, module: str, residual: torch.Tensor, key: int = 0) -> None:
        """Store the same tensor after the encoding.

        Stochastic rounding to the stored form is keyed by ``key``, which differs between ranks, the module and its
        number of calls: not by a number of calls of all modules, since several may be under way.
        """

    def scale(self, factor: float) -> None:
        """Multiply all residuals by ``factor``."""

    def reset(self, module: str) -> None:
        """Set the residual of a module to zero."""

    def nbytes(self) -> int:
        """Return the memory in use."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return copies of all residuals, in fp32 on the CPU."""

    def load_state_dict(self, residuals: Mapping[str, torch.Tensor], counts: Mapping[str, int]) -> None:
        """Restore what `state_dict` and `counts` returned."""


class FullResidual:
    """The whole error of each encoding.

    Args:
        form: How residuals are stored (`dtcomm.compress.residuals`): ``"fp32"`` is exact and takes 4 bytes per
            element of the whole gradient, ``"bf16"`` takes 2, ``"int8"`` about 1. Default: ``"fp32"``.
    """

    def __init__(self, form: str = "fp32") -> None:
        self._residuals = Residuals(form)
        self._calls: dict[str, int] = {}

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of calls of each module."""
        return self._calls

    def take(self, module: str, like: torch.Tensor) -> torch.Tensor:
        """Return the flat fp32 residual, which the next encoding adds and overwrites."""
        return self._residuals.get(module, like)

    def put(self, module: str, residual: torch.Tensor, key: int = 0) -> None:
        """Store the same tensor after the encoding; see `ResidualStore.put`."""
        calls = self._calls[module] = self._calls.get(module, 0) + 1
        self._residuals.put(module, counter_rng.absorb(key, calls))

    def scale(self, factor: float) -> None:
        """Multiply all residuals by ``factor``."""
        self._residuals.scale(factor)

    def reset(self, module: str) -> None:
        """Set the residual of a module to zero."""
        self._residuals.reset(module)

    def nbytes(self) -> int:
        """Return the memory in use."""
        return self._residuals.nbytes()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return copies of all residuals, in fp32 on the CPU."""
        return self._residuals.state_dict()

    def load_state_dict(self, residuals: Mapping[str, torch.Tensor], counts: Mapping[str, int]) -> None:
        """Restore what `state_dict` and `counts` returned."""
        self._calls = dict(counts)
        self._residuals.load_state_dict(residuals)


class LoCoResidual:
    """The error feedback of LoCo (Xie et al. 2024, arXiv:2407.04480): a moving average of the error, in 8 bits.

    ``residual = beta * residual + (1 - beta) * error``. Every ``reset_calls`` calls of a module the residual becomes
    zero, so that the rounding errors of its 8 bits do not accumulate. It takes about one byte per element.

    The 8 bits are rounded stochastically: to the nearest value, an average would never take in errors that are small
    beside the largest one of their block.
    """

    def __init__(self, beta: float = LOCO_BETA, reset_calls: int = LOCO_RESET_CALLS) -> None:
        self.beta, self.reset_calls = beta, reset_calls
        self._payloads: dict[str, torch.Tensor] = {}
        self._loaded: dict[str, torch.Tensor] = {}  # from a checkpoint, in fp32 until the next `put`
        self._calls: dict[str, int] = {}
        self._pending_factors: dict[str, float] = {}  # of `scale`, applied when a residual is next decoded
        self._numels: dict[str, int] = {}
        self._free_buffers: list[torch.Tensor] = []

    def take(self, module: str, like: torch.Tensor) -> torch.Tensor:
        """Return the flat fp32 residual, which the next encoding adds and overwrites; `put` takes the memory back."""
        return self._decode(module, self._take_buffer(like.numel(), like.device))

    def put(self, module: str, residual: torch.Tensor, key: int = 0) -> None:
        """Update the average with the encoding's error, which is in ``residual``."""
        calls = self._calls[module] = self._calls.get(module, 0) + 1
        if calls % self.reset_calls == 0:
            self.reset(module)
        else:
            old = self._decode(module, self._take_buffer(residual.numel(), residual.device))
            # A block with a non-finite gradient leaves its residual unchanged, so old and new are equal there.
            average = old.lerp_(residual, 1 - self.beta)
            self._numels[module] = residual.numel()
            payload = self._payloads.get(module)
            reusable = payload is not None and payload.device == residual.device
            key = counter_rng.absorb(key, zlib.crc32(module.encode()), calls)
            self._payloads[module] = encode(LOCO_CODEC, average, key, out=payload if reusable else None)
            self._loaded.pop(module, None)
            self._pending_factors.pop(module, None)
            self._free_buffers.append(old)
        self._free_buffers.append(residual)

    def _take_buffer(self, numel: int, device: torch.device) -> torch.Tensor:
        """Return fp32 memory, reused where possible: page faults of fresh memory cost more than the arithmetic."""
        for index, buffer in enumerate(self._free_buffers):
            if buffer.numel() == numel and buffer.device == device:
                return self._free_buffers.pop(index)
        del self._free_buffers[:-3]  # keep a few, for modules of other sizes
        return torch.empty(numel, device=device)

    def _decode(self, module: str, out: torch.Tensor) -> torch.Tensor:
        if module not in self._payloads and module not in self._loaded:
            return out.zero_()
        if self._numels[module] != out.numel():
            raise ValueError(
                f"the residual of {module!r} has {self._numels[module]} elements, its gradient {out.numel()}: was the "
                "state saved from another model?"
            )
        if module in self._loaded:
            out.copy_(self._loaded[module])
        else:
            decode(LOCO_CODEC, match_device(self._payloads[module], out), out.numel(), out=out)
        factor = self._pending_factors.get(module)
        return out if factor is None else out.mul_(factor)

    def scale(self, factor: float) -> None:
        """Multiply all residuals by ``factor``, when they are next used."""
        for module in (*self._payloads, *self._loaded):
            self._pending_factors[module] = self._pending_factors.get(module, 1.0) * factor

    def reset(self, module: str) -> None:
        """Set the residual of a module to zero."""
        self._payloads.pop(module, None)
        self._loaded.pop(module, None)
        self._pending_factors.pop(module, None)

    def nbytes(self) -> int:
        """Return the memory in use."""
        loaded = sum(4 * residual.numel() for residual in self._loaded.values())
        return loaded + sum(payload.numel() for payload in self._payloads.values())

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of calls of each module, which decides when its residual is next reset."""
        return self._calls

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return copies of all residuals, in fp32 on the CPU."""
        return {
            name: self._decode(name, torch.empty(self._numels[name]))
            for name in (*self._payloads, *self._loaded)
        }

    def load_state_dict(self, residuals: Mapping[str, torch.Tensor], counts: Mapping[str, int]) -> None:
        """Restore what `state_dict` and `counts` returned, exactly: rounded a second time they might differ."""
        self._calls, self._pending_factors, self._payloads = dict(counts), {}, {}
        self._numels = {name: residual.numel() for name, residual in residuals.items()}
        self._loaded = {name: residual.clone() for name, residual in residuals.items()}
