"""The README's table, from a result of ``bench.all_reduce``."""

from __future__ import annotations

from typing import Any

from bench.common.output import microseconds, size_name

PEERS = {"gloo": "Gloo", "mpi": "Open MPI (best of 3 settings)"}


def readme(result: dict[str, Any]) -> str:
    """Markdown: one row a rank count and size; dtcomm's time, then how many times longer the peers take."""
    rows = [(row, medians(row)) for row in result["rows"]]
    peers = [peer for peer in PEERS if any(peer in found for _, found in rows)]
    heads = ["all_reduce, fp32", "dtcomm", "`dtcomm.empty`", *(PEERS[peer] for peer in peers)]
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    for row, found in rows:
        if "dtcomm" not in found:
            continue
        cells = [f"{size_name(row['bytes'])}, {row['ranks']} ranks"]
        cells += [f"{microseconds(found[ours])} µs" for ours in ("dtcomm", "dtcomm.empty")]
        for peer in peers:
            cells.append(
                f"{microseconds(found[peer])} µs ({found[peer] / found['dtcomm']:.1f}x)"
                if peer in found
                else ""
            )
        lines.append("| " + " | ".join(cells) + " |")
    trips = [trip for row, _ in rows for trip in row["round_trip_ns"] if trip is not None]
    machine = result["machine"]
    lines += ["", f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}"]
    if trips:
        lines[-1] += f", cache line to the other core and back in {min(trips):.0f} to {max(trips):.0f} ns"
    return "\n".join(lines)


def medians(row: dict[str, Any]) -> dict[str, float]:
    """Seconds of the best variant of each family."""
    found: dict[str, float] = {}
    for each in row["contestants"]:
        seconds = each["median_us"] / 1e6
        found[each["family"]] = min(seconds, found.get(each["family"], seconds))
    return found
