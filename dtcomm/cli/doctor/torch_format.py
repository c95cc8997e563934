"""``dtcomm doctor --flight DIR --format torch``: flight records as dumps of torch's Flight Recorder.

torch's analyser, ``python -m torch.distributed.flight_recorder.fr_trace DIR/torch``, reads one pickle for each rank,
named ``rank_<n>``, in the format of ``torch._C._distributed_c10d._dump_fr_trace()`` of torch 2.13 (version 2.10).
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VERSION = "2.10"
#: The analyser accepts operations of the backends that torch knows alone.
BACKEND = "gloo"
DESCRIPTION = "dtcomm"
STATES = {"issued": "scheduled", "started": "started", "failed": "started", "done": "completed"}
DTYPES = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "uint8": "Byte",
    "int8": "Char",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "bool": "Bool",
}


def write(records: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Write a dump for each record and return the paths.

    Args:
        records: Flight records of ranks, as `dtcomm.cli.doctor.flight.load` returns them.
        folder: The folder for the dumps. Earlier dumps in it are removed, because the analyser reads all files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for earlier in folder.glob("rank_*"):
        earlier.unlink()
    paths = []
    for rank, dump in dumps(records).items():
        paths.append(folder / f"rank_{rank}")
        paths[-1].write_bytes(pickle.dumps(dump, protocol=2))
    return paths


def dumps(records: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the contents of the dumps by rank."""
    first_numbers = _first_common_numbers(records)
    return {record["rank"]: _dump(record, first_numbers) for record in records}


def _first_common_numbers(records: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Return by communicator the number from which on every rank still has its operations.

    The analyser matches operations by number, and would take one that has left a rank's memory for a missing one. Its
    own alignment is by a counter over all groups, on which ranks that are in different groups do not agree.
    """
    numbers: dict[str, int] = {}
    for record in records:
        for communicator in record["communicators"]:
            operations = communicator["operations"]
            first = operations[0]["number"] if operations else 1
            numbers[communicator["id"]] = max(numbers.get(communicator["id"], 1), first)
    return numbers


def _dump(record: dict[str, Any], first_numbers: dict[str, int]) -> dict[str, Any]:
    operations = [
        (communicator, index, operation)
        for index, communicator in enumerate(record["communicators"])
        for operation in communicator["operations"]
        if operation["number"] >= first_numbers[communicator["id"]]
    ]
    operations.sort(key=lambda entry: (entry[2]["issued"] or 0.0, entry[1], entry[2]["number"]))
    return {
        "version": VERSION,
        "comm_lib_version": "",
        "pg_config": {
            communicator["id"]: {
                "name": communicator["id"],
                "desc": DESCRIPTION,
                "ranks": str(communicator["ranks"]),
            }
            for communicator in record["communicators"]
        },
        "pg_status": {str(i): _status(c) for i, c in enumerate(record["communicators"])},
        "entries": [
            {"record_id": position, "pg_id": index, **_entry(communicator, operation, record["rank"])}
            for position, (communicator, index, operation) in enumerate(operations)
        ],
    }


def _status(communicator: dict[str, Any]) -> dict[str, int]:
    operations = communicator["operations"]
    return {
        "last_enqueued_collective": max((entry["number"] for entry in operations), default=-1),
        "last_started_collective": max((e["number"] for e in operations if e["started"]), default=-1),
        "last_completed_collective": max(
            (entry["number"] for entry in operations if entry["state"] == "done"), default=-1
        ),
    }


def _entry(communicator: dict[str, Any], operation: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return an operation as torch's Flight Recorder would have recorded it."""
    ranks = communicator["ranks"]
    inputs, outputs = _sizes(operation, len(ranks), operation.get("root") == ranks.index(rank))
    dtypes = _dtypes(operation)
    point_to_point = operation["collective"] == "send"
    return {
        "process_group": (communicator["id"], DESCRIPTION),
        "thread_name": "",
        "thread_id": "",
        # Point-to-point operations have communicators of their own here, so one number orders both kinds.
        "collective_seq_id": operation["number"],
        "p2p_seq_id": operation["number"] if point_to_point else 0,
        "op_id": operation["number"],
        "profiling_name": f"{BACKEND}:{_name(operation, ranks, rank)}",
        "time_created_ns": _nanoseconds(operation["issued"]),
        "time_discovered_started_ns": _nanoseconds(operation["started"]),
        "time_discovered_completed_ns": _nanoseconds(operation["finished"]),
        "input_sizes": inputs,
        "input_dtypes": dtypes if inputs != [[]] else [],
        "output_sizes": outputs,
        "output_dtypes": dtypes if outputs != [[]] else [],
        "state": STATES[operation["state"]],
        "retired": operation["state"] in ("done", "failed"),
        "timeout_ms": 0,
        "is_p2p": point_to_point,
        "frames": [],
    }


def _name(operation: dict[str, Any], ranks: Sequence[int], rank: int) -> str:
    if operation["collective"] != "send":
        return str(operation["collective"])
    # The analyser counts ranks within the sorted group; the root of a send is the rank of the sender in the group.
    places = {member: place for place, member in enumerate(sorted(ranks))}
    sender = ranks[operation["root"]]
    receiver = next((member for member in ranks if member != sender), sender)
    if rank == sender:
        return f"send {places[sender]}->{places[receiver]}"
    return f"recv {places[receiver]}<-{places[sender]}"


def _sizes(operation: dict[str, Any], ranks: int, is_root: bool) -> tuple[list[list[int]], list[list[int]]]:
    """Return the sizes of inputs and outputs; flight records count the elements of a shard for gathers and scatters."""
    numel = operation["numel"]
    shard, whole, nothing = [[numel]], [[numel * ranks]], list[list[int]]([[]])
    sizes = {
        "all_gather": (shard, whole),
        "reduce_scatter": (whole, shard),
        "all_to_all": (whole, whole),
        "gather": (shard, whole if is_root else nothing),
        "scatter": (whole if is_root else nothing, shard),
    }
    return sizes.get(operation["collective"], (shard, shard))


def _dtypes(operation: dict[str, Any]) -> list[str]:
    """Return the dtype and what else the analyser has to compare but has no field for: operator, codec and root."""
    terms = ["/".join(DTYPES.get(name, name) for name in operation["dtype"].split("/"))]
    if operation.get("op", "sum") != "sum":
        terms.append(operation["op"])
    if operation["codec"] != "none":
        terms.append(operation["codec"])
    if "root" in operation and operation["collective"] != "send":
        terms.append(f"root {operation['root']}")
    return [" ".join(terms)]


def _nanoseconds(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds * 1e9)
