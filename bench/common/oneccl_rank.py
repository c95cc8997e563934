"""A rank of Intel's oneCCL on CPUs, from the packages of PyPI."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.common.native import FLAGS, compile_shared
from bench.common.torch_rank import TorchRank

PACKAGES = "pip install oneccl-devel impi-rt intel-cmplr-lib-rt; apt-get install libhwloc-dev"
PREFIX = Path(sys.prefix)  # where pip puts their files
LIBRARY = PREFIX / "lib/ccl/cpu/lib/libccl.a"
# Of the settings without MPI's launcher the ones with which it is fastest on ranks that share cores: the caller works,
# no thread of oneCCL's own does.
SETTINGS = {
    "CCL_PROCESS_LAUNCHER": "none",
    "CCL_ATL_TRANSPORT": "ofi",
    "CCL_ATL_SHM": "1",
    "CCL_WORKER_OFFLOAD": "0",
    "CCL_LOG_LEVEL": "error",
}


def why_unavailable() -> str | None:
    """Return what to install before oneCCL can be measured, or None if it is there."""
    return None if LIBRARY.exists() else f"oneCCL is not measured: {LIBRARY} not found ({PACKAGES})"


@functools.cache
def _library() -> ctypes.CDLL:
    libraries = ["-l:libintlc.so.5", "-l:libimf.so", "-l:libirng.so", "-l:libsvml.so", "-l:libmpi.so.12"]
    flags = [*FLAGS, "-fPIC", "-shared", "-pthread", f"-I{PREFIX / 'include'}"]
    after = [
        str(LIBRARY),
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
    library.oneccl_all_reduce.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
    ]
    return library


class OneCclRank(TorchRank):
    """A rank that calls oneCCL's all-reduce; its threads are not bound, as oneCCL waits in them."""

    def __init__(self, rank: int, ranks: int, store_file: str, dtype: str = "float32") -> None:
        super().__init__(rank, ranks, store_file, pinned=False, dtype=dtype)
        os.environ.update(SETTINGS, CCL_LOCAL_RANK=str(rank), CCL_LOCAL_SIZE=str(ranks))
        if rank == 0:
            _library()  # compiles it
        dist.barrier()
        self._communicator = _library().oneccl_open(f"{store_file}.oneccl".encode(), rank, ranks)
        if not self._communicator:
            raise RuntimeError("oneCCL did not connect; its message is above")
        dist.barrier()

    def measure(self, variant: str, numel: int, warm: int, iters: int) -> float:
        """Return the seconds of a call on this rank, from ``iters`` calls."""
        tensor = self._tensor(variant, numel)
        tensor.fill_(self.rank + 1.0)
        self._run(tensor, max(1, warm))
        return self._run(tensor, iters) / iters

    def _run(self, tensor: torch.Tensor, calls: int) -> float:
        bf16 = tensor.dtype == torch.bfloat16
        seconds: float = _library().oneccl_all_reduce(
            self._communicator, tensor.data_ptr(), tensor.numel(), bf16, calls
        )
        return seconds

    def _call(self, variant: str) -> Any:
        return lambda tensor: self._run(tensor, 1)
