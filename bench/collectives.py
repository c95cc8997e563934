"""Compare every collective of dtcomm with Gloo and Open MPI on one host, and all_reduce with more peers.

python -m bench.collectives [--ranks 2 4] [--sizes 1K 64M] [--collectives NAMES] [--peers NAMES] [--dtype bfloat16]
                            [--repeat 7] [--quick] [--json FILE]

Sums of fp32 if not told otherwise, root 0. A size is that of all shards together if every rank has one, as in
nccl-tests. "torch on dtcomm" is the call of torch.distributed on backend "dtcomm", so what the backend costs;
"dtcomm.empty" uses tensors in the ranks' shared memory. all_reduce is also compared with DeepSpeed, oneCCL, a
hand-written all-reduce (the yardstick) and the memory floor: the fastest of three ways to read and write as many bytes
as the message has. Open MPI, the yardstick and the floor know fp32 only, and are the fastest of their settings.
Results are checked; the exit status is 1 if one is wrong.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import torch
import torch.distributed as dist

from bench.common import harness, mpi, native, peers, report
from bench.common.harness import Measure
from bench.common.native import Segment, Tuning, Yardstick, tuning
from bench.common.pool import Pool, pin
from bench.common.ranks import contestant, rank_pool
from dtcomm.cli.perf.backend import CollectiveCall
from dtcomm.cli.perf.collectives import COLLECTIVES
from dtcomm.cli.perf.libraries import Gloo, find_backend
from dtcomm.measure import exact_inputs

KB, MB = 1 << 10, 1 << 20
SIZES = [KB, 64 * KB, MB, 16 * MB, 64 * MB]
PINGPONG = "pingpong"  # ranks 2k and 2k + 1 send each other a message by turns
GROUPS = ("gloo", "backend", "empty", "mpi", "deepspeed", "oneccl", "yardstick")
RING = 8 * MB


class OnDtcomm(Gloo):
    """The calls that Gloo gets, on a group of torch.distributed's backend "dtcomm"."""

    def group_backend(self) -> str:
        """Return the name of the backend."""
        return "dtcomm"


@functools.cache
def _backend(name: str) -> Any:
    return find_backend(name)(120)


def make_collective(
    rank: int, ranks: int, name: str, *, collective: str, numel: int, backend: str, shared: bool, dtype: str
) -> Callable[[], object]:
    """Return a collective's call, after a check of its result on inputs whose result is exact."""
    import dtcomm

    def tensor(count: int) -> torch.Tensor:
        made: Callable[..., torch.Tensor] = dtcomm.empty if shared else torch.empty
        return made(count, dtype=getattr(torch, dtype))

    known = COLLECTIVES.get(collective)
    if known is None:
        return _pingpong(rank, backend, tensor(numel), tensor(numel))
    full = numel * (ranks if known.sharded else 1)
    output = tensor(numel if collective in ("reduce_scatter", "scatter") else full)
    given = output if known.in_place_api else tensor(full if collective in exact_inputs.SHARDS_IN else numel)
    call = CollectiveCall(collective=collective, output=output, input=given, op="sum")
    run: Callable[[], object] = _backend(backend).bind_with_copy(call)
    case: dict[str, Any] = {"rank": rank, "world_size": ranks, "seed": 1}
    given.copy_(exact_inputs.inputs(collective, numel, **case))
    run()
    expected = exact_inputs.expected(collective, numel, **case)
    if not torch.equal(output[: expected.numel()].float(), expected.float()):
        raise AssertionError(f"{name}: {collective} of {numel} elements is wrong on rank {rank}")
    given.fill_(1.0)
    return run


def _pingpong(rank: int, backend: str, sent: torch.Tensor, received: torch.Tensor) -> Callable[[], object]:
    import dtcomm

    send: Any = dtcomm.send if backend == "dtcomm" else dist.send
    receive: Any = dtcomm.recv if backend == "dtcomm" else dist.recv
    group = None if backend == "dtcomm" else _backend(backend).group
    sent.fill_(1.0)

    def first() -> None:
        send(sent, rank ^ 1, group=group)
        receive(received, rank ^ 1, group=group)

    def second() -> None:
        receive(received, rank ^ 1, group=group)
        send(sent, rank ^ 1, group=group)

    return second if rank % 2 else first


class YardRank:
    """A rank of the hand-written all-reduce, with private buffers at addresses that differ in the cache sets."""

    def __init__(self, rank: int, ranks: int, address: tuple[str, int, int, int], largest: int) -> None:
        pin(rank)
        self.yardstick = Yardstick(address, rank)
        self.x = native.library().yardstick_allocate(largest, (2 * rank + 1) * native.SKEW)
        self.y = native.library().yardstick_allocate(largest, (2 * rank + 2) * native.SKEW)

    def measure(self, algorithm: int, numel: int, settings: dict[str, int], warm: int, iters: int) -> float:
        """Return the seconds of a call on this rank."""
        return self.yardstick.time(
            algorithm, self.x, self.y, numel, Tuning(**settings), warm=warm, iters=iters
        )

    def close(self) -> None:
        """Unmap the segment."""
        self.yardstick.close()


#: Settings that were fastest at some size in a sweep: algorithm, arguments of `tuning`, largest message.
YARDSTICKS: dict[str, tuple[int, dict[str, int], int]] = {
    "one-shot": (native.ONE_SHOT, {}, 128 * KB),
    "one-shot, non-temporal": (native.ONE_SHOT, {"stream_stage": 1}, 128 * KB),
    "two-shot 1 MB x 2": (native.TWO_SHOT, {"piece_bytes": MB, "slots": 2}, 4 * MB),
    "two-shot 256 KB x 4": (native.TWO_SHOT, {}, 1 << 40),
    "two-shot 256 KB x 8": (native.TWO_SHOT, {"slots": 8}, 1 << 40),
    "two-shot 512 KB x 4, non-temporal": (
        native.TWO_SHOT,
        {"piece_bytes": 512 * KB, "stream_result": 1},
        1 << 40,
    ),
}
FLOORS = {"copy": native.COPY, "non-temporal copy": native.STREAMING_COPY, "in place": native.UPDATE}


class Peers:
    """The ranks of all contestants, on which calls are built one case at a time."""

    def __init__(self, stack: ExitStack, ranks: int, groups: list[str], dtype: str, largest: int) -> None:
        self.ranks, self.dtype, self._groups = ranks, dtype, groups
        self._pools = {"dtcomm": stack.enter_context(rank_pool(ranks))}
        if "gloo" in groups:  # bound to one core, Gloo's caller and its I/O thread get in each other's way
            self._pools["gloo"] = stack.enter_context(rank_pool(ranks, pinned=False))
        for peer, (why_not, _) in peers.PEERS.items():
            if peer in groups and (reason := why_not()):
                print(reason)
            elif peer in groups:
                self._pools[peer] = stack.enter_context(rank_pool(ranks, pinned=peer != "oneccl"))
        self._mpi: dict[str, mpi.MpiRanks] = {}
        if "mpi" in groups and dtype == "float32":
            if reason := mpi.why_unavailable() or "":
                print(reason)
            else:
                for setting in mpi.SETTINGS:
                    self._mpi[setting] = stack.enter_context(closing(mpi.MpiRanks(setting, ranks)))
        self._yard: Pool | None = None
        if "yardstick" in groups and dtype == "float32":
            segment = stack.enter_context(closing(Segment.create(ranks, RING, largest)))
            self._yard = stack.enter_context(Pool(YardRank, ranks, address=segment.address, largest=largest))

    def measures(self, collective: str, numel: int, size: int) -> dict[str, list[Measure]]:
        """Return by contestant its settings; Gloo, if it is measured, comes first."""
        case: dict[str, Any] = {"collective": collective, "numel": numel, "dtype": self.dtype}
        for pool in self._pools.values():
            pool.call("forget")
        found: dict[str, list[Measure]] = {}
        for name, pool, backend, shared in (
            ("gloo", "gloo", "gloo", False),
            ("dtcomm", "dtcomm", "dtcomm", False),
            ("dtcomm.empty", "dtcomm" if "empty" in self._groups else "", "dtcomm", True),
            (
                "torch on dtcomm",
                "dtcomm" if "backend" in self._groups else "",
                "bench.collectives:OnDtcomm",
                False,
            ),
        ):
            if pool in self._pools:
                settle = name != "gloo"
                measure = contestant(
                    self._pools[pool],
                    name,
                    make_collective,
                    settle=settle,
                    backend=backend,
                    shared=shared,
                    **case,
                )
                found[name] = [measure]
        if self._mpi and collective != PINGPONG:
            found["mpi"] = [
                functools.partial(_of_mpi, ranks, collective, numel) for ranks in self._mpi.values()
            ]
        if collective != "all_reduce":
            return found
        for peer in peers.PEERS:
            if peer in self._pools:
                arguments = {"peer": peer, "numel": numel, "dtype": self.dtype}
                found[peer] = [contestant(self._pools[peer], peer, peers.make_all_reduce, **arguments)]
        if self._yard is not None:
            found["yardstick"] = [
                functools.partial(
                    _of_yard, self._yard, algorithm, numel, tuning(ranks=self.ranks, **settings)
                )
                for algorithm, settings, largest in YARDSTICKS.values()
                if size <= largest
            ]
            found["floor"] = [
                functools.partial(_of_yard, self._yard, algorithm, numel, tuning(ranks=self.ranks))
                for algorithm in FLOORS.values()
            ]
        return found


def _of_mpi(ranks: mpi.MpiRanks, collective: str, numel: int, calls: int) -> float:
    return max(ranks.measure(collective=collective, numel=numel, warm=1, iters=calls))


def _of_yard(pool: Pool, algorithm: int, numel: int, settings: Tuning, calls: int) -> float:
    arguments: dict[str, Any] = {"settings": settings.as_dict(), "warm": 1, "iters": calls}
    return max(pool.call("measure", algorithm=algorithm, numel=numel, **arguments))


def fastest(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return the times of the fastest setting of each contestant; names are ``contestant#setting``."""
    best: dict[str, list[float]] = {}
    for key, series in times.items():
        name = key.partition("#")[0]
        if name not in best or statistics.median(series) < statistics.median(best[name]):
            best[name] = series
    return best


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = harness.parser(__doc__, rounds=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=report.parse_size, nargs="+", default=SIZES)
    parser.add_argument("--collectives", nargs="+", choices=[*COLLECTIVES, PINGPONG], metavar="NAME")
    parser.add_argument("--peers", nargs="*", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = harness.parse(parser, arguments)
    names = options.collectives or [*COLLECTIVES, PINGPONG]
    if options.quick:
        options.ranks, options.sizes = options.ranks[:1], [64 * KB]
    results = harness.Results(options)
    for ranks in options.ranks:
        with ExitStack() as stack:
            measured = Peers(stack, ranks, options.peers, options.dtype, max(options.sizes))
            for collective in names:
                for size in options.sizes:
                    width = getattr(torch, options.dtype)
                    known = COLLECTIVES.get(collective)
                    numel = known.count(size, width, ranks) if known else size // width.itemsize
                    settings = {
                        f"{name}#{i}": measure
                        for name, variants in measured.measures(collective, numel, size).items()
                        for i, measure in enumerate(variants)
                    }
                    times = harness.take_turns(settings, options.repeat)
                    case = {"collective": collective, "bytes": size, "ranks": ranks, "dtype": options.dtype}
                    title = f"{collective} of {report.size_name(size)}, {ranks} ranks, {options.dtype}"
                    results.add(title, case, fastest(times))
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
