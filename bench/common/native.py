"""Compiles and calls the code in ``bench/native``: the hand-written all-reduce, the memory floor and the probe."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dtcomm import _C

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "bench" / "native"
BUILD = ROOT / "build" / "bench"
FLAGS = ["-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]

ONE_SHOT, TWO_SHOT, DIRECT, COPY, STREAMING_COPY, UPDATE, MEMCPY = range(7)
BOX_BYTES = 1 << 20
SKEW = 276 << 10


class Tuning(ctypes.Structure):
    """``Tuning`` of yardstick.cpp."""

    _fields_ = [
        (name, ctypes.c_uint32)
        for name in (
            "piece_bytes",
            "slots",
            "ahead",
            "behind",
            "stream_stage",
            "stream_slot",
            "stream_result",
            "spins",
            "yields",
        )
    ]

    def as_dict(self) -> dict[str, int]:
        """Return the fields by name."""
        return {name: getattr(self, name) for name, *_ in self._fields_}


def tuning(piece_bytes: int = 256 << 10, slots: int = 4, *, ranks: int = 2, **overrides: int) -> Tuning:
    """Return settings for pieces of ``piece_bytes`` in ``slots`` slots; waits spin briefly if ranks share cores."""
    crowded = ranks > (os.cpu_count() or 1)
    values = {
        "piece_bytes": piece_bytes,
        "slots": slots,
        "ahead": 1,
        "behind": 1 if slots > 2 else 0,
        "stream_stage": 0,
        "stream_slot": 0,
        "stream_result": 0,
        "spins": 64 if crowded else 20_000,
        "yields": 1000,
    }
    return Tuning(**(values | overrides))


def compile_shared(
    name: str,
    sources: list[str],
    compiler: str = "g++",
    flags: list[str] | None = None,
    after: Sequence[str] = (),
) -> Path:
    """Return ``build/bench/<name>``, compiled again if a source is newer; ``after`` are arguments behind the sources.

    Raises:
        RuntimeError: The compiler is missing or failed; the message contains its output.
    """
    out = BUILD / name
    newest = max(path.stat().st_mtime for path in SOURCES.iterdir())
    if out.exists() and out.stat().st_mtime >= newest:
        return out
    if shutil.which(compiler) is None:
        raise RuntimeError(f"{compiler} is not installed: the yardsticks of bench/native need it")
    BUILD.mkdir(parents=True, exist_ok=True)
    # A separate name, so that processes that compile at the same time do not read each other's unfinished file.
    scratch = BUILD / f"{name}.{os.getpid()}"
    command = [compiler, *(FLAGS + ["-fPIC", "-shared", "-pthread"] if flags is None else flags)]
    command += [str(SOURCES / source) for source in sources] + [*after, "-o", str(scratch)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    scratch.replace(out)
    return out


@functools.cache
def library() -> ctypes.CDLL:
    """Return the library of the yardsticks, compiled if necessary."""
    lib = ctypes.CDLL(str(compile_shared("libyardstick.so", ["yardstick.cpp", "probe.cpp"])), use_errno=True)
    size, pointer, integer = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    settings = ctypes.POINTER(Tuning)
    signatures: dict[str, tuple[object, list[object]]] = {
        "yardstick_bytes": (size, [integer, size, size]),
        "yardstick_open": (pointer, [ctypes.c_char_p, integer, integer, size, size]),
        "yardstick_close": (None, [pointer]),
        "yardstick_tensor": (pointer, [pointer, integer]),
        "yardstick_barrier": (None, [pointer, settings]),
        "yardstick_time": (
            ctypes.c_double,
            [
                pointer,
                integer,
                pointer,
                pointer,
                size,
                settings,
                integer,
                integer,
                ctypes.POINTER(ctypes.c_char_p),
            ],
        ),
        "yardstick_allocate": (pointer, [size, size]),
        "yardstick_free": (None, [pointer, size, size]),
        "contention": (ctypes.c_double, [integer, integer, integer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


@dataclass(frozen=True, kw_only=True)
class Segment:
    """An anonymous shared segment that ranks open by path as long as the process that created it keeps ``fd`` open."""

    fd: int
    ranks: int
    ring_bytes: int
    tensor_bytes: int

    @classmethod
    def create(cls, ranks: int, ring_bytes: int, tensor_bytes: int) -> Segment:
        """Create a segment with a ring of ``ring_bytes`` and a tensor of ``tensor_bytes`` for each rank."""
        fd = os.memfd_create("yardstick")
        os.ftruncate(fd, library().yardstick_bytes(ranks, ring_bytes, tensor_bytes))
        return cls(fd=fd, ranks=ranks, ring_bytes=ring_bytes, tensor_bytes=tensor_bytes)

    @property
    def address(self) -> tuple[str, int, int, int]:
        """What another process needs to open the segment: the first arguments of `Yardstick`."""
        return (f"/proc/{os.getpid()}/fd/{self.fd}", self.ranks, self.ring_bytes, self.tensor_bytes)

    def close(self) -> None:
        """Close the file descriptor; mappings stay valid."""
        os.close(self.fd)


class Yardstick:
    """One rank of the hand-written all-reduce."""

    def __init__(self, address: tuple[str, int, int, int], rank: int) -> None:
        path, self.ranks, ring_bytes, tensor_bytes = address
        self.rank = rank
        self._lib = library()
        self._handle = self._lib.yardstick_open(path.encode(), rank, self.ranks, ring_bytes, tensor_bytes)
        if not self._handle:
            raise OSError(ctypes.get_errno(), f"cannot map the yardstick's segment {path}")

    def time(
        self,
        algorithm: int,
        x: int | None,
        y: int | None,
        numel: int,
        settings: Tuning,
        *,
        warm: int,
        iters: int,
    ) -> float:
        """Return the seconds of a call, from ``iters`` calls; ``x`` and ``y`` are addresses of ``numel`` floats."""
        reason = ctypes.c_char_p()
        seconds: float = self._lib.yardstick_time(
            self._handle, algorithm, x, y, numel, settings, warm, iters, ctypes.byref(reason)
        )
        if reason.value is not None:
            raise ValueError(reason.value.decode())
        return seconds

    def tensor(self) -> int:
        """Return the address of this rank's tensor in the segment."""
        address: int = self._lib.yardstick_tensor(self._handle, self.rank)
        return address

    def close(self) -> None:
        """Unmap the segment."""
        self._lib.yardstick_close(self._handle)
        self._handle = None


def round_trip_ns(batches: int = 200, trips: int = 200) -> float | None:
    """Return the nanoseconds of a cache line's round trip between the first two CPUs; None if there is one CPU."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        return None
    nanoseconds = _C.round_trip_ns(cpus[0], cpus[1], batches, trips)
    if nanoseconds < 0:
        raise OSError(f"cannot pin a thread to CPU {cpus[0]} or {cpus[1]}")
    return nanoseconds


def share_one_core(trials: int = 20) -> bool:
    """Return whether the first two CPUs are threads of one core, by how much they slow each other down."""
    cpus = sorted(os.sched_getaffinity(0))
    return len(cpus) > 1 and float(library().contention(cpus[0], cpus[1], trials)) > 1.5
