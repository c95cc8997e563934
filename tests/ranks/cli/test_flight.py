"""Flight records of ranks of which one dies, stops, comes late or calls something else, and doctor's diagnosis."""

from __future__ import annotations

import copy
import json
import math
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtcomm
import dtcomm.collectives as C
from dtcomm.cli import doctor as doctor_command
from dtcomm.cli.doctor.flight import diagnose, format_ranks
from dtcomm.errors import DtcommError
from dtcomm.launch.ranks import run_ranks, send_to_parent, spawn_ranks

NUMEL = 25 * 2**20 // 4
OVER_GLOO = {"DTCOMM_RUNTIME": "process_group", "DTCOMM_PIECE_KIB": "256"}


def call_three_times(rank: int, world_size: int, kind: str) -> str:
    """Make two correct calls and a third one in which the last rank fails as ``kind`` says."""
    x = torch.ones(NUMEL)
    for _ in range(2):
        C.all_reduce(x)
    is_last = rank == world_size - 1
    if is_last and kind in ("SIGKILL", "SIGSTOP", "absent"):
        send_to_parent("here")
        time.sleep(30 if kind.startswith("SIG") else 6)
    try:
        if kind == "mismatch" and is_last:
            C.broadcast(x, 0)
        else:
            C.all_reduce(x)
    except DtcommError as error:
        return type(error).__name__
    return ""


def write_records(kind: str, tmp_path: Path, env: dict[str, str], timeout: float) -> None:
    with spawn_ranks(
        call_three_times, 3, kind, env={"DTCOMM_FLIGHT_DIR": str(tmp_path), **env}, group_timeout=timeout
    ) as ranks:
        if kind in ("SIGKILL", "SIGSTOP"):
            assert ranks.receive(2) == "here"
            ranks.kill(2, signal.Signals[kind])
        if kind == "SIGSTOP":
            time.sleep(timeout + 2)
            ranks.kill(2, signal.SIGKILL)
        ranks.join(30)


def run_doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    assert doctor_command.main(["--flight", str(tmp_path), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert doctor_command.main(["--flight", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    (wrong,) = [entry for entry in document["communicators"] if entry["kind"] != "healthy"]
    assert wrong["sentence"] in text
    return wrong, text


MISSING = (
    "rank 2 never entered all_reduce #3 of 25.0 MiB that ranks 0-1 wait for (the last it entered is #2; "
)


@pytest.mark.parametrize(
    ("kind", "env", "timeout", "sentence"),
    [
        ("SIGKILL", {}, 20.0, MISSING + "its process is gone)"),
        ("SIGSTOP", {}, 4.0, MISSING + "it left no record: stopped, killed or busy elsewhere)"),
        ("SIGKILL", OVER_GLOO, 20.0, "rank 2 entered all_reduce #3 of 25.0 MiB and does not go on; "),
    ],
    ids=["killed", "stopped", "killed over gloo"],
)
def test_dead_or_stopped_rank_is_diagnosed(
    kind: str,
    env: dict[str, str],
    timeout: float,
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_records(kind, tmp_path, env, timeout)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0.json", "rank-1.json"]
    wrong, text = run_doctor(tmp_path, capsys)
    if env:  # over Gloo no rank knows the progress of another
        sentence = sentence.replace("entered", "never entered").partition(" and ")[0]
    assert wrong["sentence"].startswith(sentence), wrong["sentence"]
    assert wrong["culprits"] == [2] and wrong["operation"] == 3
    assert "ranks 0-2" in text


def test_late_rank_is_diagnosed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_records("absent", tmp_path, {}, 4.0)
    wrong, _ = run_doctor(tmp_path, capsys)
    assert wrong["kind"] == "missing" and wrong["culprits"] == [2]
    assert "s too late to all_reduce #3 of 25.0 MiB that ranks 0-1 waited for" in wrong["sentence"]


@pytest.mark.parametrize("env", [{}, {**OVER_GLOO, "DTCOMM_CHECK": "1"}], ids=["native", "process_group"])
def test_mismatched_call_is_diagnosed(
    env: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_records("mismatch", tmp_path, env, 20.0)
    wrong, _ = run_doctor(tmp_path, capsys)
    assert wrong["kind"] == "mismatch" and wrong["culprits"] == [2]
    first, _, second = wrong["sentence"].partition(", but ")
    assert first.startswith(
        "the ranks disagree on operation #3: ranks 0-1 called all_reduce(sum, 6553600 float"
    )
    assert second.startswith("rank 2 called broadcast(6553600 float32")


def write_record_on_demand(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    for _ in range(300):
        C.all_reduce(torch.ones(10), codec="int8")
    work = C.all_reduce(torch.ones(5, dtype=torch.int64), async_op=True)
    work.wait()
    return dtcomm.flight_record(folder)


@pytest.mark.parametrize("env", [{}, OVER_GLOO], ids=["native", "process_group"])
def test_record_on_demand_holds_the_last_256_operations(
    env: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, record in enumerate(run_ranks(write_record_on_demand, 2, str(tmp_path), env=env)):
        (communicator,) = record["communicators"]
        operations = communicator["operations"]
        assert record["rank"] == rank and communicator["ranks"] == [0, 1] and communicator["failure"] == ""
        assert [operation["number"] for operation in operations] == list(range(46, 302)), "the last 256"
        for operation in operations:
            assert operation["state"] == "done"
            assert operation["issued"] <= operation["started"] <= operation["finished"]
        assert abs(operations[-1]["finished"] - time.time()) < 30
        first, last = operations[0], operations[-1]
        call = {"collective": "all_reduce", "numel": 10, "codec": "int8", "op": "sum"}
        assert call.items() <= first.items()
        assert {"dtype": "int64", "bytes": 40, "codec": "none"}.items() <= last.items()
        assert first["algorithm"] in ("one_shot", "two_shot")
    assert doctor_command.main(["--flight", str(tmp_path)]) == 0
    assert "nothing is missing: ranks 0-1 finished all 301 operations" in capsys.readouterr().out


def record_while_connecting(rank: int, world_size: int, folder: str) -> None:
    """Ranks 0 and 1 use the group; rank 2 does when they have written their records."""
    tensor = torch.ones(5)
    if rank == 2:
        dist.barrier()
    work = C.all_reduce(tensor, async_op=True)
    if rank != 2:
        dtcomm.flight_record(folder)
        dist.barrier()
    work.wait()


def test_ranks_that_did_not_come_to_make_a_communicator_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(record_while_connecting, 3, str(tmp_path))
    wrong, _ = run_doctor(tmp_path, capsys)
    assert wrong["kind"] == "connecting" and wrong["culprits"] == [2]
    assert wrong["sentence"] == (
        "ranks 0-1 wait for rank 2 to make the communicator: every rank of the group has to call"
    )


def test_folder_without_valid_records_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor_command.main(["--flight", str(tmp_path)]) == 2
    assert "no rank-*.json" in capsys.readouterr().err
    (tmp_path / "rank-0.json").write_text("{")
    assert doctor_command.main(["--flight", str(tmp_path)]) == 2
    assert "rank-0.json" in capsys.readouterr().err


def _damaged(value: Any, rng: random.Random) -> Any:
    """Return a copy of a record with one entry somewhere left out or replaced."""
    value, at = copy.deepcopy(value), None
    inner = value
    while isinstance(inner, dict | list) and inner and (at is None or rng.random() < 0.9):
        outer, at = inner, rng.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        inner = outer[at]
    if isinstance(outer, dict) and rng.random() < 0.2:
        del outer[at]
    else:
        odd = [None, -1, 10**30, 3, math.nan, math.inf, 1.5, True]
        odd += ["\x1b[2J", "x", [], {}, [None], {"rank": 0}]
        outer[at] = rng.choice(odd)
    return value


def test_damaged_records_are_named_and_the_others_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng, folder = random.Random(1), str(tmp_path)
    seen = [{"rank": 1, "last": 7, "text": "all_reduce(...)", "alive": True}]
    records = [_record(rank, (6, "done", None), (7, "failed", (rank + 1) % 4)) for rank in range(4)]
    for record in records:
        record["format"] = 1
        record["communicators"][0]["seen"] = seen
    named = 0
    for _ in range(200):
        for rank, record in enumerate(records):
            text = json.dumps(record if rank else _damaged(record, rng))
            (tmp_path / f"rank-{rank}.json").write_text(text[: -rng.randrange(9)] if rank == 3 else text)
        assert doctor_command.main(["--flight", folder]) in (0, 1)
        out, _ = capsys.readouterr()
        assert "all_reduce #7" in out and "\x1b" not in out
        named += "rank-0.json: " in out
    assert named > 75


def _record(rank: int, *operations: tuple[int, str, int | None], failure: str = "") -> dict[str, Any]:
    common = {"text": "all_reduce(...)", "collective": "all_reduce", "bytes": 2**20, "waited_for": []}
    common |= {"issued": 1.0, "started": 1.0, "finished": 2.0}
    issued = [
        {"number": number, "state": state, "waiting_for": waiting, **common}
        for number, state, waiting in operations
    ]
    names = [f"rank {rank} (host h, pid {rank + 10})" for rank in range(4)]
    communicator = {"id": "0/1", "ranks": [0, 1, 2, 3], "names": names, "seen": [], "operations": issued}
    return {"rank": rank, "communicators": [{**communicator, "failure": failure}]}


def test_last_rank_of_a_chain_of_waits_is_the_culprit() -> None:
    records = [_record(rank, (7, "failed", waits_for)) for rank, waits_for in ((0, 1), (1, 2), (2, 3))]
    records.append(_record(3, (7, "started", None)))
    (diagnosis,) = diagnose(records)
    assert (diagnosis.kind, diagnosis.culprits) == ("stuck", [3])
    text = "rank 3 entered all_reduce #7 of 1.0 MiB and does not go on; ranks 0-2 wait for it"
    assert diagnosis.sentence == text


def test_damaged_payload_is_reported_with_its_sender() -> None:
    text = "what rank 2 (host h, pid 12) sent to rank 0 (host h, pid 10) arrived damaged: chunk 1 of piece 0"
    (diagnosis,) = diagnose([_record(a, (7, "failed", b), failure=text) for a, b in ((0, 2), (2, 0))])
    assert (diagnosis.kind, diagnosis.culprits, diagnosis.sentence) == ("corrupt", [2], text)


def test_ranks_are_formatted() -> None:
    texts = [format_ranks(ranks) for ranks in ([], [3], [0, 1, 2], [5, 0, 1])]
    assert texts == ["no rank", "rank 3", "ranks 0-2", "ranks 0-1, 5"]
