"""Every collective of torch.distributed gives the same results on the backend as on Gloo."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dtcomm
from dtcomm.launch.ranks import run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
SHAPES = ((), (0,), (7, 3), (64, 33))


def _values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    values = torch.randint(0, 7, shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype)


def _all_reduce(shape: Any, dtype: Any, rank: int, group: Any, later: bool) -> Any:
    results = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        tensor = _values(shape, dtype, rank)
        _wait(dist.all_reduce(tensor, op, group=group, async_op=later))
        results.append(tensor)
    return results


def _bitwise(shape: Any, dtype: Any, rank: int, group: Any, later: bool) -> Any:
    if dtype.is_floating_point:
        return []
    results = []
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        tensor = _values(shape, dtype, rank)
        _wait(dist.all_reduce(tensor, op, group=group, async_op=later))
        results.append(tensor)
    return results


def _broadcast(shape: Any, dtype: Any, rank: int, group: Any, later: bool) -> Any:
    tensor = _values(shape, dtype, rank)
    _wait(dist.broadcast(tensor, dist.get_world_size() - 1, group=group, async_op=later))
    return tensor


def _reduce(shape: Any, dtype: Any, rank: int, group: Any, later: bool) -> Any:
    tensor = _values(shape, dtype, rank)
    _wait(dist.reduce(tensor, 1, group=group, async_op=later))
    return tensor if rank == 1 else []  # on other ranks the content is undefined


def _all_gather(shape: Any, dtype: Any, rank: int, group: Any, later: bool) -> Any:
    tensor = _values(shape, dtype, rank)
    apart = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    _wait(dist.all_gather(apart, tensor, group=group, async_op=later))
    together = list(torch.empty((dist.get_world_size(), *shape), dtype=dtype).unbind())
    _wait(dist.all_gather(together, tensor, group=group, async_op=later))
    return apart + together


def _all_gather_single(shape: Any, dtype: Any, rank: int, group: Any, later: bool) -> Any:
    tensor = _values(shape, dtype, rank).reshape(-1)
    output = torch.empty(tensor.numel() * dist.get_world_size(), dtype=dtype)
    _wait(dist.all_gather_into_tensor(output, tensor, group=group, async_op=later))
    return output


def _gather(shape: Any, dtype: Any, rank: int, group: Any, later: bool) -> Any:
    tensor = _values(shape, dtype, rank)
    outputs = [torch.empty_like(tensor) for _ in range(dist.get_world_size())] if rank == 1 else None
    _wait(dist.gather(tensor, outputs, 1, group=group, async_op=later))
    return outputs or []


def _scatter(shape: Any, dtype: Any, rank: int, group: Any, later: bool) -> Any:
    inputs = [_values(shape, dtype, i) for i in range(dist.get_world_size())] if rank == 1 else None
    output = torch.empty(shape, dtype=dtype)
    _wait(dist.scatter(output, inputs, 1, group=group, async_op=later))
    return output


def _reduce_scatter(shape: Any, dtype: Any, rank: int, group: Any, later: bool) -> Any:
    inputs = [_values(shape, dtype, 10 * rank + i) for i in range(dist.get_world_size())]
    output = torch.empty(shape, dtype=dtype)
    _wait(dist.reduce_scatter(output, inputs, group=group, async_op=later))
    joined = torch.cat([tensor.reshape(-1) for tensor in inputs])
    single = torch.empty(output.numel(), dtype=dtype)
    _wait(dist.reduce_scatter_tensor(single, joined, group=group, async_op=later))
    return [output, single]


def _all_to_all(shape: Any, dtype: Any, rank: int, group: Any, later: bool) -> Any:
    ranks = dist.get_world_size()
    inputs = [_values(shape, dtype, 10 * rank + i) for i in range(ranks)]
    outputs = [torch.empty(shape, dtype=dtype) for i in range(ranks)]
    if dist.get_backend(group) == "gloo":  # up to torch 2.11 it accepts no lists
        exchanged = torch.empty((ranks, *shape), dtype=dtype)
        _wait(dist.all_to_all_single(exchanged, torch.stack(inputs), group=group, async_op=later))
        outputs = list(exchanged.unbind())
    else:
        _wait(dist.all_to_all(outputs, inputs, group=group, async_op=later))
    source = _values((ranks * 2, 3), dtype, rank)
    equal = torch.empty_like(source)
    _wait(dist.all_to_all_single(equal, source, group=group, async_op=later))
    input_splits = [(rank + i) % 3 for i in range(ranks)]
    output_splits = [(rank + i) % 3 for i in range(ranks)]
    uneven = torch.empty((sum(output_splits), 2), dtype=dtype)
    source = _values((sum(input_splits), 2), dtype, rank)
    _wait(dist.all_to_all_single(uneven, source, output_splits, input_splits, group=group, async_op=later))
    return [*outputs, equal, uneven]


def _strided(shape: Any, dtype: Any, rank: int, group: Any, later: bool) -> Any:
    """Outputs with gaps and permuted dimensions. Gloo gets contiguous copies."""
    tensor = _values((4, 6), dtype, rank)
    outputs = [torch.empty((6, 4), dtype=dtype).t() for _ in range(dist.get_world_size())]
    _wait(dist.all_gather(outputs, tensor.clone(), group=group, async_op=later))
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        for make_view in _VIEWS:
            outputs += _reductions_of(
                functools.partial(_view, make_view, dtype, rank, group), op, rank, group, later
            )
    for make_view in _VIEWS:
        view = _view(make_view, dtype, rank, group)
        _wait(dist.broadcast(view, 1, group=group, async_op=later))
        gathered = torch.empty(dist.get_world_size() * view.shape[0], *view.shape[1:], dtype=dtype)
        _wait(dist.all_gather_into_tensor(gathered, view, group=group, async_op=later))
        received = _view(make_view, dtype, rank, group)
        if rank == 0:
            dist.send(view, 1, group=group)
        elif rank == 1:
            dist.recv(received, 0, group=group)
        outputs += [view, gathered, received]
    return outputs


# a column, an inner block, the block transposed
_VIEWS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda matrix: matrix[:, 0],
    lambda matrix: matrix[:, 1:3],
    lambda matrix: matrix[:, 1:3].t(),
)


def _view(make_view: Callable[[torch.Tensor], torch.Tensor], dtype: Any, rank: int, group: Any) -> Any:
    """Return a view with gaps for the backend, and a contiguous copy for Gloo, which ignores strides."""
    view = make_view(_values((6, 4), dtype, rank + 1))
    return view if group is None else view.contiguous()


def _reductions_of(make: Callable[[], Any], op: Any, rank: int, group: Any, later: bool) -> list[Any]:
    summed, reduced, shard = make(), make(), make()
    _wait(dist.all_reduce(summed, op, group=group, async_op=later))
    _wait(dist.reduce(reduced, 1, op, group=group, async_op=later))
    inputs = [make() for _ in range(dist.get_world_size())]
    _wait(dist.reduce_scatter(shard, inputs, op, group=group, async_op=later))
    future_of = dist.all_reduce(second := make(), op, group=group, async_op=True).get_future()
    (value,) = future_of.wait()
    return [summed, *([reduced] if rank == 1 else []), shard, second, value.clone()]


OPERATIONS: dict[str, Callable[..., Any]] = {
    "all_reduce": _all_reduce,
    "bitwise": _bitwise,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "all_gather_single": _all_gather_single,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "strided": _strided,
}


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()


def compare(rank: int, world_size: int) -> list[str]:
    """Return the names of the results that differ between the backend and Gloo."""
    gloo = dist.new_group(backend="gloo")
    different = []
    for name, operation in OPERATIONS.items():
        for dtype in DTYPES:
            for shape in SHAPES:
                for later in (False, True):
                    ours = operation(shape, dtype, rank, None, later)
                    theirs = operation(shape, dtype, rank, gloo, later)
                    ours, theirs = (
                        result if isinstance(result, list) else [result] for result in (ours, theirs)
                    )
                    if len(ours) != len(theirs) or not all(
                        torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)
                    ):
                        different.append(f"{name} {dtype} {shape} async={later}")
    return different


@pytest.mark.parametrize("ranks", [2, 3])
def test_results_equal_those_of_gloo(ranks: int) -> None:
    assert run_ranks(compare, ranks, backend="dtcomm") == [[]] * ranks


def reduce_unusual_tensors(rank: int, world_size: int) -> list[float]:
    mesh = init_device_mesh("cpu", (world_size,))
    for _ in range(3):
        dist.all_reduce(torch.ones(8))  # from now on such calls take the short way
    freed = torch.ones(8)
    freed.untyped_storage().resize_(0)
    sharded = distribute_tensor(torch.ones(8), mesh, [Shard(0)])
    for tensor, error in ((freed, "tensor"), (sharded, "to_local")):
        for call in (dist.all_reduce, dtcomm.all_reduce, lambda tensor: dist.broadcast(tensor, 0)):
            with pytest.raises(TypeError, match=error):
                call(tensor)
    summed = functional.all_reduce(torch.ones(8), "sum", dist.group.WORLD)
    dist.all_reduce(summed)
    other = functional.all_reduce(torch.ones(8), "sum", dist.group.WORLD)
    gathered = torch.empty(8 * world_size)
    dist.all_gather_into_tensor(gathered, other)
    return [*summed.tolist(), *gathered.tolist()]


def test_tensors_without_memory_are_refused_and_results_of_functional_collectives_taken() -> None:
    assert run_ranks(reduce_unusual_tensors, 2, backend="dtcomm") == [[4.0] * 8 + [2.0] * 16] * 2


def repeat_collectives(rank: int, world_size: int) -> dict[str, list[str]]:
    """Return, by collective, the functions of dtcomm that calls with arguments used before still enter."""
    whole, shard = torch.empty(12 * world_size), torch.empty(12)
    other = torch.empty_like(whole)
    calls: dict[str, Callable[[bool], Any]] = {
        "all_reduce": lambda later: dist.all_reduce(whole, async_op=later),
        "reduce": lambda later: dist.reduce(whole, 0, async_op=later),
        "broadcast": lambda later: dist.broadcast(whole, 0, async_op=later),
        "all_gather": lambda later: dist.all_gather_into_tensor(whole, shard, async_op=later),
        "reduce_scatter": lambda later: dist.reduce_scatter_tensor(shard, whole, async_op=later),
        "all_to_all": lambda later: dist.all_to_all_single(other, whole, async_op=later),
    }
    entered: dict[str, list[str]] = {name: [] for name in calls}
    with pytest.MonkeyPatch.context() as patch:
        for name, call in calls.items():
            for repetition in range(4):
                whole.copy_(torch.arange(whole.numel()) + rank)
                shard.fill_(rank)
                if repetition == 2:
                    original = getattr(dtcomm.collectives, name)

                    def record(
                        *arguments: Any, original: Any = original, name: str = name, **options: Any
                    ) -> Any:
                        entered[name].append(original.__name__)
                        return original(*arguments, **options)

                    patch.setattr(dtcomm.collectives, name, record)
                _wait(call(repetition % 2 == 1))
                if repetition == 0:
                    expected = [tensor.clone() for tensor in (whole, shard, other)]
                assert all(map(torch.equal, (whole, shard, other), expected)), name
        whole.fill_(1)
        dist.all_reduce(whole[::2])  # not contiguous: the long way, with the same values
        assert whole.tolist() == [world_size, 1] * (whole.numel() // 2)
        assert entered.pop("all_reduce") == ["all_reduce"]
        dist.all_gather_into_tensor(whole, torch._neg_view(torch.ones(12)))  # its memory has other values
        assert whole.eq(-1).all() and entered.pop("all_gather") == ["all_gather"]
    return entered


@pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="this torch has no C functions that read tensors (torch 2.10 or newer has)",
)
def test_repeated_calls_enter_the_engine_at_once() -> None:
    for entered in run_ranks(repeat_collectives, 2, backend="dtcomm"):
        assert entered and not any(entered.values())
