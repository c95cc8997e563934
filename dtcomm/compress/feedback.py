"""What takes the place of residuals, by parameter: a user's own feedback, EF21 and DIANA, and DGC.

The codec says how bytes look; a feedback says what is encoded, and what becomes of the mean that arrives.

- `Feedback` is what a user writes, `FeedbackStates` keeps its tensors.
- `References`: EF21 and DIANA, which send differences to a reference that all ranks share.
- `DGC` and `Velocities`: Deep Gradient Compression, top-k sparsification with momentum correction.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from dtcomm.codecs import TopK
from dtcomm.codecs.base import FLOAT_TYPES, option
from dtcomm.codecs.sparse import VALUES
from dtcomm.codecs.spec import options_of
from dtcomm.compress.residuals import cpu_copies, fitting, flat_copies
from dtcomm.streams import match_device

State = dict[str, torch.Tensor]


class Feedback(abc.ABC):
    """A compressor with state, which a codec makes complete: ``dtcomm.ddp.compress(model, codec, feedback=...)``.

    In every step and for every compressed parameter, each rank sends `send`'s tensor in the codec, gets the mean over
    the ranks of what was decoded, and `receive` turns that into the gradient. State is kept by parameter in two
    dictionaries of fp32 tensors, empty at first: ``own`` differs between ranks; ``shared`` is equal on all ranks,
    because only `receive` changes it, which knows nothing else. So all ranks get the same gradient, bit for bit. State
    is saved and loaded with the compression's, scaled with the loss, and set to zero after a step with NaN or Inf. With
    another number of ranks a run continues with the mean of the ranks' ``own``.

    The methods get flat fp32 tensors on the gradient's device, and must not keep or change those but for ``own`` in
    `send` and `keep`, and ``shared`` in `receive`. ``str(feedback)`` names it in reports and checkpoints, which a
    feedback of another name refuses; by default it is the class with the instance's attributes.

    Example:
        EF21 (Richtárik et al. 2021, arXiv:2106.05203), which sends differences to an estimate of the gradient::

            class EF21(dtcomm.ddp.Feedback):
                def send(self, gradient, own, shared):
                    difference = gradient - own["estimate"] if own else gradient
                    own["estimate"] = gradient
                    return difference

                def keep(self, lost, own):
                    own["estimate"] = own["estimate"] - lost

                def receive(self, mean, shared):
                    shared["estimate"] = shared["estimate"] + mean if shared else mean
                    return shared["estimate"]

            state = dtcomm.ddp.compress(model, "topk:ratio=0.01", feedback=EF21())
    """

    @abc.abstractmethod
    def send(self, gradient: torch.Tensor, own: State, shared: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return what this rank sends.

        Args:
            gradient: This rank's gradient, fp32 [numel].
            own: This rank's state of the parameter; entries may be set and changed.
            shared: The state that all ranks share.

        Returns:
            An fp32 tensor [numel], which the codec encodes.
        """

    def keep(self, lost: torch.Tensor, own: State) -> None:  # noqa: B027 - not every rule needs it
        """Take note of what this rank's encodings lost; nothing by default.

        The mean that arrives is that of ``send``'s tensors less the ``lost`` of each rank.

        Args:
            lost: fp32 [numel]; the losses of sums that this rank encoded included.
            own: This rank's state of the parameter; entries may be set and changed.
        """

    @abc.abstractmethod
    def receive(self, mean: torch.Tensor, shared: State) -> torch.Tensor:
        """Return the gradient.

        Args:
            mean: The mean over the ranks of what arrived, fp32 [numel], the same bits on all ranks.
            shared: The state that all ranks share; entries may be set and changed.

        Returns:
            An fp32 tensor [numel]. It becomes the parameter's gradient.
        """

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in sorted(vars(self).items()))
        return f"{type(self).__name__}({options})"


class FeedbackStates:
    """The state of a user's `Feedback` on one rank, by parameter; the interface of `ef21.References`."""

    def __init__(self, feedback: Feedback) -> None:
        self._feedback = feedback
        self._own: dict[str, State] = {}
        self._shared: dict[str, State] = {}

    def begin(self, name: str, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a tensor to average in place, and zeros, which the collective overwrites with what was lost."""
        own, shared = self._states(name, gradient)
        # A copy: the gradient's memory is a bucket of DDP, and what the user keeps of it must not change.
        offered = gradient.to(torch.float32, copy=True)
        sent = self._checked("send", self._feedback.send(offered, own, MappingProxyType(shared)), gradient)
        self._require_state("own", name, own)
        kept = {tensor.untyped_storage().data_ptr() for tensor in (offered, *own.values(), *shared.values())}
        if sent.untyped_storage().data_ptr() in kept or not sent.is_contiguous():
            sent = sent.clone(memory_format=torch.contiguous_format)
        return sent, torch.zeros_like(sent)

    def finish(self, name: str, gradient: torch.Tensor, mean: torch.Tensor, lost: torch.Tensor) -> None:
        """Call the user's functions with the mean and what was lost; ``gradient`` becomes the result."""
        own, shared = self._states(name, gradient)
        self._feedback.keep(lost, own)
        result = self._checked("receive", self._feedback.receive(mean, shared), gradient)
        self._require_state("own", name, own)
        self._require_state("shared", name, shared)
        gradient.copy_(result)
        finite = torch.isfinite(result).all()  # the same on all ranks, which hold the same bits
        if not finite.is_cpu or not finite:  # the host does not wait for a device
            for state in (own, shared):
                for key, tensor in state.items():
                    state[key] = tensor.masked_fill(~finite, 0.0)

    def get(self, name: str) -> tuple[torch.Tensor, ...]:
        """Return the tensors of a parameter."""
        return tuple(
            tensor for states in (self._own, self._shared) for tensor in states.get(name, {}).values()
        )

    def scale(self, factor: float) -> None:
        """Multiply every tensor by ``factor``."""
        for state in (*self._own.values(), *self._shared.values()):
            for key, tensor in state.items():
                state[key] = tensor * factor

    def reset(self, name: str) -> None:
        """Drop the state of a parameter; to be called on all ranks in the same step."""
        self._own.pop(name, None)
        self._shared.pop(name, None)

    def nbytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(
            tensor.nbytes for name in self._own.keys() | self._shared.keys() for tensor in self.get(name)
        )

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return copies on the CPU, under ``parameter/key``."""
        return {
            side: cpu_copies(
                {f"{name}/{key}": t for name, state in states.items() for key, t in state.items()}
            )
            for side, states in (("local", self._own), ("shared", self._shared))
        }

    def load_state_dict(
        self, state: Mapping[str, Mapping[str, torch.Tensor]], *, same_world_size: bool
    ) -> None:
        """Load a rank's state; with another number of ranks ``state`` has the mean of the ranks' own."""
        self._own, self._shared = {}, {}
        for side, states in (("local", self._own), ("shared", self._shared)):
            for path, tensor in state.get(side, {}).items():
                name, _, key = path.rpartition("/")
                states.setdefault(name, {})[key] = tensor.detach().clone()

    def _states(self, name: str, like: torch.Tensor) -> tuple[State, State]:
        own, shared = self._own.setdefault(name, {}), self._shared.setdefault(name, {})
        for state in (own, shared):
            for key, tensor in state.items():
                state[key] = match_device(tensor, like)
        return own, shared

    def _checked(self, method: str, tensor: object, gradient: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32:
            what = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise TypeError(
                f"feedback: {method} of {self._feedback} returned {what}; expected a float32 tensor"
            )
        if tensor.shape != gradient.shape or tensor.device != gradient.device:
            raise ValueError(
                f"feedback: {method} of {self._feedback} returned shape {tuple(tensor.shape)} on {tensor.device}; "
                f"expected {tuple(gradient.shape)} on {gradient.device}"
            )
        return tensor

    def _require_state(self, argument: str, name: str, state: State) -> None:
        for key, tensor in state.items():
            if not isinstance(key, str) or "/" in key:
                raise ValueError(
                    f"feedback: {argument} of {self._feedback} has the key {key!r}; expected a str without /"
                )
            if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32:
                what = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                raise TypeError(
                    f"feedback: {argument}[{key!r}] of {self._feedback} for {name} is {what}; expected a float32 tensor"
                )


class References:
    """The local and the shared estimates of EF21 and DIANA on one rank, by parameter: fp32 [numel], zeros at first.

    Every rank keeps an estimate h_i of its own gradient, and all ranks keep their mean h. A rank sends C(g_i - h_i);
    the gradient becomes h + mean C(g_i - h_i), and both estimates move by ``rate`` times what arrived. The errors
    shrink with the differences, whereas error feedback makes up for them later.

    - rate 1: EF21 (Richtarik, Sokolov, Fatkhullin 2021, arXiv:2106.05203), for biased codecs such as topk.
    - rate below 1: DIANA (Mishchenko, Gorbunov, Takac, Richtarik 2019, arXiv:1901.09269), for unbiased codecs, that is
      with stochastic rounding. The rate should be at most 1 / (1 + the codec's relative variance).

    What arrived of a rank is what it sent less what its encodings lost, those of sums included, so that h stays the
    mean of all h_i.
    """

    def __init__(self, rate: float = 1.0) -> None:
        if not 0 < rate <= 1:
            raise ValueError(f"feedback: rate is {rate!r}; valid: above 0, at most 1")
        self.rate = rate
        self._local: dict[str, torch.Tensor] = {}
        self._shared: dict[str, torch.Tensor] = {}

    def begin(self, name: str, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a tensor to average in place, and what the collective adds to it."""
        local = _estimate(self._local, name, gradient)
        _estimate(self._shared, name, gradient)
        minus_local = local.neg()
        # The estimate moves before the collective, which overwrites the gradient; `finish` subtracts what was lost.
        local.lerp_(gradient.float(), self.rate)
        # Sums stay fp32: the rounding of a 16-bit mean would be missing from the shared estimate for good.
        return (gradient if gradient.dtype == torch.float32 else gradient.float()), minus_local

    def finish(self, name: str, gradient: torch.Tensor, mean: torch.Tensor, lost: torch.Tensor) -> None:
        """Update both estimates; ``gradient`` becomes the estimate of the mean gradient.

        ``mean`` is that over ranks of what arrived, ``lost`` what the encodings of this rank lost.
        """
        shared = _estimate(self._shared, name, gradient)
        result = shared + mean
        shared.add_(mean, alpha=self.rate)
        self._local[name].sub_(lost, alpha=self.rate)
        gradient.copy_(result)
        finite = torch.isfinite(result).all()  # the same on all ranks, which hold the same bits
        if not finite.is_cpu or not finite:  # the host does not wait for a device
            for estimate in (shared, self._local[name]):
                estimate.masked_fill_(~finite, 0.0)

    def get(self, name: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the local and the shared estimate, or None before the first step."""
        return self._local.get(name), self._shared.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._local

    def scale(self, factor: float) -> None:
        """Multiply every estimate by ``factor``."""
        for estimate in (*self._local.values(), *self._shared.values()):
            estimate.mul_(factor)

    def reset(self, name: str) -> None:
        """Start the parameter's estimates from zero; to be called on all ranks in the same step."""
        self._local.pop(name, None)
        self._shared.pop(name, None)

    def nbytes(self) -> int:
        """Return the bytes of all estimates."""
        return sum(4 * estimate.numel() for estimate in (*self._local.values(), *self._shared.values()))

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return copies on the CPU."""
        return {"local": cpu_copies(self._local), "shared": cpu_copies(self._shared)}

    def load_state_dict(
        self, state: Mapping[str, Mapping[str, torch.Tensor]], *, same_world_size: bool
    ) -> None:
        """Load a rank's own state; with another number of ranks the local estimates start as the shared one."""
        self._shared = flat_copies(state.get("shared", {}), "reference")
        self._local = flat_copies(state.get("local" if same_world_size else "shared", {}), "reference")


def _estimate(estimates: dict[str, torch.Tensor], name: str, like: torch.Tensor) -> torch.Tensor:
    estimates[name] = estimate = fitting(estimates.get(name), "reference", name, like)
    return estimate


DGC_NAME = "dgc"
FIRST_RATIO = 0.25


@dataclass(frozen=True, kw_only=True)
class DGC:
    """Deep Gradient Compression (Lin et al. 2018, arXiv:1712.01887), a compressor.

    It sends the `ratio` largest elements of every granule of 4096, with momentum on each rank.

    - Momentum correction: every rank applies momentum to its own gradients, ``u = m u + g``, and accumulates the
      velocity instead of the gradient, ``v = v + u``.
    - Local clipping: a gradient is clipped before it is added, to the bound over sqrt(ranks).
    - Momentum factor masking: u is set to zero where v was sent.
    - Warm-up: the share of elements that is sent falls from a quarter to `ratio`, by factors of four.

    The optimizer must have no momentum of its own; uncompressed parameters get the same momentum here. The
    spec is ``dgc:ratio=0.001,momentum=0.9,clip=1.0,warmup=400,values=fp16``.

    Attributes:
        ratio: The share of elements that is sent, above 0 and at most 1. Default 0.001.
        momentum: The momentum, 0 or more and below 1. Default 0.9.
        clip: The norm to which a parameter's gradient is clipped, over sqrt(ranks), on each rank. DDP reduces bucket by
            bucket, so the bound holds for a parameter and not for the whole model. Default 0: no clipping.
        warmup: The number of steps in which the ratio falls from 0.25 to ``ratio``. Default 0.
        values: The codec of the values: bf16, fp16, fp32 or int8 to int2. Default bf16.

    Example:
        >>> from dtcomm.compress.feedback import DGC
        >>> str(DGC(ratio=0.01, warmup=40).at(step=0))
        'dgc:ratio=0.25'
    """

    ratio: float = option(default=0.001, valid="a number above 0, at most 1")
    momentum: float = option(default=0.9, valid="0 or more, below 1")
    clip: float = option(default=0.0, valid="0 (not at all) or a norm")
    warmup: int = option(default=0, valid="0 or more steps")
    values: str = option(default="bf16", valid=VALUES)

    def __post_init__(self) -> None:
        bounds = {"momentum": 0 <= self.momentum < 1, "clip": self.clip >= 0, "warmup": self.warmup >= 0}
        for name, valid in bounds.items():
            if not valid:
                field = next(field for field in dataclasses.fields(self) if field.name == name)
                raise ValueError(
                    f"{DGC_NAME}: option {name!r} is {getattr(self, name)}; valid: {field.metadata['valid']}"
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
        return f"{DGC_NAME}:{','.join(changed)}" if changed else DGC_NAME

    @staticmethod
    def parse(spec: str) -> DGC:
        """Parse the output of ``str``; ValueError names the option that is wrong."""
        name, colon, rest = spec.strip().partition(":")
        if name != DGC_NAME or (colon and not rest):
            raise ValueError(f"compressor: {spec!r}; valid: {DGC_NAME}:OPTION=VALUE,…")
        return DGC(**options_of(DGC_NAME, rest, {field.name: field for field in dataclasses.fields(DGC)}))


def common_momentum(schemes: Iterable[object]) -> float | None:
    """Return the momentum that every parameter gets if one of ``schemes`` is DGC, else None.

    ValueError if the schemes have different momenta.
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
        used: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute ``u = momentum u + gradient`` in place, with the gradient clipped to ``max_norm`` (0: not clipped).

        Returns u, and whether it was updated, a bool tensor without dimensions on the gradient's device. u stays as it
        is if the gradient holds NaN or Inf, or is not ``used``.
        """
        self._velocities[name] = velocity = fitting(self._velocities.get(name), "velocity", name, gradient)
        if not used:
            return velocity, torch.zeros((), dtype=torch.bool, device=gradient.device)
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        has_update = norm < float("inf")
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
        return cpu_copies(self._velocities)

    def load_state_dict(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace all velocities with copies of ``tensors``."""
        self._velocities = {name: tensor.detach().flatten().clone() for name, tensor in tensors.items()}
