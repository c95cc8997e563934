"""Ranks in containers: system calls that are refused, little shared memory, and other user ids."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

import dtcomm
import dtcomm.collectives as C
from dtcomm.launch.ranks import run_ranks
from tests.ranks.runtime.test_rendezvous import init_with_tcp_store
from tests.support.forbidden_calls import CANNOT_FORBID, forbid

NUMEL = 2**21
_NEW_MOUNTS, _PRIVATE = 0x00020000, 1 << 18 | 1 << 14  # CLONE_NEWNS; MS_PRIVATE | MS_REC


def use_everything(rank: int) -> dict[str, Any]:
    """Run operations of every kind of hand-over; return what `dtcomm.info` says."""
    tensor, shared = torch.full((NUMEL,), rank + 1.0), dtcomm.empty(NUMEL)
    shared.fill_(rank + 1.0)
    gathered, copied = torch.empty(2 * NUMEL), torch.full((NUMEL,), rank + 1.0)
    C.all_reduce(tensor)
    C.all_reduce(shared)
    C.all_gather(gathered, torch.full((NUMEL,), rank + 1.0))
    C.broadcast(copied, 1)
    C.all_reduce(small := torch.ones(3), codec="int8")
    assert tensor.eq(3).all() and shared.eq(3).all() and copied.eq(2).all() and small.sub(2).abs().max() < 0.1
    assert gathered[:NUMEL].eq(1).all() and gathered[NUMEL:].eq(2).all()
    return C.info()


def run_without(rank: int, world_size: int, calls: tuple[str, ...], on: list[int]) -> tuple[str, Any]:
    if rank in on and (reason := forbid(*calls)):
        return reason, None
    info = use_everything(rank)
    return "", {key: info.get(key) for key in ("runtime", "reason", "memory", "single_copy")}


@pytest.mark.parametrize("on", [[1], [0, 1]], ids=["one rank", "both"])
def test_without_ptrace(on: list[int]) -> None:
    calls = ("process_vm_readv", "process_vm_writev")
    results = run_ranks(run_without, 2, calls, on, fresh=True)
    if reason := next((reason for reason, _ in results if reason), ""):
        assert reason.startswith(CANNOT_FORBID)
        pytest.skip(reason)
    assert [info["runtime"] for _, info in results] == ["native", "native"]
    assert all(info["single_copy"] != "process_vm_readv" for _, info in results), results


@pytest.mark.parametrize(
    "calls",
    [
        *(("memfd_create",), ("eventfd2", "getrandom"), ("fallocate", "sched_getaffinity"), ("ftruncate",)),
        ("memfd_create", "eventfd2", "fallocate", "ftruncate", "getrandom", "sched_getaffinity"),
    ],
    ids=" ".join,
)
def test_without_calls_that_have_a_substitute(calls: tuple[str, ...]) -> None:
    sockets = {"DTCOMM_TRANSPORT": "sockets", "DTCOMM_CONNECTIONS": "3"}
    for env in [{}, *([sockets] if "eventfd2" in calls else [])]:
        results = run_ranks(run_without, 2, calls, [1], fresh=True, env=env)
        if reason := next((reason for reason, _ in results if reason), ""):
            assert reason.startswith(CANNOT_FORBID)
            pytest.skip(reason)
        assert [info["runtime"] for _, info in results] == ["native", "native"]
        replaced = (
            "/dev/shm (memfd_create: Operation not permitted)" if "memfd_create" in calls else "memfd_create"
        )
        assert [info["memory"] for _, info in results] == ["memfd_create", replaced]


def reduce_with_small_files(rank: int, world_size: int) -> dict[str, Any]:
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
    C.all_reduce(tensor := torch.full((NUMEL,), rank + 1.0))
    assert tensor.eq(3).all()
    return C.info()


def test_files_that_may_not_be_as_large_as_the_memory() -> None:
    for info in run_ranks(reduce_with_small_files, 2, fresh=True):
        assert info["runtime"] == "process_group" and "rank 1" in info["reason"] and "bytes" in info["reason"]


@pytest.mark.parametrize("on", [[1], [0, 1]], ids=["one rank", "both"])
def test_without_handles_of_processes(on: list[int]) -> None:
    """The engine needs pidfd_open, to notice that a peer has died; without it Gloo serves, on all ranks."""
    results = run_ranks(run_without, 2, ("pidfd_open",), on, fresh=True)
    if reason := next((reason for reason, _ in results if reason), ""):
        assert reason.startswith(CANNOT_FORBID)
        pytest.skip(reason)
    for _, info in results:
        assert info["runtime"] == "process_group"
        assert "pidfd_open" in info["reason"] and "Operation not permitted" in info["reason"]


def run_with_little_shared_memory(rank: int, world_size: int) -> tuple[str, Any]:
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.unshare(_NEW_MOUNTS)
        or libc.mount(b"none", b"/", None, _PRIVATE, None)
        or libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=64k")
    ):
        return f"/dev/shm cannot be replaced: {os.strerror(ctypes.get_errno())} (needs root)", None
    assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 64 * 1024
    return "", use_everything(rank)["runtime"]


def test_with_a_small_dev_shm() -> None:
    """Shared memory of dtcomm has no names, and none of it lies in /dev/shm."""
    results = run_ranks(run_with_little_shared_memory, 2, fresh=True)
    if reason := next((reason for reason, _ in results if reason), ""):
        pytest.skip(reason)
    assert [runtime for _, runtime in results] == ["native", "native"]


def run_as_two_users(rank: int, world_size: int, directory: Path) -> tuple[str, Any]:
    if os.geteuid() != 0:
        return "another user id needs root", None
    init_with_tcp_store(rank, world_size, directory, 60.0)
    os.environ["DTCOMM_TRANSPORT"] = "sockets"
    use_everything(rank)  # imports what the other user may not read
    C.release()
    del os.environ["DTCOMM_TRANSPORT"]
    os.seteuid(65534 * rank)
    try:
        info = use_everything(rank)
    finally:
        os.seteuid(0)
    return "", {key: info.get(key) for key in ("runtime", "transport", "reason")}


def test_two_users_of_one_host_are_connected_by_sockets(tmp_path: Path) -> None:
    results = run_ranks(run_as_two_users, 2, tmp_path, backend=None, fresh=True)
    if reason := next((reason for reason, _ in results if reason), ""):
        pytest.skip(reason)
    expected = {
        "runtime": "native",
        "transport": "sockets",
        "reason": "the ranks are of 2 user ids on one host: sockets",
    }
    assert [info for _, info in results] == [expected] * 2
