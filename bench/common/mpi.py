"""Open MPI as a contestant: ranks started once by ``mpirun``, told through named pipes what to measure."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from bench.common.native import compile_shared
from bench.common.pool import RankFailed

# Which of them is best differs by size and by version: a comparison takes the best of all.
SETTINGS = {
    "default": [],
    "ob1": ["--mca", "pml", "ob1"],
    "ring": [
        *("--mca", "coll_tuned_use_dynamic_rules", "1"),
        *("--mca", "coll_tuned_allreduce_algorithm", "4"),
    ],
}


def missing() -> str | None:
    """What to install before Open MPI can be measured; None where it is all there."""
    lacking = [tool for tool in ("mpirun", "mpicc") if shutil.which(tool) is None]
    if not lacking:
        return None
    return f"Open MPI is left out: no {' or '.join(lacking)} (apt-get install openmpi-bin libopenmpi-dev)"


class MpiRanks:
    """``ranks`` MPI processes under one of ``SETTINGS``; stands where a ``Pool`` stands."""

    def __init__(self, setting: str, ranks: int, *, timeout: float = 120) -> None:
        program = compile_shared("mpi_all_reduce", ["mpi_all_reduce.c"], "mpicc", ["-O2", "-Wall", "-Werror"])
        self.timeout = timeout
        self._folder = tempfile.TemporaryDirectory(prefix="dtcomm-bench-")
        folder = Path(self._folder.name)
        for rank in range(ranks):
            os.mkfifo(folder / f"in.{rank}")
            os.mkfifo(folder / f"out.{rank}")
        # Opened for reading and writing, so that opening does not wait for the ranks.
        self._to = [os.open(folder / f"in.{rank}", os.O_RDWR) for rank in range(ranks)]
        self._from = [os.open(folder / f"out.{rank}", os.O_RDWR) for rank in range(ranks)]
        crowded = ranks > (os.cpu_count() or 1)
        command = ["mpirun", "-np", str(ranks), "--oversubscribe"]
        # A session folder of its own: two mpiruns that start at once trip over each other's in /tmp.
        command += ["--mca", "orte_tmpdir_base", self._folder.name]
        if crowded:
            command += ["--bind-to", "none"]
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [*command, *SETTINGS[setting], str(program), str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )

    def call(self, method: str, *, numel: int, warm: int, iters: int) -> list[float]:
        """Seconds a call on every rank; ``method`` must be ``measure``."""
        if method != "measure":
            raise ValueError(f"method: {method!r}; an MPI rank only knows 'measure'")
        for fd in self._to:
            os.write(fd, f"{numel} {warm} {iters}\n".encode())
        return [float(self._line(fd)) for fd in self._from]

    def close(self) -> None:
        """Ends the ranks and removes the pipes."""
        for fd in self._to:
            os.write(fd, b"0 0 0\n")
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
                line += os.read(fd, 1)
            elif self._process.poll() is not None or time.monotonic() > deadline:
                self._log.seek(0)
                raise RankFailed(f"mpirun: no answer\n{self._log.read().decode(errors='replace')}")
        return line.decode()
