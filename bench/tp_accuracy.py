"""Measure the perplexity of a model under compressed tensor parallelism: every width, with and without rotation and
spikes.

python -m bench.tp_accuracy [--model gpt] [--ranks 2 4] [--codecs int8 …] [--windows N] [--seconds S] [--fresh]
    [--json FILE]

A GPT of 0.8 M parameters, or with ``--model text`` the one of 6.5 M of bench.workloads, learns Python's source once,
which takes minutes; its weights stay under build/bench. Then the outputs of its attention and feed-forward blocks are
summed over n ranks in a codec, on held-out text. The ranks are emulated in one process (dtcomm.tp.emulate, whose sums a
test compares to those of the collectives, bit by bit). "int4" is summed as the layers do by default: with one shot on
two ranks and with two on more. "int4 one_shot" names the algorithm. "calibrated" is a plan with a codec for each layer,
made as ``dtcomm tp calibrate`` makes it, on training text, so that perplexity there rises by 1 % at most. Results that
the file has are not measured again, except with `--fresh`. With `--seconds` the program stops after that time, and the
next call continues. A picture goes to docs/results.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.common import machine, output
from bench.common.pages import DOCS
from bench.training import gpt, tp_page
from dtcomm.codecs import codec
from dtcomm.tp.calibrate import calibrate
from dtcomm.tp.emulate import emulate, restore

WIDTHS = ("int8", "int6", "int5", "int4", "int3", "int2")
OPTIONS = ("", "rotate=hadamard", "spikes=1", "rotate=hadamard,spikes=1")
#: Codecs with a zero point for each block, because activations are not centred.
ASYMMETRIC = (
    *(f"int4:symmetric=false{option}" for option in ("", ",rotate=hadamard", ",spikes=1")),
    "int4:block=64,symmetric=false,spikes=1",
)
SUMS = ("int4 one_shot", "int4 two_shot", "int4 two_shot_symmetric")
CALIBRATED = "calibrated"
OTHERS = (
    *ASYMMETRIC,
    *SUMS,
    "int5:block=128",
    "fp8_e4m3",
    "fp8_e3m4",
    "mxfp4",
    "mxfp4:rotate=hadamard",
    "nvfp4",
    "intv",
    "intv:width=4",
    CALIBRATED,
)
#: The most that perplexity may rise, as a fraction.
TARGETS = {
    CALIBRATED: 0.01,
    "int8": 0.001,
    "int6": 0.001,
    "int4": 0.01,
    SUMS[0]: 0.01,
    ASYMMETRIC[2]: 0.01,
    ASYMMETRIC[3]: 0.01,
    "intv": 0.01,
}


def specs() -> list[str]:
    """Return the default codecs; an algorithm other than the default follows after a space."""
    return [*(f"{width}:{options}" if options else width for width in WIDTHS for options in OPTIONS), *OTHERS]


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, print the table and write the files; return the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(gpt.SETTINGS), default="gpt")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--codecs", nargs="+", default=specs())
    parser.add_argument("--windows", type=int, default=256, help="of held-out text")
    parser.add_argument("--steps", type=int, help="of training; default: those of the model")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--fresh", action="store_true", help="repeat what was measured before")
    parser.add_argument("--json", help="where to write instead of bench/results (then no picture)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    training = gpt.SETTINGS[options.model]
    training = replace(training, steps=options.steps or training.steps)
    model, corpus = gpt.trained(training, say=lambda line: print(line, flush=True))
    name = tp_page.RESULTS[options.model]
    path = Path(options.json or output.RESULTS / f"{name}.json")
    rows: dict[str, dict[str, Any]] = {}
    plain = gpt.held_out_loss(model, corpus, options.windows)
    setting = {"windows": options.windows, "steps": training.steps, "loss": round(plain, 9)}
    saved = {} if options.fresh else output.resumable(path)
    if saved.get("setting") == setting:
        rows = {f"{row['codec']} {row['ranks']}": row for row in saved["rows"]}
    end = time.monotonic() + options.seconds
    complete = True
    for spec in options.codecs:
        for ranks in options.ranks:
            if f"{spec} {ranks}" in rows:
                continue
            if time.monotonic() > end:
                complete = False
                continue
            if spec == CALIBRATED:
                batches = gpt.calibration_batches(training, corpus)
                calibrated = calibrate(model, batches, ranks, gpt.PLAN)
                bits, algorithm = calibrated.mean_bits, ""
                layers = emulate(model, ranks, calibrated.layers)
            else:
                codec_spec, _, algorithm = spec.partition(" ")
                bits = _bits(codec_spec)
                layers = emulate(model, ranks, gpt.PLAN, codec_spec, algorithm=algorithm or "auto")
            loss = gpt.held_out_loss(model, corpus, options.windows)
            restore(model, layers)
            rows[f"{spec} {ranks}"] = row = _row(spec, ranks, bits, algorithm, loss, plain)
            print(f"{spec} on {ranks} ranks: {100 * row['change']:+.3f} %", flush=True)
    selected_rows = [
        rows[key] for key in (f"{s} {n}" for s in options.codecs for n in options.ranks) if key in rows
    ]
    result = {
        "machine": machine.describe(),
        "setting": setting,
        "rows": selected_rows,
        "verdicts": verdicts(selected_rows),
    }
    written = output.write(name, result, options.json, timed=False)
    output.table(f"perplexity a symbol, uncompressed {math.exp(plain):.4f}", *tp_page.table(selected_rows))
    print("\n".join(result["verdicts"]))
    print(written if complete else f"{written}; stopped in time: call again to go on")
    if complete and options.json is None:
        picture = DOCS / f"results/{name}.png"
        tp_page.plot(selected_rows, picture)
        print(f"{picture}; python -m bench.pages writes the table")
    return result


def _bits(spec: str) -> float:
    numel = 1 << 20
    return 8 * codec(spec).wire_bytes(numel) / numel


def _row(spec: str, ranks: int, bits: float, algorithm: str, loss: float, plain: float) -> dict[str, Any]:
    # Compared to two shots of bf16, in which a rank sends 2 (n - 1) / n of the tensor; one shot sends n - 1 of it.
    shots = ranks / 2 if algorithm == "one_shot" else 1
    return {
        "codec": spec,
        "ranks": ranks,
        "bits": round(bits, 4),
        "less_than_bf16": round(16 / bits / shots, 3),
        "perplexity": round(math.exp(loss), 5),
        "change": round(math.expm1(loss - plain), 7),
    }


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """Return the verdicts: each target, and whether spikes help at 2 bits."""
    changes = {(row["codec"], row["ranks"]): row["change"] for row in rows}
    lines = []
    for (spec, ranks), change in changes.items():
        if spec in TARGETS:
            limit = TARGETS[spec]
            passed = "PASS" if change <= limit else "MISS"
            lines.append(f"{passed} {spec}, TP={ranks}: {100 * change:+.3f} %, at most {100 * limit:g} %")
        spiked = changes.get((f"{spec}:spikes=1", ranks))
        if spec == "int2" and spiked is not None:
            passed = "PASS" if spiked < change else "MISS"
            lines.append(
                f"{passed} int2, TP={ranks}: {100 * spiked:+.1f} % with spikes, {100 * change:+.1f} % without"
            )
    return lines


if __name__ == "__main__":
    main()
