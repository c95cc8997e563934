"""Measure the error of every codec beside the error that follows from its definition.

python -m bench.quality [--json [FILE]]

The codecs, the samples and the measurement are those of `dtcomm codecs`; all kernels give the same errors. Expected
errors on Gaussian data are integrated from the formats' definitions (bench/common/theory.py). The result is the table
of docs/results/codecs.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from bench.common import machine, output, theory
from dtcomm.cli.codecs import main as codecs_command
from dtcomm.cli.codecs import measure as codecs_measure
from dtcomm.cli.codecs import report
from dtcomm.codecs import Codec

SPEED_BYTES = 4 << 20


def _scaled(
    values: theory.Array, block: int, rule: Callable[[theory.Array], Callable[[float], float]]
) -> float:
    return theory.block_error(values, block, rule(values))


#: Relative L2 error on Gaussian data by spec: the number, and where it comes from.
EXPECTED: dict[str, tuple[Callable[[], float], str]] = {
    "fp16": (lambda: theory.cast_error(theory.FP16), "integral over the values of binary16"),
    "bf16": (lambda: theory.cast_error(theory.BF16), "integral over the values of bfloat16"),
    **{
        f"int{bits}": (
            lambda bits=bits: _scaled(theory.INT[bits], 32, theory.to_largest),
            f"integral over {2 * len(theory.INT[bits]) - 1} levels up to the block's largest",
        )
        for bits in range(8, 1, -1)
    },
    "fp8_e4m3": (lambda: _scaled(theory.E4M3, 128, theory.to_largest), "integral over the values of e4m3"),
    "fp8_e5m2": (lambda: _scaled(theory.E5M2, 128, theory.to_largest), "integral over the values of e5m2"),
    "fp8_e3m4": (lambda: _scaled(theory.E3M4, 128, theory.to_largest), "integral over the values of e3m4"),
    "mxfp8": (lambda: _scaled(theory.E4M3, 32, theory.to_power), "the same with a power of two as scale"),
    "mxfp8:element=e5m2": (
        lambda: _scaled(theory.E5M2, 32, theory.to_power),
        "the same with a power of two as scale",
    ),
    "mxfp4": (lambda: _scaled(theory.E2M1, 32, theory.to_power), "integral over the values of e2m1"),
    "nvfp4": (
        lambda: theory.block_error(theory.E2M1, 16, theory.to_e4m3(theory.E2M1, 4096)),
        "the same with a scale in e4m3",
    ),
    "sign": (lambda: theory.sign_error(256), "√((1 − 2/π)(1 − 1/256)); Max 1960: √0.3634"),
    "topk": (lambda: theory.top_error(41 / 4096), "√(1 − r − 2τφ(τ)), τ the threshold of the share r"),
    "topk:ratio=0.1": (lambda: theory.top_error(410 / 4096), "√(1 − r − 2τφ(τ))"),
    "randk": (lambda: theory.random_error(41 / 4096), "√(1/r − 1)"),
    "randk:ratio=0.1": (lambda: theory.random_error(410 / 4096), "√(1/r − 1)"),
}


def measure(
    codecs: Sequence[Codec], *, speed: bool = True, numel: int = codecs_measure.NUMEL
) -> dict[str, Any]:
    """Return the rows of `dtcomm codecs --json`, each with its expected error, or null."""
    samples = codecs_measure.distributions(numel)
    size = SPEED_BYTES if speed else None
    rows = codecs_measure.measure_codecs(codecs, samples, size, lambda spec: None)
    result = report.as_dict(rows, size)
    for row in result["codecs"]:
        expected = EXPECTED.get(row["codec"])
        row["expected_gaussian"] = None if expected is None else expected[0]()
    return {"numel": numel, **result}


def page(result: dict[str, Any]) -> str:
    """Return the page's tables: size and error of every codec, then expected beside measured errors."""
    lines = [
        "| codec | bits per element | error, Gaussian | error, Laplace | error, Student-t | worst block "
        "| encode, GB/s | decode, GB/s |",
        "|---" + "|---:" * 7 + "|",
    ]
    for row in result["codecs"]:
        errors = row["errors"]
        cells = [f"`{row['codec']}`", f"{row['bits_per_element']:.4g}"]
        cells += [_number(errors[name]["relative_l2"]) for name in ("Gaussian", "Laplace", "Student-t")]
        cells += [_number(errors["Student-t"]["worst_block"])]
        cells += [_number(row["encode_gbps"]), _number(row["decode_gbps"])]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| codec, on Gaussian data | measured | expected | which is |", "|---|---:|---:|---|"]
    for row in result["codecs"]:
        if row["expected_gaussian"] is not None:
            measured = row["errors"]["Gaussian"]["relative_l2"]
            words = EXPECTED[row["codec"]][1]
            lines.append(
                f"| `{row['codec']}` | {_number(measured)} | {_number(row['expected_gaussian'])} | {words} |"
            )
    return "\n".join(lines)


def _number(value: float | None) -> str:
    """Return a number with three significant digits."""
    if value is None:
        return "–"
    return "0" if value == 0 else f"{value:.2e}" if value < 1e-3 else f"{value:#.3g}".removesuffix(".")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, print, write the result file if requested; return the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", nargs="?", const="", help="write bench/results/quality.json, or this file")
    options = parser.parse_args(arguments)
    result = {
        "machine": machine.describe(),
        "load": machine.load(),
        **measure(codecs_command.default_codecs()),
    }
    print(page(result))
    if options.json is not None:
        print(output.write("quality", result, options.json or None))
    return result


if __name__ == "__main__":
    main()
