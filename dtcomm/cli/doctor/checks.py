"""Checks of ``dtcomm doctor``.

Most look at versions, the build, the CPU, CUDA, cores and environment variables. `engine` starts a few ranks, which
reduce tensors with known sums, with and without compression.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import os
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dtcomm import _C
from dtcomm.measure import processor
from dtcomm.runtime.cuda_peer.launch import RAN_BETWEEN_GPUS
from dtcomm.system import allowed_cores

OK, NOTE, FAIL = "ok", "note", "FAIL"
UNUSED_FUSED_KERNELS = "fused kernels have not run between GPUs yet: only DTCOMM_RUNTIME=peer uses them"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """Result of a check: a ``summary`` to print and ``details`` (JSON values) for programs."""

    name: str
    summary: str
    status: str = OK
    details: dict[str, Any] = dataclasses.field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "status": self.status, "summary": self.summary, **self.details}


AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vbmi", "avx512_vbmi2")
# names in /proc/cpuinfo of the features that the native kernels use
FEATURES = ("f16c", "avx2", "bmi1", "bmi2", *AVX512, "asimd")


def versions() -> Check:
    """Report the versions of dtcomm, torch, Python and the system."""
    import dtcomm

    details = {
        "dtcomm": dtcomm.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    software = [f"dtcomm {details['dtcomm']}", f"torch {details['torch']}", f"Python {details['python']}"]
    return Check(
        name="versions",
        summary=", ".join([*software, details["system"]]),
        details=details,
    )


def build() -> Check:
    """Report how the native module was compiled and where it was loaded from."""
    info: dict[str, str] = _C.build_info()
    details = {**info, "file": str(_C.__file__)}
    note = f"; sanitizers: {info['sanitize']}" if info["sanitize"] else ""
    return Check(
        name="build",
        status=NOTE if note else OK,
        summary=f"{info['compiler']} {info['type']} for {info['processor']}{note}; {info['flags']}",
        details=details,
    )


def kernels() -> Check:
    """Report the CPU's features and the kernels in use."""
    from dtcomm.kernels import ops

    model, flags = processor()
    features = [name for name in FEATURES if name in flags]
    names, current = ops.available(), ops.current()
    best = names[0]
    status = OK if current == best else NOTE
    forced = "" if current == best else f" (forced; the fastest is {best})"
    return Check(
        name="kernels",
        status=status,
        summary=f"{current} in use{forced}, of {', '.join(names)}; {model}: {' '.join(features) or 'no vectors'}",
        details={"current": current, "available": list(names), "cpu": model, "features": features},
    )


def cuda() -> Check:
    """Check whether ``_cuda`` was built and sees a device."""
    if importlib.util.find_spec("dtcomm._cuda") is None:
        card = Path("/dev/nvidiactl").exists()
        summary = "_cuda was not built" + (
            ", though this machine has a GPU: build again with nvcc on PATH" if card else ""
        )
        return Check(name="cuda", status=NOTE if card else OK, summary=summary, details={"built": False})
    from dtcomm import _cuda

    platform_info = _cuda.platform()
    details = {"built": True, **platform_info}
    built = f"_cuda built with CUDA {_version(platform_info['runtime'])}"
    if not platform_info["devices"]:
        reason = platform_info["error"] if platform_info["driver"] else "no NVIDIA driver"
        return Check(name="cuda", summary=f"{built}; no device: {reason}", details=details)
    rule = "" if RAN_BETWEEN_GPUS else f"; {UNUSED_FUSED_KERNELS}"
    devices = ", ".join(
        f"{device['name']} (sm_{device['capability'][0]}{device['capability'][1]}, {device['memory'] >> 30} GiB)"
        for device in platform_info["devices"]
    )
    return Check(
        name="cuda",
        summary=f"{built}, driver for CUDA {_version(platform_info['driver'])}; {devices}{rule}",
        details=details,
    )


def ucx() -> Check:
    """Report whether ranks of different hosts can use UCX, and its transports and devices."""
    from dtcomm.runtime.bootstrap import between_hosts

    try:
        library = between_hosts.open_ucx()
    except RuntimeError as error:
        return Check(name="ucx", summary=f"between hosts TCP: {error}", details={"available": False})
    details = {"available": True, "version": library.version, "devices": library.devices}
    rdma = library.rdma_devices
    if rdma:
        used = f"used between hosts if all ranks have an RDMA device, here {', '.join(rdma)}"
    else:
        used = f"no RDMA device, so TCP is used between hosts unless DTCOMM_TRANSPORT=ucx; {', '.join(library.devices)}"
    return Check(name="ucx", summary=f"UCX {library.version}: {used}", details=details)


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def cores(ranks: int) -> Check:
    """Check whether each of ``ranks`` ranks has a core."""
    from dtcomm.runtime.native.copy_policy import usable_cores

    usable, total = usable_cores(), os.cpu_count() or 1
    oversubscribed = ranks > usable
    verdict = "they share cores; waiting ranks yield" if oversubscribed else "one core each"
    return Check(
        name="cores",
        status=NOTE if oversubscribed else OK,
        summary=f"{usable} of {total} usable; {ranks} ranks: {verdict}",
        details={"usable": usable, "total": total, "ranks": ranks, "oversubscribed": oversubscribed},
    )


def variables() -> Check:
    """Check that the DTCOMM_ variables that are set are known and valid."""
    from dtcomm import env
    from dtcomm.runtime import emulated_link

    variables = {
        name: env.printable(name, value)
        for name, value in sorted(os.environ.items())
        if name.startswith("DTCOMM_")
    }
    unknown = env.unknown()
    wrong = []
    for name in set(variables) - set(unknown):
        try:
            env.get(name)
            if name == "DTCOMM_EMULATE_LINK":
                emulated_link.links()
        except ValueError as error:
            wrong.append(str(error))
    text = ", ".join(f"{name}={value}" for name, value in variables.items()) or "none set"
    if wrong:
        text = "; ".join(sorted(wrong))
    elif unknown:
        text += f"; not known to dtcomm: {', '.join(unknown)}"
    status = FAIL if wrong else NOTE if unknown else OK
    return Check(
        name="variables", status=status, summary=text, details={"set": variables, "unknown": unknown}
    )


NUMEL = (1 << 18) + 77  # 1 MiB of fp32 and an odd tail
REPEATS = 20
TRIAL_CALLS = 400  # after which the engine has tried its variants
TIMEOUT_SECONDS = 30.0


def engine(ranks: int) -> Check:
    """Check all_reduce with ``none`` (exact) and ``int8`` (bounded error, equal bits on all ranks) on local ranks."""
    from dtcomm.launch.ranks import run_ranks

    started = time.perf_counter()
    reports: list[dict[str, Any]] = run_ranks(self_test, ranks, timeout=TIMEOUT_SECONDS)
    seconds = time.perf_counter() - started
    first = reports[0]
    problems = [f"rank {rank}: {text}" for rank, report in enumerate(reports) for text in report["problems"]]
    if len({report["digest"] for report in reports}) != 1:
        problems.append("ranks ended with different bits")
    details = {**first, "problems": problems, "seconds": seconds}
    if problems:
        return Check(name="engine", status=FAIL, summary="; ".join(problems), details=details)
    native = first["runtime"] in ("native", "none")
    times = ", ".join(f"{codec} {us:.0f} µs" for codec, us in first["median_us"].items())
    served = first["runtime"] if native else f"{first['runtime']}, because {first['reason']}"
    summary = (
        f"{ranks} ranks, {served}: sums exact with none, within int8's bound, the same bits on all ranks; "
        f"1 MiB all_reduce: {times}, {describe_choices(first['choices'])}; "
        f"{describe_threads(first['threads'])}; "
        f"{describe_placement(round_trip_ns(allowed_cores()[:2]))}; {describe_single_copy(first['single_copy'])}"
    )
    return Check(name="engine", status=OK if native else NOTE, summary=summary, details=details)


def describe_choices(choices: list[dict[str, Any]]) -> str:
    """Describe what trials chose for the uncompressed all_reduce."""
    for choice in choices:
        if choice["settled"] and " none " in choice["size_class"]:
            threads = ", several threads" if choice["parallel"] else ""
            stores = "non-temporal" if choice["stream_payload"] else "ordinary"
            copies = "one copy" if choice["single_copy"] else f"two copies with {stores} stores"
            pieces = f"pieces of {choice['piece_bytes'] // 1024} KiB"
            return f"chosen in {choice['trials']} trials: {copies}, {pieces}{threads}"
    return "nothing chosen by trials"


def describe_threads(threads: int) -> str:
    """Describe how many threads a rank uses."""
    return "one thread a rank" if threads == 1 else f"up to {threads} threads a rank"


def round_trip_ns(cpus: Sequence[int]) -> float | None:
    """Return the nanoseconds of a cache line's round trip, or None without two usable CPUs. Takes 1 to 3 ms."""
    if len(cpus) < 2:
        return None
    nanoseconds = _C.round_trip_ns(cpus[0], cpus[1], 20, 100)
    return nanoseconds if nanoseconds >= 0 else None


def describe_placement(nanoseconds: float | None) -> str:
    """Describe where two ranks run, given the round trip of a cache line between their cores."""
    if nanoseconds is None:
        return "cache-line round trip not measured (one core)"
    if nanoseconds < 60:
        where = "one core, or one L3"
    else:
        where = "one L3" if nanoseconds < 250 else "different L3 caches or sockets"
    return f"cache-line round trip {nanoseconds:.0f} ns ({where})"


def describe_single_copy(method: str) -> str:
    """Describe whether receivers read the senders' memory."""
    if method == "process_vm_readv":
        return "tensors may be copied once, directly from the sender's memory"
    return f"every tensor is staged ({method})"


def self_test(rank: int, world_size: int) -> dict[str, Any]:
    """Run the self-test on one rank and return its results."""
    from dtcomm import collectives

    inputs = [_integers(other) for other in range(world_size)]
    exact = inputs[rank].clone()
    collectives.all_reduce(exact)
    problems = [] if torch.equal(exact, sum(inputs, torch.zeros(NUMEL))) else ["none: the sum is wrong"]

    seeded = [torch.Generator().manual_seed(other) for other in range(world_size)]
    noise = [torch.randn(NUMEL, generator=generator) for generator in seeded]
    total = sum(noise, torch.zeros(NUMEL))
    lossy = noise[rank].clone()
    collectives.all_reduce(lossy, codec="int8")
    # The encodings of the inputs and of the sum are each off by at most half a step of 1/127 of their largest element.
    # 2 % are added because scales are rounded to bf16 and the decoded sum may exceed the true one.
    largest = sum(float(x.abs().max()) for x in noise) + float(total.abs().max())
    bound = largest / 254 * 1.02
    error = float((lossy - total).abs().max())
    if error > bound:
        problems.append(f"int8: an element is off by {error:.3g}, the bound is {bound:.3g}")
    # Until the engine has tried its variants, so that the times are those of later calls.
    zeros = torch.zeros(NUMEL)
    for _ in range(TRIAL_CALLS):
        collectives.all_reduce(zeros)
    if world_size > 1 and error == 0:
        problems.append("int8: nothing was lost, so nothing was compressed")

    info = collectives.info()
    return {
        "problems": problems,
        "digest": hashlib.sha256(lossy.numpy().tobytes()).hexdigest(),
        "median_us": {codec: _median_us(noise[rank], codec) for codec in ("none", "int8")},
        "runtime": info["runtime"],
        "reason": info["reason"],
        "single_copy": str(info.get("single_copy", "ranks share no memory")),
        "choices": info.get("choices", []),
        "threads": info.get("threads", 1),
    }


def _integers(rank: int) -> torch.Tensor:
    """Return small integers, whose sum is exact in any order."""
    return ((torch.arange(NUMEL) * 31 + rank * 17) % 251).float()


def _median_us(x: torch.Tensor, codec: str) -> float:
    from dtcomm import collectives

    work, times = x.clone(), []
    for _ in range(REPEATS):
        work.copy_(x)
        started = time.perf_counter()
        collectives.all_reduce(work, codec=codec)
        times.append((time.perf_counter() - started) * 1e6)
    return statistics.median(times)
