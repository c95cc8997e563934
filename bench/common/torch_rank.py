"""One rank with torch.distributed up: Gloo and dtcomm, called from Python as a user calls them."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.common.pool import pin

MODULUS = 13
SETTLING_CALLS = 400  # after which the first trials of an operation are over
SETTLING_SECONDS = 2.0


class GlooRank:
    """A rank of a Gloo process group.

    Args:
        rank: The rank.
        ranks: Number of ranks.
        store_file: A file through which the ranks connect.
        pinned: Bind the calling thread to a core; Gloo's own threads are not bound.
    """

    def __init__(self, rank: int, ranks: int, store_file: str, pinned: bool = True) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        self.rank, self.ranks = rank, ranks
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store_file}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=120),
        )
        dist.barrier()
        if pinned:
            pin(rank)

    def settle(self, run: Callable[[], Any]) -> None:
        """Repeat a call until its first trials are over, so that what is measured is what a long run does."""
        start = time.monotonic()
        for _ in range(0, SETTLING_CALLS, 20):
            for _ in range(20):
                run()
            late = torch.tensor([time.monotonic() - start > SETTLING_SECONDS])
            dist.broadcast(late, 0)  # over Gloo: all ranks stop after the same call
            if late:
                return

    def close(self) -> None:
        """Destroy the process group."""
        dist.destroy_process_group()


class TorchRank(GlooRank):
    """A rank that calls all_reduce of torch.distributed's Gloo and of dtcomm."""

    def __init__(
        self, rank: int, ranks: int, store_file: str, pinned: bool = True, dtype: str = "float32"
    ) -> None:
        super().__init__(rank, ranks, store_file, pinned)
        self._dtype = getattr(torch, dtype)
        self._tensors: dict[str, torch.Tensor] = {}
        self._settled: set[int] = set()

    def measure(self, variant: str, numel: int, warm: int, iters: int) -> float:
        """Return the seconds of a call on this rank, from ``iters`` calls; the last warm-up call aligns the ranks."""
        call = self._call(variant)
        tensor = self._tensor(variant, numel)
        tensor.fill_(self.rank + 1.0)
        if variant.startswith("dtcomm") and numel not in self._settled:
            self._settled.add(numel)
            self.settle(lambda: call(tensor))
        for _ in range(max(1, warm)):
            call(tensor)
        start = time.perf_counter()
        for _ in range(iters):
            call(tensor)
        return (time.perf_counter() - start) / iters

    def wrong(self, variant: str, numel: int) -> int:
        """Return how many elements of a sum of small integers are wrong."""
        tensor = self._tensor(variant, numel)
        index = torch.arange(numel, dtype=torch.int64)
        tensor.copy_((index + self.rank) % MODULUS)
        self._call(variant)(tensor)
        expected = sum(((index + r) % MODULUS for r in range(self.ranks)), torch.zeros_like(index))
        return int((tensor != expected).sum())

    def info(self) -> dict[str, Any]:
        """Return ``dtcomm.info()`` as strings."""
        from dtcomm import collectives

        return {key: str(value) for key, value in collectives.info().items()}

    def close(self) -> None:
        """Release the tensors, then destroy the process group."""
        self._tensors.clear()
        super().close()

    def _call(self, variant: str) -> Callable[[torch.Tensor], Any]:
        if variant == "gloo":
            return dist.all_reduce
        import dtcomm

        return dtcomm.all_reduce

    def _tensor(self, variant: str, numel: int) -> torch.Tensor:
        """Return a tensor of ``numel`` elements, kept until another size is asked for; one of each kind at a time."""
        kind = "segment" if variant == "dtcomm.empty" else "ordinary"
        if kind not in self._tensors or self._tensors[kind].numel() != numel:
            self._tensors.pop(kind, None)
            if kind == "segment":
                import dtcomm

                self._tensors[kind] = dtcomm.empty(numel, dtype=self._dtype)
            else:
                self._tensors[kind] = torch.empty(numel, dtype=self._dtype)
        return self._tensors[kind]


class DeepSpeedRank(TorchRank):
    """A rank that calls DeepSpeed's all-reduce over shared memory, which is made for inference on CPUs."""

    def __init__(self, rank: int, ranks: int, store_file: str, dtype: str = "float32") -> None:
        super().__init__(rank, ranks, store_file, dtype=dtype)
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ["LOCAL_SIZE"] = str(ranks)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ["MASTER_PORT"] = Path(store_file).parent.name.rsplit("-", 1)[-1]  # names its shared memory
        if rank == 0:
            _deepspeed_operator()  # compiles it
        dist.barrier()
        _deepspeed_operator().initialize(ranks, rank)
        dist.barrier()
        if rank == 0:  # all ranks have mapped it; DeepSpeed would leave it behind
            for buffer in Path("/dev/shm").glob(f"deepspeed_*_{os.environ['MASTER_PORT']}_*"):
                buffer.unlink()

    def _call(self, variant: str) -> Callable[[torch.Tensor], Any]:
        operator: Callable[[torch.Tensor], Any] = torch.ops.deepspeed.inference_all_reduce_
        return operator


def why_no_deepspeed() -> str | None:
    """Return what to install before DeepSpeed can be measured, or None if it is installed."""
    missing = [name for name in ("deepspeed", "ninja") if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    return f"DeepSpeed is not measured: {' and '.join(missing)} not found (pip install deepspeed ninja)"


def _deepspeed_operator() -> Any:
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    return ShareMemCommBuilder().load(verbose=False)


def new_store_file() -> str:
    """Return the path of a file, not yet created, through which ranks can connect."""
    return str(Path(tempfile.mkdtemp(prefix="dtcomm-bench-")) / "store")
