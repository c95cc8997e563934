"""What concerns a group or its memory and moves no tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch

from dtcomm.collectives._arguments import Group
from dtcomm.collectives.reduce_ops import all_reduce
from dtcomm.runtime import flight_recorder
from dtcomm.runtime.communicator_cache import device_communicators, existing_communicator, get_communicator
from dtcomm.runtime.native.runtime import empty_shared
from dtcomm.runtime.process_groups import require_group
from dtcomm.runtime.work import Work


@overload
def barrier(*, async_op: Literal[True], group: Group = None) -> Work: ...


@overload
def barrier(*, async_op: bool = False, group: Group = None) -> Work | None: ...


def barrier(*, group: Group = None, async_op: bool = False) -> Work | None:
    """Until all ranks of the group have come here."""
    return all_reduce(
        torch.zeros(1, dtype=torch.uint8), "max", algorithm="one_shot", group=group, async_op=async_op
    )


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None, group: Group = None) -> torch.Tensor:
    """An uninitialised CPU tensor in memory that the other ranks of this host can map.

    Collectives with codec none that find every rank's tensor in such memory work on the tensors themselves:
    no staging copy. Each call allocates whole pages and holds a file descriptor until the tensor is freed, so
    allocate few and large ones. ``group`` is accepted for symmetry: the memory serves every group of the
    host's ranks. Raises OSError where the machine has no such memory left.
    """
    shape: Any = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    return empty_shared(torch.Size(shape), dtype or torch.get_default_dtype())


def info(group: Group = None) -> dict[str, Any]:
    """How the group's ranks are served: runtime ("native", "peer" or "process_group"), why, kernels, hosts, bytes.

    ``devices`` says the same of tensors on CUDA devices, by device, once there was a call on some; where there were
    none on the CPU, all of it is about them.
    """
    devices = {name: made.info() for name, made in device_communicators(group).items()}
    if not devices:
        return get_communicator(group).info()
    made = existing_communicator(require_group(group))
    said = next(iter(devices.values())) if made is None else made.info()
    return {**said, "devices": devices}


def flight_record(directory: str | None = None) -> dict[str, Any]:
    """The last operations of this process's communicators: what each was, how far it came, whom it waited for.

    With ``directory`` it is also written there, as ``rank-<n>.json``, for ``dtcomm doctor --flight``. A rank whose
    operation fails does that by itself where DTCOMM_FLIGHT_DIR is set. OSError where the file cannot be written.
    """
    if directory is not None:
        flight_recorder.write(directory, "on demand")
    return flight_recorder.record("on demand")
