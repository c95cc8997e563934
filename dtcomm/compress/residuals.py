"""Residuals of error feedback: what a lossy encoding dropped, kept per parameter and added to the next gradient.

Residuals are flat, in the memory order of the gradient, and stored under the parameter's name. Unlike an index, a name
survives DDP's bucket rebuild, a checkpoint and a change of world size. A residual is allocated at first use.

Sums and encodings read them in fp32. Between steps they may be kept in fewer bytes: ``bf16``, or ``int8`` with a scale
for each block, rounded stochastically: otherwise gradients far smaller than the residual beside them would never add up
(LoCo also keeps its errors in 8 bits; Xie et al. 2024, arXiv:2407.04480).

`SampleReferences` are those of AQ-SGD, for the activations that pipeline stages send.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from dtcomm.codecs import Codec, codec
from dtcomm.kernels import counter_rng, ops
from dtcomm.profiling.summary import format_bytes
from dtcomm.streams import match_device, record_streams

_log = logging.getLogger("dtcomm")

#: How residuals may be kept between two steps, and the codec that packs them.
FORMS = {"fp32": None, "bf16": codec("bf16"), "int8": codec("int8:round=stochastic")}


class Residuals:
    """The residuals of one rank, ``name -> fp32 tensor [numel]``, kept between steps in one of `FORMS`."""

    saves_payloads = True

    def __init__(self, form: str = "fp32") -> None:
        if form not in FORMS:
            raise ValueError(f"residual: {form!r}; valid: {', '.join(FORMS)}")
        self.form = form
        self._codec = FORMS[form]
        self._expanded: dict[str, torch.Tensor] = {}
        self._packed: dict[str, tuple[torch.Tensor, int]] = {}
        self._backups: dict[str, torch.Tensor | tuple[torch.Tensor, int] | None] = {}  # None: there was none
        self.max_expanded_bytes = 0  # the most fp32 bytes that were held within a step beside the packed ones

    def get(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return the residual of ``name`` in fp32, on the device of ``like`` [numel]; zeros at first use.

        Until `put` it is the same memory at every call. ValueError if a loaded residual has another number of elements.
        """
        residual = self._expand(name) if name in self._packed else self._expanded.get(name)
        self._expanded[name] = residual = fitting(residual, "residual", name, like)
        self._packed.pop(name, None)
        if self._codec is not None:
            expanded = sum(tensor.numel() * 4 for tensor in self._expanded.values())
            self.max_expanded_bytes = max(self.max_expanded_bytes, expanded)
        return residual

    def put(self, name: str, key: int = 0) -> None:
        """Pack the residual of ``name`` after its step; ``key`` chooses the random numbers of the rounding."""
        if self._codec is None or name not in self._expanded:
            return
        residual = self._expanded.pop(name)
        mixed = counter_rng.absorb(key, zlib.crc32(name.encode()))
        self._packed[name] = ops.encode(self._codec, residual, key=mixed), residual.numel()

    def back_up(self, name: str) -> None:
        """Keep the residual of ``name`` as it is now, until `restore` or `drop_backups`."""
        expanded = self._expanded.get(name)
        self._backups[name] = self._packed.get(name) if expanded is None else expanded.clone()

    def restore(self) -> None:
        """Set all residuals with a backup to it."""
        for name, backup in self._backups.items():
            self.reset(name)
            if isinstance(backup, torch.Tensor):
                self._expanded[name] = backup
            elif backup is not None:
                self._packed[name] = backup
        self._backups.clear()

    def drop_backups(self, names: Iterable[str] | None = None) -> None:
        """Forget the backups of ``names``, or all."""
        for name in list(self._backups) if names is None else names:
            self._backups.pop(name, None)

    def add(self, name: str, lost: torch.Tensor, key: int = 0) -> None:
        """Add ``lost`` to the residual of ``name`` and pack it."""
        self.get(name, lost).add_(lost)
        self.put(name, key)

    def __contains__(self, name: str) -> bool:
        return name in self._expanded or name in self._packed

    def __len__(self) -> int:
        return len(self._expanded) + len(self._packed)

    def names(self) -> list[str]:
        return [*self._packed, *self._expanded]

    def scale(self, factor: float, names: Iterable[str] | None = None) -> None:
        """Multiply every residual, or those of ``names``, by ``factor``; they stay fp32 until their next step."""
        for name in self.names() if names is None else names:
            self._expanded[name] = self._in_fp32(name).mul_(factor)
            self._packed.pop(name, None)

    def reset(self, name: str) -> None:
        """Drop the residual of ``name``."""
        self._expanded.pop(name, None)
        self._packed.pop(name, None)

    def nbytes(self) -> int:
        """Return the bytes that are held between steps; `max_expanded_bytes` were held in addition within one."""
        packed = sum(payload.numel() for payload, _ in self._packed.values())
        for backup in self._backups.values():
            if isinstance(backup, torch.Tensor):
                packed += 4 * backup.numel()
            elif backup is not None:
                packed += backup[0].numel()
        return packed + sum(residual.numel() * 4 for residual in self._expanded.values())

    def state_dict(self) -> dict[str, Any]:
        """Return copies on the CPU for `expand_saved`: bf16 tensors, and payloads of int8 if `saves_payloads`.

        What is kept in fp32 at the moment is saved so.
        """
        saved: dict[str, Any] = {}
        for name in self.names():
            if name in self._packed and self.form == "int8" and self.saves_payloads:
                payload, numel = self._packed[name]
                saved[name] = {"int8": payload.to("cpu", copy=True), "numel": numel}
            else:
                residual = self._in_fp32(name)
                packed_as = torch.bfloat16 if name in self._packed and self.form == "bf16" else torch.float32
                saved[name] = residual.to("cpu", packed_as, copy=True)
        return saved

    def load_state_dict(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace all residuals; they stay fp32 until their next step, so that loading is exact."""
        self._expanded, self._packed = flat_copies(tensors, "residual"), {}
        self._backups.clear()

    def _in_fp32(self, name: str) -> torch.Tensor:
        return self._expanded[name] if name in self._expanded else self._expand(name)

    def _expand(self, name: str) -> torch.Tensor:
        assert self._codec is not None
        payload, numel = self._packed[name]
        record_streams(payload)  # it was packed on the stream on which the last step was finished
        return ops.decode(self._codec, payload, numel)


def expand_saved(saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return residuals in fp32 that were saved in any of `FORMS`; ValueError if a payload is not valid."""
    expanded = {}
    for name, value in saved.items():
        if isinstance(value, Mapping):
            payload, numel = value.get("int8"), value.get("numel")
            packing = FORMS["int8"]
            assert packing is not None
            if (
                type(numel) is not int
                or not isinstance(payload, torch.Tensor)
                or payload.dtype != torch.uint8
                or (numel < 0 or tuple(payload.shape) != (packing.wire_bytes(numel, torch.float32),))
            ):
                raise ValueError(f"residual of {name!r}: its payload and its number of elements do not match")
            value = ops.decode(packing, payload, numel)
        is_bf16 = isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
        expanded[name] = value.float() if is_bf16 else value
    return expanded


def describe_size(numel: int, form: str) -> str:
    """Return the memory of so many residuals on each rank, as text."""
    size = format_bytes(numel * {"bf16": 2.0, "int8": 1.06}.get(form, 4.0))
    return f"{size} of residuals" + (" (a quarter with residual='int8')" if form == "fp32" else "")


def log_feedback(integration: str, memory: str, reason: str) -> None:
    """Log the memory of error feedback, as text, or that it is off (empty) if there is a ``reason``, that of "auto".

    It is a warning where feedback takes memory without being asked for.
    """
    why = f" ({reason})" if reason else ""
    if memory:
        level = logging.WARNING if reason else logging.INFO
        _log.log(level, "%s: error feedback keeps %s on every rank%s", integration, memory, why)
    elif reason:
        _log.info("%s: feedback off%s", integration, why)


def require_numel(numel: int, what: str, name: str, like: torch.Tensor) -> None:
    """Raise ValueError if what was kept for a gradient, ``what`` of ``name``, has another number of elements."""
    if numel != like.numel():
        raise ValueError(
            f"the {what} of {name!r} has {numel} elements, its gradient {like.numel()}: was the state saved from "
            "another model?"
        )


def fitting(kept: torch.Tensor | None, what: str, name: str, like: torch.Tensor) -> torch.Tensor:
    """Return what was kept for a gradient on its device, fp32 [numel]; zeros for None. See `require_numel`."""
    if kept is None:
        return torch.zeros(like.numel(), dtype=torch.float32, device=like.device)
    require_numel(kept.numel(), what, name, like)
    return kept if kept.is_cpu and like.is_cpu else match_device(kept, like)


def cpu_copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies on the CPU, for a checkpoint."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def flat_copies(tensors: Mapping[str, torch.Tensor], what: str) -> dict[str, torch.Tensor]:
    """Return flat copies; ValueError if one is not an fp32 tensor. ``what`` names them in the message."""
    copies = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32:
            raise ValueError(f"{what} of {name!r}: expected an fp32 tensor, got {tensor!r}")
        copies[name] = tensor.detach().flatten().clone()
    return copies


def redistribute(
    states: Sequence[Mapping[str, torch.Tensor]], rank: int, world_size: int
) -> dict[str, torch.Tensor]:
    """Return the residuals of ``rank`` of ``world_size`` ranks, from those of all ranks of a run of another size.

    New rank r takes the sum of the old ranks r, r + n, r + 2n, ... If ranks leave, the sum over ranks is kept, to fp32
    rounding; if ranks join, the new ones start without residuals.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of world_size {world_size}")
    return _sum_states(states[rank::world_size])


def average_states(states: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the mean over ranks, with which every rank of a run of another size starts (velocities)."""
    return {name: total / len(states) for name, total in _sum_states(states).items()}


def _sum_states(states: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
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


class SampleReferences:
    """What both ends of a link know about the activations of each sample: sample → fp32 tensor [elements of a sample].

    Wang et al. 2022, "Fine-tuning Language Models over Slow Networks using Activation Compression with Guarantees"
    (arXiv:2206.01299): the sender encodes the difference between a sample's activation and its reference, which is what
    the receiver had of the same sample the last time. Both add the decoded difference to their reference, so that the
    references stay equal, bit for bit. A sample is sent uncompressed the first time.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._references: dict[int, torch.Tensor] = {}

    def known(self, samples: Sequence[int]) -> torch.Tensor:
        """Return which of ``samples`` have a reference, bool [samples]; the same at both ends of the link."""
        return torch.tensor([sample in self._references for sample in samples], dtype=torch.bool)

    def store(self, samples: Sequence[int], rows: torch.Tensor) -> None:
        """Make the references of samples that were sent uncompressed, from ``rows`` [samples, ...]."""
        for sample, row in zip(samples, rows, strict=True):
            self._references[sample] = row.detach().flatten().to(torch.float32, copy=True)

    def encode(self, samples: Sequence[int], rows: torch.Tensor, key: int) -> torch.Tensor:
        """Return the payload of the differences of ``rows`` [samples, ...] from their references, and advance these."""
        references = self._stack(samples)
        payload = ops.encode(self.codec, rows.detach().flatten(1).float() - references, key=key)
        self._advance(samples, references, payload)
        return payload

    def payload_bytes(self, samples: Sequence[int]) -> int:
        """Return the size of the payload of some samples."""
        numel = sum(self._references[sample].numel() for sample in samples)
        return self.codec.wire_bytes(numel, torch.float32)

    def decode(self, samples: Sequence[int], payload: torch.Tensor) -> torch.Tensor:
        """Advance the references by a payload; return them, fp32 [samples, elements of a sample]."""
        return self._advance(samples, self._stack(samples), payload)

    def nbytes(self) -> int:
        """Return the bytes of the references."""
        return sum(reference.nbytes for reference in self._references.values())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return copies on the CPU, keyed by the sample."""
        return cpu_copies({str(sample): reference for sample, reference in self._references.items()})

    def load_state_dict(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace all references."""
        self._references = {int(name): value for name, value in flat_copies(tensors, "reference").items()}

    def _stack(self, samples: Sequence[int]) -> torch.Tensor:
        return torch.stack([self._references[sample] for sample in samples])

    def _advance(
        self, samples: Sequence[int], references: torch.Tensor, payload: torch.Tensor
    ) -> torch.Tensor:
        difference = ops.decode(self.codec, payload, references.numel()).view_as(references)
        advanced = references.to(difference.device) + difference
        for sample, reference in zip(samples, advanced, strict=True):
            self._references[sample] = reference.clone()
        return advanced
