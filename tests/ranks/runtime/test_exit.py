"""Exit of a program while a daemon thread waits in a collective."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys, threading, time
import torch, torch.distributed as dist
import dtcomm
rank = int(sys.argv[1])
dist.init_process_group("gloo", rank=rank, world_size=2, init_method="file://" + sys.argv[2])
dtcomm.all_reduce(torch.ones(10))
def wait():
    began.set()
    dtcomm.all_reduce(torch.ones(10))
if rank == 0:
    began = threading.Event()
    threading.Thread(target=wait, daemon=True).start()
    began.wait()
    time.sleep(0.2)  # until it sleeps in the engine
    sys.exit(3)
sys.stdin.read()
"""


def test_exit_status_is_the_programs_own(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "store")],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        _, errors = ranks[0].communicate(timeout=60)
        assert ranks[0].returncode == 3, errors
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
