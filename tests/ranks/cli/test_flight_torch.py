"""torch's Flight Recorder analyser reads what ``dtcomm doctor --flight --format torch`` writes."""

from __future__ import annotations

import gc
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import dtcomm
from dtcomm.cli.doctor import main as doctor_command
from dtcomm.errors import DtcommError
from dtcomm.launch.ranks import run_ranks, spawn_ranks

fr_trace = pytest.importorskip("torch.distributed.flight_recorder.fr_trace")


def analyse(folder: Path, *options: str) -> Any:
    """Return the database of torch's analyser."""
    assert doctor_command.main(["--flight", str(folder), "--format", "torch"]) == 0
    try:
        fr_trace.main([str(folder / "torch"), "-o", str(folder / "database"), *options])
    finally:
        gc.enable()  # the analyser disables it
    return pickle.loads((folder / "database").read_bytes())[1]


def call_everything(rank: int, n: int, folder: str) -> None:
    x, shards = torch.ones(100), torch.ones(100 * n)
    dtcomm.all_reduce(x, codec="int8")
    dtcomm.all_reduce(torch.ones(7, dtype=torch.bfloat16), "max")
    dtcomm.all_gather(shards, x)
    dtcomm.reduce_scatter(x, shards, codec="fp16")
    dtcomm.all_to_all(torch.ones(100 * n), shards)
    dtcomm.broadcast(x, 1)
    dtcomm.reduce(x, 1)
    dtcomm.gather(x, torch.empty(100 * n) if rank == 0 else None, 0)
    dtcomm.scatter(x, shards if rank == 1 else None, 1)
    dtcomm.all_reduce_coalesced([torch.ones(10), torch.ones(20)])
    for sender in range(n):
        (dtcomm.send if rank == sender else dtcomm.recv)(x, 1 - rank)
    dtcomm.flight_record(folder)


def test_complete_records_pass_its_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(call_everything, 2, str(tmp_path), fresh=True)  # a pooled process has records of other groups
    database = analyse(tmp_path)
    assert f"2 dumps in {tmp_path / 'torch'}\n" in capsys.readouterr().out
    assert all(collective.pass_check and not collective.missing_ranks for collective in database.collectives)
    names = {
        collective.collective_name.partition(":")[2].split(" ")[0] for collective in database.collectives
    }
    copies = {"all_gather", "all_to_all", "broadcast", "gather", "scatter"}
    assert names - {"send", "recv"} == {"all_reduce", "reduce", "reduce_scatter"} | copies
    assert names & {"send", "recv"}, "one of the two ends of a message names it"
    assert {group.size for group in database.groups} == {2}
    assert len(database.ncclcalls) == 2 * len(database.collectives)
    first = database.collectives[0]
    assert (first.input_sizes, first.output_sizes, first.collective_state) == ([[100]], [[100]], "completed")


def disagree(rank: int, n: int, kind: str, folder: str) -> None:
    x = torch.ones(1000)
    for _ in range(2):
        dtcomm.all_reduce(x)
    if rank == 1 and kind == "missing":
        time.sleep(2.5)  # rank 0 has given up by then
        dtcomm.flight_record(folder)
        return
    codec = "int8" if rank == 1 and kind == "codec" else "none"
    with pytest.raises(DtcommError):
        if rank == 1 and kind == "collective":
            dtcomm.broadcast(x, 0)
        else:
            dtcomm.all_reduce(x, codec=codec)


@pytest.mark.parametrize("kind", ["collective", "codec", "missing"])
def test_it_finds_mismatches_and_missing_ranks(kind: str, tmp_path: Path) -> None:
    timeout = 1.0 if kind == "missing" else 20.0
    environment = {"DTCOMM_FLIGHT_DIR": str(tmp_path)}
    with spawn_ranks(disagree, 2, kind, str(tmp_path), env=environment, group_timeout=timeout) as ranks:
        ranks.join(30)
    collectives = analyse(tmp_path).collectives
    assert [collective.pass_check for collective in collectives[:2]] == [True, True]
    wrong = collectives[2]
    assert wrong.collective_seq_id == 3
    if kind == "missing":
        assert wrong.missing_ranks == {1}
        return
    assert not wrong.pass_check
    (mismatch,) = wrong.mismatch_collectives.values()
    reason = str(mismatch.type_of_mismatch)
    if kind == "collective":
        assert "COLLECTIVE_TYPE_MISMATCH" in reason and "'broadcast'" in reason
    else:
        assert "COLLECTIVE_DTYPE_MISMATCH" in reason and "'Float int8'" in reason


def test_a_rank_without_a_record_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(disagree, 2, "codec", str(tmp_path), env={"DTCOMM_FLIGHT_DIR": str(tmp_path)}, fresh=True)
    (tmp_path / "rank-1.json").unlink()
    database = analyse(tmp_path, "--allow-incomplete-ranks")
    out = capsys.readouterr().out
    assert "1 dumps in" in out and "; no records of rank 1" in out and "--allow-incomplete-ranks" in out
    assert {call.global_rank for call in database.ncclcalls} == {0}


def test_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor_command.main(["--flight", str(tmp_path), "--format", "torch"]) == 2
    assert "no flight records" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        doctor_command.main(["--format", "torch"])
    assert "--format torch needs --flight DIR" in capsys.readouterr().err


def many_calls(rank: int, n: int, folder: str) -> None:
    for _ in range(255):
        dtcomm.all_reduce(torch.ones(4))
    if rank == 0:
        dtcomm.flight_record(folder)  # has operation 1, which rank 1's record has no longer
    for _ in range(10):
        dtcomm.all_reduce(torch.ones(4))
    if rank == 1:
        dtcomm.flight_record(folder)


def test_records_that_begin_at_different_operations_are_aligned(tmp_path: Path) -> None:
    run_ranks(many_calls, 2, str(tmp_path), fresh=True)
    collectives = analyse(tmp_path).collectives
    assert [collective.collective_seq_id for collective in collectives] == list(range(10, 266))
    assert [collective.missing_ranks for collective in collectives] == [None] * 246 + [{0}] * 10
