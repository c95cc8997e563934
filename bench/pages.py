"""Write tables and pictures of the README and of docs/ from the results in bench/results: python -m bench.pages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import (
    auto_runs,
    collectives,
    compression_setups,
    frozen_variance,
    fsdp_speed,
    invariant_sums,
    local_sgd,
    mesh_training,
    partial_sums,
    published_runs,
    quality,
    reliability,
    slow_link,
    tp_speed,
    two_hosts,
    two_shot_error,
)
from bench.common import axes_page, gpu_page, pages, readme, sites_page
from bench.common.output import RESULTS, all_processors
from bench.training import page as convergence_page
from bench.training import shards_page, tp_page, workloads_page

README = pages.DOCS.parent / "README.md"
# Page and marks, what makes the text between them, and the programs whose results it takes.
PAGES: list[tuple[Path, str, Callable[..., str], tuple[str, ...]]] = [
    (README, "bench", readme.readme, ("all_reduce",)),
    (README, "hosts", readme.between_hosts, ("two_hosts", "slow_link", "fsdp_speed")),
    (pages.DOCS / "results/all-reduce.md", "all_reduce", readme.readme, ("all_reduce",)),
    (pages.DOCS / "results/collectives.md", "collectives", collectives.page, ("collectives",)),
    (pages.DOCS / "results/two-hosts.md", "two_hosts", two_hosts.page, ("two_hosts",)),
    (pages.DOCS / "results/ddp.md", "slow_link", slow_link.page, ("slow_link",)),
    (pages.DOCS / "results/ddp.md", "auto_runs", auto_runs.page, ("auto_runs",)),
    (pages.DOCS / "results/fsdp.md", "fsdp_speed", fsdp_speed.page, ("fsdp_speed",)),
    *(
        (pages.DOCS / "results/fsdp.md", name, shards_page.text, (name,))
        for name in shards_page.RESULTS.values()
    ),
    *(
        (pages.DOCS / "results/tensor-parallel.md", name, tp_page.text, (name,))
        for name in tp_page.RESULTS.values()
    ),
    (pages.DOCS / "results/convergence.md", "convergence", convergence_page.text, ("convergence",)),
    (pages.DOCS / "results/tensor-parallel.md", "tp_speed", tp_speed.page, ("tp_speed",)),
    (
        pages.DOCS / "results/reliability.md",
        "reliability",
        reliability.page,
        tuple(f"reliability/{name}" for name in reliability.NAMES),
    ),
    (pages.DOCS / "results/codecs.md", "quality", quality.page, ("quality", "kernels")),
    *(
        (pages.DOCS / "results/partial-sums.md", name, partial_sums.page, (name,))
        for name in partial_sums.RESULTS
    ),
    (pages.DOCS / "results/partial-sums.md", "two_shot_error", two_shot_error.page, ("two_shot_error",)),
    (
        pages.DOCS / "results/convergence.md",
        "frozen_variance",
        frozen_variance.page,
        ("frozen_variance",),
    ),
    (
        pages.DOCS / "guides/reproducible-sums.md",
        "invariant_sums",
        invariant_sums.page,
        ("invariant_sums",),
    ),
    (pages.DOCS / "results/axes.md", "pipeline", axes_page.pipeline, ("pipeline",)),
    (pages.DOCS / "results/axes.md", "experts", axes_page.experts, ("experts",)),
    (pages.DOCS / "results/axes.md", "context_parallel", axes_page.context_parallel, ("context_parallel",)),
    (pages.DOCS / "results/axes.md", "tp_chunks", axes_page.tp_chunks, ("tp_chunks",)),
    (pages.DOCS / "results/axes.md", "mesh_training", mesh_training.page, ("mesh_training",)),
    (
        pages.DOCS / "results/axes.md",
        "context_parallel_training",
        axes_page.training,
        ("context_parallel_training",),
    ),
    (pages.DOCS / "results/axes.md", "experts_training", axes_page.training, ("experts_training",)),
    (pages.DOCS / "results/sites.md", "wide_area", sites_page.wide_area, ("wide_area",)),
    (pages.DOCS / "results/sites.md", "outer_gradients", sites_page.outer_gradients, ("outer_gradients",)),
    (pages.DOCS / "results/sites.md", "local_sgd", local_sgd.page, ("local_sgd",)),
    (pages.DOCS / "results/sites.md", "uneven_ranks", sites_page.uneven_ranks, ("uneven_ranks",)),
    (pages.DOCS / "results/gpu.md", "gpu_kernels", gpu_page.kernels, ("gpu_kernels",)),
    (pages.DOCS / "results/gpu.md", "gpu_two_shot", gpu_page.two_shot, ("gpu_fused",)),
    (pages.DOCS / "results/gpu.md", "gpu_latency", gpu_page.latency, ("gpu_fused",)),
    (pages.DOCS / "results/gpu.md", "gpu_processes", gpu_page.processes, ("gpu_fused",)),
    (pages.DOCS / "results/workloads.md", "workloads", workloads_page.kept_page, ()),
    (pages.DOCS / "guides/planning.md", "published_runs", published_runs.page, ("published_runs",)),
    (
        pages.DOCS / "guides/planning.md",
        "compression_setups",
        compression_setups.page,
        ("compression_setups",),
    ),
]
#: What draws pictures from results of programs that do not draw them themselves.
PICTURES: list[Callable[[], list[Path]]] = [workloads_page.kept_picture]


def kept(program: str) -> dict[str, Any]:
    """Return the result of a program in ``bench/results``."""
    result: dict[str, Any] = json.loads((RESULTS / f"{program}.json").read_text(encoding="utf-8"))
    return result


def between_marks(text: Callable[..., str], programs: tuple[str, ...]) -> str:
    """Return the text between two marks: the table, and for each program of how many runs it shows the median.

    A table of one program is there for every processor on which the program has run. Results with entries, those of
    `bench.reliability`, say in the table itself where they come from. Of a program without a kept result the text is
    how to measure it.
    """
    if missing := [program for program in programs if not (RESULTS / f"{program}.json").exists()]:
        commands = ", ".join(f"`python -m bench.{program}`" for program in missing)
        return f"Not measured on this tree: {commands}."
    tables = (
        [[result] for result in all_processors(programs[0])]
        if len(programs) == 1
        else [[*map(kept, programs)]]
    )
    parts = []
    for results in tables:
        measured = [result for result in results if "entries" not in result]
        parts += [text(*results), *map(pages.provenance, measured)]
    return "\n\n".join(parts)


def main() -> None:
    """Write all tables and pictures."""
    for page, marks, text, programs in PAGES:
        print(pages.fill(page, marks, between_marks(text, programs)))
    for draw in PICTURES:
        print(*draw())


if __name__ == "__main__":
    main()
