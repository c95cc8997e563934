"""A rank of bench.collectives: runs every collective on dtcomm or Gloo through the backends of ``dtcomm perf``."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from bench.common.torch_rank import GlooRank
from dtcomm.cli.perf.backends import find_backend
from dtcomm.cli.perf.backends.base import CollectiveCall
from dtcomm.cli.perf.collectives import COLLECTIVES
from dtcomm.measure import exact_inputs

PINGPONG = "pingpong"  # ranks 2k and 2k + 1 send each other a message by turns


class CollectiveRank(GlooRank):
    """A rank of one backend of ``dtcomm perf``; the arguments are those of `GlooRank` and the backend's name."""

    def __init__(self, rank: int, ranks: int, store_file: str, backend: str, pinned: bool) -> None:
        super().__init__(rank, ranks, store_file, pinned)
        self.plain = backend == "gloo"
        self._backend = find_backend(backend)(120)
        self._prepared: tuple[Any, ...] = ()
        self._run: Callable[[], Any] | None = None
        self._settled: set[tuple[str, bool, int]] = set()

    def measure(self, collective: str, shared: bool, numel: int, warm: int, iters: int) -> float:
        """Return the seconds of a call on this rank, from ``iters`` calls; the last warm-up call aligns the ranks."""
        run = self._operation(collective, shared, numel)
        if not self.plain and (collective, shared, numel) not in self._settled:
            self._settled.add((collective, shared, numel))
            self.settle(run)
        for _ in range(max(1, warm)):
            run()
        start = time.perf_counter()
        for _ in range(iters):
            run()
        return (time.perf_counter() - start) / iters

    def wrong(self, collective: str, shared: bool, numel: int) -> int:
        """Return how many elements of a result are wrong, with inputs whose result is exact."""
        if collective == PINGPONG:
            return 0
        run = self._operation(collective, shared, numel)
        case: dict[str, Any] = {"rank": self.rank, "world_size": self.ranks, "seed": 1}
        self._input.copy_(exact_inputs.inputs(collective, numel, **case))
        run()
        expected = exact_inputs.expected(collective, numel, **case)
        wrong = int((self._output[: expected.numel()] != expected).sum())
        self._input.fill_(1.0)
        return wrong

    def _operation(self, collective: str, shared: bool, numel: int) -> Callable[[], Any]:
        """Return the call; its tensors are kept until another operation or size is asked for."""
        key = (collective, shared, numel)
        if self._run is None or self._prepared != key:
            self._run = None
            self._input = self._output = torch.empty(0)  # released before the next ones are allocated
            self._run = self._make(collective, shared, numel)
            self._prepared = key
        return self._run

    def _make(self, collective: str, shared: bool, numel: int) -> Callable[[], Any]:
        known = COLLECTIVES.get(collective)
        full_numel = numel * (self.ranks if known is not None and known.sharded else 1)
        inputs = full_numel if collective in exact_inputs.SHARDS_IN else numel
        outputs = numel if collective in ("reduce_scatter", "scatter") else full_numel
        self._output = self._tensor(outputs, shared)
        alike = known is not None and known.in_place_api
        self._input = self._output if alike else self._tensor(inputs, shared)
        self._input.fill_(1.0)
        if known is None:
            return self._pingpong()
        call = CollectiveCall(collective=collective, output=self._output, input=self._input, op="sum")
        return self._backend.bind_with_copy(call)

    def _pingpong(self) -> Callable[[], Any]:
        peer = self.rank ^ 1
        send: Any = dist.send
        receive: Any = dist.recv
        if not self.plain:
            import dtcomm

            send, receive = dtcomm.send, dtcomm.recv
        sent, received = self._input, self._output

        def first() -> None:
            send(sent, peer)
            receive(received, peer)

        def second() -> None:
            receive(received, peer)
            send(sent, peer)

        return first if self.rank % 2 == 0 else second

    def _tensor(self, numel: int, shared: bool) -> torch.Tensor:
        if not shared:
            return torch.empty(numel)
        import dtcomm

        return dtcomm.empty(numel, dtype=torch.float32)
