"""Measure the error of all-reduces by the number of partial sums: every codec, 1 to 64 ranks, ring, tree and two shots.

python -m bench.partial_sums [--workload text [--whole]] [--ranks 1 2 4 8 16 32 64] [--codecs SPECS] [--json FILE]

A small GPT is trained for 160 steps on the source of Python's standard library. In three steps two kinds of tensors are
recorded: the gradients of 64 ranks, each of a batch of its own, and the activations that 64 ranks of tensor parallelism
sum behind the row-parallel layers (the projection of the attention and the last layer of the MLP), each the product of
its share of the inputs. Fewer ranks sum the first gradients, and larger shares of activations.

Each kind is summed by the native engine, whose ranks are stepped in one thread, and compared with its fp64 sum. vNMSE
is the sum of squared errors over the sum of squares of the sum, over all matrices of at least 1024 elements, which are
what the DDP hook compresses; each travels on blocks of its own. There is no error feedback. "1 rank" is one encoding.
The plot goes to docs/results/partial-sums.png, and `bench.pages` writes the tables. It takes 20 minutes of one core.

With ``--workload`` the tensors are those of a workload of `bench.workloads`, trained as there and uncompressed: 4,096
elements from the middle of each matrix, at a twentieth of the steps, half of them and the last. Activations are the
text workload's alone, whose model has row-parallel layers. It takes 30 minutes for text, and 10 for the others. With
``--whole`` gradients are whole matrices, of 1 and 8 ranks, summed with a few codecs; that takes 10 and 3 minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.common import machine, output, pages
from bench.training.recording import Recorded, Tensors, record, record_workload
from bench.training.tasks import Unavailable
from bench.training.units import WORKLOADS
from dtcomm import algorithms
from dtcomm.cli.codecs.main import default_codecs
from dtcomm.codecs import Codec, codec
from dtcomm.kernels import ops
from dtcomm.measure.virtual_ranks import Operation, Simulation, run_simulated
from dtcomm.runtime.types import Buffers, OpSpec, TensorSpec

RANKS = (1, 2, 4, 8, 16, 32, 64)
WORKLOAD_RANKS = (1, 8, 64)
RESULTS = (
    "partial_sums",
    *(f"partial_sums_{workload}{part}" for workload in WORKLOADS for part in ("", "_whole")),
)
ALGORITHMS = ("two_shot", "tree", "ring")
EXTRA = (
    "int7:block=128",
    "int6:block=128",
    "int5:block=128",
    "int4:block=128",
    "intv:width=6",
    "intv:block=64",
    "intv:block=128",
)
#: Those of the plot, and of the tables by matrix and of widths that vary.
SHOWN = ("fp8_e4m3", "int8", "int6:block=128", "intv", "int4", "nvfp4", "int2")
BY_MATRIX = ("int8", "int6:block=128", "intv", "int4")
WIDTHS = ("int6", "int6:block=128", "intv:width=6", "int5", "intv", "intv:block=64", "intv:block=128")
WIDTHS += ("intv:width=4", "int4")
WHOLE, WHOLE_RANKS = ("int8", "int7:block=128", *WIDTHS), (1, 8)  # codecs and ranks with --whole
TARGET = 1e-3
#: vNMSE of DynamiQ (arXiv:2602.08923) at 5 bits an element, by model and task, as public lists of its results give it.
DYNAMIQ = {"LLaMA 1B, MMLU": 9.6e-4, "Gemma 1B, chat": 1.2e-3, "LLaMA 1B, chat": 1.5e-3, "BERT large": 2.2e-3}
#: Widths of a ring's encodings of `intv`: of the first half of the hops, of the others, and of the complete sum. All
#: put equally many bytes on the wire, half of which carry the complete sum.
HOP_WIDTHS = ((5, 5, 5), (4, 6, 5), (3, 7, 5), (6, 6, 6), (5, 7, 6))


@dataclass(frozen=True)
class Terms:
    """What ranks sum, by rank and name, and the exact sums in fp64."""

    tensors: Tensors
    exact: dict[str, torch.Tensor]

    @classmethod
    def of(cls, tensors: Tensors) -> Terms:
        """Return tensors with their sums."""
        names = list(tensors[0])
        return cls(tensors, {name: sum_of([own[name].double() for own in tensors]) for name in names})


def sum_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum, in the order of the ranks."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def terms_of(recorded: Recorded, rank_counts: Sequence[int]) -> dict[tuple[str, int, int], Terms]:
    """Return the terms by kind, step and number of ranks: once for all codecs. All ranks are in the middle step."""
    few = min(8, max(rank_counts))
    return {
        (kind, step, ranks): Terms.of(of_ranks(recorded, kind, step, ranks))
        for kind, of_kind in recorded.items()
        for step in of_kind
        for ranks in (rank_counts if step == middle(of_kind) else (few,))
    }


def middle(steps: Iterable[int]) -> int:
    """Return the median of an odd number of steps."""
    ordered = sorted(steps)
    return ordered[len(ordered) // 2]


def of_ranks(recorded: Recorded, kind: str, step: int, ranks: int) -> Tensors:
    """Return what so many ranks sum: the first ranks' gradients, or activations of larger shares of the layers."""
    tensors = recorded[kind][step]
    if kind == "gradients":
        return tensors[:ranks]
    group = len(tensors) // ranks
    groups = [tensors[first : first + group] for first in range(0, len(tensors), group)]
    return [{name: torch.stack([own[name] for own in part]).sum(0) for name in part[0]} for part in groups]


def all_reduce(layout: Codec, algorithm: str, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Return the sums that the engine leaves on every rank; of one rank what one encoding leaves."""
    names, ranks = list(tensors[0]), len(tensors)
    if ranks == 1:
        return {name: ops.decode(layout, ops.encode(layout, x), x.numel()) for name, x in tensors[0].items()}
    parts = tuple(TensorSpec(x.numel(), x.dtype, layout) for x in tensors[0].values())
    shape = OpSpec("all_reduce", "sum", parts, algorithm)
    schedule = algorithms.build(algorithm, "all_reduce", ranks)
    results = [[own[name].clone() for name in names] for own in tensors]
    operations = [
        [Operation(shape=shape, schedule=schedule, buffers=[Buffers(x, x, None) for x in own], seed=1)]
        for own in results
    ]
    simulation = Simulation(ranks=ranks, seed=1, delay=0.0, piece_bytes=256 << 10, slot_bytes=1 << 20)
    for outcome in run_simulated(simulation, operations):
        if outcome.status != "done":
            raise RuntimeError(f"{layout}, {algorithm}, {ranks} ranks: {outcome}")
    return dict(zip(names, results[0], strict=True))


def squares(layout: Codec, algorithm: str, terms: Terms) -> dict[str, tuple[float, float]]:
    """Return by matrix the sum of squared errors and the sum of squares."""
    return errors_of(all_reduce(layout, algorithm, terms.tensors), terms)


def errors_of(result: dict[str, torch.Tensor], terms: Terms) -> dict[str, tuple[float, float]]:
    """Return what `squares` does, of sums that some algorithm made."""
    return {
        name: (float((result[name].double() - exact).square().sum()), float(exact.square().sum()))
        for name, exact in terms.exact.items()
    }


def vnmse(of_matrices: dict[str, tuple[float, float]]) -> float:
    """Return the vNMSE over several matrices."""
    errors, sums = (sum(values) for values in zip(*of_matrices.values(), strict=True))
    return float(f"{errors / sums:.4g}")


def ring_by_hop(layouts: Sequence[Codec], terms: Terms) -> dict[str, tuple[float, float]]:
    """Return what `squares` does, of a ring in which each hop has a codec; the last encodes the complete sum.

    Args:
        layouts: One for each encoding of a chunk: as many as there are ranks.
        terms: What the ranks sum.
    """
    result = {}
    for name, partial in terms.tensors[0].items():
        for layout, own in zip(layouts, [*terms.tensors[1:], None], strict=True):
            partial = ops.decode(layout, ops.encode(layout, partial), partial.numel())
            partial = partial if own is None else partial + own[name]
        result[name] = partial
    return errors_of(result, terms)


def codecs() -> list[str]:
    """Return the specs: all codecs that lose something in a sum, with their usual options."""
    lossy = [
        str(layout)
        for layout in default_codecs()
        if not layout.lossless(torch.float32) and not layout.needs_agreement
    ]
    return list(dict.fromkeys([*lossy, *EXTRA]))


def measure(specs: Sequence[str], rank_counts: Sequence[int], recorded: Recorded) -> dict[str, Any]:
    """Return the rows of the tables."""
    terms = terms_of(recorded, rank_counts)
    steps = sorted(recorded["gradients"])
    rows: list[dict[str, Any]] = []
    layers: list[dict[str, Any]] = []
    for kind in recorded:
        for spec in specs:
            rows += measure_codec(spec, terms, kind, middle(steps), rank_counts)
            layers += measure_layers(spec, terms, kind, steps, min(8, max(rank_counts)))
            print(f"{kind}, {spec}: {rows[-1]['vnmse']:.2e}, {rows[-1]['ranks']} ranks, ring", flush=True)
    hops = [
        row
        for ranks in (8, 64)
        if ranks in rank_counts
        for row in measure_hops(terms["gradients", middle(steps), ranks], ranks)
    ]
    numel = {
        kind: sum(x.numel() for x in terms[kind, middle(steps), min(rank_counts)].exact.values())
        for kind in recorded
    }
    return {
        "numel": numel,
        "steps": steps,
        "step": middle(steps),
        "rows": rows,
        "layers": worst_matrices(layers),
        "hops": hops,
    }


def measure_codec(
    spec: str, terms: dict[tuple[str, int, int], Terms], kind: str, step: int, rank_counts: Sequence[int]
) -> list[dict[str, Any]]:
    """Return a codec's errors in a step by algorithm and number of ranks."""
    layout, rows = codec(spec), []
    numels = [x.numel() for x in terms[kind, step, rank_counts[0]].exact.values()]
    bits = round(8 * sum(map(layout.wire_bytes, numels)) / sum(numels), 3)
    for algorithm in ALGORITHMS:
        for ranks in rank_counts:
            if ranks == 1 and algorithm != ALGORITHMS[0]:
                continue
            error = vnmse(squares(layout, algorithm, terms[kind, step, ranks]))
            what = "one encoding" if ranks == 1 else algorithm
            row = {
                "recorded": kind,
                "codec": spec,
                "bits": bits,
                "what": what,
                "ranks": ranks,
                "vnmse": error,
            }
            rows.append(row)
    return rows


def measure_layers(
    spec: str, terms: dict[tuple[str, int, int], Terms], kind: str, steps: Sequence[int], ranks: int
) -> list[dict[str, Any]]:
    """Return a codec's errors in two shots by matrix and step; matrix "all" is all of them together."""
    rows = []
    for step in steps:
        of_matrices = squares(codec(spec), "two_shot", terms[kind, step, ranks])
        for name, pair in {**of_matrices, "all": None}.items():
            error = vnmse(of_matrices) if pair is None else vnmse({name: pair})
            row = {
                "recorded": kind,
                "codec": spec,
                "step": step,
                "layer": name,
                "ranks": ranks,
                "vnmse": error,
            }
            rows.append(row)
    return rows


def worst_matrices(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the page: all matrices of `BY_MATRIX`; of other codecs their total and the worst one."""
    kept = [row for row in layers if row["layer"] == "all" or row["codec"] in BY_MATRIX]
    others: dict[tuple[str, str], dict[str, Any]] = {}
    for row in layers:
        key = (row["recorded"], row["codec"])
        if row not in kept and row["vnmse"] > others.get(key, {"vnmse": -1.0})["vnmse"]:
            others[key] = row
    return kept + list(others.values())


def measure_hops(terms: Terms, ranks: int) -> list[dict[str, Any]]:
    """Return the errors of rings of `intv` whose widths differ by hop and whose bytes do not."""
    rows = []
    for early, late, last in HOP_WIDTHS:
        # The middle one of an odd number of hops has the mean width.
        half, middle = divmod(ranks - 1, 2)
        widths = [early] * half + [(early + late) // 2] * middle + [late] * half + [last]
        layouts = [codec(f"intv:width={width}") for width in widths]
        numels = [x.numel() for x in terms.exact.values()]
        sent = [8 * sum(map(layout.wire_bytes, numels)) / sum(numels) for layout in layouts]
        bits = (sum(sent[:-1]) + (ranks - 1) * sent[-1]) / (2 * (ranks - 1))
        error = vnmse(ring_by_hop(layouts, terms))
        widths_named = f"{early} bits, then {late}; the sum {last}"
        rows.append({"name": widths_named, "bits": round(bits, 3), "ranks": ranks, "vnmse": error})
    return rows


def kinds(result: dict[str, Any]) -> list[str]:
    """Return the kinds of tensors that were recorded."""
    return list(dict.fromkeys(row["recorded"] for row in result["rows"]))


def page(result: dict[str, Any]) -> str:
    """Return the tables of docs/results/partial-sums.md."""
    counts = sorted({row["ranks"] for row in result["rows"]} - {1})
    few, many = (8 if 8 in counts else counts[0]), counts[-1]
    shown = [
        ("one encoding", 1),
        *((algorithm, n) for algorithm in ALGORITHMS for n in dict.fromkeys((few, many))),
    ]
    bits = {row["codec"]: row["bits"] for row in result["rows"]}
    specs = sorted(bits, key=lambda spec: (-bits[spec], spec))
    text = []
    for kind in kinds(result):
        summed = f"{kind.capitalize()}, {result['numel'][kind]:,} elements"
        text += [f"{summed}, step {result['step']}:", "", _table(result, kind, specs, shown), ""]
    text += [f"The fewest bits of a codec whose vNMSE is at most {TARGET:.0e}, and the codec:", ""]
    text += [_fewest_bits(result, shown), ""]
    if "workload" in result:
        text += [f"Over the training, two shots of {few} ranks:", "", _by_step(result, specs)]
        return "\n".join(text)
    text += ["DynamiQ, published, at 5 bits:", ""]
    text += [pages.markdown(list(DYNAMIQ), [[_number(value) for value in DYNAMIQ.values()]]), ""]
    text += ["Widths that vary (`intv`) beside fixed ones, on gradients:", ""]
    widths = [spec for spec in specs if spec in WIDTHS]
    text += [
        _table(result, "gradients", widths, shown),
        "",
        "A width for each hop of a ring, on gradients:",
        "",
    ]
    text += [_hops(result), "", f"Over the training, two shots of {few} ranks:", ""]
    text += [_by_step(result, specs), "", f"By matrix and step, two shots of {few} ranks:"]
    for kind in kinds(result):
        text += ["", _by_matrix(result, kind)]
    return "\n".join(text)


def _title(shown: tuple[str, int]) -> str:
    what, ranks = shown
    return what if ranks == 1 else f"{what.replace('_', ' ')}, {ranks}"


def _errors(result: dict[str, Any], kind: str) -> dict[tuple[str, str, int], float]:
    """Return vNMSE by codec, algorithm and number of ranks."""
    rows = [row for row in result["rows"] if row["recorded"] == kind]
    return {(row["codec"], row["what"], row["ranks"]): row["vnmse"] for row in rows}


def _table(result: dict[str, Any], kind: str, specs: Sequence[str], shown: Sequence[tuple[str, int]]) -> str:
    errors = _errors(result, kind)
    bits = {row["codec"]: row["bits"] for row in result["rows"] if row["recorded"] == kind}
    lines = [
        [f"`{spec}`", f"{bits[spec]:.4g}", *(_number(errors[spec, what, ranks]) for what, ranks in shown)]
        for spec in specs
    ]
    return pages.markdown(["codec", "bits", *map(_title, shown)], lines, aligned=True)


def _fewest_bits(result: dict[str, Any], shown: Sequence[tuple[str, int]]) -> str:
    lines = []
    for kind in kinds(result):
        cells = []
        for what, ranks in shown:
            reaching = [
                (row["bits"], row["codec"])
                for row in result["rows"]
                if (row["recorded"], row["what"], row["ranks"]) == (kind, what, ranks)
                and row["vnmse"] <= TARGET
            ]
            bits, spec = min(reaching, default=(None, "none of these"))
            cells.append(spec if bits is None else f"{bits:.4g} (`{spec}`)")
        lines.append([kind, *cells])
    return pages.markdown(["recorded", *map(_title, shown)], lines, aligned=True)


def _hops(result: dict[str, Any]) -> str:
    counts = sorted({row["ranks"] for row in result["hops"]})
    by_name: dict[str, dict[int, dict[str, Any]]] = {}
    for row in result["hops"]:
        by_name.setdefault(row["name"], {})[row["ranks"]] = row
    lines = [
        [name, *(f"{rows[n]['bits']:.4g}" for n in counts), *(_number(rows[n]["vnmse"]) for n in counts)]
        for name, rows in by_name.items()
    ]
    columns = ["widths of the hops", *(f"bits, {n} ranks" for n in counts), *(f"{n} ranks" for n in counts)]
    return pages.markdown(columns, lines, aligned=True)


def _by_step(result: dict[str, Any], specs: Sequence[str]) -> str:
    """Return for every codec the error of each step, and of the worst matrix in any."""
    columns, lines = ["codec"], {spec: [f"`{spec}`"] for spec in specs}
    for kind in kinds(result):
        columns += [f"{kind}, step {step}" for step in result["steps"]] + [f"{kind}, worst matrix"]
        rows = [row for row in result["layers"] if row["recorded"] == kind]
        by_step = {(row["codec"], row["step"]): row["vnmse"] for row in rows if row["layer"] == "all"}
        for spec, cells in lines.items():
            worst = max(row["vnmse"] for row in rows if row["codec"] == spec)
            cells += [*(_number(by_step[spec, step]) for step in result["steps"]), _number(worst)]
    return pages.markdown(columns, list(lines.values()), aligned=True)


def _by_matrix(result: dict[str, Any], kind: str) -> str:
    rows = [row for row in result["layers"] if row["recorded"] == kind and row["codec"] in BY_MATRIX]
    specs = list(dict.fromkeys(row["codec"] for row in rows))
    errors = {(row["layer"], row["codec"], row["step"]): row["vnmse"] for row in rows}
    columns = [kind, *(f"`{spec}`, step {step}" for spec in specs for step in result["steps"])]
    lines = [
        [name, *(_number(errors[name, spec, step]) for spec in specs for step in result["steps"])]
        for name in dict.fromkeys(row["layer"] for row in rows)
    ]
    return pages.markdown(columns, lines, aligned=True)


def _number(value: float) -> str:
    return f"{value:.1e}"


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw vNMSE by number of ranks, a panel for each algorithm."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from dtcomm.cli._plot import COLOURS, INK, STYLE

    rows = kinds(result)
    with pyplot.rc_context(STYLE):
        figure, grid = pyplot.subplots(
            len(rows), len(ALGORITHMS), figsize=(11, 7), sharex=True, sharey=True, squeeze=False
        )
        for kind, panels in zip(rows, grid, strict=True):
            for axes, algorithm in zip(panels, ALGORITHMS, strict=True):
                for colour, spec in zip(COLOURS, SHOWN):
                    points = [
                        (row["ranks"], row["vnmse"])
                        for row in result["rows"]
                        if (row["recorded"], row["codec"]) == (kind, spec)
                        and row["what"] in (algorithm, "one encoding")
                    ]
                    axes.plot(*zip(*points, strict=True), marker="o", markersize=3, color=colour, label=spec)
                low, high = min(DYNAMIQ.values()), max(DYNAMIQ.values())
                axes.axhspan(low, high, color=INK, alpha=0.12, label="DynamiQ, 5 bits")
                axes.set_xscale("log", base=2)
                axes.set_yscale("log")
                axes.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
                axes.set_title(f"{algorithm.replace('_', ' ')}, {kind}")
            panels[0].set_ylabel("vNMSE")
        for axes in grid[-1]:
            axes.set_xlabel("ranks")
        grid[0][-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        figure.tight_layout()
        figure.savefig(path, dpi=110)
        pyplot.close(figure)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, print the tables, write the file and the plot; return what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=list(WORKLOADS), help="instead of the small GPT")
    parser.add_argument("--whole", action="store_true", help="with --workload: whole matrices, a few codecs")
    parser.add_argument(
        "--ranks", type=int, nargs="+", help="default: 1 to 64; of a workload 1, 8, 64 or 1, 8"
    )
    parser.add_argument("--codecs", nargs="+", help="default: all; with --whole a few")
    parser.add_argument(
        "--json",
        help="where to write instead of bench/results/partial_sums[_WORKLOAD[_whole]].json (then no plot)",
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.whole and not options.workload:
        parser.error("--whole: only valid with --workload; the small GPT's matrices are always whole")
    default_ranks = WHOLE_RANKS if options.whole else WORKLOAD_RANKS if options.workload else RANKS
    rank_counts = options.ranks or list(default_ranks)
    specs = options.codecs or (WHOLE if options.whole else codecs())
    name, settings = "partial_sums", {}
    try:
        if options.whole:
            name, settings = f"partial_sums_{options.workload}_whole", {"workload": options.workload}
            recorded = record_workload(WORKLOADS[options.workload], max(rank_counts), None)
            recorded.pop("activations", None)
        elif options.workload:
            name, settings = f"partial_sums_{options.workload}", {"workload": options.workload}
            recorded = record_workload(WORKLOADS[options.workload], max(rank_counts))
        else:
            recorded = record(ranks=max(rank_counts))
    except Unavailable as error:
        parser.error(str(error))
    result = {"machine": machine.describe(), **settings, **measure(specs, rank_counts, recorded)}
    print(page(result))
    print(output.write(name, result, options.json, timed=False))
    if options.json is None and not options.workload:
        plot(result, pages.DOCS / "results" / "partial-sums.png")
    return result


if __name__ == "__main__":
    main()
