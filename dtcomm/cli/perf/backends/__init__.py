"""Backends of ``dtcomm perf``: the libraries that carry out a measured collective.

`BACKENDS` lists them by name. ``module:Class`` names a subclass of `Backend` from elsewhere.
"""

from __future__ import annotations

import importlib

from dtcomm.cli.perf.backends.base import Backend
from dtcomm.cli.perf.backends.dtcomm_backend import Dtcomm, Native, Peer, ProcessGroup
from dtcomm.cli.perf.backends.mpi import OpenMpi
from dtcomm.cli.perf.backends.torch_backend import Gloo, Nccl, SymmetricOneShot, SymmetricTwoShot

BACKENDS: dict[str, type[Backend]] = {
    "dtcomm": Dtcomm,
    "native": Native,
    "peer": Peer,
    "process_group": ProcessGroup,
    "gloo": Gloo,
    "nccl": Nccl,
    "symm_one_shot": SymmetricOneShot,
    "symm_two_shot": SymmetricTwoShot,
    "mpi": OpenMpi,
}
PEERS = ("gloo", "mpi", "nccl", "symm_one_shot", "symm_two_shot")
BACKEND_HELP = (
    f"{', '.join(BACKENDS)}, or module:Class of your own; repeated or a,b compares in one table "
    "(native; dtcomm on GPUs)"
)


def backend_names(device: str) -> list[str]:
    """Return the names of the backends that support tensors on ``device``."""
    return [name for name, backend in BACKENDS.items() if device in backend.devices]


def find_backend(name: str) -> type[Backend]:
    """Return the backend class of a name or of ``module:Class``; ValueError lists the valid names."""
    if name in BACKENDS:
        return BACKENDS[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"--backend {name!r} is not one of {', '.join(BACKENDS)}, module:Class")
    try:
        backend = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--backend {name!r}: {error}") from error
    if not (isinstance(backend, type) and issubclass(backend, Backend)):
        raise ValueError(f"--backend {name!r} is not a subclass of dtcomm.cli.perf.backends.base.Backend")
    return backend
