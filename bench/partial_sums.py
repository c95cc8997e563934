"""Measure the error of all-reduces by the number of partial sums: every codec, 1 to 64 ranks, ring, tree and two shots.

python -m bench.partial_sums [--ranks 1 2 4 8 16 32 64] [--codecs SPECS] [--json FILE]

A small GPT is trained for 160 steps on the source of Python's standard library. In three steps the gradients of 64
ranks are recorded, each of a batch of its own. They are summed by the native engine, whose ranks are stepped in one
thread, and compared with their fp64 sum. vNMSE is the sum of squared errors over the sum of squares of the sum, over
all matrices of at least 1024 elements, which are what the DDP hook compresses; each travels on blocks of its own. There
is no error feedback. "1 rank" is one encoding. The plot goes to docs/results/partial-sums.png, and `bench.pages` writes
the table. It takes 7 minutes of one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.common import machine, output, pages
from bench.training.tasks import TASKS
from dtcomm import algorithms
from dtcomm.cli.codecs.main import default_codecs
from dtcomm.codecs import Codec, codec
from dtcomm.kernels import ops
from dtcomm.measure.virtual_ranks import Operation, Simulation, run_simulated
from dtcomm.runtime.types import Buffers, OpSpec, TensorSpec

RANKS = (1, 2, 4, 8, 16, 32, 64)
ALGORITHMS = ("two_shot", "tree", "ring")
STEPS, MIDDLE = (8, 80, 159), 80
EXTRA = (
    "int7:block=128",
    "int6:block=128",
    "int5:block=128",
    "int4:block=128",
    "intv:width=6",
    "intv:block=128",
)
#: Those of the plot, and of the tables by layer and by step.
SHOWN = ("fp8_e4m3", "int8", "int6:block=128", "intv", "int4", "nvfp4", "int2")
BY_LAYER = ("int8", "int6:block=128", "intv", "int4")
#: vNMSE of DynamiQ (arXiv:2602.08923) at 5 bits an element, by model and task, as public lists of its results give it.
DYNAMIQ = {"LLaMA 1B, MMLU": 9.6e-4, "Gemma 1B, chat": 1.2e-3, "LLaMA 1B, chat": 1.5e-3, "BERT large": 2.2e-3}

Gradients = list[dict[str, torch.Tensor]]  # by rank and name


def record(steps: Sequence[int] = STEPS, ranks: int = max(RANKS)) -> dict[int, Gradients]:
    """Train, and return the gradients of the matrices of all ranks by step; four ranks' mean is applied."""
    task = TASKS["gpt"]
    torch.manual_seed(0)
    model = task.model()
    names = [name for name, p in model.named_parameters() if p.ndim >= 2 and p.numel() >= 1024]
    optimizer = task.optimizer(list(model.parameters()))
    recorded: dict[int, Gradients] = {}
    for step in range(max(steps) + 1):
        mean: list[torch.Tensor] = []
        for rank in range(ranks if step in steps else 4):
            gradients = torch.autograd.grad(
                task.loss(model, task.batch(0, step, rank)), list(model.parameters())
            )
            by_name = dict(zip((name for name, _ in model.named_parameters()), gradients, strict=True))
            if step in steps:
                recorded.setdefault(step, []).append({name: by_name[name].flatten() for name in names})
            if rank < 4:
                mean = [a + b / 4 for a, b in zip(mean or [torch.zeros(())] * len(gradients), gradients)]
        for parameter, gradient in zip(model.parameters(), mean, strict=True):
            parameter.grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = task.rate_at(step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return recorded


def all_reduce(layout: Codec, algorithm: str, gradients: Gradients) -> dict[str, torch.Tensor]:
    """Return the sums that the engine leaves on every rank; of one rank what one encoding leaves."""
    names, ranks = list(gradients[0]), len(gradients)
    if ranks == 1:
        return {
            name: ops.decode(layout, ops.encode(layout, x), x.numel()) for name, x in gradients[0].items()
        }
    parts = tuple(TensorSpec(x.numel(), x.dtype, layout) for x in gradients[0].values())
    shape = OpSpec("all_reduce", "sum", parts, algorithm)
    schedule = algorithms.build(algorithm, "all_reduce", ranks)
    results = [[own[name].clone() for name in names] for own in gradients]
    operations = [
        [Operation(shape=shape, schedule=schedule, buffers=[Buffers(x, x, None) for x in own], seed=1)]
        for own in results
    ]
    simulation = Simulation(ranks=ranks, seed=1, delay=0.0, piece_bytes=256 << 10, slot_bytes=1 << 20)
    for outcome in run_simulated(simulation, operations):
        if outcome.status != "done":
            raise RuntimeError(f"{layout}, {algorithm}, {ranks} ranks: {outcome}")
    return dict(zip(names, results[0], strict=True))


def squares(layout: Codec, algorithm: str, gradients: Gradients) -> dict[str, tuple[float, float]]:
    """Return by matrix the sum of squared errors and the sum of squares."""
    result = all_reduce(layout, algorithm, gradients)
    exact = {name: sum(own[name].double() for own in gradients) for name in result}
    return {
        name: (float((result[name].double() - exact[name]).square().sum()), float(exact[name].square().sum()))
        for name in result
    }


def vnmse(of_matrices: dict[str, tuple[float, float]]) -> float:
    """Return the vNMSE over several matrices."""
    errors, sums = (sum(values) for values in zip(*of_matrices.values(), strict=True))
    return float(f"{errors / sums:.4g}")


def codecs() -> list[str]:
    """Return the specs: all codecs that lose something in a sum, with their usual options."""
    lossy = [
        str(layout)
        for layout in default_codecs()
        if not layout.lossless(torch.float32) and not layout.needs_agreement
    ]
    return list(dict.fromkeys([*lossy, *EXTRA]))


def measure(specs: Sequence[str], rank_counts: Sequence[int]) -> dict[str, Any]:
    """Return the rows of the tables."""
    recorded = record(ranks=max(rank_counts))
    numel = sum(x.numel() for x in recorded[MIDDLE][0].values())
    rows, layers = [], []
    for spec in specs:
        layout = codec(spec)
        bits = 8 * sum(layout.wire_bytes(x.numel()) for x in recorded[MIDDLE][0].values()) / numel
        for algorithm in ALGORITHMS:
            for ranks in rank_counts:
                if ranks == 1 and algorithm != ALGORITHMS[0]:
                    continue
                error = vnmse(squares(layout, algorithm, recorded[MIDDLE][:ranks]))
                where = "one encoding" if ranks == 1 else algorithm
                rows.append(
                    {"codec": spec, "bits": round(bits, 3), "what": where, "ranks": ranks, "vnmse": error}
                )
        print(f"{spec}: {rows[-1]['vnmse']:.2e} on {ranks} ranks in a {algorithm}", flush=True)
    ranks = min(8, max(rank_counts))
    for spec in BY_LAYER:
        for step in STEPS:
            of_matrices = squares(codec(spec), "two_shot", recorded[step][:ranks])
            for name, pair in {**of_matrices, "all": None}.items():
                error = vnmse(of_matrices) if pair is None else vnmse({name: pair})
                layers.append({"codec": spec, "step": step, "layer": name, "ranks": ranks, "vnmse": error})
    return {"numel": numel, "steps": list(STEPS), "step": MIDDLE, "rows": rows, "layers": layers}


def page(result: dict[str, Any]) -> str:
    """Return the tables of docs/results/partial-sums.md."""
    errors = {(row["codec"], row["what"], row["ranks"]): row["vnmse"] for row in result["rows"]}
    bits = {row["codec"]: row["bits"] for row in result["rows"]}
    counts = sorted({row["ranks"] for row in result["rows"]} - {1})
    few, many = (8 if 8 in counts else counts[0]), counts[-1]
    columns = ["codec", "bits", "one encoding"]
    columns += [f"{algorithm.replace('_', ' ')}, {n}" for algorithm in ALGORITHMS for n in (few, many)]
    lines = []
    for spec in sorted(bits, key=lambda spec: (-bits[spec], spec)):
        cells = [_number(errors.get((spec, "one encoding", 1)))]
        cells += [_number(errors[spec, algorithm, n]) for algorithm in ALGORITHMS for n in (few, many)]
        lines.append([f"`{spec}`", f"{bits[spec]:.4g}", *cells])
    text = [pages.markdown(columns, lines, aligned=True), "", "DynamiQ, published, at 5 bits:"]
    text += ["", pages.markdown(list(DYNAMIQ), [[_number(value) for value in DYNAMIQ.values()]])]
    text += ["", f"By matrix and by step of training, two shots of {result['layers'][0]['ranks']} ranks:"]
    specs = list(dict.fromkeys(row["codec"] for row in result["layers"]))
    layer_errors = {(row["layer"], row["codec"], row["step"]): row["vnmse"] for row in result["layers"]}
    columns = ["matrix", *(f"`{spec}`, step {step}" for spec in specs for step in result["steps"])]
    lines = [
        [name, *(_number(layer_errors[name, spec, step]) for spec in specs for step in result["steps"])]
        for name in dict.fromkeys(row["layer"] for row in result["layers"])
    ]
    return "\n".join([*text, "", pages.markdown(columns, lines, aligned=True)])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw vNMSE by number of ranks, a panel for each algorithm."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from dtcomm.cli._plot import COLOURS, INK, STYLE

    with pyplot.rc_context(STYLE):
        figure, panels = pyplot.subplots(1, len(ALGORITHMS), figsize=(11, 4), sharey=True)
        for axes, algorithm in zip(panels, ALGORITHMS, strict=True):
            for colour, spec in zip(COLOURS, SHOWN):
                points = [
                    (row["ranks"], row["vnmse"])
                    for row in result["rows"]
                    if row["codec"] == spec and row["what"] in (algorithm, "one encoding")
                ]
                axes.plot(*zip(*points, strict=True), marker="o", markersize=3, color=colour, label=spec)
            axes.axhspan(
                min(DYNAMIQ.values()), max(DYNAMIQ.values()), color=INK, alpha=0.12, label="DynamiQ, 5 bits"
            )
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
            axes.set_title(algorithm.replace("_", " "))
            axes.set_xlabel("ranks")
        panels[0].set_ylabel("vNMSE")
        panels[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        figure.tight_layout()
        figure.savefig(path, dpi=110)
        pyplot.close(figure)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, print the tables, write the file and the plot; return what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--codecs", nargs="+", default=codecs())
    parser.add_argument(
        "--json", help="where to write instead of bench/results/partial_sums.json (then no plot)"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result = {"machine": machine.describe(), **measure(options.codecs, options.ranks)}
    print(page(result))
    print(output.write("partial_sums", result, options.json, timed=False))
    if options.json is None:
        plot(result, pages.DOCS / "results" / "partial-sums.png")
    return result


if __name__ == "__main__":
    main()
