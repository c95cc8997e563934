"""A function as torchrun's workers, restarted when one fails, without the minute that starting their Pythons takes.

The agent, its rendezvous, its store and the workers' environment are torchrun's; the agent is a rank of this package's
pool and its workers come from a fork server, which imports what all of them need once.
"""

from __future__ import annotations

import multiprocessing
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from dtcomm.launch import fork_server
from dtcomm.launch.ranks import run_ranks

# Or ranks of a second life read from the agent's store where those of the first could be reached.
STORE_OF_THEIR_OWN = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def launch(
    fn: Callable[..., Any],
    ranks: int,
    *args: Any,
    restarts: int = 0,
    env: Mapping[str, str] | None = None,
    timeout: float = 240.0,
) -> None:
    """Run ``fn(*args)``, importable, as ``torchrun --standalone --nproc-per-node ranks --max-restarts restarts`` would.

    Raises what the agent raises when there are failures and no restarts left, RankTimeout after ``timeout`` seconds.
    """
    task = (fn, ranks, args, restarts, fork_server.MODULES)
    run_ranks(_agent, 1, *task, backend=None, fresh=True, env=env, timeout=timeout)


def _agent(
    rank: int,
    world_size: int,
    fn: Callable[..., Any],
    ranks: int,
    args: tuple[Any, ...],
    restarts: int,
    modules: list[str],
) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    multiprocessing.set_forkserver_preload(modules)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        monitor_interval=0.1,
        start_method="forkserver",
    )
    elastic_launch(config, fn)(*args)
