"""The steps of a visit to a GPU, each a program: python -m bench.common.visit_steps NAME --json FILE."""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dtcomm
from dtcomm import ddp
from dtcomm.collectives import groups as collective_groups
from dtcomm.errors import DtcommError
from dtcomm.launch.ranks import run_ranks
from dtcomm.runtime import communicator
from dtcomm.runtime.bootstrap import Connection
from dtcomm.runtime.torchdist.runtime import TorchDistRuntime
from dtcomm.runtime.torchdist.transport import Transport
from dtcomm.runtime.types import Runtime
from dtcomm.streams import HostStreams, streams_of

WORLD = 8  # ranks of the training step, one of which is real
MIB = 1 << 20


class Found:
    """What a step finds, written to its file as it comes.

    Args:
        path: The file.
        seconds: When the step should stop measuring.
        rehearse: Whether the device is a fake one.
    """

    def __init__(self, path: Path, seconds: float, rehearse: bool) -> None:
        self.rehearse = rehearse
        self.path, self._end = path, time.monotonic() + seconds
        self._facts: dict[str, Any] = {"lines": [], "rows": []}

    def left(self) -> float:
        """The seconds that are left."""
        return self._end - time.monotonic()

    def add(self, line: str, **row: Any) -> None:
        """Add a sentence and its figures."""
        print(line, flush=True)
        self._facts["lines"].append(line)
        if row:
            self._facts["rows"].append(row)
        self.path.write_text(json.dumps(self._facts, indent=1) + "\n")

    def device(self) -> torch.device:
        """The device that tensors are on."""
        return torch.device("cpu") if self.rehearse else torch.device("cuda", torch.cuda.current_device())


def synchronize(found: Found) -> None:
    if not found.rehearse:
        torch.cuda.synchronize()


# --- what the rest can do


def about(found: Found) -> None:
    from bench.common.memory_floor import time_calls
    from dtcomm.measure import make_clock, versions

    device = found.device()
    if not found.rehearse:
        from dtcomm import _cuda

        platform = _cuda.platform()
        if not torch.cuda.is_available() or not platform["devices"]:
            sys.exit(f"torch sees {torch.cuda.device_count()} CUDA devices, _cuda none: {platform['error']}")
        for index in range(torch.cuda.device_count()):
            peers = [i for i in range(torch.cuda.device_count()) if i != index]
            reached = [i for i in peers if torch.cuda.can_device_access_peer(index, i)]
            found.add(
                f"GPU {index}: {torch.cuda.get_device_name(index)}, reaches GPUs {reached or 'none'}",
                gpu=index,
            )
    found.add(", ".join(f"{name} {version}" for name, version in versions().items()))
    clock, size = make_clock(device), (1 if found.rehearse else 1024) * MIB
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = statistics.median(time_calls(clock, lambda: target.copy_(source)) for _ in range(10))
    rate = 2 * size / max(seconds, 1e-9)
    found.add(f"a copy reads and writes {rate / 1e12:.2f} TB/s", copy_bytes_per_s=rate)


# --- what a training step costs


class CopyTransport(Transport):
    """A network that takes the time of copies on the device, and brings zeros from all other ranks."""

    name = "copies"

    def __init__(self, sink: torch.Tensor) -> None:
        self._sink = sink
        self.calls = 0

    def all_to_all(
        self, output: torch.Tensor, output_sizes: Any, input: torch.Tensor, input_sizes: Any
    ) -> None:
        self.calls += 1
        self._sink[: input.numel()].copy_(input)
        output.zero_()

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        self.calls += 1
        for place in torch.split(output, input.numel()):
            if place.data_ptr() != input.data_ptr():
                place.copy_(input)

    def send_recv(self, sends: Any, receives: Any, checksum: bool, context: str) -> None:
        self.calls += 1
        for message in sends:
            self._sink[: message.payload.numel()].copy_(message.payload)
        for message in receives:
            message.payload.zero_()

    def wait(self, handle: Any) -> None: ...

    def describe(self, device: torch.device) -> str:
        return self.name


class AloneBootstrap:
    """Rank 0 of WORLD ranks, which are alone on their hosts and do not exist."""

    tuning_table = links = ""
    reason, epoch = "one rank alone", 0

    def __init__(self, runtime: Runtime) -> None:
        self.names = [f"rank {rank}" for rank in range(WORLD)]
        self.groups = tuple((rank,) for rank in range(WORLD))
        self.runtime: Runtime | None = runtime

    def join(self) -> None: ...


def connect_alone(transport: CopyTransport) -> None:
    """Let later communicators have no other ranks than this one."""

    def make(made: Any, *_: Any) -> Connection:
        streams = HostStreams() if made.device is None else streams_of(made.device)
        return Connection(
            lambda: timedelta(seconds=60),
            streams,
            lambda deadline: made.join(AloneBootstrap(TorchDistRuntime(transport, streams, 0))),
            made.connected,
            lambda: made.runtime.close(),
        )

    communicator.connect_with(make)
    collective_groups.Announcement.require_all = lambda *_: None  # type: ignore[method-assign]


def launch_each_alone() -> None:
    """Launch a kernel for every parameter and peer, as before calls were grouped."""
    from dtcomm.kernels import eager

    def one_by_one(kernel: str, group: Any, device: torch.device) -> Callable[[Any, int], None]:
        def run(tensors: Any, seed: int) -> None:
            for call in group.calls:
                eager.run_single(kernel, group, call, tensors, seed)

        return run

    eager.prepare = one_by_one


def training(found: Found) -> None:
    """A step of GPT-2 124M with the hook's real host path, and a copy instead of the network."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend)

    cases: list[tuple[str, bool]] = [("", False), ("none", False), ("int8", False), ("int8", True)]
    cases += [("int4", False), ("int4", True), ("int8 alone", False)]  # the last: kernels are not grouped
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=dist.HashStore())
    device, alone = found.device(), 0.0
    transport = CopyTransport(
        torch.empty((2 if found.rehearse else 200) * MIB, dtype=torch.uint8, device=device)
    )
    connect_alone(transport)
    for name, guarded in cases:
        spec, _, kernels = name.partition(" ")
        if kernels:
            launch_each_alone()
        step, state = training_step(spec, guarded, found)
        for _ in range(3):
            step()
        synchronize(found)
        times, hosts, transport.calls = [], [], 0
        for _ in range(2 if found.rehearse else 15):
            began = time.perf_counter()
            step()
            hosts.append(time.perf_counter() - began)
            synchronize(found)
            times.append(time.perf_counter() - began)
        median, host = statistics.median(times) * 1e3, statistics.median(hosts) * 1e3
        alone = alone or median
        label = (
            f"{spec or 'no hook'}{', guarded' if guarded else ''}{', one launch a slice' if kernels else ''}"
        )
        found.add(
            f"{label}: {median:.2f} ms a step ({median - alone:+.2f}), host {host:.2f} ms, "
            f"{transport.calls / len(times):.0f} calls of the network",
            case=label,
            median_ms=round(median, 3),
            added_ms=round(median - alone, 3),
            host_ms=round(host, 3),
            calls=transport.calls / len(times),
        )
        if state is not None:
            dtcomm.release()
        if found.left() < 8:
            found.add("the rest did not fit into the time")
            raise SystemExit(3)
    dist.destroy_process_group()


def training_step(spec: str, guarded: bool, found: Found) -> tuple[Callable[[], None], Any]:
    """A function that makes a step, and the hook's state."""
    from torch.nn.parallel import DistributedDataParallel

    from dtcomm.cli.demo.train import GPT, ModelShape, cross_entropy

    device = found.device()
    gpt2 = ModelShape(vocabulary=50257, context=1024, layers=12, width=768, heads=12)
    shape = ModelShape(vocabulary=64, context=16, layers=1, width=64) if found.rehearse else gpt2
    model = GPT(shape)
    model.head.weight = model.symbols.weight
    wrapped = DistributedDataParallel(model.to(device), init_sync=False)
    state = None
    if spec:
        state = ddp.compress(wrapped, spec, feedback=True, guard=ddp.Guard() if guarded else None)
    else:
        wrapped.register_comm_hook(None, leave_as_it_is)
    symbols = torch.randint(shape.vocabulary, (2 if found.rehearse else 8, shape.context), device=device)
    autocast = nullcontext() if found.rehearse else torch.autocast("cuda", torch.bfloat16)

    def step() -> None:
        wrapped.zero_grad()
        with autocast:
            loss = cross_entropy(wrapped, symbols, symbols)
        loss.backward()

    return step, state


def leave_as_it_is(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook that communicates nothing."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


# --- kernels


def profile(found: Found) -> None:
    """The kernels that `ncu` watches, few times each."""
    from bench.common.virtual_ranks import VirtualRanks
    from dtcomm.kernels import cuda
    from dtcomm.kernels.calls import Combine

    numel = 4096 if found.rehearse else 16 * MIB
    for spec in ("int8", "none"):
        virtual = VirtualRanks(2 if found.rehearse else WORLD, "cuda")
        plan = virtual.plan("all_reduce", numel, torch.float32, spec, algorithm="two_shot")
        xs = [torch.ones(numel, device="cuda") for _ in range(virtual.ranks)]
        virtual.run(plan, xs, xs)
        virtual.check()
        codec = dtcomm.codec(spec)
        payload = torch.empty(codec.wire_bytes(numel), dtype=torch.uint8, device="cuda")
        cuda.combine(Combine(codec=codec, numel=numel, dtype=torch.float32, local=xs[0], payload_out=payload))
        synchronize(found)
        found.add(f"two_shot and encode of {numel} elements in {spec}: see profile.csv")


def kernels(found: Found) -> None:
    """`bench.gpu`: codec kernels of the first tier, then fused collectives."""
    from bench import gpu

    first_tier = ["int8", "fp8_e4m3", "int4", "none", "bf16"]
    parts = {"kernels": (["--codecs", *first_tier, "--mib", "64"], 0.45), "fused": ([], 0.9)}
    for part, (options, share) in parts.items():
        file = found.path.with_name(f"gpu_{part}.json")
        options = [*options, "--parts", part, "--seconds", str(found.left() * share), "--repeat", "5"]
        if found.rehearse:
            options += ["--device", "emulator", "--quick", "--codecs", "int8"]
        if gpu.main([*options, "--json", str(file)]):
            raise SystemExit(1)
        result = json.loads(file.read_text())
        for row in result["rows"]:
            what = f"{row['codec'] or 'others'} {row['what']} of {row['bytes']} bytes, {row['dtype']}, {row['name']}"
            found.add(f"{what}: {row['median_us']} us, floor {row.get('floor')}", **row)
        if result["cut"]:
            found.add(f"no time was left for: {'; '.join(map(str, result['cut']))}")


def golden(found: Found) -> None:
    """Every kernel beside the CPU's, in one process; the most used codecs first."""
    from dtcomm.codecs import codec
    from dtcomm.codecs.base import FLOAT_TYPES
    from tests.cuda import test_device, test_fused
    from tests.unit.kernels.inputs import floats

    first = [codec(spec) for spec in ("int8", "fp8_e4m3", "int4", "none", "bf16")]
    codecs = list(dict.fromkeys([*first, *test_device.FEW, *test_device.EVERYTHING]))
    if found.rehearse:
        codecs = first
    compared = 0
    for collective in test_fused.COLLECTIVES:
        for ranks in (2,) if found.rehearse else (2, 3, 8):
            test_fused.test_virtual_ranks_match_engine(
                collective, torch.bfloat16 if ranks == 3 else torch.float32, ranks
            )
            compared += 1
    found.add(f"{compared} kinds of fused collectives have the engine's bytes", fused=compared)
    compared = 0
    for number, chosen in enumerate(codecs):
        for dtype in FLOAT_TYPES if number < len(first) else (torch.float32,):
            x = floats("nonfinite", 2 * chosen.granularity + 37, seed=1).to(dtype)
            for call in test_device.calls(chosen, x, counts=(1, 3, 8)):
                test_device.compare(call, shift=compared % 2)
                compared += 1
        if found.left() < 3:
            found.add(f"{len(codecs) - number - 1} of {len(codecs)} codecs did not fit into the time")
            raise SystemExit(3)
    found.add(f"{compared} calls of {len(codecs)} codecs have the CPU's bytes", calls=compared)


def sanitized(found: Found) -> None:
    """Kernels of every kind on tensors that are small enough for a sanitizer."""
    from tests.cuda import test_device, test_fused

    test_fused.test_sanitizer_sized_virtual_ranks()
    for spec in (
        "none",
        "int8",
        "int8:block=4096",
        "int4:rotate=hadamard",
        "fp8_e4m3",
        "mxfp4",
        "topk:ratio=0.25",
    ):
        test_device.test_sanitizer_sized_kernels(spec)
    found.add("fused collectives and kernels of 7 codecs ran")


def absent(found: Found) -> None:
    """A rank that does not come to a replayed graph is named, and replays end by themselves."""
    from dtcomm import _C
    from dtcomm.codecs import codec
    from dtcomm.runtime.cuda_peer.launch import CudaLauncher, FusedRanks, PeerBufferLayout
    from dtcomm.runtime.types import Buffers, OpSpec, TensorSpec

    layout = PeerBufferLayout(2)
    memory = [torch.zeros(_C.fused_bytes(2, layout), dtype=torch.uint8, device="cuda") for _ in range(2)]
    pad = memory[0][_C.MISSING_OFFSET :][:4].view(torch.int32)
    addresses, launcher = [tensor.data_ptr() for tensor in memory], CudaLauncher(torch.device("cuda"))
    local = 1
    if found.rehearse:  # the emulator has all ranks, and leaves one out
        local, launcher.absent = 2, 1  # type: ignore[attr-defined]
    first = FusedRanks(launcher, layout, addresses, [pad] * local, 0, local, timeout_ns=20_000_000)
    plan = first.prepare(
        OpSpec("all_reduce", "sum", (TensorSpec(5000, torch.float32, codec("int8")),), "two_shot")
    )
    x = torch.ones(5000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first.launch(plan, [[Buffers(x, x)]] * local)
    for replay in range(3):
        began = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        found.add(f"replay {replay}: {seconds * 1e3:.1f} ms, rank {int(pad) - 1} is missing", seconds=seconds)
        assert int(pad) == 2, "the missing rank is not named"


# --- between processes


def between(found: Found, body: Callable[..., Any], ranks: int, **env: str) -> list[Any]:
    """Run a function on ranks that have the devices in turn; NCCL allows several ranks on one since 2.30."""
    shared = found.rehearse or torch.cuda.device_count() < ranks
    if shared:
        env |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "1"}
        env |= {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    backend = "gloo" if found.rehearse else "cpu:gloo,cuda:nccl"
    device, variables = found.device().type, dict[str, str | None](env)
    return run_ranks(
        body, ranks, device, timeout=max(found.left(), 5), backend=backend, fresh=True, env=variables
    )


def choose_device(rank: int, device: str) -> None:
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())


def same_bits(rank: int, world_size: int, device: str) -> dict[str, Any]:
    """Whether DDP and FSDP have the same gradients on the device as on the CPU, and the times of a sum."""
    from tests.cuda.test_communication import ddp_gradients, fsdp_gradients

    choose_device(rank, device)
    result: dict[str, Any] = {}
    for body in (ddp_gradients, fsdp_gradients):
        pairs = zip(body(rank, world_size, device), body(rank, world_size, "cpu"), strict=True)
        result[body.__name__] = all(torch.equal(a, b) for a, b in pairs)
    x = torch.randn(6_553_600 if device == "cuda" else 1000, device=device)
    half = x.bfloat16()
    runs: dict[str, Callable[[], object]] = {
        "torch all_reduce fp32": lambda: dist.all_reduce(x),
        "torch all_reduce bf16": lambda: dist.all_reduce(half),
        "dtcomm int8": lambda: dtcomm.all_reduce(x, codec="int8"),
        "dtcomm fp8_e4m3": lambda: dtcomm.all_reduce(x, codec="fp8_e4m3"),
    }
    for name, run in runs.items():
        run()
        times = []
        for _ in range(5):
            dist.barrier()
            began = time.perf_counter()
            run()
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        result[name] = statistics.median(times) * 1e6
    result["info"] = str(dtcomm.info()["devices"]) if device == "cuda" else "rehearsed on the CPU"
    return result


def nccl(found: Found) -> None:
    """The default path between ranks."""
    devices = 0 if found.rehearse else torch.cuda.device_count()
    version = (2, 30) if found.rehearse else torch.cuda.nccl.version()
    if not found.rehearse and devices < 2 and version < (2, 30):
        sys.exit(f"one GPU and NCCL {version}: several ranks on one GPU need NCCL 2.30")
    for runtime in ("auto", "peer") if devices > 1 else ("auto",):
        results = between(found, same_bits, 2, DTCOMM_RUNTIME=runtime)
        for name, value in results[0].items():
            found.add(
                f"2 ranks, DTCOMM_RUNTIME={runtime}, {name}: {value}", what=name, runtime=runtime, value=value
            )
        assert all(value is not False for result in results for value in result.values()), (
            "other bits than the CPU's"
        )


def opposite_order(rank: int, world_size: int, device: str) -> bool:
    """Two groups, whose calls two ranks make in opposite order."""
    choose_device(rank, device)
    groups = [dist.new_group(backend=dist.get_backend()) for _ in range(2)]
    tensors = [torch.full((300_000,), float(rank + 1), device=device) for _ in groups]
    for group, x in zip(groups, tensors):
        dtcomm.all_reduce(x, codec="int8", group=group)  # connects, in one order
    for x in tensors:
        x.fill_(rank + 1)
    order = (0, 1) if rank == 0 else (1, 0)
    works = [dtcomm.all_reduce(tensors[i], codec="int8", group=groups[i], async_op=True) for i in order]
    for work in works:
        work.wait()
    return all(abs(float(x[-1]) - 3) < 0.1 for x in tensors)


def groups(found: Found) -> None:
    """Both runtimes, as far as there is peer memory."""
    for runtime in ("auto",) if found.rehearse else ("process_group", "peer"):
        try:
            assert all(between(found, opposite_order, 2, DTCOMM_RUNTIME=runtime)), "wrong sums"
        except DtcommError as error:
            found.add(f"DTCOMM_RUNTIME={runtime}: {error}", runtime=runtime, outcome=str(error))
            raise
        found.add(
            f"DTCOMM_RUNTIME={runtime}: two groups in opposite order ended", runtime=runtime, outcome="ended"
        )


PROGRAMS: dict[str, Callable[[Found], None]] = {
    **{step.__name__: step for step in (about, profile, training, kernels, golden, nccl, groups, absent)},
    "memcheck": sanitized,
    "racecheck": sanitized,
}
ON_FAKE_DEVICE = ("profile", "golden", "memcheck", "racecheck", "absent")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=list(PROGRAMS))
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    if options.rehearse and options.step in ON_FAKE_DEVICE:
        from tests.cuda import fake_device_plugin  # noqa: F401
    PROGRAMS[options.step](Found(options.json, options.seconds, options.rehearse))


if __name__ == "__main__":
    main()
