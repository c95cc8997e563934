"""Peers that need libraries of their own: DeepSpeed's all-reduce over shared memory and oneCCL's, for `Rank.build`."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.common.native import FLAGS, compile_shared

PREFIX = Path(sys.prefix)  # where pip puts oneCCL's files
ONECCL = PREFIX / "lib/ccl/cpu/lib/libccl.a"
ONECCL_PACKAGES = "pip install oneccl-devel impi-rt intel-cmplr-lib-rt; apt-get install libhwloc-dev"
# Of the settings without MPI's launcher the ones with which it is fastest on ranks that share cores: the caller works,
# no thread of oneCCL's own does.
ONECCL_SETTINGS = {
    "CCL_PROCESS_LAUNCHER": "none",
    "CCL_ATL_TRANSPORT": "ofi",
    "CCL_ATL_SHM": "1",
    "CCL_WORKER_OFFLOAD": "0",
    "CCL_LOG_LEVEL": "error",
}


def why_no_deepspeed() -> str:
    """Return what to install before DeepSpeed can be measured, or an empty string."""
    missing = [name for name in ("deepspeed", "ninja") if importlib.util.find_spec(name) is None]
    reason = f"DeepSpeed is not measured: {' and '.join(missing)} not found (pip install deepspeed ninja)"
    return reason if missing else ""


def why_no_oneccl() -> str:
    """Return what to install before oneCCL can be measured, or an empty string."""
    return "" if ONECCL.exists() else f"oneCCL is not measured: {ONECCL} not found ({ONECCL_PACKAGES})"


def _shared(value: object) -> Any:
    """Return rank 0's value on all ranks."""
    box = [value]
    dist.broadcast_object_list(box, 0)
    return box[0]


@functools.cache
def _deepspeed(rank: int, ranks: int) -> Callable[[torch.Tensor], object]:
    port = str(_shared(20000 + os.getpid() % 40000))  # names its shared memory
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    if rank == 0:
        ShareMemCommBuilder().load(verbose=False)  # compiles it
    dist.barrier()
    ShareMemCommBuilder().load(verbose=False).initialize(ranks, rank)
    dist.barrier()
    if rank == 0:  # all ranks have mapped it; DeepSpeed would leave it behind
        for buffer in Path("/dev/shm").glob(f"deepspeed_*_{port}_*"):
            buffer.unlink()
    operator: Callable[[torch.Tensor], object] = torch.ops.deepspeed.inference_all_reduce_
    return operator


@functools.cache
def _oneccl_library() -> ctypes.CDLL:
    libraries = ["-l:libintlc.so.5", "-l:libimf.so", "-l:libirng.so", "-l:libsvml.so", "-l:libmpi.so.12"]
    flags = [*FLAGS, "-fPIC", "-shared", "-pthread", f"-I{PREFIX / 'include'}"]
    after = [
        str(ONECCL),
        "-lhwloc",
        f"-L{PREFIX / 'lib'}",
        f"-Wl,-rpath,{PREFIX / 'lib'}",
        *libraries,
        "-ldl",
    ]
    library = ctypes.CDLL(str(compile_shared("liboneccl_rank.so", ["oneccl.cpp"], flags=flags, after=after)))
    library.oneccl_open.restype = ctypes.c_void_p
    library.oneccl_open.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
    library.oneccl_all_reduce.restype = ctypes.c_double
    pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.oneccl_all_reduce.argtypes = [pointer, pointer, size, integer, integer]
    return library


@functools.cache
def _oneccl(rank: int, ranks: int) -> Callable[[torch.Tensor], object]:
    os.environ.update(ONECCL_SETTINGS, CCL_LOCAL_RANK=str(rank), CCL_LOCAL_SIZE=str(ranks))
    if rank == 0:
        _oneccl_library()  # compiles it
    dist.barrier()
    path = _shared(tempfile.mktemp(prefix="dtcomm-oneccl-"))
    communicator = _oneccl_library().oneccl_open(path.encode(), rank, ranks)
    if not communicator:
        raise RuntimeError("oneCCL did not connect; its message is above")
    dist.barrier()

    def call(tensor: torch.Tensor) -> object:
        bf16 = tensor.dtype == torch.bfloat16
        return _oneccl_library().oneccl_all_reduce(communicator, tensor.data_ptr(), tensor.numel(), bf16, 1)

    return call


PEERS = {"deepspeed": (why_no_deepspeed, _deepspeed), "oneccl": (why_no_oneccl, _oneccl)}


def make_all_reduce(
    rank: int, ranks: int, name: str, *, peer: str, numel: int, dtype: str
) -> Callable[[], object]:
    """Return a peer's sum in place, after a check of its result."""
    call = PEERS[peer][1](rank, ranks)
    tensor = torch.full((numel,), rank + 1.0, dtype=getattr(torch, dtype))
    call(tensor)
    if not bool((tensor == ranks * (ranks + 1) / 2).all()):
        raise AssertionError(f"{peer}: a sum of {numel} elements is wrong")
    return lambda: call(tensor)
