"""Who carries out a measured collective. ``BACKENDS`` is the list; ``module:Class`` names one from elsewhere."""

from __future__ import annotations

import importlib

from dtcomm.cli.perf.backends.base import Backend, Call, Moved
from dtcomm.cli.perf.backends.dtcomm_backend import Dtcomm, Native, Peer, ProcessGroup
from dtcomm.cli.perf.backends.torch_backend import (
    Gloo,
    Nccl,
    SymmetricOneShot,
    SymmetricTwoShot,
    TorchDistributed,
)

__all__ = ["BACKENDS", "Backend", "Call", "Dtcomm", "Moved", "Native", "TorchDistributed", "find", "names"]

BACKENDS: dict[str, type[Backend]] = {
    "dtcomm": Dtcomm,
    "native": Native,
    "peer": Peer,
    "process_group": ProcessGroup,
    "gloo": Gloo,
    "nccl": Nccl,
    "symm_one_shot": SymmetricOneShot,
    "symm_two_shot": SymmetricTwoShot,
}
PEERS = ("gloo", "mpi", "nccl", "symm_one_shot", "symm_two_shot")
HELP = (
    f"{', '.join(BACKENDS)}, mpi, or module:Class of your own; repeated or a,b compares in one table "
    "(native; dtcomm on GPUs)"
)


def names(device: str) -> list[str]:
    """The backends whose tensors may be on that device."""
    return [name for name, each in BACKENDS.items() if device in each.devices]


def find(name: str) -> type[Backend]:
    """The backend of that name; ValueError lists the valid ones."""
    if name in BACKENDS:
        return BACKENDS[name]
    if name == "mpi":
        from dtcomm.cli.perf.backends.mpi import OpenMpi

        return OpenMpi
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"--backend {name!r} is not one of {', '.join(BACKENDS)}, mpi, module:Class")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--backend {name!r}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise ValueError(f"--backend {name!r} is not a subclass of dtcomm.cli.perf.backends.registry.Backend")
    return found
