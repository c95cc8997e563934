"""Start ranks on this machine: used by the command line, benchmarks, tests and users' scripts.

`run_ranks` runs a function on several local ranks and returns their results. `spawn_ranks` returns the running
processes.
"""

from dtcomm.launch.process_pool import RankError
from dtcomm.launch.ranks import RankOutcome as RankOutcome
from dtcomm.launch.ranks import RankTimeout, run_ranks, spawn_ranks
from dtcomm.launch.ranks import RunningRanks as RunningRanks
from dtcomm.launch.worker import send_to_parent

__all__ = ["RankError", "RankTimeout", "run_ranks", "send_to_parent", "spawn_ranks"]
