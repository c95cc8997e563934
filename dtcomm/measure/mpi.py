"""Open MPI as what we are compared with: ranks started once by ``mpirun``, told through named pipes what to measure.

The program (mpi_rank.c) is compiled where it is first needed, so that nothing of it is built where nobody compares.
"""

from __future__ import annotations

import hashlib
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("mpi_rank.c")
# Which of them is best differs by size and by version: a comparison of all_reduce takes the best of all.
SETTINGS: dict[str, list[str]] = {
    "default": [],
    "ob1": ["--mca", "pml", "ob1"],
    "ring": [
        *("--mca", "coll_tuned_use_dynamic_rules", "1"),
        *("--mca", "coll_tuned_allreduce_algorithm", "4"),
    ],
}
TYPES = ("float", "double", "int32", "int64", "uint8", "int8")  # by nccl-tests' names
OPS = ("sum", "min", "max")


class MpiFailed(RuntimeError):
    """mpirun or one of its ranks ended or did not answer; the message carries what they wrote."""


def missing() -> str | None:
    """What to install before Open MPI can be measured; None where it is all there."""
    lacking = [tool for tool in ("mpirun", "mpicc") if shutil.which(tool) is None]
    if not lacking:
        return None
    return f"Open MPI is left out: no {' or '.join(lacking)} (apt-get install openmpi-bin libopenmpi-dev)"


def program() -> Path:
    """The compiled rank program, kept in the user's cache under a digest of its source."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dtcomm"
    out = cache / f"mpi_rank-{digest}"
    if out.exists():
        return out
    cache.mkdir(parents=True, exist_ok=True)
    # A name of its own, so that two processes that build at once do not read each other's half-written file.
    scratch = out.with_suffix(f".{os.getpid()}")
    command = ["mpicc", "-O2", "-Wall", "-Werror", str(SOURCE), "-o", str(scratch)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise MpiFailed(f"{' '.join(command)}\n{done.stderr}")
    scratch.replace(out)
    return out


class MpiRanks:
    """``ranks`` MPI processes on this host under one of ``SETTINGS``."""

    def __init__(self, setting: str, ranks: int, *, timeout: float = 120) -> None:
        path = program()
        self.timeout = timeout
        self._folder = tempfile.TemporaryDirectory(prefix="dtcomm-mpi-")
        folder = Path(self._folder.name)
        for rank in range(ranks):
            os.mkfifo(folder / f"in.{rank}")
            os.mkfifo(folder / f"out.{rank}")
        # Opened for reading and writing, so that opening does not wait for the ranks.
        self._to = [os.open(folder / f"in.{rank}", os.O_RDWR) for rank in range(ranks)]
        self._from = [os.open(folder / f"out.{rank}", os.O_RDWR) for rank in range(ranks)]
        crowded = ranks > len(os.sched_getaffinity(0))
        command = ["mpirun", "-np", str(ranks), "--oversubscribe"]
        # A session folder of its own: two mpiruns that start at once trip over each other's in /tmp.
        command += ["--mca", "orte_tmpdir_base", self._folder.name]
        if crowded:
            command += ["--bind-to", "none"]
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
        # Under torchrun this process has variables that MPI would take for its own launcher's.
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_"))
        }
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [*command, *SETTINGS[setting], str(path), str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=environment,
        )

    def call(self, method: str, **arguments: Any) -> list[float]:
        """Seconds a call on every rank, for contestants that take turns; ``method`` must be ``measure``."""
        if method != "measure":
            raise ValueError(f"method: {method!r}; an MPI rank only knows 'measure'")
        return [times[0] for times in self.measure(**arguments)]

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
        each: bool = False,
    ) -> list[list[float]]:
        """By rank: the mean seconds of a call, or with ``each`` those of every call.

        ``numel`` counts one shard where the collective has a shard for every rank. Buffers hold zeros.
        """
        line = f"{collective} {numel} {datatype} {op} {root} {warm} {iters} {int(each)}\n"
        for fd in self._to:
            os.write(fd, line.encode())
        return [[float(word) for word in self._line(fd).split()] for fd in self._from]

    def close(self) -> None:
        """Ends the ranks and removes the pipes."""
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

    def _line(self, fd: int) -> str:
        deadline = time.monotonic() + self.timeout
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([fd], [], [], 0.2)
            if ready:
                line += os.read(fd, 65536)  # one line is answered to one
            elif self._process.poll() is not None or time.monotonic() > deadline:
                self._log.seek(0)
                raise MpiFailed(f"mpirun: no answer\n{self._log.read().decode(errors='replace')}")
        return line.decode()
