"""The rendezvous, in which the ranks of a group make a communicator: deadlines, failures and several groups at once."""

import contextlib
import errno
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import dtcomm.collectives as C
from dtcomm.errors import CollectiveTimeout, DtcommError, PeerLost
from dtcomm.launch.ranks import run_ranks, send_to_parent, spawn_ranks
from dtcomm.runtime.bootstrap import cpu
from dtcomm.runtime.bootstrap.cpu import CpuBootstrap
from dtcomm.runtime.bootstrap.rendezvous import StoreExchange
from dtcomm.runtime.bootstrap.tcp import Listener
from dtcomm.runtime.native import NativeRuntime
from dtcomm.runtime.torchdist.runtime import TorchDistRuntime
from tests.support.stopwatch import Elapsed, Stopwatch


def init_with_tcp_store(rank: int, world_size: int, directory: Path, timeout_s: float) -> None:
    """Initialize the default group with a TCPStore on rank 0."""
    file = directory / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        (directory / "draft").write_text(str(store.port))
        os.replace(directory / "draft", file)
    else:
        while not file.exists():
            time.sleep(0.005)
        store = dist.TCPStore("127.0.0.1", int(file.read_text()), world_size, is_master=False)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def use_two_groups(rank: int, world_size: int, directory: Path) -> bool:
    init_with_tcp_store(rank, world_size, directory, 60.0)
    first, second = (dist.new_group([0, 1]) for _ in range(2))
    dist.barrier()
    watch = Stopwatch()
    if rank == 0:
        waiting = in_thread(lambda: C.barrier(group=first))
        time.sleep(0.1)  # the thread waits for rank 1
        C.barrier(group=second)
        waiting.join()
    else:
        C.barrier(group=second)
        C.barrier(group=first)
    elapsed = watch.elapsed()
    dist.barrier()  # rank 0 has the store
    return elapsed.within(cpu_s=2.0, wall_s=20.0)


def test_groups_do_not_wait_for_each_other(tmp_path: Path) -> None:
    assert run_ranks(use_two_groups, 2, tmp_path, backend=None) == [True, True]


def wait_in_two_threads(rank: int, world_size: int) -> list[tuple[str, bool]]:
    """Return what two threads of rank 0 raise and whether both end soon after the timeout of 2 s."""
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=2))
    dist.barrier()
    results: list[tuple[str, bool]] = []

    def wait() -> None:
        watch = Stopwatch()
        with pytest.raises(CollectiveTimeout) as error:
            C.barrier(group=group)
        results.append((str(error.value), watch.elapsed().within(cpu_s=1.0, wall_s=3.8)))

    if rank == 0:
        threads = [in_thread(wait) for _ in range(2)]
        for thread in threads:
            thread.join()
    dist.barrier()
    return results


def test_one_deadline_for_all_ranks_and_threads() -> None:
    results = run_ranks(wait_in_two_threads, 3)[0]
    assert [soon for _, soon in results] == [True, True]
    assert all("ranks 1 and 2 did not come" in text and "timeout of 2 s" in text for text, _ in results), (
        results
    )


def lose_the_store(rank: int, world_size: int, directory: Path, before: bool) -> str:
    init_with_tcp_store(rank, world_size, directory, 60.0)
    dist.barrier()
    send_to_parent("ready")
    if rank == 0:
        time.sleep(60)
    while before and accepts_connections(int((directory / "port").read_text())):
        time.sleep(0.01)
    with pytest.raises(DtcommError) as error:
        C.barrier()
    return f"{type(error.value).__name__}: {error.value}"


def accepts_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("before", [True, False])
def test_error_of_the_store_is_reported_as_such(tmp_path: Path, before: bool) -> None:
    with spawn_ranks(lose_the_store, 2, tmp_path, before, backend=None) as ranks:
        assert [ranks.receive(rank) for rank in range(2)] == ["ready", "ready"]
        time.sleep(0.0 if before else 0.2)
        ranks.kill(0)
        outcome = ranks.join(30)[1]
    assert outcome.ok and outcome.result.startswith("DtcommError: the group's store"), outcome


def fail_once(rank: int, world_size: int, directory: Path, cause: str) -> str:
    """Return the error that one rank causes in the first barrier; the second barrier works."""
    init_with_tcp_store(rank, world_size, directory, 60.0)
    if rank == 2 and cause == "table":  # it comes when the others have raised
        while len(list(directory.glob("raised-*"))) < 2:
            time.sleep(0.005)
    with contextlib.ExitStack() as faults:
        patch = faults.enter_context(pytest.MonkeyPatch.context())
        if cause == "table" and rank == 0:
            patch.setenv("DTCOMM_TUNE", "/nonexistent")
        elif cause == "descriptors" and rank == 1:
            use_all_descriptors(faults)
        elif cause == "memory" and rank == 1:
            patch.setattr(NativeRuntime, "attach", run_out_of_memory)
        elif cause == "connection":
            patch.setenv("DTCOMM_RUNTIME", "process_group")
            if rank == 1:  # while the others connect through Gloo
                patch.setattr(cpu, "private_store", run_out_of_memory)
        watch = Stopwatch()
        with pytest.raises((RuntimeError, OSError, ValueError, MemoryError)) as error:
            C.barrier()
        elapsed = watch.elapsed()
    (directory / f"raised-{rank}").touch()
    assert elapsed.within(cpu_s=3.0, wall_s=20.0), elapsed
    C.barrier()
    dist.barrier()  # rank 0 has the store
    return f"{type(error.value).__name__}: {error.value}"


def use_all_descriptors(until: contextlib.ExitStack) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
    until.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
    with contextlib.suppress(OSError):
        while True:
            until.callback(os.close, os.open("/dev/null", os.O_RDONLY))


def run_out_of_memory(*args: object, **kwargs: object) -> None:
    raise MemoryError("no memory left")


@pytest.mark.parametrize(
    ("cause", "culprit", "own", "others"),
    [
        ("table", 0, "ValueError: DTCOMM_TUNE=/nonexistent", "ValueError: DTCOMM_TUNE=/nonexistent"),
        ("descriptors", 1, "OSError: [Errno 24]", "OSError: [Errno 24]"),
        ("memory", 1, "MemoryError: no memory left", "MemoryError: no memory left"),
        ("connection", 1, "MemoryError: no memory left", "MemoryError: no memory left"),
    ],
)
def test_failure_of_one_rank_is_raised_on_all(
    tmp_path: Path, cause: str, culprit: int, own: str, others: str
) -> None:
    results = run_ranks(fail_once, 3, tmp_path, cause, backend=None)
    for rank, text in enumerate(results):
        expected = (
            own if rank == culprit else f"DtcommError: rank {culprit} could not make a communicator: {others}"
        )
        assert text.startswith(expected), results


def retry_until_all_meet(rank: int, world_size: int, how: str) -> int:
    """Return how many attempts failed on this rank."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    dist.barrier()
    if how == "released by one":
        C.barrier(group=group)
        if rank == 0:
            C.release(group)
    elif rank == 1:  # it comes after the first attempt of rank 0
        dist.barrier()
    for failures in range(5):
        try:
            if how == "pair":
                C.send(torch.ones(1), 1, group=group) if rank == 0 else C.recv(torch.ones(1), 0, group=group)
            else:
                C.barrier(group=group)
            return failures
        except DtcommError:
            if how == "released by one":
                C.release(group)
        if how != "released by one" and rank == 0 and failures == 0:
            dist.barrier()
    raise AssertionError("the ranks did not meet")


@pytest.mark.parametrize("how", ["late", "pair", "released by one"])
def test_a_group_can_be_made_again(how: str) -> None:
    assert max(run_ranks(retry_until_all_meet, 2, how)) <= 2


def wait_for_a_dead_rank(rank: int, world_size: int) -> tuple[str, Elapsed]:
    group = dist.new_group([0, 1, 2])
    C.barrier()  # from now on the ranks know each other's processes
    send_to_parent("ready")
    if rank == 2:
        time.sleep(60)
    watch = Stopwatch()
    with pytest.raises(PeerLost) as error:
        C.barrier(group=group)
    return str(error.value), watch.elapsed()


def die_while_gloo_connects(rank: int, world_size: int, moment: tuple[type, str]) -> tuple[str, str, Elapsed]:
    """Return the error of the first operation over Gloo, where the last rank dies just before ``moment``, a method."""
    group = dist.new_group(range(world_size), timeout=timedelta(seconds=60))
    dist.barrier()
    if rank == world_size - 1:
        setattr(*moment, lambda *args: os.kill(os.getpid(), signal.SIGKILL))
    watch = Stopwatch()
    with pytest.raises(DtcommError) as error:
        C.all_reduce(torch.ones(8), group=group)
    return type(error.value).__name__, str(error.value), watch.elapsed()


@pytest.mark.parametrize("moment", [(CpuBootstrap, "_private_backend"), (TorchDistRuntime, "prepare")])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_dies_before_its_first_message_is_named(
    world_size: int, moment: tuple[type, str]
) -> None:
    """Gloo waits five times the timeout for a connection from a rank that has died."""
    env = {"DTCOMM_RUNTIME": "process_group"}
    with spawn_ranks(die_while_gloo_connects, world_size, moment, env=env) as ranks:
        pid = ranks.pids[world_size - 1]
        for outcome in ranks.join(40)[:-1]:
            assert outcome.ok, str(outcome)
            kind, text, elapsed = outcome.result
            assert kind == "PeerLost", text
            assert text.startswith(f"rank {world_size - 1} (") and f"pid {pid}) is gone" in text
            assert elapsed.within(cpu_s=2.0, wall_s=20.0), elapsed


def die_before_its_memory_is_read(rank: int, world_size: int) -> str:
    """Return the error where a rank agrees to single copies and dies before the others try to read its memory."""
    group = dist.new_group(range(world_size), timeout=timedelta(seconds=30))
    victim = world_size - 1
    if rank == victim:
        agree = CpuBootstrap._agree

        def agree_and_die(self: CpuBootstrap, exchange: StoreExchange, *args: Any) -> bool:
            with mock.patch.object(exchange, "_wait", lambda _: os.kill(os.getpid(), signal.SIGKILL)):
                return agree(self, exchange, *args)

        with mock.patch.object(CpuBootstrap, "_agree", agree_and_die):
            C.all_reduce(torch.ones(8), group=group)
    why_no_single_copy = NativeRuntime.why_no_single_copy

    def await_the_death(self: NativeRuntime) -> str:
        while not self.native.single_copy_error():
            time.sleep(1e-3)
        return why_no_single_copy(self)

    with mock.patch.object(NativeRuntime, "why_no_single_copy", await_the_death):
        with pytest.raises(PeerLost) as error:
            C.all_reduce(torch.ones(8), group=group)
    return str(error.value)


def test_a_rank_that_dies_before_its_memory_is_read_is_named() -> None:
    with spawn_ranks(die_before_its_memory_is_read, 3, env={"DTCOMM_SINGLE_COPY": "on"}) as ranks:
        for outcome in ranks.join(40)[:-1]:
            assert outcome.ok, str(outcome)
            assert outcome.result.startswith("rank 2 (")


def fail_to_connect(rank: int, world_size: int) -> tuple[str, str, Elapsed]:
    """Return what serves a group in which the last rank has no descriptors left, and how long it took to connect."""
    group = dist.new_group(range(world_size), timeout=timedelta(seconds=60))
    dist.barrier()
    os.environ["DTCOMM_HOST_ID"] = f"host {rank}"
    watch = Stopwatch()
    with contextlib.ExitStack() as patches:
        if rank == world_size - 1:
            error = OSError(errno.EMFILE, "Too many open files")
            patches.enter_context(mock.patch.object(Listener, "connect", side_effect=error))
        C.barrier(group=group)
    info = C.info(group)
    return info["runtime"], info["reason"], watch.elapsed()


def test_the_ranks_do_not_wait_for_connections_of_one_that_cannot_make_them() -> None:
    for runtime, reason, elapsed in run_ranks(fail_to_connect, 3):
        assert runtime == "process_group" and "Too many open files" in reason
        assert elapsed.within(cpu_s=2.0, wall_s=10.0), elapsed


def stop_while_gloo_connects(rank: int, world_size: int, directory: Path) -> str:
    init_with_tcp_store(rank, world_size, directory, 60.0)
    group = dist.new_group(range(world_size), timeout=timedelta(seconds=2))
    dist.barrier()
    if rank == world_size - 1:
        with mock.patch.object(
            CpuBootstrap, "_private_backend", lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
        ):
            C.all_reduce(torch.ones(8), group=group)
    watch = Stopwatch()
    with pytest.raises(CollectiveTimeout) as error:
        C.all_reduce(torch.ones(8), group=group)
    elapsed = watch.elapsed()
    send_to_parent((str(error.value), elapsed))
    time.sleep(60)  # rank 0 has the store
    return ""


def test_a_rank_that_stops_while_gloo_connects_is_named_at_the_deadline(tmp_path: Path) -> None:
    """Gloo waits in the store, and a client in which one thread waits serves no other."""
    env = {"DTCOMM_RUNTIME": "process_group"}
    with spawn_ranks(stop_while_gloo_connects, 3, tmp_path, backend=None, env=env) as ranks:
        for rank in range(2):
            text, elapsed = ranks.receive(rank)
            assert text.startswith("rank 2 did not come to make a communicator before the timeout of 2 s")
            assert elapsed.within(cpu_s=1.0, wall_s=3.8), elapsed


def give_up_connecting(rank: int, world_size: int, path: str) -> float:
    """Return how long the thread lives on in which Gloo connects, where another rank stops and the store is lost."""
    store = dist.FileStore(path, world_size)  # type: ignore[attr-defined]
    timeout = timedelta(seconds=1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    if rank == 1:
        with mock.patch.object(CpuBootstrap, "_private_backend", lambda *_: time.sleep(60)):
            C.all_reduce(torch.ones(8))
    with pytest.raises(CollectiveTimeout):
        C.all_reduce(torch.ones(8))
    Path(path).unlink()
    given_up = time.monotonic()
    while any(thread.name == "dtcomm-gloo" for thread in threading.enumerate()):
        time.sleep(0.05)
    send_to_parent(time.monotonic() - given_up)
    return 0.0


def test_the_thread_of_a_connection_that_was_given_up_ends(tmp_path: Path) -> None:
    env = {"DTCOMM_RUNTIME": "process_group"}
    path = str(tmp_path / "store")
    # Fresh ranks, in which no thread of another test connects.
    with spawn_ranks(give_up_connecting, 2, path, backend=None, fresh=True, env=env) as ranks:
        assert ranks.receive(0, 60) < 20  # Gloo waits five times the timeout


def test_a_rank_that_dies_is_named() -> None:
    with spawn_ranks(wait_for_a_dead_rank, 3) as ranks:
        assert [ranks.receive(rank) for rank in range(3)] == ["ready"] * 3
        time.sleep(0.2)  # the others wait
        pid = ranks.pids[2]
        ranks.kill(2)
        for outcome in ranks.join(40)[:2]:
            assert outcome.ok, str(outcome)
            text, elapsed = outcome.result
            assert text.startswith("rank 2 (") and f"pid {pid}) is gone" in text
            assert elapsed.within(cpu_s=2.0, wall_s=20.0), elapsed
