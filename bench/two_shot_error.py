"""Measure the error of a two-shot all-reduce of 8 ranks by codec, beside the published table of flashinfer's.

python -m bench.two_shot_error [--json [FILE]]

flashinfer's FP8 two-shot all-reduce (flashinfer-ai/flashinfer#3759) publishes its mean relative error on five
distributions. Every rank contributes bf16 tensors drawn from:

- normal: N(0, 1); uniform: U(-1, 1); sparse: N(0, 1) of which 10 % are not zero; silu*y: silu(x) y of two normals;
- heavy tail: N(0, 1) of which 1 % are multiplied by 100.

The published text names the distributions and the result, not the formulas. The ones above, with the mean of
|error| / |sum| over the sums larger than 0.01, are confirmed by the row "their scheme, repeated": FP8 (E4M3) in groups
of 256 with fp32 scales, every contribution encoded, sum encoded. It has to give the published numbers.

Our rows are the all-reduce of the native engine (8 simulated ranks, algorithm "two_shot"), in which the owner of a
chunk adds its own contribution unencoded. vNMSE is the sum of squared errors over the sum of squares. All errors are
taken against the fp64 sum of the bf16 inputs, so they include the rounding of the result to bf16.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.common import machine, output
from bench.common.pages import markdown
from dtcomm import algorithms
from dtcomm.codecs import Codec
from dtcomm.codecs import codec as parse
from dtcomm.kernels import ops
from dtcomm.measure.virtual_ranks import Operation, Simulation, run_simulated
from dtcomm.runtime.types import Buffers, OpSpec, TensorSpec

RANKS = 8
NUMEL = 1 << 20  # of a rank: another seed changes a mean relative error by less than one percent of it
SMALLEST_SUM = 0.01  # smaller sums have no meaningful relative error

#: Mean relative error by distribution, in percent, as flashinfer-ai/flashinfer#3759 publishes it for 8 ranks.
PUBLISHED = {"normal": 9.5, "uniform": 8.7, "sparse": 4.0, "silu·y": 6.9, "heavy tail": 9.0}
PUBLISHED_NAME = "flashinfer FP8, published"
REPEATED_NAME = "their scheme, repeated"
REPEATED = "fp8_e4m3:block=256,scale=fp32"

SPECS = (
    "bf16",
    "fp8_e4m3",
    "fp8_e4m3:block=256",
    "fp8_e3m4",
    "mxfp8",
    "mxfp4",
    "nvfp4",
    "int8",
    "int8:block=128",
    "int8:rotate=hadamard",
    "int8:spikes=1",
    "int8:block=128,spikes=1",
    "int6",
    "int6:rotate=hadamard",
    "int6:spikes=1",
    "int4",
    "int4:rotate=hadamard",
    "int4:spikes=1",
    "intv",
)

Draw = Callable[[torch.Generator, int], torch.Tensor]


def _normal(generator: torch.Generator, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=generator)


def _uniform(generator: torch.Generator, numel: int) -> torch.Tensor:
    return torch.rand(numel, generator=generator) * 2 - 1


def _with_probability(generator: torch.Generator, numel: int, probability: float) -> torch.Tensor:
    return torch.rand(numel, generator=generator) < probability


def _sparse(generator: torch.Generator, numel: int) -> torch.Tensor:
    return _normal(generator, numel) * _with_probability(generator, numel, 0.1)


def _silu_product(generator: torch.Generator, numel: int) -> torch.Tensor:
    return torch.nn.functional.silu(_normal(generator, numel)) * _normal(generator, numel)


def _heavy_tail(generator: torch.Generator, numel: int) -> torch.Tensor:
    return _normal(generator, numel) * (1 + 99 * _with_probability(generator, numel, 0.01))


#: The distributions by name, in the order of the published table.
DISTRIBUTIONS: dict[str, Draw] = {
    "normal": _normal,
    "uniform": _uniform,
    "sparse": _sparse,
    "silu·y": _silu_product,
    "heavy tail": _heavy_tail,
}


def contributions(name: str, numel: int = NUMEL) -> list[torch.Tensor]:
    """Return the ranks' bf16 tensors of a distribution, the same in every run."""
    draw = DISTRIBUTIONS[name]
    return [draw(torch.Generator().manual_seed(rank), numel).bfloat16() for rank in range(RANKS)]


def errors(result: torch.Tensor, tensors: Sequence[torch.Tensor]) -> dict[str, float]:
    """Return the errors of a sum of ``tensors``: mean relative error in percent, and vNMSE."""
    exact = torch.stack([tensor.double() for tensor in tensors]).sum(0)
    error = result.double() - exact
    large = exact.abs() > SMALLEST_SUM
    return {
        "mean_relative_percent": 100 * float((error[large] / exact[large]).abs().mean()),
        "vnmse": float(error.square().sum() / exact.square().sum()),
    }


def all_reduce(codec: Codec, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum that the native engine's two-shot all-reduce leaves on every rank."""
    numel = tensors[0].numel()
    shape = OpSpec("all_reduce", "sum", (TensorSpec(numel, tensors[0].dtype, codec),), "two_shot")
    schedule = algorithms.build("two_shot", "all_reduce", len(tensors))
    results = [tensor.clone() for tensor in tensors]
    operations = [
        [Operation(shape=shape, schedule=schedule, buffers=[Buffers(result, result, None)])]
        for result in results
    ]
    simulation = Simulation(ranks=len(tensors), seed=1, delay=0.0, piece_bytes=256 << 10, slot_bytes=1 << 20)
    for rank, outcome in enumerate(run_simulated(simulation, operations)):
        if outcome.status != "done" or not torch.equal(results[rank], results[0]):
            raise RuntimeError(f"{codec}: rank {rank} ended with {outcome}, or with other bits than rank 0")
    return results[0]


def encode_everything(codec: Codec, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of a two-shot all-reduce that encodes all contributions and then their sum."""
    payloads = [ops.encode(codec, tensor) for tensor in tensors]
    numel, dtype = tensors[0].numel(), tensors[0].dtype
    return ops.decode(codec, ops.reduce_encode(codec, payloads, numel, dtype=dtype), numel, dtype)


def measure(specs: Sequence[str] = SPECS, numel: int = NUMEL) -> dict[str, Any]:
    """Return the errors of every codec on every distribution, and those of flashinfer's scheme."""
    schemes: list[tuple[str, Codec, Callable[[Codec, Sequence[torch.Tensor]], torch.Tensor]]] = [
        (REPEATED_NAME, parse(REPEATED), encode_everything),
        *((spec, parse(spec), all_reduce) for spec in specs),
    ]
    rows: list[dict[str, Any]] = [
        {
            "scheme": scheme,
            "bits_per_element": 8 * codec.wire_bytes(1 << 16, torch.bfloat16) / (1 << 16),
            "errors": {},
        }
        for scheme, codec, _ in schemes
    ]
    for name in DISTRIBUTIONS:
        tensors = contributions(name, numel)
        for row, (_, codec, run) in zip(rows, schemes, strict=True):
            row["errors"][name] = errors(run(codec, tensors), tensors)
    return {"ranks": RANKS, "numel": numel, "published": PUBLISHED, "rows": rows}


def page(result: dict[str, Any]) -> str:
    """Return the page's two tables: mean relative errors beside the published ones, and vNMSE."""
    names = list(result["published"])
    relative = [[PUBLISHED_NAME, "8.125", *(f"{result['published'][name]:.1f}" for name in names)]]
    squared = []
    for row in result["rows"]:
        scheme = row["scheme"] if row["scheme"] == REPEATED_NAME else f"`{row['scheme']}`"
        label = [scheme, f"{row['bits_per_element']:.4g}"]
        by_name = [row["errors"][name] for name in names]
        relative.append([*label, *(f"{error['mean_relative_percent']:.2f}" for error in by_name)])
        squared.append([*label, *(f"{error['vnmse']:.1e}" for error in by_name)])
    columns = ["bits per element", *names]
    return "\n\n".join(
        [
            markdown(["mean relative error, %", *columns], relative, aligned=True),
            markdown(["vNMSE", *columns], squared, aligned=True),
        ]
    )


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, print, write the result file if requested; return the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", nargs="?", const="", help="write bench/results/two_shot_error.json, or this file"
    )
    options = parser.parse_args(arguments)
    result = {"machine": machine.describe(), **measure()}
    print(page(result))
    if options.json is not None:
        print(output.write("two_shot_error", result, options.json or None, timed=False))
    return result


if __name__ == "__main__":
    main()
