"""dtcomm: collective communication and gradient compression for PyTorch.

The collectives are functions of this module: ``dtcomm.all_reduce`` and so on, with the argument order of
torch.distributed and a ``codec``. ``dtcomm.codec`` parses a codec's spec, ``dtcomm.encode`` and ``dtcomm.decode`` apply
one to a tensor, and ``dtcomm.info`` describes how a group communicates. Integrations are submodules: ``dtcomm.ddp``,
``dtcomm.fsdp``, ``dtcomm.tp``, ``dtcomm.context_parallel``, ``dtcomm.moe``, ``dtcomm.pipeline``, ``dtcomm.local_sgd``
and ``dtcomm.backend``; ``dtcomm.mesh`` combines them. ``dtcomm.extensions`` has what the core does not need.
"""

import importlib
from typing import TYPE_CHECKING, Any

from dtcomm import _torch_backend_entry, env

if TYPE_CHECKING:
    from dtcomm.codecs import codec
    from dtcomm.collectives import (
        Work,
        all_gather,
        all_gather_coalesced,
        all_reduce,
        all_reduce_coalesced,
        all_to_all,
        barrier,
        broadcast,
        empty,
        flight_record,
        gather,
        info,
        recv,
        reduce,
        reduce_scatter,
        reduce_scatter_coalesced,
        release,
        run,
        scatter,
        send,
        sendrecv,
    )
    from dtcomm.kernels.ops import decode, encode

__version__ = "0.1.0"

__all__ = [
    "Work",
    "all_gather",
    "all_gather_coalesced",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "barrier",
    "broadcast",
    "codec",
    "decode",
    "empty",
    "encode",
    "flight_record",
    "gather",
    "info",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_coalesced",
    "release",
    "run",
    "scatter",
    "send",
    "sendrecv",
]

# Another build of the native modules, such as one with sanitizers, may replace the one in this folder.
if env.get("DTCOMM_NATIVE_DIR"):
    __path__.insert(0, env.get("DTCOMM_NATIVE_DIR"))

_torch_backend_entry.register()

# Names are imported when they are first used, so that `dtcomm --help` does not import torch.
_HOMES = {"codec": "dtcomm.codecs", "decode": "dtcomm.kernels.ops", "encode": "dtcomm.kernels.ops"}
_SUBMODULES = (
    "algorithms",
    "backend",
    "codecs",
    "collectives",
    "compress",
    "context_parallel",
    "ddp",
    "errors",
    "extensions",
    "frameworks",
    "fsdp",
    "kernels",
    "launch",
    "local_sgd",
    "mesh",
    "moe",
    "pipeline",
    "profiling",
    "schedule",
    "tp",
)


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"dtcomm.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'dtcomm' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES.get(name, "dtcomm.collectives")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
