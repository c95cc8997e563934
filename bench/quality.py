"""Measure the errors of codecs: of each alone on three distributions, and of a two-shot all-reduce of eight ranks.

python -m bench.quality [--codecs SPEC ...] [--numel N] [--json FILE]

A codec's error is the relative L2 error, as `dtcomm codecs` prints it; tests hold it against the error that the
definition of the format predicts. The all-reduce runs on the native engine with simulated ranks; its errors (vNMSE, and
the mean relative error in per cent) are taken against the fp64 sum of the bf16 inputs. Beside them stand the mean
relative errors that flashinfer publishes for its FP8 all-reduce of 8 ranks (flashinfer-ai/flashinfer#3759). Errors do
not depend on the machine, so --repeat has no effect.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch

from bench.common import harness, report
from bench.common.virtual_ranks import Operation, Simulation, run_simulated
from dtcomm import algorithms
from dtcomm.cli.codecs import bits_per_element, default_codecs, distributions, measure_error
from dtcomm.codecs import codec
from dtcomm.runtime.types import Buffers, OpSpec, TensorSpec

RANKS = 8
NUMEL = 1 << 20  # of a rank: another seed changes a mean relative error by less than one percent of it
SMALLEST_SUM = 0.01  # smaller sums have no meaningful relative error
#: Mean relative error by distribution, in percent.
PUBLISHED = {"normal": 9.5, "uniform": 8.7, "sparse": 4.0, "silu*y": 6.9, "heavy tail": 9.0}
SPECS = (
    "bf16",
    "fp8_e4m3",
    "mxfp8",
    "mxfp4",
    "nvfp4",
    "int8",
    "int6",
    "int4",
    "int4:rotate=hadamard",
    "int4:spikes=1",
)

Draw = Callable[[torch.Generator, int], torch.Tensor]


def _normal(generator: torch.Generator, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=generator)


def _some(generator: torch.Generator, numel: int, probability: float) -> torch.Tensor:
    return torch.rand(numel, generator=generator) < probability


DISTRIBUTIONS: dict[str, Draw] = {
    "normal": _normal,
    "uniform": lambda generator, numel: torch.rand(numel, generator=generator) * 2 - 1,
    "sparse": lambda generator, numel: _normal(generator, numel) * _some(generator, numel, 0.1),
    "silu*y": lambda generator, numel: (
        torch.nn.functional.silu(_normal(generator, numel)) * _normal(generator, numel)
    ),
    "heavy tail": lambda generator, numel: (
        _normal(generator, numel) * (1 + 99 * _some(generator, numel, 0.01))
    ),
}


def all_reduce(spec: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum that the native engine's two-shot all-reduce leaves on every rank."""
    part = TensorSpec(tensors[0].numel(), tensors[0].dtype, codec(spec))
    shape = OpSpec("all_reduce", "sum", (part,), "two_shot")
    schedule = algorithms.build("two_shot", "all_reduce", len(tensors))
    results = [tensor.clone() for tensor in tensors]
    operations = [
        [Operation(shape=shape, schedule=schedule, buffers=[Buffers(result, result, None)])]
        for result in results
    ]
    simulation = Simulation(ranks=len(tensors), seed=1, delay=0.0, piece_bytes=256 << 10, slot_bytes=1 << 20)
    for rank, outcome in enumerate(run_simulated(simulation, operations)):
        if outcome.status != "done" or not torch.equal(results[rank], results[0]):
            raise RuntimeError(f"{spec}: rank {rank} ended with {outcome}, or with other bits than rank 0")
    return results[0]


def two_shot_errors(spec: str, numel: int) -> dict[str, tuple[float, float]]:
    """Return by distribution the vNMSE and the mean relative error in per cent."""
    errors = {}
    for name, draw in DISTRIBUTIONS.items():
        tensors = [draw(torch.Generator().manual_seed(rank), numel).bfloat16() for rank in range(RANKS)]
        exact = torch.stack([tensor.double() for tensor in tensors]).sum(0)
        error = all_reduce(spec, tensors).double() - exact
        large = exact.abs() > SMALLEST_SUM
        relative = 100 * float((error[large] / exact[large]).abs().mean())
        errors[name] = float(error.square().sum() / exact.square().sum()), relative
    return errors


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = harness.parser(__doc__, rounds=1)
    parser.add_argument("--codecs", nargs="+", help="instead of the usual ones of each table")
    parser.add_argument("--numel", type=int, default=NUMEL, help="elements of a rank's tensor")
    options = harness.parse(parser, arguments)
    numel = 1 << 14 if options.quick else options.numel
    results = harness.Results(options)
    samples = distributions()
    lines = []
    for spec in options.codecs or [str(each) for each in default_codecs()]:
        errors = {sample.name: measure_error(codec(spec), sample).relative_l2 for sample in samples}
        bits = bits_per_element(codec(spec))
        results.rows.append({"codec": spec, "bits": round(bits, 4), "relative_l2": errors})
        lines.append([spec, f"{bits:.4g}", *(f"{error or 0:.3g}" for error in errors.values())])
    report.table("relative L2 error", ["", "bits", *(sample.name for sample in samples)], lines)
    published = {"two_shot": "flashinfer FP8, published", "mean_relative_percent": PUBLISHED}
    results.rows.append(published)
    lines = [["flashinfer FP8, published", *(f"{value:g} %" for value in PUBLISHED.values())]]
    for spec in options.codecs or SPECS:
        both = two_shot_errors(spec, numel)
        results.rows.append(
            {
                "two_shot": spec,
                "vnmse": {name: vnmse for name, (vnmse, _) in both.items()},
                "mean_relative_percent": {name: relative for name, (_, relative) in both.items()},
            }
        )
        lines.append([spec, *(f"{relative:.3g} %, {vnmse:.1e}" for vnmse, relative in both.values())])
    report.table(
        f"two-shot all-reduce of {RANKS} ranks: mean relative error, vNMSE", ["", *DISTRIBUTIONS], lines
    )
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
