"""Train the GPT of examples/train_gpt_mesh.py with every axis of parallelism and their combinations, compressed, beside
one uncompressed rank: held-out loss over several seeds.

python -m bench.mesh_training [--cases "tp" "dp x tp" …] [--steps 300] [--seeds 3] [--seconds S] [--fresh] [--json FILE]

The text is Python's source. All runs of a seed start from the same weights and see the same batches, however many ranks
share the work, so the uncompressed run of one rank is what the others stand beside (tests hold uncompressed axes to its
losses); runs with experts stand beside one rank with experts. "int8" compresses gradients, parameters, activations and
their gradients, keys and values, and tokens, on every axis that the case has. The goal is a mean loss that rises by no
more than the uncompressed seeds differ. Runs that the result file has are not repeated; ``--seconds`` stops after a
time, and the next call goes on.
"""

from __future__ import annotations

import argparse
import runpy
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import machine, output, pages
from bench.common.conditions import ROOT
from dtcomm.launch.ranks import run_ranks

EXAMPLE = ROOT / "examples" / "train_gpt_mesh.py"
EXPERTS = "--experts 4"


@dataclass(frozen=True, kw_only=True)
class Case:
    """Axes, and what is compressed with what.

    Attributes:
        axes: Arguments of the example.
        ranks: How many ranks these axes have.
        codec: The codec of every axis.
    """

    axes: str
    ranks: int
    codec: str = "int8"

    @property
    def base(self) -> str:
        """The uncompressed run that it stands beside."""
        return ONE_RANK_EXPERTS if EXPERTS in self.axes else ONE_RANK


ONE_RANK, ONE_RANK_EXPERTS = "one rank", "one rank, experts"
CASES = {
    ONE_RANK: Case(axes="", ranks=1, codec="none"),
    ONE_RANK_EXPERTS: Case(axes=EXPERTS, ranks=1, codec="none"),
    "dp": Case(axes="--dp 2", ranks=2),
    "fsdp": Case(axes="--fsdp 2", ranks=2),
    "tp": Case(axes="--tp 2", ranks=2),
    "tp, int4": Case(axes="--tp 2", ranks=2, codec="int4"),
    "tp of 4": Case(axes="--tp 4", ranks=4),
    "tp of 4, 5.25 bits": Case(axes="--tp 4", ranks=4, codec="int4:block=64,symmetric=false,spikes=1"),
    "pp": Case(axes="--pp 2", ranks=2),
    "cp": Case(axes="--cp 2", ranks=2),
    "ep": Case(axes=f"--ep 2 {EXPERTS}", ranks=2),
    "dp x tp": Case(axes="--dp 2 --tp 2", ranks=4),
    "fsdp x tp": Case(axes="--fsdp 2 --tp 2", ranks=4),
    "fsdp x cp": Case(axes="--fsdp 2 --cp 2", ranks=4),
    "ep x dp": Case(axes=f"--ep 2 --dp 2 {EXPERTS}", ranks=4),
    "dp x tp x pp": Case(axes="--dp 2 --tp 2 --pp 2", ranks=8),
}


def train(rank: int, ranks: int, arguments: str) -> dict[str, Any]:
    """Run the example on this rank."""
    result: dict[str, Any] = runpy.run_path(str(EXAMPLE))["run"](arguments.split())
    return result


def run(case: Case, steps: int, seed: int) -> dict[str, Any]:
    """Train once; return the held-out loss, and what rank 0 sent along each axis as a share of uncompressed bytes."""
    arguments = f"{case.axes} --codec {case.codec} --steps {steps} --seed {seed}"
    begin = time.monotonic()
    results = run_ranks(train, case.ranks, arguments, timeout=1200, fresh=True)
    losses = {round(result["held_out"], 4) for result in results}
    if len(losses) > 1:
        raise AssertionError(f"{arguments}: the ranks' held-out losses differ: {sorted(losses)}")
    shares = {axis: round(sent / plain, 3) for axis, (sent, plain) in results[0]["bytes"].items() if plain}
    return {"loss": losses.pop(), "sent": shares, "seconds": round(time.monotonic() - begin, 1)}


def key(name: str, seed: int) -> str:
    """Return the key of a run."""
    return f"{name} | seed {seed}"


def compare(runs: dict[str, Any], seeds: int) -> list[dict[str, Any]]:
    """Return a row for each case that has run on all seeds, with its losses beside those of its uncompressed run."""
    rows = []
    for name, case in CASES.items():
        of_case, of_base = (
            [runs[key(which, seed)] for seed in range(seeds) if key(which, seed) in runs]
            for which in (name, case.base)
        )
        if len(of_case) < seeds or len(of_base) < seeds:
            continue
        losses, base = ([entry["loss"] for entry in entries] for entries in (of_case, of_base))
        change = statistics.fmean(losses) - statistics.fmean(base)
        spread = max(base) - min(base)
        rows.append(
            {
                "name": name,
                "ranks": case.ranks,
                "codec": case.codec,
                "losses": losses,
                "change": round(change, 4),
                "spread": round(spread, 4),
                "sent": of_case[0]["sent"],
                "verdict": "" if name == case.base else "PASS" if change <= spread else "MISS",
            }
        )
    return rows


def page(result: dict[str, Any]) -> str:
    """Return the table of docs/results/axes.md."""
    lines = [
        [
            row["name"],
            str(row["ranks"]),
            f"`{row['codec']}`",
            *(f"{loss:.4f}" for loss in row["losses"]),
            f"{row['change']:+.4f}" if row["verdict"] else "",
            f"{row['spread']:.4f}",
            ", ".join(f"{axis} {100 * share:.0f} %" for axis, share in row["sent"].items()) or "–",
        ]
        for row in result["rows"]
    ]
    seeds = (f"seed {seed}" for seed in range(len(result["rows"][0]["losses"])))
    columns = ["axes", "ranks", "codec", *seeds, "change of the mean", "spread of the seeds", "bytes sent"]
    return pages.markdown(columns, lines, aligned=True)


def write(runs: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Write the result file."""
    result = {
        "machine": machine.describe(),
        "steps": options.steps,
        "rows": compare(runs, options.seeds),
        "runs": runs,
    }
    output.write("mesh_training", result, options.json, timed=False)
    return result


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Train what is missing, print the table and write the file; return the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--fresh", action="store_true", help="repeat runs that were made before")
    parser.add_argument(
        "--json",
        type=Path,
        default=output.RESULTS / "mesh_training.json",
        help="where to write instead of bench/results/mesh_training.json",
    )
    options = parser.parse_args(arguments)
    saved = {} if options.fresh else output.resumable(options.json)
    runs: dict[str, Any] = saved["runs"] if saved.get("steps") == options.steps else {}
    end = time.monotonic() + options.seconds
    bases = dict.fromkeys(CASES[name].base for name in options.cases)
    for seed in range(options.seeds):
        for name in dict.fromkeys([*bases, *options.cases]):
            if key(name, seed) not in runs and time.monotonic() < end:
                runs[key(name, seed)] = entry = run(CASES[name], options.steps, seed)
                print(f"{key(name, seed)}: {entry['loss']} in {entry['seconds']} s", flush=True)
                write(runs, options)
    result = write(runs, options)
    columns = ["axes", "codec", "losses", "change", "spread", ""]
    output.table(
        f"held-out loss after {options.steps} steps",
        columns,
        [
            [
                row["name"],
                row["codec"],
                " ".join(f"{loss:.4f}" for loss in row["losses"]),
                f"{row['change']:+.4f}",
                f"{row['spread']:.4f}",
                row["verdict"],
            ]
            for row in result["rows"]
        ],
    )
    if time.monotonic() > end:
        print("stopped in time; call again to go on")
    return result


if __name__ == "__main__":
    main()
