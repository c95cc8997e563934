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
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import P2POp, batch_isend_irecv
from torch.nn.parallel import DistributedDataParallel

VERBS = ("encode", "decode", "reduce_encode")
WARM_UP_CALLS = 8  # DDP rebuilds its buckets after the first step
MAX_SETTLING_CALLS = 500
ALIGNING_CALLS = 2  # before each measurement: they align the ranks and warm the caches
REPETITIONS = 100
UNTIMED_STEPS = 3  # of the hook, before a step whose launches are counted


class EqualBuckets(torch.nn.Module):
    """Parameters of ``numel`` floats, one per bucket, with a backward pass that costs little."""

    def __init__(self, buckets: int, numel: int) -> None:
        super().__init__()
        # Matrices, because the default policy does not compress vectors.
        self.weights = torch.nn.ParameterList(torch.randn(1, numel) for _ in range(buckets))

    def forward(self) -> torch.Tensor:
        """Return the sum of all weights."""
        return torch.stack([weight.sum() for weight in self.weights]).sum()


@contextmanager
def counted(fake: Any, counts: Counter[str]) -> Iterator[None]:
    """Count the kernels and operators that start on the fake device; views and empty tensors start nothing."""
    run, kernels = fake._run, fake._Kernels
    originals = {name: value for name, value in vars(kernels).items() if isinstance(value, staticmethod)}

    def run_operator(func: Any, args: Any, given: Any) -> Any:
        name = func.overloadpacket.__name__
        aliases = [argument.alias_info for argument in func._schema.arguments]
        if "empty" not in name and not any(alias is not None and not alias.is_write for alias in aliases):
            counts[name] += 1
        return run(func, args, given)

    def counting(name: str, kernel: Callable[..., object]) -> Callable[..., object]:
        def call(*args: Any, **given: Any) -> object:
            counts[f"kernel {name}"] += 1
            return kernel(*args, **given)

        return call

    for name, original in originals.items():
        setattr(kernels, name, staticmethod(counting(name, original.__func__)))
    fake._run = run_operator
    try:
        yield
    finally:
        fake._run = run
        for name, original in originals.items():
            setattr(kernels, name, original)


class Bucket:
    """The methods of `GradBucket` that a hook calls, for one matrix of a device."""

    def __init__(self, index: int, last: bool, parameter: torch.Tensor, memory: torch.Tensor) -> None:
        self._index, self._last, self._parameter, self._memory = index, last, parameter, memory

    def index(self) -> int:
        """Return the number of the bucket."""
        return self._index

    def is_last(self) -> bool:
        """Return whether it is the last one of a step."""
        return self._last

    def buffer(self) -> torch.Tensor:
        """Return the gradients as one vector."""
        return self._memory

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters."""
        return [self._parameter]

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients in the parameters' shapes."""
        return [self._memory.view(self._parameter.shape)]


class CheckoutRank:
    """The cases of one rank."""

    def __init__(self, rank: int, ranks: int, store: str) -> None:
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
        torch.set_num_threads(1)
        torch.manual_seed(rank)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        self._calls: dict[str, Callable[[], object]] = {}
        self._group: dist.ProcessGroup | None = None  # of backend "dtcomm"

    def origin(self) -> str:
        """Return the file that dtcomm was imported from."""
        import dtcomm

        return str(dtcomm.__file__)

    def prepare(self, name: str, kind: str, buckets: int, nbytes: int, codec: str, call: str) -> str:
        """Allocate the tensors of a case and run it several times; return the error if that fails, otherwise ""."""
        try:
            run = self._make(kind, buckets, nbytes, codec, call)
            for _ in range(WARM_UP_CALLS):
                run()
            if kind not in VERBS:
                self._settle(run, self._group if kind == "backend" else None)
        except (ValueError, TypeError, AttributeError, ImportError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        self._calls[name] = run
        return ""

    def _settle(self, call: Callable[[], object], group: dist.ProcessGroup | None) -> None:
        """Repeat a call until the first trials of its operations are over, which all ranks know alike."""
        import dtcomm

        if not self._calls:
            time.sleep(0.3)  # processes of the start before may still be ending
        for _ in range(MAX_SETTLING_CALLS):
            if all(choice["settled"] for choice in dtcomm.info(group).get("choices", [])):
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

    def launches(self, buckets: int, nbytes: int, codec: str) -> tuple[dict[str, int], str]:
        """Return how often a step of the hook on a fake CUDA device starts each kernel and operator, and the error."""
        try:
            return self._count_launches(buckets, nbytes, codec), ""
        except (ValueError, TypeError, AttributeError, ImportError, RuntimeError) as error:
            return {}, f"{type(error).__name__}: {error}"

    def _count_launches(self, buckets: int, nbytes: int, codec: str) -> dict[str, int]:
        import dtcomm.ddp
        from tests.support import fake_cuda_tensor
        from tests.support.fake_cuda_ranks import fake_cuda_rank
        from tests.support.stream_checker import RecordedStreams

        counts: Counter[str] = Counter()
        with fake_cuda_rank(RecordedStreams()), counted(fake_cuda_tensor, counts):
            parameters = {str(i): torch.zeros(64, nbytes // 256) for i in range(buckets)}
            state = dtcomm.ddp.DDPState(codec, parameters=parameters.items())
            held = [
                Bucket(
                    int(i), int(i) == buckets - 1, x, fake_cuda_tensor.to_fake_cuda(torch.randn(x.numel()))
                )
                for i, x in parameters.items()
            ]
            for _ in range(UNTIMED_STEPS + 1):
                counts.clear()
                for bucket in held:
                    dtcomm.ddp.hook(state, bucket)  # type: ignore[arg-type]
                state._reducer._end_pass()  # what backward's end calls; it has no public name
            launched = dict(counts)
        dtcomm.release()
        return launched

    def _make(self, kind: str, buckets: int, nbytes: int, codec: str, call: str) -> Callable[[], object]:
        if kind == "hook":
            return self._ddp_step(buckets, nbytes, codec)
        if kind in VERBS:
            return self._codec_verb(kind, nbytes, codec)
        if kind == "repeated":
            return self._repeated(nbytes, codec)
        if kind == "backend":
            return self._backend(call, nbytes)
        return self._collective(kind, nbytes, codec)

    def _tensors(self, nbytes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return two tensors that the ranks' shards fill, and a shard of the first one."""
        ranks = dist.get_world_size()
        numel = max(1, nbytes // 4 // ranks)
        whole = torch.randn(numel * ranks)
        return whole, torch.empty_like(whole), torch.randn(numel)

    def _collective(self, name: str, nbytes: int, codec: str) -> Callable[[], object]:
        import dtcomm

        tensor = torch.randn(nbytes // 4)
        whole, other, shard = self._tensors(nbytes)
        after, before = self._neighbours()
        calls: dict[str, Callable[[], object]] = {
            # an average in place stays finite
            "all_reduce": lambda: dtcomm.all_reduce(tensor, "avg", codec=codec),
            "reduce_scatter": lambda: dtcomm.reduce_scatter(shard, whole, codec=codec),
            "all_gather": lambda: dtcomm.all_gather(whole, shard, codec=codec),
            "all_to_all": lambda: dtcomm.all_to_all(other, whole, codec=codec),
            "broadcast": lambda: dtcomm.broadcast(tensor, 0, codec=codec),
            "sendrecv": lambda: dtcomm.sendrecv(whole, after, other, before, codec=codec),
        }
        return calls[name]

    def _repeated(self, nbytes: int, codec: str) -> Callable[[], object]:
        import dtcomm

        tensor = torch.randn(nbytes // 4)
        make: Any = getattr(dtcomm, "all_reduce_init", None)  # of older checkouts
        call = make(tensor, "avg", codec=codec) if make else None

        def repeat() -> None:
            for _ in range(REPETITIONS):
                if call:
                    call()
                else:
                    dtcomm.all_reduce(tensor, "avg", codec=codec)

        return repeat

    def _backend(self, name: str, nbytes: int) -> Callable[[], object]:

        if self._group is None:
            self._group = dist.new_group(backend="dtcomm")
        group = self._group
        tensor = torch.randn(nbytes // 4)
        whole, other, shard = self._tensors(nbytes)
        after, before = self._neighbours()

        def sendrecv() -> None:
            operations = [
                P2POp(dist.isend, whole, after, group=group),
                P2POp(dist.irecv, other, before, group=group),
            ]
            for work in batch_isend_irecv(operations):
                work.wait()

        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(shard, whole, group=group),
            "all_gather": lambda: dist.all_gather_into_tensor(whole, shard, group=group),
            "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
            "broadcast": lambda: dist.broadcast(tensor, 0, group=group),
            "sendrecv": sendrecv,
        }
        return calls[name]

    def _neighbours(self) -> tuple[int, int]:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        return (rank + 1) % ranks, (rank - 1) % ranks

    def _ddp_step(self, buckets: int, nbytes: int, codec: str) -> Callable[[], object]:
        import dtcomm.ddp

        model = DistributedDataParallel(
            EqualBuckets(buckets, nbytes // 4), bucket_cap_mb=nbytes / 2**20, gradient_as_bucket_view=True
        )
        model.register_comm_hook(dtcomm.ddp.DDPState(codec), dtcomm.ddp.hook)
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
