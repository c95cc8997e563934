"""What a rank does in tests.stress.torch_suite: it runs tests of torch's own suite for torch.distributed."""

from __future__ import annotations

import os
import unittest
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

# What torch skips for the name of the backend, or on the machines of its own CI.
_RUN_ANYWAY = (
    "Only MPI supports CPU all_to_all_single",
    "Only MPI supports all_to_all",
    "https://github.com/",
)
_CHOOSE_BY_NAME = ("no_sync",)  # tests that have one model for Gloo and one for NCCL, and none else


def environment(world_size: int, folder: str | os.PathLike[str] = "") -> dict[str, str]:
    """Return the variables that torch's tests read. They skip what Gloo does not support, on every backend.

    Args:
        world_size: Number of ranks.
        folder: Where the ranks may write; not needed to import the tests.
    """
    return {
        "BACKEND": "gloo",
        "WORLD_SIZE": str(world_size),
        "INIT_METHOD": f"file://{folder}/init",
        "MASTER_ADDR": "127.0.0.1",
    }


def make_folders(folder: Path, tests: Sequence[str]) -> None:
    """Make the folders through which the ranks of each test meet."""
    for test in tests:
        for name in ("barrier", "test_dir"):
            (folder / test / name).mkdir(parents=True)


def list_tests(rank: int, world_size: int) -> list[str]:
    """Return the names of all tests, in the order of torch's file."""
    from tests.stress.torch_suite_module import suite

    return [name for name in vars(suite.DistributedTest._DistTestBase) if name.startswith("test_")]


def run_tests(rank: int, world_size: int, backend: str, tests: Sequence[str], folder: str) -> dict[str, str]:
    """Run tests one after the other; the first that fails raises.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        backend: Backend of the default group.
        tests: Names of tests.
        folder: The same on all ranks; contains what `make_folders` makes.

    Returns:
        Why tests were skipped, by their names.
    """
    from torch.testing._internal.common_distributed import TEST_SKIPS

    from tests.stress.torch_suite_module import suite

    case = type("Suite", (suite.TestDistBackend, suite.DistributedTest._DistTestBase), {})
    reasons = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
    skipped = {}
    for name in tests:
        function = getattr(case, name)
        reason = getattr(function, "__unittest_skip_why__", "")
        if reason and not reason.startswith(_RUN_ANYWAY):
            skipped[name] = reason
            continue
        if (
            function.__code__.co_filename == unittest.case.__file__
        ):  # raises SkipTest; torch's decorators only mark
            setattr(case, name, function.__wrapped__)
        suite.BACKEND = "gloo" if any(part in name for part in _CHOOSE_BY_NAME) else backend
        try:
            _run_test(suite, case, name, backend, rank, world_size, Path(folder) / name)
        except SystemExit as exit:  # how torch's decorators skip in a rank
            if exit.code not in reasons:
                raise RuntimeError(f"{name} ended with status {exit.code}") from exit
            skipped[name] = reasons[exit.code]
        except unittest.SkipTest as skip:
            skipped[name] = str(skip)
        except Exception as error:
            text = next((line for line in str(error).splitlines() if line.strip()), "")
            raise RuntimeError(f"{name} failed: {type(error).__name__}: {text}") from error
        if dist.is_initialized():
            dist.destroy_process_group()
    return skipped


def _run_test(
    suite: Any, case: Any, name: str, backend: str, rank: int, world_size: int, folder: Path
) -> None:
    from torch.testing._internal.common_utils import set_rng_seed

    os.environ["TEMP_DIR"] = str(folder)
    dist.set_debug_level(dist.DebugLevel.OFF)  # some tests leave another one
    suite.Barrier.barrier_id = 0
    test = case(name)
    test.rank, test.file_name = rank, str(folder / "store")
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=suite.CUSTOM_PG_TIMEOUT.get(name, suite.default_pg_timeout)),
    )
    test._barrier()
    set_rng_seed()
    getattr(test, name)()
    test._barrier()
