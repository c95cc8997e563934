"""Batches sized by the measured speed of each rank, so that unlike ranks finish their steps together.

Zhang, Hu, Shi, Bai 2024, "Poplar: Efficient Scaling of Distributed DNN Training on Heterogeneous GPU Clusters"
(arXiv:2408.12596), sizes batches so for ZeRO. `BalancedSampler` divides every batch of the whole job among the ranks,
`BalanceObserver` measures steps and sets the weights of gradients, `find_stragglers` names slow ranks
and their cause.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from dtcomm.arguments import require_int
from dtcomm.collectives import recv, send
from dtcomm.compress.checkpoint import rank_and_size
from dtcomm.ddp import DDPState
from dtcomm.ddp.reducer import InFlightBucket, Reducer, ReducerObserver
from dtcomm.extensions.extras.run_monitor import RankSpeed, Straggler, find_stragglers, gather_rows
from dtcomm.streams import Streams

MIN_GAIN = 0.03  # of a step, which a new division must promise
PROBE_BYTES = 1 << 18
PROBES = 3  # the first one makes the connection

_log = logging.getLogger("dtcomm")


def divide(total: int, speeds: Sequence[float], largest: int | None = None) -> list[int]:
    """Return the samples of each rank in proportion to speeds; every rank gets at least one and at most ``largest``.

    Example:
        >>> from dtcomm.extensions.extras.balanced_sampler import divide
        >>> divide(32, [2.0, 1.0, 1.0]), divide(32, [2.0, 1.0, 1.0], largest=12)
        ([16, 8, 8], [12, 10, 10])
    """
    limit = total if largest is None else largest
    sizes = [1] * len(speeds)
    for _ in range(total - len(speeds)):
        # The rank that would finish first with one sample more; the lowest one of equals.
        open_ranks = [rank for rank, size in enumerate(sizes) if size < limit]
        next_rank = min(open_ranks, key=lambda rank: ((sizes[rank] + 1) / speeds[rank], rank))
        sizes[next_rank] += 1
    return sizes


class BalancedSampler(Sampler[list[int]]):
    """A batch sampler that divides each batch of the job among the ranks by their measured speed.

    All ranks together draw the same samples in the same order as with equal parts; only who computes which of them
    changes. Pass it as ``batch_sampler``, and to `balance`, which measures steps and weights each rank's
    gradients by its samples, so that their average is that of the whole batch. The samples of an epoch that do not fill
    a batch are left out.

    Args:
        data: The data set, or any object with a length.
        batch_size: The samples of all ranks together in a step.
        group: The process group; None is the default group.
        shuffle: Draw the samples in random order, another one in each epoch. Default True.
        seed: The seed of the order. Default 0.
        every: The number of steps between two looks at the speeds. Default 20.
        largest: The most samples that a rank may get, for ranks with little memory. Default None: any number.

    Attributes:
        batch_size: The samples of all ranks together.
        every: The steps between two looks.
        sizes: The samples of each rank in the batch that was drawn last.
        speeds: What was measured before the last look, of all ranks; empty before the first one.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The batch is too small for one sample on each rank, or too large for ``largest`` on each.

    Example::

        sampler = extras.BalancedSampler(dataset, batch_size=64)
        loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler)
        state = dtcomm.ddp.compress(model, "int8")
        extras.balance(state, sampler)
        for epoch in range(10):
            sampler.set_epoch(epoch)
            for x, y in loader:
                loss(model(x), y).backward()  # the mean over this rank's samples
                ...
        print(sampler.stragglers)
    """

    def __init__(
        self,
        data: Sized,
        batch_size: int,
        group: dist.ProcessGroup | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        every: int = 20,
        largest: int | None = None,
    ) -> None:
        for name, value, least in (("batch_size", batch_size, 1), ("seed", seed, None), ("every", every, 1)):
            require_int(name, value, least)
        self._rank, ranks = rank_and_size(group)
        if batch_size < ranks:
            raise ValueError(
                f"batch_size={batch_size}: expected at least one sample for each of {ranks} ranks"
            )
        if largest is not None:
            require_int("largest", largest, 1)
            if largest * ranks < batch_size:
                raise ValueError(
                    f"largest={largest}: {ranks} ranks cannot take batch_size={batch_size}; "
                    f"expected at least {-(-batch_size // ranks)}"
                )
        if len(data) < batch_size:
            raise ValueError(f"data: {len(data)} samples are less than batch_size={batch_size}")
        self.batch_size, self.every, self.group = batch_size, every, group
        self.sizes = tuple(divide(batch_size, [1.0] * ranks, largest))
        self.speeds: list[RankSpeed] = []
        self._samples, self._shuffle, self._seed, self._largest = len(data), shuffle, seed, largest
        self._epoch = self._first = self._drawn = 0
        # Sizes that hold from a batch on; all ranks know the same ones, but some have drawn more batches than others.
        self._changes: deque[tuple[int, tuple[int, ...]]] = deque()
        self._drawn_sizes: deque[int] = deque()  # of the batches that no step has used yet
        self._logged: set[tuple[int, str]] = set()

    def __len__(self) -> int:
        return self._samples // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's part of each batch of the epoch."""
        self._drawn_sizes.clear()
        order = list(range(self._samples))
        if self._shuffle:
            generator = torch.Generator().manual_seed((self._seed << 20) + self._epoch)
            order = torch.randperm(self._samples, generator=generator).tolist()
        self._drawn, self._first = self._first, 0
        self.sizes = self._last_sizes()
        self._changes.clear()
        while self._drawn < len(self):
            while self._changes and self._drawn >= self._changes[0][0]:
                self.sizes = self._changes.popleft()[1]
            begin = self._drawn * self.batch_size + sum(self.sizes[: self._rank])
            size = self.sizes[self._rank]
            self._drawn += 1
            self._drawn_sizes.append(size)
            yield order[begin : begin + size]

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next epoch.

        Args:
            epoch: The number of the epoch.
        """
        require_int("epoch", epoch, 0)
        self._epoch = epoch

    def next_samples(self) -> int:
        """Return the samples of this rank in the next step, in the order in which batches were drawn.

        Raises:
            RuntimeError: No batch was drawn for this step.
        """
        if not self._drawn_sizes:
            raise RuntimeError(
                "BalancedSampler: a backward pass without a batch of the sampler; iterate over the loader "
                "that has it as batch_sampler, and call backward once for each batch"
            )
        return self._drawn_sizes.popleft()

    def update(self, sample_s: float, wait_s: float, device: torch.device | None = None) -> None:
        """Exchange what ranks measured, and size the batches that no rank has drawn yet; all ranks call it.

        It is called every ``every`` steps.

        Args:
            sample_s: Seconds until this rank's gradients of a step are computed, for each of its samples.
            wait_s: Seconds that it then waits.
            device: The device whose tensors the group communicates. Default None: the CPU.
        """
        own = [float(self.sizes[self._rank]), sample_s, wait_s, float(self._drawn)]
        gathered = gather_rows(own, self.group, device)
        # A rank receives over the link to the rank before it; each link is measured once.
        incoming = [row[0] for row in gather_rows([self._probe(device)], self.group, device)]
        links = [min(pair) for pair in zip(incoming, [*incoming[1:], incoming[0]], strict=True)]
        self.speeds = [
            RankSpeed(
                rank=rank, samples=round(count), sample_s=max(each, 1e-9), wait_s=wait, link_s=links[rank]
            )
            for rank, (count, each, wait, _) in enumerate(gathered)
        ]
        for straggler in self.stragglers:
            if (straggler.rank, straggler.cause) not in self._logged and self._rank == 0:
                self._logged.add((straggler.rank, straggler.cause))
                _log.warning("dtcomm.ddp: %s", straggler)
        sizes = divide(self.batch_size, [1 / speed.sample_s for speed in self.speeds], self._largest)
        before, after = (
            max(size * speed.sample_s for size, speed in zip(parts, self.speeds, strict=True))
            for parts in ([speed.samples for speed in self.speeds], sizes)
        )
        if after < (1 - MIN_GAIN) * before:
            self._changes.append((round(max(row[3] for row in gathered)), tuple(sizes)))

    @property
    def stragglers(self) -> list[Straggler]:
        """The ranks that held up the others before the last look, with their causes; see `find_stragglers`."""
        return find_stragglers(self.speeds) if self.speeds else []

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch and the sizes, which are the same on all ranks."""
        return {
            "epoch": self._epoch,
            "batches": self._first or self._drawn - len(self._drawn_sizes),
            "sizes": list(self._last_sizes()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batches that were used; with another number of ranks, with equal parts.

        Args:
            state: What `state_dict` returned.
        """
        self._epoch, self._first = state["epoch"], state["batches"] % len(self)
        if len(state["sizes"]) == len(self.sizes):
            self.sizes = tuple(state["sizes"])
            self._changes.clear()

    def _last_sizes(self) -> tuple[int, ...]:
        """Return the sizes that were decided last."""
        return self._changes[-1][1] if self._changes else self.sizes

    def _probe(self, device: torch.device | None) -> float:
        """Return the seconds of a message from the rank before this one, while all ranks send one."""
        ranks = len(self.sizes)
        if ranks == 1:
            return 0.0
        group = self.group
        ring = [place if group is None else dist.get_global_rank(group, place) for place in range(ranks)]
        sent = torch.zeros(PROBE_BYTES // 4, device=device)
        received = torch.empty_like(sent)
        seconds = []
        for _ in range(PROBES):
            begin = time.perf_counter()
            sending = send(sent, ring[(self._rank + 1) % ranks], group=group, async_op=True)
            recv(received, ring[self._rank - 1], group=group)
            float(received[-1])  # on a device the host waits here
            seconds.append(time.perf_counter() - begin)
            sending.wait()
        return min(seconds)


def balance(state: DDPState, sampler: BalancedSampler) -> None:
    """Let a sampler size batches by the speed of this rank's steps, and weight gradients by its sizes.

    Call it once on every rank. Each batch of the sampler must have one backward pass with communication.

    Args:
        state: The state of a DDP model, which `dtcomm.ddp.compress` returned.
        sampler: The batch sampler of the training data, over the same group.

    Raises:
        TypeError: ``sampler`` is not a `BalancedSampler`.
    """
    if not isinstance(sampler, BalancedSampler):
        raise TypeError(f"sampler: expected a BalancedSampler, got {type(sampler).__name__}")
    state.attach_observer(lambda reducer: BalanceObserver(sampler, reducer))


class BalanceObserver(ReducerObserver):
    """Measures the steps of a reducer for a `BalancedSampler`, and weights gradients by its sizes."""

    def __init__(self, sampler: BalancedSampler, reducer: Reducer) -> None:
        self._sampler, self._reducer = sampler, reducer
        self._streams: Streams | None = None
        self._begin: Any = None  # of the step: the end of the one before
        self._computed: Any = None
        self._samples = 1  # of this step
        self._steps: list[tuple[Any, Any, Any, int]] = []

    def begin_pass(self, step: int, streams: Streams) -> None:
        """Weight the gradients of this step."""
        self._streams = streams
        self._samples = self._sampler.next_samples()
        self._reducer.set_samples(self._samples, self._sampler.batch_size)

    def end_compute(self) -> None:
        """Take the time at which the gradients are computed."""
        assert self._streams is not None
        self._computed = self._streams.mark()

    def end_pass(self, step: int, buckets: list[InFlightBucket]) -> None:
        """Take the time of the end, and give the sampler the medians of ``every`` steps."""
        assert self._streams is not None
        end = self._streams.mark()
        if self._begin is not None:
            self._steps.append((self._begin, self._computed, end, self._samples))
        self._begin = end
        if len(self._steps) < self._sampler.every:
            return
        streams, steps = self._streams, self._steps
        self._steps = []
        if not streams.query(end):
            streams.synchronize(end)
        each = [streams.elapsed(begin, computed) / samples for begin, computed, _, samples in steps]
        sample_s = statistics.median(each)
        wait_s = statistics.median(streams.elapsed(computed, done) for _, computed, done, _ in steps)
        on_cpu = streams.device.type == "cpu"
        self._sampler.update(sample_s, wait_s, None if on_cpu else streams.device)
        self._begin = self._streams.mark()  # without what the exchange took
