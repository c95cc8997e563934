"""One rank with torch.distributed up: Gloo and dtcomm, called from Python as a user calls them."""

from __future__ import annotations

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

    def close(self) -> None:
        """Destroy the process group."""
        dist.destroy_process_group()


class TorchRank(GlooRank):
    """A rank that calls all_reduce of torch.distributed's Gloo and of dtcomm."""

    def __init__(self, rank: int, ranks: int, store_file: str, pinned: bool = True) -> None:
        super().__init__(rank, ranks, store_file, pinned)
        self._tensors: dict[str, torch.Tensor] = {}

    def measure(self, variant: str, numel: int, warm: int, iters: int) -> float:
        """Return the seconds of a call on this rank, from ``iters`` calls; the last warm-up call aligns the ranks."""
        call = self._call(variant)
        tensor = self._tensor(variant, numel)
        tensor.fill_(self.rank + 1.0)
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
        """Return a tensor of ``numel`` floats, kept until another size is asked for; one of each kind at a time."""
        kind = "segment" if variant == "dtcomm.empty" else "ordinary"
        if kind not in self._tensors or self._tensors[kind].numel() != numel:
            self._tensors.pop(kind, None)
            if kind == "segment":
                import dtcomm

                self._tensors[kind] = dtcomm.empty(numel, dtype=torch.float32)
            else:
                self._tensors[kind] = torch.empty(numel)
        return self._tensors[kind]


def new_store_file() -> str:
    """Return the path of a file, not yet created, through which ranks can connect."""
    return str(Path(tempfile.mkdtemp(prefix="dtcomm-bench-")) / "store")
