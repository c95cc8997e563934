"""The native engine tries variants of operations and chooses among them, alike on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtcomm import collectives
from dtcomm.launch.ranks import run_ranks

NUMEL = 3000
OPERATIONS = 300  # of each kind: enough for the stages of all properties
Choices = dict[str, dict[str, Any]]


def choices() -> Choices:
    return {choice["size_class"]: choice for choice in collectives.info()["choices"]}


def run_operations(rank: int, n: int) -> Choices:
    """Run operations of several size classes, synchronous and asynchronous, and compare every result."""
    summed, own, gathered = torch.empty(NUMEL), torch.empty(NUMEL), torch.empty(NUMEL * n)
    averaged, copied = torch.empty(NUMEL * 20), torch.empty(NUMEL * 20)
    for step in range(OPERATIONS):
        summed.fill_(rank + step)
        work = collectives.all_reduce(summed, async_op=True)
        own.fill_(rank * step)
        collectives.all_gather(gathered, own)
        work.wait()
        assert summed.eq(sum(range(n)) + n * step).all()
        assert gathered.view(n, -1).eq(torch.arange(n).view(-1, 1) * step).all()
        averaged.fill_(step % 64 + rank)
        collectives.all_reduce(averaged, "max", codec="bf16")
        assert averaged.eq(step % 64 + n - 1).all()
        copied.fill_(step if rank == step % n else -1)
        collectives.broadcast(copied, step % n)
        assert copied.eq(step).all()
    return choices()


@pytest.mark.parametrize("n", [2, 3])
def test_ranks_choose_alike_and_results_are_exact(n: int) -> None:
    reports = run_ranks(run_operations, n)
    for report in reports:
        assert [name.split()[0] for name in report] == ["all_reduce", "all_gather", "all_reduce", "broadcast"]
        assert all(choice["settled"] and choice["trials"] >= 14 for choice in report.values())
    assert all(choice["microseconds"] > 0 for choice in reports[0].values())
    for report in reports[1:]:
        for name, choice in report.items():
            assert {**choice, "microseconds": 0} == {**reports[0][name], "microseconds": 0}


def count_trials(rank: int, n: int) -> tuple[int, int]:
    """Return how many of the operations after the first search were trials, and the number of these operations."""
    x = torch.zeros(4096)
    while not any(choice["settled"] for choice in choices().values()):
        for _ in range(100):
            collectives.all_reduce(x)
    before = next(iter(choices().values()))["trials"]
    for _ in range(20_000):
        collectives.all_reduce(x)
    return next(iter(choices().values()))["trials"] - before, 20_000


def test_a_settled_class_stays_as_it_is() -> None:
    assert [trials for trials, _ in run_ranks(count_trials, 2)] == [0, 0]


def test_trials_can_go_on_and_are_then_rare() -> None:
    for trials, operations in run_ranks(count_trials, 2, env={"DTCOMM_TRIALS": "always"}):
        assert 0 < trials < operations * 0.08


def report_choices(rank: int, n: int) -> tuple[str, list[dict[str, Any]]]:
    x, out = torch.ones(100_000), torch.empty(100_000 * n)
    for _ in range(300):
        collectives.all_gather(out, x)
    info = collectives.info()
    return info["trials"], info["choices"]


@pytest.mark.parametrize(
    ("variables", "fixed"),
    [
        ({"DTCOMM_STAGING": "streaming"}, {"stream_payload": True}),
        ({"DTCOMM_STAGING": "ordinary"}, {"stream_payload": False}),
        ({"DTCOMM_PIECE_KIB": "96"}, {"piece_bytes": 96 * 1024}),
        ({"DTCOMM_SINGLE_COPY": "off"}, {"single_copy": False}),
        ({"DTCOMM_SINGLE_COPY": "on"}, {"single_copy": True}),
    ],
)
def test_what_a_variable_fixes_is_not_tried(variables: dict[str, str], fixed: dict[str, Any]) -> None:
    for trials, (choice,) in run_ranks(report_choices, 2, env=variables):
        assert trials == "first"
        assert choice["trials"] > 0
        assert {key: choice[key] for key in fixed} == fixed


def test_trials_can_be_switched_off() -> None:
    for trials, reported in run_ranks(report_choices, 2, env={"DTCOMM_TRIALS": "never"}):
        assert (trials, reported) == ("DTCOMM_TRIALS=never", [])


def small_operations(rank: int, n: int) -> list[dict[str, Any]]:
    x = torch.zeros(256)
    for _ in range(100):
        collectives.all_reduce(x)
    choices: list[dict[str, Any]] = collectives.info()["choices"]
    return choices


def test_small_operations_are_not_tried() -> None:
    assert run_ranks(small_operations, 2) == [[], []]


def exchange(rank: int, n: int) -> list[dict[str, Any]]:
    """Send and receive at once, until the first stage has ended and no other one has."""
    sent, received = torch.full((16_384,), float(rank)), torch.empty(16_384)
    for _ in range(100):
        collectives.sendrecv(sent, 1 - rank, received, 1 - rank)
        assert received.eq(1 - rank).all()
    messages: list[dict[str, Any]] = collectives.info()["messages"]
    return messages


def test_both_directions_of_messages_try_the_same_at_the_same_time() -> None:
    for rank, messages in enumerate(run_ranks(exchange, 2)):
        ends = [(message["peer"], message["sends"]) for message in messages]
        assert sorted(ends) == [(1 - rank, False), (1 - rank, True)]
        for message in messages:
            (choice,) = message["choices"]
            assert choice["size_class"] == "send send none float32 2^16 bytes"
            # One and two copies, in four rounds, each for eight messages in a row.
            assert choice["trials"] == 64


def reduce_exactly(rank: int, n: int) -> tuple[bytes, dict[str, Any]]:
    """Return the bytes of an average of numbers that are rounded, while one and two shots are tried."""
    generator = torch.Generator().manual_seed(rank)
    source = torch.randn(20_001, generator=generator).half()
    x = source.clone()
    collectives.all_reduce(x, "avg", algorithm="two_shot")
    want = x.clone()
    for _ in range(200):
        x.copy_(source)
        collectives.all_reduce(x, "avg")
        assert torch.equal(x, want)
    (choice,) = (choice for choice in collectives.info()["choices"] if " direct " in choice["size_class"])
    return want.numpy().tobytes(), choice


@pytest.mark.parametrize("n", [2, 3])
def test_one_and_two_shots_give_the_same_bits(n: int) -> None:
    (want, choice), *others = run_ranks(reduce_exactly, n)
    assert choice["trials"] >= 28  # four combinations of stores and shots
    assert all(bits == want for bits, _ in others)


def mix_requests(rank: int, n: int) -> list[str]:
    """Call with and without a given algorithm in turn, so that plans with other variants have the same sizes."""
    x = torch.empty(5000)
    for step in range(300):
        for algorithm in ("auto", "one_shot", "two_shot", "ring"):
            x.fill_(rank + step)
            collectives.all_reduce(x, algorithm=algorithm)
            assert x.eq(sum(range(n)) + n * step).all()
    return [choice["size_class"].split()[1] for choice in collectives.info()["choices"]]


def test_a_given_algorithm_is_a_class_of_its_own() -> None:
    assert run_ranks(mix_requests, 3) == [["direct", "one_shot", "two_shot", "ring"]] * 3
