"""Deep Gradient Compression: top-k whose waiting gradients keep their momentum.

Lin, Han, Mao, Wang, Dally 2018, "Deep Gradient Compression" (arXiv:1712.01887). Momentum correction: every rank runs
its momentum on its own gradients, ``u = m u + g``, and what waits is the velocity, ``v = v + u``. Local clipping: a
gradient is clipped before it is added, to the bound over sqrt(ranks). Momentum factor masking: where v was sent, u
starts anew. Warm-up: the share that is sent falls from a quarter to `ratio` by quarters.

The optimiser must then have no momentum of its own; what travels uncompressed gets the same momentum here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dtcomm.codecs import TopK
from dtcomm.codecs.base import FLOAT_TYPES, option
from dtcomm.codecs.spec import options_of
from dtcomm.device.streams import match_device

NAME = "dgc"
FIRST_RATIO = 0.25


@dataclass(frozen=True, kw_only=True)
class DGC:
    """The `ratio` largest elements of every granule of 4096, in the codec `values`, with momentum.

    clip: a parameter's gradient is scaled to a norm of at most clip / sqrt(ranks) on each rank (DDP hands out the
    buckets one by one, so the bound is a parameter's and not the whole model's); 0: not at all. warmup: steps in which
    the ratio falls. Spec: ``dgc:ratio=0.001,momentum=0.9,clip=1.0,warmup=400/fp16``.
    """

    ratio: float = option(default=0.001, valid="a number above 0, at most 1")
    momentum: float = option(default=0.9, valid="0 or more, below 1")
    clip: float = option(default=0.0, valid="0 (not at all) or a norm")
    warmup: int = option(default=0, valid="0 or more steps")
    values: str = "bf16"

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
        TopK(ratio=self.ratio, values=self.values)  # refuses what it refuses

    @property
    def topk(self) -> TopK:
        """The codec that travels."""
        return TopK(ratio=self.ratio, values=self.values)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Of the gradients that it takes."""
        return FLOAT_TYPES

    def lossless(self, dtype: torch.dtype) -> bool:
        return False

    def stage(self, step: int) -> int:
        """Of the warm-up: how often the ratio has fallen."""
        last = 0
        while FIRST_RATIO / 4**last > self.ratio:
            last += 1
        return last if step >= self.warmup else last * step // self.warmup

    def at(self, step: int) -> DGC:
        """With the ratio of this step."""
        ratio = max(self.ratio, FIRST_RATIO / 4 ** self.stage(step)) if step < self.warmup else self.ratio
        return dataclasses.replace(self, ratio=ratio, warmup=0)

    def __str__(self) -> str:
        changed = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if "valid" in field.metadata and getattr(self, field.name) != field.default
        ]
        tail = "" if self.values == "bf16" else f"/{self.values}"
        return (f"{NAME}:{','.join(changed)}" if changed else NAME) + tail

    @staticmethod
    def parse(spec: str) -> DGC:
        """The inverse of ``str``; ValueError names the option that is wrong."""
        head, slash, tail = spec.strip().partition("/")
        name, colon, rest = head.partition(":")
        if name != NAME or (colon and not rest):
            raise ValueError(f"compressor: {head!r}; valid: {NAME}:OPTION=VALUE,…")
        fields = {field.name: field for field in dataclasses.fields(DGC) if "valid" in field.metadata}
        values = options_of(NAME, rest, fields)
        return DGC(**values, values=tail) if slash else DGC(**values)


class Velocities:
    """The momentum of one rank's own gradients: ``name -> fp32 tensor [numel]``."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def step(
        self, name: str, gradient: torch.Tensor, momentum: float, bound: float = 0.0
    ) -> torch.Tensor | None:
        """``u = momentum u + gradient``, which is clipped to a norm of `bound` (0: not at all); returns u.

        None, and u stays as it was, where the gradient holds NaN or Inf.
        """
        norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float32))
        if not norm < float("inf"):
            return None
        velocity = self._of(name, gradient)
        return velocity.mul_(momentum).add_(gradient, alpha=bound / norm if 0 < bound < norm else 1.0)

    def step_there(
        self,
        name: str,
        gradient: torch.Tensor,
        momentum: float,
        bound: float = 0.0,
        moves: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same on a device, where nobody waits to see: u, and whether it has moved, a bool without dimensions.

        Where ``moves`` says no it stays as well.
        """
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        moved = norm < float("inf")
        moved = moved if moves is None else moved & moves
        velocity = self._of(name, gradient)
        term = gradient.float() * (bound / norm).clamp(max=1.0) if bound else gradient
        torch.where(moved, momentum * velocity + term, velocity, out=velocity)
        return velocity, moved

    def get(self, name: str) -> torch.Tensor | None:
        """u as it is."""
        return self._kept.get(name)

    def _of(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        velocity = self._kept.get(name)
        if velocity is None:
            velocity = torch.zeros(gradient.numel(), dtype=torch.float32, device=gradient.device)
        elif velocity.numel() != gradient.numel():
            raise ValueError(
                f"the velocity of {name!r} has {velocity.numel()} elements, its gradient {gradient.numel()}: "
                "was the state saved from another model?"
            )
        velocity = self._kept[name] = match_device(velocity, gradient)
        return velocity

    def mask(self, name: str, sent: torch.Tensor) -> None:
        """Start anew where `sent` (bool [numel]) says so."""
        self._kept[name].masked_fill_(sent, 0)

    def scale(self, factor: float) -> None:
        for velocity in self._kept.values():
            velocity.mul_(factor)

    def reset(self, name: str) -> None:
        self._kept.pop(name, None)

    def nbytes(self) -> int:
        return sum(4 * velocity.numel() for velocity in self._kept.values())

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: velocity.to("cpu", copy=True) for name, velocity in self._kept.items()}

    def load_state_dict(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._kept = {name: tensor.detach().flatten().clone() for name, tensor in tensors.items()}
