"""What gradient encodings lost, kept from one reduce-scatter of a module to its next."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dtcomm.codecs import codec
from dtcomm.compress.residuals import Residuals
from dtcomm.device.streams import match_device
from dtcomm.kernels.ops import decode, encode

BETA = 0.8
RESET = 1024
STORED = codec("int8:block=256")


class Exact:
    """The whole error, kept in a form of `dtcomm.compress.residuals`: fp32, where nothing is lost, at 4 bytes an
    element of every module's whole gradient; bf16 at 2, int8 at about 1.
    """

    def __init__(self, form: str = "fp32") -> None:
        self._residuals = Residuals(form)

    def take(self, module: str, like: torch.Tensor) -> torch.Tensor:
        """The fp32 residual that the next encoding adds and rewrites."""
        return self._residuals.get(module, like)

    def give(self, module: str, residual: torch.Tensor, key: int = 0) -> None:
        """The same tensor, rewritten; ``key`` chooses the random numbers of rounding it to its form."""
        self._residuals.put(module, key)

    def scale(self, factor: float) -> None:
        self._residuals.scale(factor)

    def forget(self, module: str) -> None:
        """What was kept for ``module`` is given up."""
        self._residuals.reset(module)

    def nbytes(self) -> int:
        return self._residuals.nbytes()

    counts: Mapping[str, int] = {}

    def decoded(self) -> dict[str, torch.Tensor]:
        """Every residual, fp32, on the CPU, copied."""
        return self._residuals.state_dict()

    def load(self, residuals: Mapping[str, torch.Tensor], counts: Mapping[str, int]) -> None:
        """What `decoded` gave."""
        self._residuals.load_state_dict(residuals)


class MovingAverage:
    """LoCo's error (Xie et al. 2024, arXiv:2407.04480): a moving average, in 8 bits, begun anew from time to time.

    ``error = beta * error + (1 - beta) * what the encoding lost``; after `reset` calls of a module it is zero, so that
    what 8 bits make of it does not pile up. About one byte an element.
    """

    def __init__(self, beta: float = BETA, reset: int = RESET) -> None:
        self.beta, self.reset = beta, reset
        self._payloads: dict[str, torch.Tensor] = {}
        self._calls: dict[str, int] = {}
        self._factors: dict[str, float] = {}
        self._numels: dict[str, int] = {}
        self._free: list[torch.Tensor] = []

    def take(self, module: str, like: torch.Tensor) -> torch.Tensor:
        """The fp32 residual that the next encoding adds and rewrites; `give` takes its memory back."""
        return self._decoded(module, self._scratch(like.numel(), like.device))

    def give(self, module: str, residual: torch.Tensor, key: int = 0) -> None:
        """What the encoding left of it. A non-finite error is no error to go on with: the old one stays."""
        calls = self._calls[module] = self._calls.get(module, 0) + 1
        if calls % self.reset == 0:
            self._payloads.pop(module, None)
        else:
            old = self._decoded(module, self._scratch(residual.numel(), residual.device))
            # A block of the gradient that was not finite left the residual as it was: old and new are equal there.
            average = old.lerp_(residual, 1 - self.beta)
            self._numels[module] = residual.numel()
            payload = self._payloads.get(module)
            there = payload is not None and payload.device == residual.device
            self._payloads[module] = encode(STORED, average, out=payload if there else None)
            self._factors.pop(module, None)
            self._free.append(old)
        self._free.append(residual)

    def _scratch(self, numel: int, device: torch.device) -> torch.Tensor:
        """Memory that was used before, where there is some: fresh pages cost more than the arithmetic on them."""
        for place, tensor in enumerate(self._free):
            if tensor.numel() == numel and tensor.device == device:
                return self._free.pop(place)
        del self._free[:-3]  # of other modules, which come again; no more of them
        return torch.empty(numel, device=device)

    def _decoded(self, module: str, out: torch.Tensor) -> torch.Tensor:
        numel, payload = out.numel(), self._payloads.get(module)
        if payload is None:
            return out.zero_()
        if payload.numel() != STORED.wire_bytes(numel):
            raise ValueError(
                f"the residual of {module!r} has {payload.numel()} bytes, its gradient of {numel} elements "
                f"{STORED.wire_bytes(numel)}: was the state saved from another model?"
            )
        decode(STORED, match_device(payload, out), numel, out=out)
        factor = self._factors.get(module)
        return out if factor is None else out.mul_(factor)

    def scale(self, factor: float) -> None:
        """Multiply every error, at its next use."""
        for module in self._payloads:
            self._factors[module] = self._factors.get(module, 1.0) * factor

    def forget(self, module: str) -> None:
        """What was kept for ``module`` is given up."""
        self._payloads.pop(module, None)

    def nbytes(self) -> int:
        return sum(payload.numel() for payload in self._payloads.values())

    @property
    def counts(self) -> Mapping[str, int]:
        """Calls of each module so far."""
        return self._calls

    def decoded(self) -> dict[str, torch.Tensor]:
        """Every error, fp32, on the CPU."""
        return {name: self._decoded(name, torch.empty(self._numels[name])) for name in self._payloads}

    def load(self, residuals: Mapping[str, torch.Tensor], counts: Mapping[str, int]) -> None:
        """What `decoded` gave: encoding what was decoded gives the same bytes."""
        self._calls, self._factors = dict(counts), {}
        self._numels = {name: residual.numel() for name, residual in residuals.items()}
        self._payloads = {name: encode(STORED, residual) for name, residual in residuals.items()}


Errors = Exact | MovingAverage
