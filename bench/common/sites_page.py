"""Tables of docs/results/sites.md: sites that are far apart, and ranks of unequal speed."""

from __future__ import annotations

from typing import Any

from bench.common import output, pages
from bench.outer_gradients import LINKS_SHARED, comparable_seconds


def wide_area(result: dict[str, Any]) -> str:
    """Return the table of `bench.wide_area`: an all_reduce over a long link."""
    lines = [
        [
            f"{row['gbit']:g} Gbit/s{_loss(row)}, {output.size_name(row['bytes'])}",
            row["name"],
            str(row["connections"] or "–"),
            f"{row['seconds']:.3f}" + pages.spread(row, "seconds", "{:.3f}".format),
            f"{100 * row['share_of_rate']:.0f} %",
            f"{row['cores_of_ranks'] + row['cores_of_relay']:.2f}",
        ]
        for row in result["rows"]
    ]
    columns = ["link", "what", "connections", "seconds", "of the rate", "cores"]
    return pages.markdown(columns, lines, aligned=True)


def outer_gradients(result: dict[str, Any]) -> str:
    """Return the table of `bench.outer_gradients`: the average of a large model's outer gradients."""
    published = result["published"]
    lines = [
        [
            f"`{row['codec']}`",
            f"{row['parameters']:.3g}",
            f"{row['seconds']:.1f}" + pages.spread(row, "seconds", "{:.1f}".format),
            f"{row['seconds_for_1e9']:.1f}",
            f"{comparable_seconds() / row['seconds_for_1e9']:.2f}×",
            f"{100 * row['share_of_rate']:.0f} %",
        ]
        for row in result["rows"]
    ]
    columns = [
        "codec",
        "parameters",
        "seconds",
        "for 1e9 parameters",
        f"beside PRIME's {published['seconds']:g} s / {LINKS_SHARED}",
        "of the rate",
    ]
    return pages.markdown(columns, lines, aligned=True)


def uneven_ranks(result: dict[str, Any]) -> str:
    """Return the table of `bench.uneven_ranks`: batches by speed, with one rank at half the speed."""
    lines = [
        [
            str(run["seed"]),
            f"{run['samples_per_s']['equal parts']:.1f}",
            f"{run['samples_per_s']['by speed']:.1f}",
            f"{gain:.2f}×",
            " + ".join(map(str, run["sizes"])),
            f"{run['loss']['equal parts']:.4f}",
            f"{run['loss']['by speed']:.4f}",
        ]
        for run, gain in zip(result["runs"], result["gains"], strict=True)
    ]
    lines.append(["median", "", "", f"{result['gain']:.2f}×", "", "", ""])
    columns = [
        "seed",
        "samples/s, equal parts",
        "by speed",
        "gain",
        "parts",
        "loss, equal parts",
        "loss, by speed",
    ]
    return pages.markdown(columns, lines, aligned=True)


def _loss(row: dict[str, Any]) -> str:
    return f", {100 * row['lost_share']:g} % lost" if row["lost_share"] else ""
