"""A rank of bench.compare_checkouts: times cases with the dtcomm of one checkout.

It is started as a script, ``python checkout_rank.py CONNECTION RANK RANKS STORE``, with PYTHONPATH set to the checkout.
It imports nothing of bench and only public names of dtcomm, so that it runs with older checkouts as well. CONNECTION is
the file descriptor of a `multiprocessing.Pipe`; requests and answers are those of `bench.common.pool`.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

WARM_UP_CALLS = 8  # DDP rebuilds its buckets after the first step
MAX_SETTLING_CALLS = 500
ALIGNING_CALLS = 2  # before each measurement: they align the ranks and warm the caches


class EqualBuckets(torch.nn.Module):
    """Parameters of ``numel`` floats, one per bucket, with a backward pass that costs little."""

    def __init__(self, buckets: int, numel: int) -> None:
        super().__init__()
        # Matrices, because the default policy does not compress vectors.
        self.weights = torch.nn.ParameterList(torch.randn(1, numel) for _ in range(buckets))

    def forward(self) -> torch.Tensor:
        """Return the sum of all weights."""
        return torch.stack([weight.sum() for weight in self.weights]).sum()


class CheckoutRank:
    """The cases of one rank."""

    def __init__(self, rank: int, ranks: int, store: str) -> None:
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
        torch.set_num_threads(1)
        torch.manual_seed(rank)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        self._calls: dict[str, Callable[[], object]] = {}

    def origin(self) -> str:
        """Return the file that dtcomm was imported from."""
        import dtcomm

        return str(dtcomm.__file__)

    def prepare(self, name: str, kind: str, buckets: int, nbytes: int, codec: str) -> str:
        """Allocate the tensors of a case and run it several times; return the error if that fails, otherwise ""."""
        try:
            call = self._make(kind, buckets, nbytes, codec)
            for _ in range(WARM_UP_CALLS):
                call()
            if kind in ("all_reduce", "hook"):
                self._settle(call)
        except (ValueError, TypeError, AttributeError, ImportError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        self._calls[name] = call
        return ""

    def _settle(self, call: Callable[[], object]) -> None:
        """Repeat a call until the first trials of its operations are over, which all ranks know alike."""
        import dtcomm

        time.sleep(0.3)  # processes of the attempt before may still be ending
        for _ in range(MAX_SETTLING_CALLS):
            if all(choice["settled"] for choice in dtcomm.info().get("choices", [])):
                return
            call()

    def measure(self, name: str, calls: int, together: bool) -> float:
        """Return the median seconds of one call; ``together``: all ranks measure this case now."""
        call = self._calls[name]
        if together:
            dist.barrier()
        for _ in range(ALIGNING_CALLS):
            call()
        seconds = []
        for _ in range(calls):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    def _make(self, kind: str, buckets: int, nbytes: int, codec: str) -> Callable[[], object]:
        if kind == "all_reduce":
            return self._all_reduce(nbytes, codec)
        if kind == "hook":
            return self._ddp_step(buckets, nbytes, codec)
        return self._codec_verb(kind, nbytes, codec)

    def _all_reduce(self, nbytes: int, codec: str) -> Callable[[], object]:
        import dtcomm

        tensor = torch.randn(nbytes // 4)
        return lambda: dtcomm.all_reduce(tensor, "avg", codec=codec)  # an average in place stays finite

    def _ddp_step(self, buckets: int, nbytes: int, codec: str) -> Callable[[], object]:
        import dtcomm.ddp

        model = DistributedDataParallel(
            EqualBuckets(buckets, nbytes // 4), bucket_cap_mb=nbytes / 2**20, gradient_as_bucket_view=True
        )
        model.register_comm_hook(dtcomm.ddp.State(codec), dtcomm.ddp.hook)
        return lambda: model().backward()

    def _codec_verb(self, verb: str, nbytes: int, codec: str) -> Callable[[], object]:
        from dtcomm.kernels import ops

        numel = nbytes // 4
        x, decoded = torch.randn(numel), torch.empty(numel)
        payload = ops.encode(codec, x)
        out = torch.empty_like(payload)
        calls: dict[str, Callable[[], object]] = {
            "encode": lambda: ops.encode(codec, x, out=out),
            "decode": lambda: ops.decode(codec, payload, numel, out=decoded),
            "reduce_encode": lambda: ops.reduce_encode(codec, [payload], numel, local=x, out=out),
        }
        return calls[verb]


def main() -> None:
    """Answer requests until the connection is closed."""
    connection = Connection(int(sys.argv[1]))
    try:
        rank = CheckoutRank(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
        connection.send((True, None))
        while True:
            method, arguments = connection.recv()
            try:
                answer: tuple[bool, Any] = (True, getattr(rank, method)(**arguments))
            except Exception:
                answer = (False, traceback.format_exc())
            connection.send(answer)
    except (EOFError, KeyboardInterrupt):
        pass


if __name__ == "__main__":
    main()
