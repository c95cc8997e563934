"""Open MPI as a peer in comparisons: ranks that ``mpirun`` starts once, controlled through named pipes.

Their program, bench/native/mpi_rank.c, is compiled on first use.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.common.native import compile_shared
from dtcomm.system import allowed_cores

# The fastest setting depends on size and version; a comparison of all_reduce takes the best of all.
SETTINGS = {
    "default": "",
    "ob1": "--mca pml ob1",
    "ring": "--mca coll_tuned_use_dynamic_rules 1 --mca coll_tuned_allreduce_algorithm 4",
}
TIMEOUT_S = 120  # of one measurement


class MpiError(RuntimeError):
    """mpirun or one of its ranks exited or did not answer; the message contains its output."""


def why_unavailable() -> str | None:
    """Return what to install before Open MPI can be measured, or None if it is installed."""
    missing = [tool for tool in ("mpirun", "mpicc") if shutil.which(tool) is None]
    if not missing:
        return None
    return f"Open MPI is not measured: {' and '.join(missing)} not found (apt-get install openmpi-bin libopenmpi-dev)"


class MpiRanks:
    """``ranks`` MPI processes on this host under one of ``SETTINGS``.

    ``mpirun`` is the command that starts them, with arguments for ranks elsewhere; None: on this host.
    """

    def __init__(self, setting: str, ranks: int, *, mpirun: Sequence[str] | None = None) -> None:
        path = compile_shared("mpi_rank", ["mpi_rank.c"], compiler="mpicc", flags=["-O2", "-Wall", "-Werror"])
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

    def measure(self, *, numel: int, warm: int, iters: int, collective: str = "all_reduce") -> list[float]:
        """Return, for each rank, the mean seconds of a call on fp32 zeros.

        ``numel`` counts one shard if the collective has a shard for every rank.
        """
        line = f"{collective} {numel} float sum 0 {warm} {iters} 0\n"
        for fd in self._to:
            os.write(fd, line.encode())
        return [float(self._read_line(fd)) for fd in self._from]

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
        deadline = time.monotonic() + TIMEOUT_S
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([fd], [], [], 0.2)
            if ready:
                line += os.read(fd, 65536)  # a rank answers each request with one line
            elif self._process.poll() is not None or time.monotonic() > deadline:
                self._log.seek(0)
                raise MpiError(f"mpirun: no answer\n{self._log.read().decode(errors='replace')}")
        return line.decode()
