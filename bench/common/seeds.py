"""Held-out losses of several runs and seeds, beside the uncompressed run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from bench.common import output


def compare(
    losses: Mapping[str, Sequence[float]],
    plain: str,
    *,
    seeds: Sequence[int],
    title: str,
    column: str = "",
    without_target: Collection[str] = (),
) -> dict[str, Any]:
    """Print the table and a verdict for each run, whose mean should rise by no more than the seeds differ.

    Args:
        losses: Held-out losses by run, one for each seed.
        plain: The name of the uncompressed run.
        seeds: The seeds.
        title: The title of the table.
        column: The head of its first column.
        without_target: Runs that get no verdict, beside the uncompressed one.

    Returns:
        Losses, spread and verdicts for the result file.
    """
    spread = max(losses[plain]) - min(losses[plain])
    mean = sum(losses[plain]) / len(losses[plain])
    lines, verdicts = [], []
    for name, values in losses.items():
        change = sum(values) / len(values) - mean
        lines.append([name, *(f"{value:.4f}" for value in values), f"{change:+.4f}"])
        if name != plain and name not in without_target and len(seeds) > 1:
            verdicts.append(
                f"{'PASS' if change <= spread else 'MISS'} {name}: held-out loss {change:+.4f}, spread of the seeds "
                f"{spread:.4f}"
            )
    output.table(title, [column, *(f"seed {seed}" for seed in seeds), f"mean beside {plain}"], lines)
    print("\n".join(verdicts))
    return {"seeds": list(seeds), "losses": losses, "spread": round(spread, 4), "verdicts": verdicts}
