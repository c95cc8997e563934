"""Compressors with state of a user's own: `Feedback` is what a user writes, `FeedbackStates` keeps its tensors.

The codec says how bytes look; a `Feedback` says what is encoded, and what becomes of the mean that arrives.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from types import MappingProxyType

import torch

from dtcomm.streams import match_device

State = dict[str, torch.Tensor]


class Feedback(abc.ABC):
    """A compressor with state, which a codec makes complete: ``dtcomm.ddp.compress(model, codec, feedback=...)``.

    In every step and for every compressed parameter, each rank sends `send`'s tensor in the codec, gets the mean over
    the ranks of what was decoded, and `receive` turns that into the gradient. State is kept by parameter in two
    dictionaries of fp32 tensors, empty at first: ``own`` differs between ranks; ``shared`` is equal on all ranks,
    because only `receive` changes it, which knows nothing else. So all ranks get the same gradient, to the bit. State
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
            side: {
                f"{name}/{key}": tensor.detach().to("cpu", copy=True)
                for name, state in states.items()
                for key, tensor in state.items()
            }
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
