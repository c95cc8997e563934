"""Train a small GPT with AdamW and coarse codecs, with Adam's second moment frozen after a warm-up and without.

python -m bench.frozen_variance [--codecs none int2 sign topk:ratio=0.01] [--seeds 3] [--steps 480] [--warmup 96]
    [--fresh] [--json FILE]

Four ranks in a loop of one process, with the memories and kernels of the DDP hook, as in ``bench.convergence``. Each
codec runs without error feedback, with it, and with it and `dtcomm.ddp.FrozenVariance`, whose warm-up is uncompressed.
It takes 10 minutes of one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.common import machine, output, pages
from bench.training.runs import Method, in_a_loop
from bench.training.tasks import RANKS, TASKS

CODECS = ("none", "int2", "sign", "topk:ratio=0.01")
WITHOUT, WITH, FROZEN = "no feedback", "feedback", "feedback, frozen variance"
WAYS = (WITHOUT, WITH, FROZEN)


def planned(codecs: list[str], seeds: int) -> Iterator[tuple[str, str, int]]:
    """Yield the runs: codec, way and seed; uncompressed gradients have no feedback."""
    for seed in range(seeds):
        for codec in codecs:
            for way in WAYS:
                if not (codec == "none" and way == WITHOUT):
                    yield codec, way, seed


def page(result: dict[str, Any]) -> str:
    """Return the table of docs/results/convergence.md: held-out loss, the median over seeds and the range."""
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in result["rows"]:
        runs.setdefault(row["codec"], {}).setdefault(row["way"], []).append(row)
    lines = []
    for codec, ways in runs.items():
        sent = ways[FROZEN][0]["sent"], ways[WITH][0]["sent"]
        cells = [_losses(ways.get(way, [])) for way in WAYS]
        lines.append([f"`{codec}`", *cells, f"{100 * sent[1]:.3g} %", f"{100 * sent[0]:.3g} %"])
    columns = ["codec", *WAYS, "sent", "sent, warm-up included"]
    return pages.markdown(columns, lines, aligned=True)


def _losses(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    losses = sorted(row["loss"] for row in rows)
    middle = losses[len(losses) // 2]
    return f"{middle:.3f}" + (f" [{losses[0]:.3f}–{losses[-1]:.3f}]" if len(losses) > 1 else "")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Train, print the table, write the file; return what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codecs", nargs="+", default=list(CODECS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=480)
    parser.add_argument("--warmup", type=int, default=96, help="steps before the variance is frozen")
    parser.add_argument("--fresh", action="store_true", help="repeat runs that were made before")
    parser.add_argument("--json", help="where to write instead of bench/results/frozen_variance.json")
    options = parser.parse_args(arguments)
    path = Path(options.json or output.RESULTS / "frozen_variance.json")
    torch.set_num_threads(1)
    task = replace(TASKS["gpt"], steps=options.steps)
    setting = {"steps": options.steps, "warmup": options.warmup}
    saved = {} if options.fresh else output.resumable(path)
    rows = {
        (row["codec"], row["way"], row["seed"]): row
        for row in (saved["rows"] if saved.get("setting") == setting else [])
    }
    for codec, way, seed in planned(options.codecs, options.seeds):
        if (codec, way, seed) in rows:
            continue
        method = Method(name=codec, spec=codec)
        run = in_a_loop(task, method, way != WITHOUT, seed, options.warmup if way == FROZEN else 0)
        rows[codec, way, seed] = {
            "codec": codec,
            "way": way,
            "seed": seed,
            "loss": run["metric"],
            "sent": run["sent"],
        }
        print(f"{codec}, {way}, seed {seed}: {run['metric']} in {run['seconds']} s", flush=True)
        result = {"machine": machine.describe(), "ranks": RANKS, "setting": setting, "rows": [*rows.values()]}
        output.write("frozen_variance", result, path, timed=False)
    result = {"machine": machine.describe(), "ranks": RANKS, "setting": setting, "rows": [*rows.values()]}
    print(page(result))
    print(output.write("frozen_variance", result, path, timed=False))
    return result


if __name__ == "__main__":
    main()
