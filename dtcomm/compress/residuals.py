"""Error feedback: what a lossy encoding dropped is kept, per parameter, and added to the next gradient.

Residuals are flat, in the memory order of the gradient, and live under the parameter's NAME: a name survives what
an index does not, DDP's bucket rebuild, a checkpoint and a change of world size. They are made at first use.

Sums and encodings take them in fp32. Between the steps they may be kept in fewer bytes: `bf16`, or `int8` with a scale
a block, rounded stochastically, since gradients far smaller than what waits beside them would otherwise never add up
(LoCo keeps its errors in 8 bit as well; Xie et al. 2024, arXiv:2407.04480). Then nothing is lost but that rounding.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence

import torch

from dtcomm.codecs import codec
from dtcomm.device.streams import match_device, record_streams
from dtcomm.kernels import counter_rng, ops

#: How residuals may be kept between two steps, and the codec that does it.
FORMS = {"fp32": None, "bf16": codec("bf16"), "int8": codec("int8:round=stochastic")}


class Residuals:
    """The residuals of one rank: ``name -> fp32 tensor [numel]``, kept in ``form`` between the steps.

    ValueError where ``form`` is none of `FORMS`.
    """

    def __init__(self, form: str = "fp32") -> None:
        if form not in FORMS:
            raise ValueError(f"residual: {form!r}; valid: {', '.join(FORMS)}")
        self.form = form
        self._codec = FORMS[form]
        self._open: dict[str, torch.Tensor] = {}
        self._packed: dict[str, tuple[torch.Tensor, int]] = {}
        self.most_open = 0  # bytes of fp32 beside the packed ones, at most so far

    def get(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """The residual of ``name``, zeros at first sight, on the device of ``like`` [numel]; the same memory until
        `put`.

        ValueError where a loaded residual has another number of elements than the gradient.
        """
        residual = self._expanded(name) if name in self._packed else self._open.get(name)
        if residual is None:
            residual = torch.zeros(like.numel(), dtype=torch.float32, device=like.device)
        elif residual.numel() != like.numel():
            raise ValueError(
                f"the residual of {name!r} has {residual.numel()} elements, its gradient {like.numel()}: "
                "was the state saved from another model?"
            )
        residual = match_device(residual, like)
        self._packed.pop(name, None)
        self._open[name] = residual
        if self._codec is not None:
            self.most_open = max(self.most_open, sum(each.numel() * 4 for each in self._open.values()))
        return residual

    def put(self, name: str, key: int = 0) -> None:
        """The step is through with ``name``: keep it in its form; ``key`` chooses the random numbers of rounding."""
        if self._codec is None or name not in self._open:
            return
        residual = self._open.pop(name)
        mixed = counter_rng.absorb(key, zlib.crc32(name.encode()))
        self._packed[name] = ops.encode(self._codec, residual, key=mixed), residual.numel()

    def add(self, name: str, lost: torch.Tensor, key: int = 0) -> None:
        """Add to a residual that the collective was not given."""
        self.get(name, lost).add_(lost)
        self.put(name, key)

    def __contains__(self, name: str) -> bool:
        return name in self._open or name in self._packed

    def __len__(self) -> int:
        return len(self._open) + len(self._packed)

    def names(self) -> list[str]:
        return [*self._packed, *self._open]

    def scale(self, factor: float, names: Iterable[str] | None = None) -> None:
        """Multiply every residual, or those of ``names``, as the loss scale of mixed-precision training was; fp32 until
        its next step.
        """
        for name in self.names() if names is None else names:
            residual = self._open[name] if name in self._open else self._expanded(name)
            self._open[name] = residual.mul_(factor)
            self._packed.pop(name, None)

    def reset(self, name: str) -> None:
        """What was kept for ``name`` is given up."""
        self._open.pop(name, None)
        self._packed.pop(name, None)

    def nbytes(self) -> int:
        """Held between the steps; `most_open` says how much more there was within one."""
        packed = sum(payload.numel() for payload, _ in self._packed.values())
        return packed + sum(residual.numel() * 4 for residual in self._open.values())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies, on the CPU, fp32 whatever the form: it can be loaded into any."""
        kept = {}
        for name in self.names():
            residual = self._open[name] if name in self._open else self._expanded(name)
            kept[name] = residual.detach().to("cpu", copy=True)
        return kept

    def load_state_dict(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """They stay fp32 until the step that uses them is through, so that loading loses nothing."""
        self._open, self._packed = checked(tensors, "residual"), {}

    def _expanded(self, name: str) -> torch.Tensor:
        assert self._codec is not None
        payload, numel = self._packed[name]
        record_streams(payload)  # it was made where the step before had landed
        return ops.decode(self._codec, payload, numel)


def checked(tensors: Mapping[str, torch.Tensor], what: str) -> dict[str, torch.Tensor]:
    """Flat copies; ValueError where one is no fp32 tensor."""
    loaded = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32:
            raise ValueError(f"{what} of {name!r}: want an fp32 tensor, got {tensor!r}")
        loaded[name] = tensor.detach().flatten().clone()
    return loaded


def redistribute(
    states: Sequence[Mapping[str, torch.Tensor]], rank: int, world_size: int
) -> dict[str, torch.Tensor]:
    """The residuals of ``rank`` of ``world_size`` ranks, from those of every rank of another world, in rank
    order.

    New rank r takes the sum of old ranks r, r + n, r + 2n, ...: nothing is lost when ranks leave (the sum
    over ranks is kept, to fp32 rounding), and where ranks join, the new ones start with nothing.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of world_size {world_size}")
    return _summed(states[rank::world_size])


def averaged(states: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What every rank of another world starts with where the mean over ranks matters, as of velocities."""
    return {name: total / len(states) for name, total in _summed(states).items()}


def _summed(states: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    sums: dict[str, torch.Tensor] = {}
    for state in states:
        for name, residual in state.items():
            if name not in sums:
                sums[name] = residual.clone()
            elif sums[name].shape != residual.shape:
                raise ValueError(
                    f"residual of {name!r}: {tuple(residual.shape)} on one rank, "
                    f"{tuple(sums[name].shape)} on another"
                )
            else:
                sums[name] += residual
    return sums
