"""Open MPI as a peer in comparisons: ranks that ``mpirun`` starts once, and the backend that measures with them.

The rank program (mpi_rank.c) is compiled on first use, so that installing dtcomm does not need MPI. `MpiRanks`
controls its ranks through named pipes; benchmarks use it too. In `dtcomm perf` rank 0 starts them, and the ranks of
dtcomm wait while they measure.
"""

from __future__ import annotations

import hashlib
import os
import platform
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist

from dtcomm.cli.perf.backend import Backend, CollectiveCall, TransportUsed
from dtcomm.cli.perf.collectives import DTYPES
from dtcomm.cli.perf.placement import CPU, Placement
from dtcomm.compress.checkpoint import gather
from dtcomm.system import allowed_cores, write_file

SOURCE = Path(__file__).with_name("mpi_rank.c")
# The fastest setting depends on size and version; a comparison of all_reduce takes the best of all.
SETTINGS = {
    "default": "",
    "ob1": "--mca pml ob1",
    "ring": "--mca coll_tuned_use_dynamic_rules 1 --mca coll_tuned_allreduce_algorithm 4",
}
TYPES = ("float", "double", "int32", "int64", "uint8", "int8")  # names as in nccl-tests
OPS = ("sum", "min", "max")


class MpiError(RuntimeError):
    """mpirun or one of its ranks exited or did not answer; the message contains its output."""


def why_unavailable() -> str | None:
    """Return what to install before Open MPI can be measured, or None if it is installed."""
    missing = [tool for tool in ("mpirun", "mpicc") if shutil.which(tool) is None]
    if not missing:
        return None
    return f"Open MPI is not measured: {' and '.join(missing)} not found (apt-get install openmpi-bin libopenmpi-dev)"


def compile_rank_program() -> Path:
    """Compile the rank program if needed; it is cached in the user's cache folder under a digest of its source."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dtcomm"
    out = cache / f"mpi_rank-{digest}"
    if out.exists():
        return out
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:  # two processes may compile at once
        command = ["mpicc", "-O2", "-Wall", "-Werror", str(SOURCE), "-o", f"{folder}/{out.name}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise MpiError(f"{' '.join(command)}\n{done.stderr}")
        write_file(out, Path(folder, out.name).read_bytes(), mode=0o777)
    return out


class MpiRanks:
    """``ranks`` MPI processes on this host under one of ``SETTINGS``.

    ``mpirun`` is the command that starts them, with arguments for ranks elsewhere; None: on this host.
    """

    def __init__(
        self, setting: str, ranks: int, *, timeout: float = 120, mpirun: Sequence[str] | None = None
    ) -> None:
        path = compile_rank_program()
        self.timeout = timeout
        self._folder = tempfile.TemporaryDirectory(prefix="dtcomm-mpi-")
        folder = Path(self._folder.name)
        for rank in range(ranks):
            os.mkfifo(folder / f"in.{rank}")
            os.mkfifo(folder / f"out.{rank}")
        # O_RDWR, so that opening does not block until the ranks open their ends.
        self._to = [os.open(folder / f"in.{rank}", os.O_RDWR) for rank in range(ranks)]
        self._from = [os.open(folder / f"out.{rank}", os.O_RDWR) for rank in range(ranks)]
        oversubscribed = ranks > len(allowed_cores())
        command = [*(mpirun or ["mpirun", "--oversubscribe"]), "-np", str(ranks)]
        # A separate session folder, because two mpiruns that start at once collide in /tmp.
        command += ["--mca", "orte_tmpdir_base", self._folder.name]
        if oversubscribed:
            command += ["--bind-to", "none"]
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
        # A launcher may have set variables that MPI would mistake for its own.
        mistaken = ("OMPI_", "PMIX_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(mistaken)}
        self._log = tempfile.TemporaryFile()
        command += [*SETTINGS[setting].split(), str(path), str(folder)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, env=environment
        )

    def measure(
        self,
        *,
        numel: int,
        warm: int,
        iters: int,
        collective: str = "all_reduce",
        datatype: str = "float",
        op: str = "sum",
        root: int = 0,
        per_call: bool = False,
    ) -> list[list[float]]:
        """Return, for each rank, the mean seconds of a call, or with ``per_call`` the seconds of every call.

        ``numel`` counts one shard if the collective has a shard for every rank. Buffers hold zeros.
        """
        line = f"{collective} {numel} {datatype} {op} {root} {warm} {iters} {int(per_call)}\n"
        for fd in self._to:
            os.write(fd, line.encode())
        return [[float(field) for field in self._read_line(fd).split()] for fd in self._from]

    def close(self) -> None:
        """Stop the ranks and remove the pipes."""
        for fd in self._to:
            os.write(fd, b"end -1 float sum 0 0 0 0\n")
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.terminate()  # mpirun passes it on to its ranks
            self._process.wait(timeout=10)
        for fd in [*self._to, *self._from]:
            os.close(fd)
        self._folder.cleanup()
        self._log.close()

    def _read_line(self, fd: int) -> str:
        deadline = time.monotonic() + self.timeout
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([fd], [], [], 0.2)
            if ready:
                line += os.read(fd, 65536)  # a rank answers each request with one line
            elif self._process.poll() is not None or time.monotonic() > deadline:
                self._log.seek(0)
                raise MpiError(f"mpirun: no answer\n{self._log.read().decode(errors='replace')}")
        return line.decode()


TYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class OpenMpi(Backend):
    """Open MPI ranks on this host, called from C; their results are not checked."""

    measures_itself: ClassVar[bool] = True
    devices: ClassVar[tuple[str, ...]] = (CPU,)

    def __init__(self, timeout: float, place: Placement | None = None) -> None:
        super().__init__(timeout, place)
        ranks = dist.get_world_size()
        if len(set(gather(platform.node()))) > 1:
            raise ValueError("--compare mpi: Open MPI is started on one host, but the ranks are on several")
        self._mpi_ranks: MpiRanks | None = None
        error_text: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                self._mpi_ranks = MpiRanks("default", ranks, timeout=timeout)
                self._mpi_ranks.measure(numel=1, warm=1, iters=1)
            except MpiError as error:
                error_text = [str(error)]
        dist.broadcast_object_list(error_text, 0)
        if error_text[0] is not None:
            raise ValueError(f"--compare mpi: {error_text[0]}")

    @classmethod
    def why_unsupported(cls, collective: str, datatype: str, op: str) -> str | None:
        """Return why a call is not supported: the C program has some types and operators only."""
        if datatype not in TYPES:
            return f"-d {datatype}: Open MPI is measured with {', '.join(TYPES)}"
        if op not in (*OPS, "none"):
            return f"-o {op}: Open MPI is measured with {', '.join(OPS)}"
        return None

    def measure_calls(self, case: Any, iters: int, warmup: int) -> list[list[float]]:
        """Return the seconds of each call, by rank; all ranks must call it."""
        gathered: list[Any] = [None]
        if self._mpi_ranks is not None:
            kind = {"collective": case.collective, "datatype": TYPE_NAMES[case.dtype], "op": case.op}
            kind |= {"numel": case.count, "root": case.root}
            gathered = [self._mpi_ranks.measure(**kind, warm=warmup, iters=iters, per_call=True)]
        dist.broadcast_object_list(gathered, 0)
        times: list[list[float]] = gathered[0]
        return times

    def bind(self, call: CollectiveCall, asynchronous: bool) -> Callable[[], Any]:
        raise TypeError("Open MPI measures itself")

    def transport_used(self, before: Any) -> TransportUsed:
        return TransportUsed("mpi")

    def describe(self) -> str:
        return "Open MPI's default, called from C"

    def close(self) -> None:
        if self._mpi_ranks is not None:
            self._mpi_ranks.close()
