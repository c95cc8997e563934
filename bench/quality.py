"""Measure the error of every codec beside the error that follows from its definition.

python -m bench.quality [--json [FILE]]

The codecs, the samples and the measurement are those of `dtcomm codecs`; all kernels give the same errors. Expected
errors on Gaussian data are integrated from the formats' definitions (bench/common/theory.py). The result is the table
of docs/results/codecs.md; its speeds are those of bench.kernels, which measures them beside memcpy and torch.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

from bench.common import machine, output, pages, theory
from dtcomm.cli.codecs import main as codecs_command
from dtcomm.cli.codecs import measure as codecs_measure
from dtcomm.cli.codecs import report
from dtcomm.codecs import Codec

Rule = Callable[[theory.Array], Callable[[float], float]]


def _scaled(values: theory.Array, block: int, rule: Rule = theory.to_largest) -> float:
    return theory.block_error(values, block, rule(values))


def _at_random(values: theory.Array, block: int) -> float:
    return theory.block_error(values, block, theory.to_largest(values), theory.random_distortion)


_ROTATED = "the same as without: a rotation leaves Gaussian data Gaussian"
_RANDOM = "the same, rounded at random: (x − l)(h − x) between values l and h"
_RANGE = "levels from a block's least to its greatest, Bennett 1948"

#: Relative L2 error on Gaussian data by spec: the number, and where it comes from.
EXPECTED: dict[str, tuple[Callable[[], float], str]] = {
    "none": (lambda: 0.0, "by definition"),
    "fp16": (lambda: theory.cast_error(theory.FP16), "integral over the values of binary16"),
    "bf16": (lambda: theory.cast_error(theory.BF16), "integral over the values of bfloat16"),
    "bf16:round=stochastic": (
        lambda: math.sqrt(theory.random_distortion(theory.BF16, float(theory.BF16[-1]))),
        _RANDOM,
    ),
    **{
        f"int{bits}": (
            lambda bits=bits: _scaled(theory.INT[bits], 32),
            f"integral over {2 * len(theory.INT[bits]) - 1} levels up to the block's largest",
        )
        for bits in range(8, 1, -1)
    },
    **{
        f"int{bits}:block={block}": (
            lambda bits=bits, block=block: _scaled(theory.INT[bits], block),
            "the same in longer blocks",
        )
        for bits, block in ((8, 256), (4, 128))
    },
    **{
        f"int{bits}:round=stochastic": (lambda bits=bits: _at_random(theory.INT[bits], 32), _RANDOM)
        for bits in (8, 4)
    },
    **{
        f"int{bits}:symmetric=false": (lambda bits=bits: theory.range_error(bits, 32), _RANGE)
        for bits in (8, 4)
    },
    **{
        f"int{bits}:{'block=128,' if block == 128 else ''}rotate=hadamard": (
            lambda bits=bits, block=block: _scaled(theory.INT[bits], block),
            _ROTATED,
        )
        for bits in (4, 3)
        for block in (32, 128)
    },
    "fp8_e4m3": (lambda: _scaled(theory.E4M3, 128), "integral over the values of e4m3"),
    "fp8_e4m3:round=stochastic": (lambda: _at_random(theory.E4M3, 128), _RANDOM),
    "fp8_e5m2": (lambda: _scaled(theory.E5M2, 128), "integral over the values of e5m2"),
    "fp8_e3m4": (lambda: _scaled(theory.E3M4, 128), "integral over the values of e3m4"),
    "fp8_e3m4:round=stochastic": (lambda: _at_random(theory.E3M4, 128), _RANDOM),
    "mxfp8": (lambda: _scaled(theory.E4M3, 32, theory.to_power), "the same with a power of two as scale"),
    "mxfp8:element=e5m2": (
        lambda: _scaled(theory.E5M2, 32, theory.to_power),
        "the same with a power of two as scale",
    ),
    "mxfp4": (lambda: _scaled(theory.E2M1, 32, theory.to_power), "integral over the values of e2m1"),
    "mxfp4:rotate=hadamard": (lambda: _scaled(theory.E2M1, 32, theory.to_power), _ROTATED),
    "nvfp4": (
        lambda: theory.block_error(theory.E2M1, 16, theory.to_e4m3(theory.E2M1, 4096)),
        "the same with a scale in e4m3",
    ),
    "sign": (lambda: theory.sign_error(256), "√((1 − 2/π)(1 − 1/256)); Max 1960: √0.3634"),
    "sign:rotate=hadamard": (lambda: theory.sign_error(256), _ROTATED),
    "topk": (lambda: theory.top_error(41 / 4096), "√(1 − r − 2τφ(τ)), τ the threshold of the share r"),
    "topk:ratio=0.1": (lambda: theory.top_error(410 / 4096), "√(1 − r − 2τφ(τ))"),
    "topk:ratio=0.1,values=int8": (
        lambda: theory.top_error(410 / 4096),
        "√(1 − r − 2τφ(τ)); int8 adds a hundredth",
    ),
    "randk": (lambda: theory.random_error(41 / 4096), "√(1/r − 1)"),
    "randk:ratio=0.1": (lambda: theory.random_error(410 / 4096), "√(1/r − 1)"),
    "randk:positions=shared": (lambda: theory.random_error(41 / 4096), "√(1/r − 1)"),
    "lossless": (lambda: 0.0, "by definition"),
}
NO_SPEED = "not measured"


def measure(codecs: Sequence[Codec], *, numel: int = codecs_measure.NUMEL) -> dict[str, Any]:
    """Return the rows of `dtcomm codecs --json` without speeds, each with its expected error, or null."""
    samples = codecs_measure.distributions(numel)
    rows = codecs_measure.measure_codecs(codecs, samples, None, lambda spec: None)
    result = report.as_dict(rows, None)
    for row in result["codecs"]:
        del row["encode_gbps"], row["decode_gbps"]
        expected = EXPECTED.get(row["codec"])
        row["expected_gaussian"] = None if expected is None else expected[0]()
    return {"numel": numel, **result}


def page(result: dict[str, Any], speeds: dict[str, Any]) -> str:
    """Return the page's tables: size, errors and speed of every codec, then expected beside measured errors.

    Args:
        result: What `measure` returned.
        speeds: The result of bench.kernels.
    """
    columns = ["codec", "bits per element", "error, Gaussian", "error, Laplace", "error, Student-t"]
    columns += ["worst block", "encode, GB/s", "decode, GB/s"]
    rows = []
    for row in result["codecs"]:
        errors = row["errors"]
        cells = [f"`{row['codec']}`", f"{row['bits_per_element']:.4g}"]
        cells += [_number(errors[name]["relative_l2"]) for name in ("Gaussian", "Laplace", "Student-t")]
        cells += [_number(errors["Student-t"]["worst_block"])]
        cells += [_speed(speeds, row["codec"], verb) for verb in ("encode", "decode")]
        rows.append(cells)
    lines = [pages.markdown(columns, rows, aligned=True)]
    lines += ["", "| codec, on Gaussian data | measured | expected | which is |", "|---|---:|---:|---|"]
    for row in result["codecs"]:
        if row["expected_gaussian"] is not None:
            measured = row["errors"]["Gaussian"]["relative_l2"]
            words = EXPECTED[row["codec"]][1]
            lines.append(
                f"| `{row['codec']}` | {_number(measured)} | {_number(row['expected_gaussian'])} | {words} |"
            )
    return "\n".join(lines)


def _speed(speeds: dict[str, Any], spec: str, verb: str) -> str:
    """Return GB/s in a cache and in memory."""
    name = {"none": "memcpy", "lossless": f"lossless {verb}, float32"}.get(spec, f"{spec} {verb}")
    found = {row["bytes"]: row for row in speeds["rows"] if row["name"] == name}
    if not found:
        return NO_SPEED
    return "; ".join(f"{found[size]['gb_per_s']:.3g}" for size in sorted(found))


def _number(value: float) -> str:
    """Return a number with three significant digits."""
    return "0" if value == 0 else f"{value:.2e}" if value < 1e-3 else f"{value:#.3g}".removesuffix(".")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, print, write the result file if requested; return the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", nargs="?", const="", help="write bench/results/quality.json, or this file")
    options = parser.parse_args(arguments)
    result = {"machine": machine.describe(), **measure(codecs_command.default_codecs())}
    print(page(result, {"rows": []}))
    if options.json is not None:
        print(output.write("quality", result, options.json or None, timed=False))
    return result


if __name__ == "__main__":
    main()
