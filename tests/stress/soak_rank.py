"""One rank of the soak, under torchrun: rounds of random operations until the end, or until a rank is killed.

Each rank and incarnation writes a file of JSON lines, which ``tests.stress.soak`` reads.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dtcomm
from tests.stress.random_ops import sequence
from tests.stress.random_run import Runner

POOL, ROUND = 400, 40  # different operations, so that plans are reused; operations in one round
TIMEOUT = 60.0


def resource_usage() -> dict[str, int]:
    """Return the resident memory in KiB, and the descriptors and threads of this process."""
    with open("/proc/self/status") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    return {
        "rss_kib": int(fields["VmRSS"].split()[0]),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(fields["Threads"]),
    }


@dataclass(frozen=True, kw_only=True)
class Life:
    """How long the ranks run.

    Attributes:
        until: The time at which the program ends.
        kills: If set, the program ends instead when so many incarnations were killed and one more has done two rounds.
        pause: Seconds between two rounds.
        shortest: Least seconds of an incarnation.
        longest: Most seconds of an incarnation.
        seed: Of the operations, the victims and the moments.
    """

    until: float
    kills: int | None
    pause: float
    shortest: float
    longest: float
    seed: int = 0

    def kill_after(self, incarnation: int, chance: random.Random) -> float | None:
        """Return after how many seconds a rank of the incarnation kills itself; None: it runs to the end."""
        life = chance.uniform(self.shortest, self.longest)
        if self.kills is not None:
            return life if incarnation < self.kills else None
        return life if time.time() + life < self.until else None

    def over(self, incarnation: int, rounds: int) -> bool:
        """Return whether this rank is done."""
        if self.kills is not None:
            return incarnation >= self.kills and rounds >= 2
        return time.time() >= self.until


def main(folder: str, settings: str) -> int:
    """Return 0 at the end, 1 after the loss of a peer, which makes torchrun start a new incarnation."""
    life = Life(**json.loads(settings))
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    incarnation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # The agent's store outlives the ranks: the keys of an earlier incarnation must not be read.
    limit = timedelta(seconds=TIMEOUT)
    agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=limit)
    store = dist.PrefixStore(f"incarnation {incarnation}", agent)
    # In every second incarnation the calls of torch.distributed go through the backend too.
    backend = ("gloo", "dtcomm")[incarnation % 2]
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
    chance = random.Random(f"{life.seed}/{incarnation}")
    victim, after = chance.randrange(ranks), life.kill_after(incarnation, chance)
    if rank == victim and after is not None:
        timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    operations = sequence(f"{life.seed}/{incarnation}", ranks, POOL)
    with open(Path(folder) / f"{incarnation:04d}.{rank}.jsonl", "w", buffering=1) as log:

        def say(**words: Any) -> None:
            log.write(json.dumps({"at": round(time.time(), 3), **words}) + "\n")

        say(event="start", pid=os.getpid(), victim=victim, life=after, backend=backend)
        try:
            _rounds(rank, ranks, incarnation, life, operations, say)
        except (dtcomm.errors.DtcommError, RuntimeError) as error:
            say(event="lost", error=type(error).__name__, message=str(error)[:300])
            log.flush()
            os._exit(1)  # peers that wait for this rank notice
        say(event="end")
    dist.destroy_process_group()
    return 0


def _rounds(
    rank: int, ranks: int, incarnation: int, life: Life, operations: list[Any], say: Callable[..., None]
) -> None:
    done = 0
    while True:
        late = torch.tensor([float(life.over(incarnation, done // ROUND))])
        dtcomm.all_reduce(late, "max")
        if late.item():
            return
        runner = Runner(rank, ranks)  # creates every subgroup
        for offset in range(ROUND):
            runner.start(operations[(done + offset) % len(operations)])
        runner.drain()
        done += ROUND
        # One collective compares the round: a digest is equal on all members, and absent on other ranks.
        digests_of_ranks: list[Any] = [None] * ranks
        dist.all_gather_object(digests_of_ranks, runner.digests)
        unequal = [
            index
            for index in set().union(*digests_of_ranks)
            if len({digests[index] for digests in digests_of_ranks if index in digests}) > 1
        ]
        for group in runner.groups[:-1]:
            if group is not None and group != dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
        say(event="round", operations=done, unequal=unequal, differs=runner.differs, **resource_usage())
        time.sleep(life.pause)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
