"""torch's own tests of torch.distributed, from the installed torch, made to run on 2 to 4 ranks without GPUs.

The ranks of tests.stress.torch_suite import it. torch's module reads variables of the environment when it is imported,
see `tests.stress.torch_suite_rank.environment`.

Most of torch's tests of DDP ask for as many GPUs as ranks, and use them like CPUs: they run on CPU tensors here. Some
cannot, such as those of SyncBatchNorm, and then fail on Gloo as well.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

NAME = "torch.testing._internal.distributed.distributed_test"
_SMALL_WORLD = 3  # ranks that tests of the group [1, 2] need; torch skips them on fewer than 8
_ATTRIBUTES = (
    "TestDistBackend",
    "DistributedTest",
    "Barrier",
    "BACKEND",
    "CUSTOM_PG_TIMEOUT",
    "default_pg_timeout",
)
_CPU = torch.device("cpu")

Function = Callable[..., Any]


def _load() -> Any:
    """Import torch's module; ImportError if the installed torch has none, or one that differs from what we know."""
    from torch.testing._internal import common_distributed as common

    patches: dict[str, Any] = {
        "skip_if_small_worldsize": _skip_if_small_world,
        "skip_if_no_gpu": _run_on_cpu,
        "skip_if_lt_x_gpu": lambda count, allow_cpu=False: _run_on_cpu,
    }
    _require(common, patches)
    with mock.patch.multiple(common, **patches):
        module: Any = importlib.import_module(NAME)
    _require(module, _ATTRIBUTES)
    _require(module.DistributedTest, ["_DistTestBase"])
    return module


def _require(owner: Any, names: Any) -> None:
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise ImportError(f"torch {torch.__version__}: {owner.__name__} has no {', '.join(missing)}")


def _skip_if_small_world(function: Function) -> Function:
    from torch.testing._internal.common_distributed import TEST_SKIPS

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if int(os.environ["WORLD_SIZE"]) < _SMALL_WORLD:
            sys.exit(TEST_SKIPS["small_worldsize"].exit_code)
        return function(*args, **kwargs)

    return wrapper


def _run_on_cpu(function: Function) -> Function:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with _gpus_are_the_cpu():
            return function(*args, **kwargs)

    return wrapper


class _OnCpu(TorchFunctionMode):
    """Puts on the CPU what a program puts on a GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        options = dict(kwargs or {})
        if "device" in options:
            options["device"] = _CPU
        if func is torch.Tensor.to:
            args = tuple(map(_to_cpu, args))
        return func(*args, **options)


def _to_cpu(device: Any) -> Any:
    is_gpu = type(device) is int or (isinstance(device, str | torch.device) and "cuda" in str(device))
    return _CPU if is_gpu else device


@contextlib.contextmanager
def _gpus_are_the_cpu() -> Iterator[None]:
    init, to = DistributedDataParallel.__init__, torch.nn.Module.to

    def init_without_devices(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **options: Any
    ) -> None:
        init(self, module, **options)

    def to_cpu(self: Any, *args: Any, **options: Any) -> Any:
        return to(self, *map(_to_cpu, args), **{name: _to_cpu(value) for name, value in options.items()})

    with (
        _OnCpu(),
        mock.patch.multiple(
            torch.cuda,
            set_device=lambda device: None,
            synchronize=lambda device=None: None,
            current_device=lambda: 0,
            device_count=lambda: int(os.environ["WORLD_SIZE"]),
            device=lambda device: contextlib.nullcontext(),
        ),
        mock.patch.object(DistributedDataParallel, "__init__", init_without_devices),
        mock.patch.object(torch.nn.Module, "to", to_cpu),
    ):
        yield


suite = _load()
