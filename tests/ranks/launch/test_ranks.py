from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dtcomm.launch.ranks import RankError, RankTimeout, run_ranks, send_to_parent, spawn_ranks


def sum_of_ranks(rank: int, world_size: int, scale: int) -> tuple[int, int, torch.Tensor]:
    tensor = torch.full((3,), float(rank * scale))
    dist.all_reduce(tensor)
    return rank, os.getpid(), tensor


def fail(rank: int, world_size: int, culprit: int, failure: str) -> None:
    if rank == culprit:
        if failure == "raise":
            raise KeyError(f"from {rank}")
        if failure == "odd":
            raise type("Odd", (Exception,), {})("cannot be pickled")
        if failure == "exit":
            sys.exit(3)
        if failure == "_exit":
            os._exit(0)
        os.kill(os.getpid(), getattr(signal, failure))
    dist.barrier()


def sleep(rank: int, world_size: int, seconds: float) -> int:
    if rank == 1:
        time.sleep(seconds)
    return rank


def environment(rank: int, world_size: int, name: str) -> str | None:
    return os.environ.get(name)


def announce_and_sleep(rank: int, world_size: int) -> int:
    send_to_parent(("here", rank))
    time.sleep(60)
    return rank


def fork_and_wait(rank: int, world_size: int) -> None:
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    send_to_parent(child)
    time.sleep(600)


def close_all_descriptors(rank: int, world_size: int) -> None:
    os.closerange(3, 256)
    time.sleep(600)


def has_process_group(rank: int, world_size: int) -> bool:
    return dist.is_initialized()


def exit_with_code_7(rank: int, world_size: int) -> int:
    import atexit

    atexit.register(os._exit, 7)
    return rank


def process_ends(pid: int, within: float = 5.0) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_results_come_in_rank_order_and_by_value() -> None:
    results = run_ranks(sum_of_ranks, 3, 10)
    assert [rank for rank, _, _ in results] == [0, 1, 2]
    for _, _, tensor in results:
        assert torch.equal(tensor, torch.full((3,), 30.0))


def test_processes_are_reused_for_other_world_sizes() -> None:
    first = {pid for _, pid, _ in run_ranks(sum_of_ranks, 2, 1)}
    second = {pid for _, pid, _ in run_ranks(sum_of_ranks, 3, 1)}
    assert len(second & first) == 2


def test_a_reused_process_keeps_its_rank() -> None:
    # torch's caches keep coordinates of device meshes, which are those of one rank.
    first = [pid for _, pid, _ in run_ranks(sum_of_ranks, 3, 1)]
    run_ranks(sum_of_ranks, 2, 1)
    assert [pid for _, pid, _ in run_ranks(sum_of_ranks, 3, 1)] == first


def test_fresh_processes_are_used_once() -> None:
    pooled = {pid for _, pid, _ in run_ranks(sum_of_ranks, 2, 1)}
    fresh = {pid for _, pid, _ in run_ranks(sum_of_ranks, 2, 1, fresh=True)}
    assert not pooled & fresh
    assert all(process_ends(pid) for pid in fresh)


def test_no_process_group_without_a_backend() -> None:
    assert run_ranks(has_process_group, 2, backend=None) == [False, False]
    assert run_ranks(has_process_group, 2) == [True, True]


def test_an_exception_keeps_its_type_and_names_its_rank() -> None:
    started = time.monotonic()
    with pytest.raises(KeyError, match="from 1") as caught:
        run_ranks(fail, 2, 1, "raise")
    assert "rank 1:" in str(caught.value.__cause__) and "in fail" in str(caught.value.__cause__)
    assert time.monotonic() - started < 20


def test_exception_that_cannot_be_pickled_is_described() -> None:
    with pytest.raises(RankError, match=r"rank 0 raised .*Odd: cannot be pickled"):
        run_ranks(fail, 2, 0, "odd")


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("exit", "rank 1 exited with code 3 before"),
        ("_exit", "rank 1 exited with code 0 before"),
        ("SIGKILL", "rank 1 was killed by SIGKILL"),
        ("SIGSEGV", "rank 1 was killed by SIGSEGV"),
    ],
)
def test_dead_rank_is_named(failure: str, message: str) -> None:
    with pytest.raises(RankError, match=message) as caught:
        run_ranks(fail, 2, 1, failure)
    assert not isinstance(caught.value, RankTimeout)


def test_hung_rank_is_killed_at_the_deadline_with_its_stack() -> None:
    run_ranks(environment, 2, "HOME")
    started = time.monotonic()
    with pytest.raises(RankTimeout, match=r"rank 1 did not return within") as caught:
        run_ranks(sleep, 2, 600.0, timeout=1.0)
    assert time.monotonic() - started < 10
    assert "in sleep" in str(caught.value)
    assert "rank 0 did" not in str(caught.value)


def test_stopped_rank_is_killed_at_the_deadline() -> None:
    run_ranks(environment, 2, "HOME")  # so that the processes have started before the deadline counts
    with pytest.raises(RankTimeout, match=r"rank 1 did not return(.|\n)*the process was stopped"):
        run_ranks(fail, 2, 1, "SIGSTOP", timeout=5.0)


def test_failed_processes_are_not_reused() -> None:
    with spawn_ranks(fail, 2, 1, "raise") as ranks:
        pids = ranks.pids
        outcomes = ranks.join(20, grace=0.5)
    assert isinstance(outcomes[1].exception, KeyError) and not outcomes[1].ok
    assert outcomes[0].timed_out or outcomes[0].exception is not None
    assert all(process_ends(pid) for pid in pids)
    assert not {pid for _, pid, _ in run_ranks(sum_of_ranks, 2, 1)} & set(pids)


def test_ranks_send_messages_and_can_be_killed() -> None:
    with spawn_ranks(announce_and_sleep, 2) as ranks:
        assert [ranks.receive(rank) for rank in (0, 1)] == [("here", 0), ("here", 1)]
        with pytest.raises(RankTimeout, match="rank 0 sent no message"):
            ranks.receive(0, timeout=0.1)
        ranks.kill(1)
        outcomes = ranks.join(1.0)
    assert (outcomes[1].exitcode, outcomes[1].timed_out) == (-signal.SIGKILL, False)
    assert outcomes[0].timed_out


def test_leaving_the_block_kills_the_rank_and_its_children() -> None:
    with spawn_ranks(fork_and_wait, 1, backend=None) as ranks:
        child = ranks.receive(0)
        assert isinstance(child, int)
        ranks.kill(0, signal.SIGSTOP)
        pids = [*ranks.pids, child]
    assert all(process_ends(pid) for pid in pids)


def test_death_is_detected_while_a_child_holds_the_socket() -> None:
    with spawn_ranks(fork_and_wait, 1, backend=None) as ranks:
        ranks.receive(0)
        ranks.kill(0)
        (outcome,) = ranks.join(10)
        assert outcome.exitcode == -signal.SIGKILL and outcome.seconds < 10


def test_a_rank_that_closes_its_descriptors_is_waited_for_without_spinning() -> None:
    with spawn_ranks(close_all_descriptors, 1, backend=None) as ranks:
        before = time.process_time()
        (outcome,) = ranks.join(1.5)
    assert outcome.timed_out and time.process_time() - before < 0.5


def test_exit_code_after_the_result_is_a_failure() -> None:
    with pytest.raises(RankError, match="exited with code 7"):
        run_ranks(exit_with_code_7, 1, fresh=True)


def test_environment_is_that_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTCOMM_TEST_A", "outer")
    assert run_ranks(environment, 2, "DTCOMM_TEST_A") == ["outer"] * 2
    assert run_ranks(environment, 2, "DTCOMM_TEST_A", env={"DTCOMM_TEST_A": "inner"}) == ["inner"] * 2
    assert run_ranks(environment, 2, "DTCOMM_TEST_A", env={"DTCOMM_TEST_A": None}) == [None] * 2
    monkeypatch.delenv("DTCOMM_TEST_A")
    assert run_ranks(environment, 2, "DTCOMM_TEST_A") == [None] * 2


def test_functions_must_be_importable() -> None:
    with pytest.raises(TypeError, match="top-level function"):
        run_ranks(lambda rank, world_size: rank, 2)


SCRIPT = """
import sys, time
from dtcomm.launch.ranks import spawn_ranks, send_to_parent, run_ranks

def work(rank, world_size):
    send_to_parent(rank)
    time.sleep(600)

def name(rank, world_size):
    return __name__, rank

if __name__ == "__main__":
    print([rank for _, rank in run_ranks(name, 2)], flush=True)
    ranks = spawn_ranks(work, 2)
    ranks.receive(0), ranks.receive(1)
    print(*ranks.pids, flush=True)
    time.sleep(600)
"""


def test_ranks_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join(p for p in sys.path if p) + os.pathsep + os.getcwd()
    environ = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environ
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline().strip() == "[0, 1]"
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
    assert all(process_ends(pid) for pid in pids)
