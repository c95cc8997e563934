"""The table of the page on training across sites from the kept result of `python -m tests.stress.elastic`."""

from __future__ import annotations

from typing import Any

from bench.common import pages


def page(result: dict[str, Any]) -> str:
    """Return the text between the marks of the page."""
    events, resources = result["events"], result["resources"]
    ended = ", ".join(f"{count} {kind}" for kind, count in events.items())
    rows = [
        [name, f"{resources['start'][field] / unit:.4g}", f"{resources['end'][field] / unit:.4g}"]
        for name, field, unit in (
            ("memory, MiB", "rss_kib", 1024),
            ("descriptors", "descriptors", 1),
            ("threads", "threads", 1),
        )
    ]
    return "\n".join(
        [
            f"{result['minutes']:.0f} minutes, {result['ranks']} ranks, {result['method']}: of {result['processes']} "
            f"processes {ended}; {result['averages']} averages of the rank that stays, the longest "
            f"{result['longest_average_s']:g} s; loss {result['losses'][0]:.3g} at the start, "
            f"{result['losses'][-1]:.3g} at the end. Verdict: {result['verdict']}"
            + ("; " + "; ".join(result["complaints"]) if result["complaints"] else "")
            + ".",
            "",
            pages.markdown(["of that rank, once settled", "start", "end"], rows, aligned=True),
        ]
    )
