"""Persistent operations give the bytes of the calls that they stand for, and fail where those would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtcomm
from dtcomm.errors import CommunicatorClosed
from dtcomm.kernels.epilogue import epilogue_task
from dtcomm.launch.ranks import run_ranks

RUNS = 4
CASES: list[dict[str, Any]] = [
    {},
    {"op": "avg"},
    {"op": "max"},
    {"codec": "int8"},
    {"codec": "int4:round=stochastic"},
    {"codec": "int8", "residual": True},
    {"codec": "topk:ratio=0.1", "residual": True},
    {"codec": "exact"},
    {"codec": "fp16", "algorithm": "ring"},
    {"codec": "int8", "checksum": True},
]


def inputs(rank: int, run: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * run + rank))


def compare_with_calls(rank: int, ranks: int, numel: int) -> None:
    """Each case on two groups of its own, so that both count the same calls."""
    for case in CASES:
        options = dict(case)
        has_residual = options.pop("residual", False)
        called, persistent = (dist.new_group() for _ in range(2))
        x, y = torch.empty(numel), torch.empty(numel)
        errors = [torch.zeros(numel) if has_residual else None for _ in range(2)]
        operation = dtcomm.all_reduce_init(y, group=persistent, residual=errors[1], **options)
        for run in range(RUNS):
            x.copy_(inputs(rank, run, numel))
            y.copy_(x)
            dtcomm.all_reduce(x, group=called, residual=errors[0], **options)
            if run % 2:
                operation.start()
                operation.wait()
            else:
                operation()
            assert torch.equal(x, y), (case, run)
            if has_residual:
                assert torch.equal(*errors), (case, run)  # type: ignore[arg-type]
        for group in (called, persistent):
            dist.destroy_process_group(group)


@pytest.mark.parametrize(("ranks", "numel"), [(2, 1000), (3, 300_000)])
def test_the_bytes_of_calls(ranks: int, numel: int) -> None:
    run_ranks(compare_with_calls, ranks, numel)


def test_the_bytes_of_calls_over_a_process_group() -> None:
    run_ranks(compare_with_calls, 2, 1000, env={"DTCOMM_RUNTIME": "process_group"})


def compare_others_with_calls(rank: int, ranks: int) -> None:
    """The other collectives: each on two groups, with the same calls."""
    shard = 24
    for codec in ("none", "int4:round=stochastic"):
        called, persistent = (dist.new_group() for _ in range(2))
        whole, part = torch.empty(ranks * shard), torch.empty(shard)
        results = [(torch.zeros(ranks * shard), torch.zeros(shard)) for _ in range(2)]
        exchanged = torch.empty(ranks * shard)
        options: dict[str, Any] = {"codec": codec, "group": persistent}
        operations = [
            dtcomm.reduce_scatter_init(results[1][1], whole, "avg", **options),
            dtcomm.all_gather_init(results[1][0], part, **options),
            dtcomm.all_to_all_init(exchanged, whole, **options),
            dtcomm.broadcast_init(part, ranks - 1, **options),
        ]
        for run in range(RUNS):
            whole.copy_(inputs(rank, run, ranks * shard))
            part.copy_(whole[:shard])
            for operation in operations:
                if run % 2:
                    operation.start()
                    operation.wait()
                else:
                    operation()
            options = {"codec": codec, "group": called}
            result = torch.empty(ranks * shard)
            dtcomm.reduce_scatter(results[0][1], whole, "avg", **options)
            own = whole[:shard].clone()
            dtcomm.all_gather(results[0][0], own, **options)
            dtcomm.all_to_all(result, whole, **options)
            dtcomm.broadcast(own, ranks - 1, **options)
            assert torch.equal(results[0][1], results[1][1]), (codec, run)
            assert torch.equal(results[0][0], results[1][0]), (codec, run)
            assert torch.equal(result, exchanged), (codec, run)
            assert torch.equal(own, part), (codec, run)
        whole.data = torch.empty(ranks * shard)
        with pytest.raises(RuntimeError, match="its memory has changed"):
            operations[0]()
        for group in (called, persistent):
            dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="expected world size x output"):
        dtcomm.reduce_scatter_init(part, part)
    with pytest.raises(ValueError, match="expected world size x input"):
        dtcomm.all_gather_init(part, part)
    with pytest.raises(ValueError, match="output: overlaps the memory of input"):
        dtcomm.all_to_all_init(part, part)
    with pytest.raises(ValueError, match="src: rank 7 is not in the group"):
        dtcomm.broadcast_init(part, 7)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_bytes_of_other_calls(ranks: int) -> None:
    run_ranks(compare_others_with_calls, ranks)


def run_many(rank: int, ranks: int) -> None:
    """Operations that are started together run in the order of their start, among others."""
    tensors = [torch.empty(50_000) for _ in range(3)]
    operations = [dtcomm.all_reduce_init(tensor, codec="int8") for tensor in tensors]
    for run in range(RUNS):
        other = torch.ones(100)
        for number, (tensor, operation) in enumerate(zip(tensors, operations, strict=True)):
            tensor.fill_(float(number + run))
            operation.start()
        dtcomm.all_reduce(other)
        for number, (tensor, operation) in enumerate(zip(tensors, operations, strict=True)):
            operation.wait()
            assert torch.allclose(tensor, torch.tensor(float(ranks * (number + run))), rtol=0.02)
        assert bool((other == ranks).all())


def test_several_at_once() -> None:
    run_ranks(run_many, 3)


def use_epilogue(rank: int, ranks: int) -> None:
    x, bias = torch.empty(8, 64), torch.arange(64.0)
    operation = dtcomm.all_reduce_init(x, epilogue=epilogue_task(x, bias=bias))
    for _ in range(RUNS):
        x.fill_(1.0)
        operation()
        assert torch.equal(x, (ranks + bias).expand(8, 64))


def test_an_epilogue_is_applied_in_every_run() -> None:
    run_ranks(use_epilogue, 2)


def use_python_codec(rank: int, ranks: int) -> None:
    codec = dtcomm.codecs.custom(
        "halves",
        lambda x: x.half().view(torch.uint8),
        lambda payload, numel: payload.view(torch.float16).float(),
        lambda numel: 2 * numel,
    )
    x, plain = torch.empty(1000), torch.empty(10)
    operation, native = dtcomm.all_reduce_init(x, codec=codec), dtcomm.all_reduce_init(plain)
    for _ in range(RUNS):
        x.fill_(1.0)
        plain.fill_(2.0)
        operation.start()
        native()  # behind the one in Python
        operation.wait()
        assert bool((x == ranks).all()) and bool((plain == 2 * ranks).all())


def test_a_codec_in_python() -> None:
    run_ranks(use_python_codec, 2)


def misuse(rank: int, ranks: int) -> list[str]:
    messages = []
    x = torch.ones(1000)

    def refused(error: type[Exception], call: Any) -> None:
        with pytest.raises(error) as raised:
            call()
        messages.append(str(raised.value))

    refused(ValueError, lambda: dtcomm.all_reduce_init(x, codec="int9"))
    refused(TypeError, lambda: dtcomm.all_reduce_init([1.0]))  # type: ignore[arg-type]
    refused(ValueError, lambda: dtcomm.all_reduce_init(x, residual=torch.ones(3)))
    operation = dtcomm.all_reduce_init(x)
    refused(RuntimeError, operation.wait)
    operation.start()
    refused(RuntimeError, operation.start)
    refused(RuntimeError, operation)
    operation.wait()
    moved = torch.ones(1000)
    other = dtcomm.all_reduce_init(moved)
    moved.set_(torch.ones(1000).untyped_storage(), 0, (1000,), (1,))  # type: ignore[call-overload]
    refused(RuntimeError, other)
    abandoned = dtcomm.all_reduce_init(torch.ones(100_000))
    abandoned.start()
    del abandoned
    operation()
    dist.barrier()
    dtcomm.release()
    refused(CommunicatorClosed, operation)
    return messages


def test_mistakes_are_named() -> None:
    expected = [
        "codec: unknown codec 'int9'",
        "tensor: expected a torch.Tensor, got list",
        "residual: has 3 elements, the tensor 1000",
        "the operation was not started; call start() first",
        "the operation runs already; call wait() first",
        "the operation runs already; call wait() first",
        "tensor: its memory has changed",
        "this communicator has been destroyed",
    ]
    for messages in run_ranks(misuse, 2):
        for message, part in zip(messages, expected, strict=True):
            assert part in message


def reduce_alone(rank: int, ranks: int) -> None:
    x = torch.ones(10)
    operation = dtcomm.all_reduce_init(x, codec="int8")
    operation()
    operation.start()
    operation.wait()
    assert bool((x == 1).all())


def test_one_rank_needs_no_other() -> None:
    run_ranks(reduce_alone, 1)


def die(rank: int, ranks: int) -> str:
    x = torch.ones(1000)
    operation = dtcomm.all_reduce_init(x)
    operation()
    if rank == 1:
        dtcomm.release()
        return ""
    with pytest.raises(dtcomm.errors.PeerLost) as error:
        for _ in range(3):
            operation()
    return str(error.value)


def test_a_rank_that_left_is_named() -> None:
    first, _ = run_ranks(die, 2)
    assert "rank 1" in first
