"""Workers of torchrun that are restarted on failure, without the start-up time of new interpreters.

The agent, the rendezvous, the store and the workers' environment are torchrun's. The agent runs in a rank process of
`dtcomm.launch`, and its workers are forked from a server process that has imported their modules.
"""

from __future__ import annotations

import multiprocessing
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from dtcomm.launch import fork_server, run_ranks

# Without this, restarted workers read the addresses of the previous workers from the agent's store.
WORKERS_OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def run_elastic(
    fn: Callable[..., Any],
    ranks: int,
    *args: Any,
    restarts: int = 0,
    env: Mapping[str, str] | None = None,
    timeout: float = 240.0,
) -> None:
    """Run ``fn(*args)`` like ``torchrun --standalone --nproc-per-node ranks --max-restarts restarts``.

    Args:
        fn: A function at the top level of an importable module.
        ranks: Number of workers.
        *args: Picklable arguments.
        restarts: How often failed workers are restarted.
        env: Environment variables set in the agent and the workers.
        timeout: Seconds until the workers must have returned.

    Raises:
        ChildFailedError: A worker failed and no restart is left.
        RankTimeout: The workers did not return in time.
    """
    task = (fn, ranks, args, restarts, fork_server.MODULES)
    run_ranks(_run_agent, 1, *task, backend=None, fresh=True, env=env, timeout=timeout)


def _run_agent(
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
