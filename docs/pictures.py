"""Makes the pictures and badges of the manual: ``python docs/pictures.py`` writes docs/pictures and docs/badges.

``docs/pictures/data.json`` has the figures of the reports in docs/results, the predictions of ``dtcomm plan``, and one
step of two ranks (``overlap``). Text in the SVG files stays text, so that it can be searched and scales with the page.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.patches import FancyBboxPatch  # noqa: E402

DOCS = Path(__file__).resolve().parent
PICTURES, BADGES = DOCS / "pictures", DOCS / "badges"

# Colours that people with colour blindness can tell apart (Okabe and Ito); one for each method, in every picture.
COLOUR = {
    "fp32": "#6b6b6b", "torch's bf16 hook": "#000000", "bf16": "#0072b2", "int8": "#d55e00", "int4": "#009e73",
    "topk 1 %": "#b0569c", "PowerSGD rank 4": "#c79400",
}  # fmt: skip
PALE, INK = "#f0f0ee", "#222222"

STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "dtcomm", "font.family": "DejaVu Sans", "font.size": 13,
    "axes.titlesize": 14, "axes.labelsize": 13, "axes.spines.top": False, "axes.spines.right": False,
    "figure.facecolor": "white", "savefig.facecolor": "white", "lines.linewidth": 2.2, "legend.frameon": False,
    "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
}  # fmt: skip


def data() -> dict[str, Any]:
    """Return the figures that the pictures show."""
    content: dict[str, Any] = json.loads((PICTURES / "data.json").read_text(encoding="utf-8"))
    return content


def speedup(figures: dict[str, Any]) -> None:
    """Draw the speed-up of a DDP step against the link's rate, for a little and for much computing.

    It is as wide as a telephone's page, so that labels are 11 pixels high there.
    """
    figure, panels = plt.subplots(1, 2, figsize=(5.5, 4.3), sharey=True)
    for axes, batch, title in zip(panels, (4, 256), ("Little computing", "Much computing")):
        predicted = figures["predicted_steps"][f"batch {batch}"]
        axes.axhspan(0.5, 1.05, color="#dcdcdc", zorder=0)
        axes.axhline(1, color="#8a8a8a", linewidth=1)
        for place, name in enumerate(("torch's bf16 hook", "bf16", "int8", "int4")):
            if name in predicted:
                axes.plot(predicted["gbit"], predicted[name], "--", color=COLOUR[name], linewidth=1.8)
            for gbit in (1, 10):
                runs = [cpu[f"{gbit} Gbit/s, batch {batch}"][name] for cpu in figures["ddp_steps"].values()]
                x = gbit * 1.13 ** (place - 1.5)
                axes.plot([x, x], [min(r["range"][0] for r in runs), max(r["range"][1] for r in runs)],
                          color=COLOUR[name], linewidth=4, solid_capstyle="round")  # fmt: skip
        axes.text(0.12, 0.8, "no gain", color="#5a5a5a", style="italic")
        axes.set(xscale="log", yscale="log", xlim=(0.095, 28), ylim=(0.72, 8.5), title=title)
        axes.tick_params(labelsize=12.5)
        _ticks(axes.xaxis, (0.1, 1, 10))
        _ticks(axes.yaxis, (1, 2, 4, 8), "{:g}×")
    figure.text(0.54, 0.25, "Gbit/s between two hosts", ha="center")
    names = {"int4": "int4", "int8": "int8", "bf16": "bf16", "torch's bf16 hook": "torch's bf16 hook"}
    lines = [plt.Line2D([], [], color=COLOUR[name], linewidth=4) for name in names]
    figure.legend(lines, list(names.values()), loc="lower center", ncols=4, bbox_to_anchor=(0.5, 0.125),
                  handlelength=0.7, handletextpad=0.4, columnspacing=1.2)  # fmt: skip
    bar = plt.Line2D([], [], color="#555555", linewidth=4, solid_capstyle="round")
    dashed = plt.Line2D([], [], color="#555555", linewidth=1.8, linestyle="--")
    figure.legend([bar, dashed], ["measured on two processors", "predicted by dtcomm plan"], loc="lower center",
                  bbox_to_anchor=(0.5, -0.02), handlelength=1.6, labelspacing=0.2)  # fmt: skip
    figure.suptitle("Steps per second, against fp32 DDP", fontsize=13.5, y=0.985)
    _save(figure, "speedup", bottom=0.265)


def _ticks(axis: Any, places: Sequence[float], form: str = "{:g}") -> None:
    axis.set_major_locator(matplotlib.ticker.FixedLocator(list(places)))
    axis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: form.format(value)))
    axis.set_minor_locator(matplotlib.ticker.NullLocator())


def gpu_hosts(figures: dict[str, Any]) -> None:
    """Draw what the planner predicts for hosts with GPUs, against the rate of the link."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True)
    for axes, case in zip(panels, figures["predicted_gpu_hosts"]):
        axes.axhspan(0.5, 1.05, color="#dcdcdc", zorder=0)
        axes.axhline(1, color="#8a8a8a", linewidth=1)
        for name in ("bf16", "int8", "int4"):
            axes.plot(case["gbit"], case[name], "--", color=COLOUR[name])
            axes.annotate(name, (case["gbit"][0], case[name][0]), (0, 5), textcoords="offset points",
                          color=COLOUR[name], weight="bold")  # fmt: skip
        axes.text(1.1, 0.82, "no gain", color="#5a5a5a", style="italic")
        axes.set(xscale="log", yscale="log", xlim=(0.95, 420), ylim=(0.75, 8.5), title=case["title"],
                 xlabel="rate of a link, Gbit/s")  # fmt: skip
        _ticks(axes.xaxis, (1, 10, 25, 100, 400))
        _ticks(axes.yaxis, (1, 1.5, 2, 3, 4, 6, 8), "{:g}×")
    panels[0].set_ylabel("steps per second, against fp32")
    _save(figure, "gpu-hosts")


def overlap(figures: dict[str, Any]) -> None:
    """Draw one step of two ranks with equal work, without and with compression, on one axis."""
    runs = figures["overlap"]
    figure, panels = plt.subplots(2, 1, figsize=(11, 4.9), sharex=True)
    longest = max(rank["step"] for ranks in runs.values() for rank in ranks)
    for axes, (name, ranks) in zip(panels, runs.items()):
        labels = []
        for number, rank in enumerate(ranks):
            base = 3 * (1 - number)
            for begin, end in rank["forward"]:
                axes.barh(base + 2, end - begin, left=begin, height=0.8, color="#9ecae1")
            for begin, end in rank["backward"]:
                axes.barh(base + 2, end - begin, left=begin, height=0.8, color="#4a90c4")
            for message in rank["messages"]:
                axes.barh(base + 1, message["done"] - message["started"], left=message["started"], height=0.8,
                          color=COLOUR["int8"], edgecolor="white", linewidth=0.8)  # fmt: skip
            backward_end = max(end for _, end in rank["backward"])
            sent = max(message["done"] for message in rank["messages"])
            if sent > backward_end:
                axes.annotate("", (sent, base + 2), (backward_end, base + 2),
                              arrowprops={"arrowstyle": "<->", "color": "#b00020", "linewidth": 1.8})  # fmt: skip
                axes.text((sent + backward_end) / 2, base + 2.25, f"waits {sent - backward_end:.0f} ms",
                          ha="center", color="#b00020")  # fmt: skip
            labels += [(base + 2, f"rank {number} computes"), (base + 1, f"rank {number} sends")]
        axes.set_yticks([place for place, _ in labels], [label for _, label in labels])
        axes.set(xlim=(0, longest * 1.02), ylim=(0.4, 5.8))
        step = max(rank["step"] for rank in ranks)
        sent = sum(message["wire"] for message in ranks[0]["messages"]) / 1e6
        title = {"none": "Uncompressed", "int8": "Codec int8"}[name]
        axes.set_title(f"{title}: {sent:.1f} MB per step, {step:.0f} ms", loc="left")
    panels[-1].set_xlabel("milliseconds since the start of the step; an emulated link of 0.3 Gbit/s")
    patches = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in ("#9ecae1", "#4a90c4", COLOUR["int8"])]
    figure.legend(patches, ["forward", "backward", "gradients on the link"], loc="lower center", ncols=3)
    _save(figure, "overlap", bottom=0.08)


def loss(figures: dict[str, Any]) -> None:
    """Draw the held-out loss against seconds, at 1 and 10 Gbit/s."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.8), sharey=True)
    names = ("fp32", "torch's bf16 hook", "int8", "int4", "topk 1 %")
    for axes, gbit in zip(panels, ("1", "10")):
        for name in names:
            run = figures["gpt"][name]
            seconds = [step * run["ms"][gbit] / 1e3 for step in run["steps"]]
            axes.plot(seconds, run["losses"], color=COLOUR[name], label=name)
        axes.set(title=f"{gbit} Gbit/s", xlabel="seconds of training", ylim=(1.6, 3.0), xlim=(0, None))
    panels[0].set_ylabel("held-out loss, nats per byte")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncols=5)
    _save(figure, "loss", bottom=0.08)


def bytes_sent(figures: dict[str, Any]) -> None:
    """Draw the bytes of a step as bars, with the held-out loss beside each."""
    figure, axes = plt.subplots(figsize=(9, 4))
    names = {"fp32": "fp32", "bf16": "bf16", "int8": "int8", "int4": "int4", "PowerSGD rank 4": "powersgd:rank=4",
             "topk 1 %": "topk 1 %"}  # fmt: skip
    base = figures["gpt"]["fp32"]["loss"]
    for place, (name, key) in enumerate(names.items()):
        run = figures["gpt"][key]
        axes.barh(-place, run["sent"] * 100, color=COLOUR[name], height=0.68)
        worse = run["loss"] / base - 1
        verdict = f"loss {run['loss']:.3f}" + (f", {worse:+.0%}" if abs(worse) > 0.01 else "")
        inside = run["sent"] > 0.9
        axes.text(98 if inside else run["sent"] * 100 + 1, -place, f"{run['sent']:.1%}: {verdict}", va="center",
                  ha="right" if inside else "left", color="white" if inside else INK)  # fmt: skip
    axes.set_yticks([-place for place in range(len(names))], list(names))
    axes.set(xlabel="bytes sent per step, % of fp32", title="GPT of 6.5 M parameters, 1,000 steps of AdamW")
    _save(figure, "bytes")


def all_reduce(figures: dict[str, Any]) -> None:
    """Draw the time of an all_reduce against its size, on two processors."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.9), sharey=True)
    series = {"gloo": ("Gloo", "#6b6b6b"), "mpi": ("Open MPI", "#0072b2"), "deepspeed": ("DeepSpeed", "#c79400"),
              "oneccl": ("oneCCL", "#b0569c"), "dtcomm": ("dtcomm", "#d55e00"),
              "dtcomm.empty": ("dtcomm, memory shared by the ranks", "#009e73")}  # fmt: skip
    for axes, (processor, rows) in zip(panels, figures["all_reduce"].items()):
        for key, (label, colour) in series.items():
            sizes, times = zip(*rows[key])
            axes.plot(sizes, times, "o-", color=colour, label=label, markersize=4)
        axes.set(xscale="log", yscale="log", title=processor, xlabel="bytes of the tensor, fp32")
        _ticks(axes.xaxis, (2**10, 2**16, 2**20, 2**24, 2**28))
        axes.set_xticklabels(["1 KB", "64 KB", "1 MB", "16 MB", "256 MB"])
        _ticks(axes.yaxis, (1, 10, 100, 1e3, 1e4, 1e5))
        axes.set_yticklabels(["1 µs", "10 µs", "100 µs", "1 ms", "10 ms", "100 ms"])
    panels[0].set_ylabel("time, 2 ranks of one host")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="lower center", ncols=3)
    _save(figure, "all-reduce", bottom=0.14)


def _canvas(width: float, height: float) -> tuple[Any, Axes]:
    """Return a figure whose axes have one unit per tenth of an inch and no frame."""
    figure = plt.figure(figsize=(width / 10, height / 10))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.axis("off")
    return figure, axes


def _box(
    axes: Axes, place: tuple[float, float, float, float], lines: Sequence[str], colour: str = PALE
) -> None:
    """Draw a box (left, bottom, width, height) whose first line is bold."""
    left, bottom, width, height = place
    axes.add_patch(FancyBboxPatch((left, bottom), width, height, boxstyle="round,pad=0,rounding_size=1.2",
                                  facecolor=colour, edgecolor="#7a7a7a", linewidth=1.1))  # fmt: skip
    step = 2.5
    top = bottom + height / 2 + step * (len(lines) - 1) / 2
    for number, line in enumerate(lines):
        axes.text(left + width / 2, top - number * step, line, ha="center", va="center", fontsize=13,
                  weight="bold" if not number else "normal")  # fmt: skip


def _arrow(axes: Axes, begin: tuple[float, float], end: tuple[float, float], label: str = "") -> None:
    axes.annotate("", end, begin, arrowprops={"arrowstyle": "-|>", "color": "#555555", "linewidth": 1.6})
    if label:
        axes.text((begin[0] + end[0]) / 2 + 0.8, (begin[1] + end[1]) / 2, label, va="center", style="italic")


def architecture(figures: dict[str, Any]) -> None:
    """Draw the path of a tensor: script, integration, collective, and what a collective is made of."""
    figure, axes = _canvas(104, 64)
    _box(axes, (34, 56, 36, 7), ["your script", "PyTorch: DDP, FSDP2, TP, Trainer, …"], "white")
    _arrow(axes, (52, 56), (52, 50.2))
    _box(axes, (14, 42, 76, 8), ["integration",
         "ddp · fsdp · tp · pipeline · moe · context_parallel · local_sgd · backend"],
         "#dbeaf5")  # fmt: skip
    _arrow(axes, (52, 42), (52, 36.2))
    _box(axes, (34, 28, 36, 8), ["collective", "all_reduce, all_gather, …"], "#dbeaf5")
    _box(axes, (2, 28, 26, 8), ["error feedback", "adds what was lost before"], "#fbe3d2")
    _box(axes, (76, 28, 26, 8), ["guard and report", "watch loss and time"], "#fbe3d2")
    _arrow(axes, (28, 32), (34, 32))
    _arrow(axes, (70, 32), (76, 32))
    for left, lines in (
        (2, ["schedule", "which rank sends", "which chunk when"]),
        (37, ["codec", "how a chunk", "becomes bytes"]),
        (72, ["transport", "shared memory, TCP,", "UCX, NCCL, Gloo"]),
    ):
        _box(axes, (left, 8, 30, 11), lines, "#dff0e6")
        _arrow(axes, (52, 28), (left + 15, 19.2))
    axes.text(34.5, 13.5, "×", ha="center", va="center", fontsize=20)
    axes.text(69.5, 13.5, "×", ha="center", va="center", fontsize=20)
    axes.text(52, 3.4, "any schedule with any codec over any transport; every rank ends with the same bits",
              ha="center", style="italic")  # fmt: skip
    _save(figure, "architecture", tight=False)


def decision(figures: dict[str, Any]) -> None:
    """Draw the questions that decide whether compression helps, and with which codec to begin."""
    figure, axes = _canvas(104, 74)
    no, yes, maybe, ask = "#e6e6e6", "#dff0e6", "#fdf1d0", "white"
    questions = [
        (62, ["Do the ranks share one host?"]),
        (44, ["Is the link slower than 1 Gbit/s,", "or its round trip above 20 ms?"]),
        (26, ["Is the link 25 Gbit/s or slower?"]),
        (8, ["Does a step wait for communication?", "(the timeline shows it)"]),
    ]
    for bottom, lines in questions:
        _box(axes, (2, bottom, 42, 9), lines, ask)
    answers = [
        (62, "yes", ["NVLink: no, use NCCL", "CPU ranks: backend “dtcomm”, no codec"], no),
        (44, "yes", ["LocalSGD every 30 steps, int4", "(one cluster: DDP with int8)"], yes),
        (26, "yes", ["int8; read the report after 100 steps", "int4 only after comparing losses"], yes),
        (8, "yes", ["bf16:round=stochastic, then int8", "keep what the report says pays"], maybe),
    ]
    for bottom, label, lines, colour in answers:
        _box(axes, (56, bottom, 46, 9), lines, colour)
        _arrow(axes, (44, bottom + 4.5), (56, bottom + 4.5))
        axes.text(50, bottom + 5.3, label, ha="center", va="bottom", style="italic")
    for (top, _), (bottom, _) in itertools.pairwise(questions):
        _arrow(axes, (23, top), (23, bottom + 9.2), "no")
    _arrow(axes, (23, 8), (23, 3.6), "no")
    axes.text(23, 2, "Compression gains nothing.", ha="center", va="center", weight="bold")
    _save(figure, "decision", tight=False)


def sites(figures: dict[str, Any]) -> None:
    """Draw when two sites compute and when they send, with each way to train across sites; a schematic."""
    figure, axes = plt.subplots(figsize=(11, 4.6))
    ways: list[tuple[str, list[tuple[int, int]], list[tuple[int, int]]]] = [
        ("DDP: each step waits", [(n, 4) for n in range(0, 96, 12)], [(n + 4, 8) for n in range(0, 96, 12)]),
        ("DiLoCo: waits every 30 steps", [(0, 40), (48, 40)], [(40, 8), (88, 8)]),
        ("Streaming DiLoCo: hardly waits", [(0, 96)], [(n, 4) for n in range(16, 96, 16)]),
        (
            "… site 2 leaves: site 1 goes on",
            [(0, 60), (64, 32)],
            [(16, 4), (32, 4), (48, 4), (60, 4), (80, 4)],
        ),
    ]
    for place, (_, computing, sending) in enumerate(ways):
        axes.broken_barh(computing, (-3 * place + 0.1, 0.9), color="#4a90c4", edgecolor="white")
        axes.broken_barh(sending, (-3 * place - 0.9, 0.9), color=COLOUR["int8"], edgecolor="white")
    axes.axvline(58, 0.02, 0.2, color="#b00020", linewidth=2)
    axes.text(57, -11, "leaves", color="#b00020", ha="right", va="center")
    axes.text(65, -11, "the average again", color="#b00020", va="center")
    axes.set_yticks([-3 * place for place in range(len(ways))], [name for name, *_ in ways])
    axes.set(xlim=(0, 96), ylim=(-11.8, 1.2), xticks=[], xlabel="time")
    patches = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in ("#4a90c4", COLOUR["int8"])]
    figure.legend(patches, ["a site computes", "bytes between the sites"], loc="lower center", ncols=2)
    _save(figure, "sites", bottom=0.07)


def _save(figure: Any, name: str, *, bottom: float = 0.0, tight: bool = True) -> None:
    if tight:
        figure.tight_layout(rect=(0, bottom, 1, 1))
    path = PICTURES / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    plt.close(figure)
    # Verdana has the widths of DejaVu Sans, in which matplotlib measured the text.
    text = path.read_text(encoding="utf-8").replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")
    path.write_text(text, encoding="utf-8")


#: Each badge: its words, which are also its name, and its colour.
BADGE_COLOURS = {"tested": "#1a7f4b", "emulated": "#1f6fb2", "untested recipe": "#8a6d1a"}


def badge(words: str, colour: str) -> str:
    """Return the SVG of a badge."""
    width = 12 + round(6.6 * len(words))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="18" role="img" aria-label="{words}">'
        f'<title>{words}</title><rect width="{width}" height="18" rx="4" fill="{colour}"/>'
        f'<text x="{width / 2:g}" y="13" fill="#fff" font-family="Verdana,Arial,sans-serif" font-size="11" '
        f'text-anchor="middle" textLength="{width - 12}">{words}</text></svg>\n'
    )


DRAWINGS: tuple[Callable[[dict[str, Any]], None], ...] = (
    speedup, gpu_hosts, overlap, loss, bytes_sent, all_reduce, architecture, decision, sites,
)  # fmt: skip


def main() -> None:
    """Write all pictures and badges."""
    figures = data()
    with plt.rc_context(STYLE):
        for draw in DRAWINGS:
            draw(figures)
    for words, colour in BADGE_COLOURS.items():
        (BADGES / f"{words.replace(' ', '-')}.svg").write_text(badge(words, colour), encoding="utf-8")


if __name__ == "__main__":
    main()
