"""Deep Gradient Compression (DGC): top-k sparsification with momentum correction.

Lin, Han, Mao, Wang, Dally 2018, "Deep Gradient Compression" (arXiv:1712.01887):

- Momentum correction: every rank applies momentum to its own gradients, ``u = m u + g``, and accumulates the velocity
  instead of the gradient, ``v = v + u``.
- Local clipping: a gradient is clipped before it is added, to the bound over sqrt(ranks).
- Momentum factor masking: u is set to zero where v was sent.
- Warm-up: the share of elements that is sent falls from a quarter to `ratio`, by factors of four.

The optimizer must then have no momentum of its own; parameters that travel uncompressed get the same momentum here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from dtcomm.codecs import TopK
from dtcomm.codecs.base import FLOAT_TYPES, option
from dtcomm.codecs.sparse import VALUES
from dtcomm.codecs.spec import options_of
from dtcomm.streams import match_device

NAME = "dgc"
FIRST_RATIO = 0.25


@dataclass(frozen=True, kw_only=True)
class DGC:
    """Deep Gradient Compression (Lin et al. 2018, arXiv:1712.01887), a compressor.

    It sends the `ratio` largest elements of every granule of 4096, with momentum on each rank. Use an optimizer without
    momentum. The spec is ``dgc:ratio=0.001,momentum=0.9,clip=1.0,warmup=400,values=fp16``.

    Attributes:
        ratio: The share of elements that is sent, above 0 and at most 1. Default 0.001.
        momentum: The momentum, 0 or more and below 1. Default 0.9.
        clip: The norm to which a parameter's gradient is clipped, over sqrt(ranks), on each rank. DDP reduces bucket by
            bucket, so the bound holds for a parameter and not for the whole model. Default 0: no clipping.
        warmup: The number of steps in which the ratio falls from 0.25 to ``ratio``. Default 0.
        values: The codec of the values: bf16, fp16, fp32 or int8 to int2. Default bf16.

    Example:
        >>> from dtcomm.compress.dgc import DGC
        >>> str(DGC(ratio=0.01, warmup=40).at(step=0))
        'dgc:ratio=0.25'
    """

    ratio: float = option(default=0.001, valid="a number above 0, at most 1")
    momentum: float = option(default=0.9, valid="0 or more, below 1")
    clip: float = option(default=0.0, valid="0 (not at all) or a norm")
    warmup: int = option(default=0, valid="0 or more steps")
    values: str = option(default="bf16", valid=VALUES)

    def __post_init__(self) -> None:
        bounds = {
            "momentum": 0 <= self.momentum < 1,
            "clip": self.clip >= 0,
            "warmup": self.warmup >= 0,
        }
        for name, valid in bounds.items():
            if not valid:
                field = next(field for field in dataclasses.fields(self) if field.name == name)
                raise ValueError(
                    f"{NAME}: option {name!r} is {getattr(self, name)}; valid: {field.metadata['valid']}"
                )
        TopK(ratio=self.ratio, values=self.values)  # validates both

    @property
    def topk(self) -> TopK:
        """The codec of the payload."""
        return TopK(ratio=self.ratio, values=self.values)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of gradients that can be compressed."""
        return FLOAT_TYPES

    def lossless(self, dtype: torch.dtype) -> bool:
        """Return False: DGC loses something of every dtype."""
        return False

    def warmup_stage(self, step: int) -> int:
        """Return how often the ratio has fallen at a step of the warm-up."""
        last = 0
        while FIRST_RATIO / 4**last > self.ratio:
            last += 1
        return last if step >= self.warmup else last * step // self.warmup

    def at(self, step: int) -> DGC:
        """Return the compressor with the ratio of a step and without warm-up."""
        warming_up = step < self.warmup
        ratio = max(self.ratio, FIRST_RATIO / 4 ** self.warmup_stage(step)) if warming_up else self.ratio
        return dataclasses.replace(self, ratio=ratio, warmup=0)

    def __str__(self) -> str:
        changed = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"{NAME}:{','.join(changed)}" if changed else NAME

    @staticmethod
    def parse(spec: str) -> DGC:
        """Parse the output of ``str``; ValueError names the option that is wrong."""
        name, colon, rest = spec.strip().partition(":")
        if name != NAME or (colon and not rest):
            raise ValueError(f"compressor: {spec!r}; valid: {NAME}:OPTION=VALUE,…")
        return DGC(**options_of(NAME, rest, {field.name: field for field in dataclasses.fields(DGC)}))


def common_momentum(schemes: Iterable[object]) -> float | None:
    """Return the momentum that every parameter gets if one of ``schemes`` is DGC, else None.

    Raises:
        ValueError: The schemes have different momenta.
    """
    momenta = {scheme.momentum for scheme in schemes if isinstance(scheme, DGC)}
    if len(momenta) > 1:
        raise ValueError(f"dgc: momenta {sorted(momenta)} in one model; valid: one")
    return momenta.pop() if momenta else None


class Velocities:
    """The momentum of one rank's own gradients: ``name -> fp32 tensor [numel]``."""

    def __init__(self) -> None:
        self._velocities: dict[str, torch.Tensor] = {}

    def update(
        self,
        name: str,
        gradient: torch.Tensor,
        momentum: float,
        max_norm: float,
        used: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute ``u = momentum u + gradient`` in place, with the gradient clipped to ``max_norm`` (0: not clipped).

        Args:
            name: The parameter.
            gradient: Its gradient, flat.
            momentum: The momentum.
            max_norm: The bound of the gradient's norm; 0 for none.
            used: A bool tensor without dimensions; u stays as it is where it is False. None: True.

        Returns:
            u, and whether it was updated: a bool tensor without dimensions on the gradient's device. u stays as it is
            if the gradient holds NaN or Inf.
        """
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        has_update = norm < float("inf")
        if used is not None:
            has_update = has_update & used
        velocity = self._of(name, gradient)
        if not gradient.is_cpu:  # the host does not wait for the device
            term = gradient.float() * (max_norm / norm).clamp(max=1.0) if max_norm else gradient
            torch.where(has_update, momentum * velocity + term, velocity, out=velocity)
        elif has_update:  # in place: fewer passes over memory
            scale = min(1.0, max_norm / float(norm)) if max_norm and norm > 0 else 1.0
            velocity.mul_(momentum).add_(gradient, alpha=scale)
        return velocity, has_update

    def get(self, name: str) -> torch.Tensor | None:
        """Return u as it is, or None before the first update."""
        return self._velocities.get(name)

    def _of(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        velocity = self._velocities.get(name)
        if velocity is None:
            velocity = torch.zeros(gradient.numel(), dtype=torch.float32, device=gradient.device)
        elif velocity.numel() != gradient.numel():
            raise ValueError(
                f"the velocity of {name!r} has {velocity.numel()} elements, its gradient {gradient.numel()}: "
                "was the state saved from another model?"
            )
        velocity = self._velocities[name] = match_device(velocity, gradient)
        return velocity

    def mask(self, name: str, was_sent: torch.Tensor) -> None:
        """Set u to zero where ``was_sent`` (bool [numel]) is True."""
        self._velocities[name].masked_fill_(was_sent, 0)

    def scale(self, factor: float) -> None:
        """Multiply every velocity by ``factor``."""
        for velocity in self._velocities.values():
            velocity.mul_(factor)

    def reset(self, name: str) -> None:
        """Start the parameter's velocity from zero."""
        self._velocities.pop(name, None)

    def nbytes(self) -> int:
        """Return the bytes of all velocities."""
        return sum(4 * velocity.numel() for velocity in self._velocities.values())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return copies on the CPU."""
        return {name: velocity.to("cpu", copy=True) for name, velocity in self._velocities.items()}

    def load_state_dict(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace all velocities with copies of ``tensors``."""
        self._velocities = {name: tensor.detach().flatten().clone() for name, tensor in tensors.items()}
