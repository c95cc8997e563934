"""torch's own communication hooks on DDP, and callbacks that wait: the results are those of Gloo, and nothing hangs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from dtcomm.errors import CollectiveMismatch, CommunicatorClosed
from dtcomm.launch.ranks import run_ranks
from tests.support.rank_tests import on_ranks

Hook = tuple[Any, Callable[..., Any]]
STEPS, LIMIT = 4, timedelta(seconds=60)


def power_state(group: dist.ProcessGroup) -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
    )


# Those of torch's hooks that work on CPU tensors over Gloo; the others need a GPU, or fail in torch itself.
HOOKS: dict[str, Callable[[dist.ProcessGroup], Hook]] = {
    "allreduce": lambda group: (group, default_hooks.allreduce_hook),
    "fp16_compress": lambda group: (group, default_hooks.fp16_compress_hook),
    "powerSGD": lambda group: (power_state(group), powerSGD_hook.powerSGD_hook),
    "fp16_compress of powerSGD": lambda group: (
        power_state(group),
        default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
    ),
    "post_localSGD": lambda group: (
        post_localSGD_hook.PostLocalSGDState(group, group, start_localSGD_iter=2),
        post_localSGD_hook.post_localSGD_hook,
    ),
}


def train(rank: int, group: dist.ProcessGroup, hook: str) -> torch.Tensor:
    """Return the parameters after some steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32))
    ddp = DistributedDataParallel(model, process_group=group)
    ddp.register_comm_hook(*HOOKS[hook](group))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        ddp(torch.randn(8, 64, generator=data)).square().mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train_with_every_hook(rank: int, world_size: int) -> dict[str, str]:
    """Return what is wrong with each hook."""
    gloo = dist.new_group(backend="gloo", timeout=LIMIT)
    wrong = {}
    for hook in HOOKS:
        expected = train(rank, gloo, hook)
        found = train(rank, dist.group.WORLD, hook)
        if not torch.allclose(found, expected, rtol=1e-3, atol=1e-5):
            wrong[hook] = f"differs by up to {(found - expected).abs().max()}"
    return wrong


def test_torchs_hooks_train_as_over_gloo() -> None:
    assert run_ranks(train_with_every_hook, 2, backend="dtcomm") == [{}, {}]


def wait_in_callbacks(rank: int, world_size: int) -> list[float]:
    """Return what callbacks found that wait for operations started in them and before them."""

    def total(factor: float) -> Any:
        return dist.all_reduce(torch.full((100,), factor), async_op=True)

    def received(done: Any) -> float:
        second.wait()
        return float(messages[0][0] + messages[1][0])

    nested = total(1.0).get_future().then(lambda done: total(2.0).get_future().wait()[0][0].item())
    twice = nested.then(lambda done: done.value() + total(4.0).get_future().wait()[0][0].item())
    twice.wait()  # all ranks must start collectives in the same order
    earlier, later = total(8.0).get_future(), total(16.0).get_future()
    before = earlier.then(lambda done: later.wait()[0][0].item())
    messages = [torch.zeros(5000), torch.zeros(5000)]
    first, second = (dist.irecv(message, 1 - rank, tag=tag) for tag, message in enumerate(messages))
    assert first is not None and second is not None
    both = first.get_future().then(received)
    for tag in range(2):
        dist.send(torch.full((5000,), tag + 1.0), 1 - rank, tag=tag)
    return [future.wait() for future in (nested, twice, before, both)]


@pytest.mark.parametrize("runtime", ["native", "process_group"])
def test_callbacks_may_wait_for_other_operations(runtime: str) -> None:
    found = run_ranks(wait_in_callbacks, 2, backend="dtcomm", env={"DTCOMM_RUNTIME": runtime})
    assert found == [[4.0, 12.0, 32.0, 3.0]] * 2


def use_torchs_tools(rank: int, world_size: int, backend: str) -> None:
    """Train with torch's checks of collectives on; what the group does not have is refused by name."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group: Any = dist.new_group(backend=backend)
    assert type(group).__name__ == type(dist.group.WORLD).__name__ == "DtcommProcessGroup"
    model = DistributedDataParallel(torch.nn.Linear(4, 4), process_group=group)
    model(torch.ones(2, 4)).sum().backward()
    total = torch.ones(3)
    dist.all_reduce(total, group=group)
    assert total.eq(world_size).all()
    for name in (
        "register_pre_hook",
        "register_post_hook",
        "register_abort_hook",
        "_register_on_completion_hook",
        "merge_remote_group",
        "reconfigure",
        "revoke",
        "new_window",
    ):
        with pytest.raises(RuntimeError, match=f"^{name}: groups of the backend dtcomm"):
            getattr(group, name)(1, print)
    assert not group.supports_abort_hooks
    if hasattr(dist, "shrink_group"):
        with pytest.raises((TypeError, RuntimeError), match="shrink"):
            dist.shrink_group([world_size - 1])
    dist.all_reduce(total)
    assert total.eq(world_size**2).all()
    with pytest.raises(CollectiveMismatch, match=r"rank 1 .* calls all_reduce\(sum, 5 float32"):
        dist.all_reduce(torch.ones(4 + rank))


@pytest.mark.parametrize("backend", ["dtcomm", "cpu:dtcomm,cuda:nccl"])
def test_torchs_debug_mode_and_hooks(backend: str) -> None:
    """What works besides: DTCOMM_FLIGHT_DIR records what torch's flight recorder would."""
    run_ranks(use_torchs_tools, 2, backend, backend=backend, fresh=True)


@on_ranks(2, backend="dtcomm")
def test_abort_ends_what_waits(rank: int, world_size: int) -> None:
    """End an operation that the other rank never calls; a group that is made afterwards works."""
    group: Any = dist.new_group(timeout=LIMIT)
    total = torch.ones(100_000)
    dist.all_reduce(total, group=group)
    if rank == 0:
        work = dist.all_reduce(total, group=group, async_op=True)
        assert work is not None
        timer = threading.Timer(0.1, group.abort)
        timer.start()
        with pytest.raises(CommunicatorClosed):
            work.wait()
        timer.join()
    total = torch.ones(100_000)
    dist.all_reduce(total, group=dist.new_group())
    assert total.eq(world_size).all()


def sum_nans(rank: int, world_size: int) -> list[str]:
    """Return what a new group logs where torch's check for NaN is asked for."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dtcomm.backend").addHandler(handler)
    dist.all_reduce(torch.full((4,), torch.nan), group=dist.new_group())
    return logged


def test_torchs_check_for_nan_is_not_left_out_in_silence() -> None:
    for logged in run_ranks(sum_nans, 2, backend="dtcomm", env={"TORCH_DIST_NAN_CHECK": "1"}):
        assert logged[0].startswith("TORCH_DIST_NAN_CHECK: the backend dtcomm does not check")
