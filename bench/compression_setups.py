"""Count in how many set-ups of Agarwal et al. gradient compression helps, as the planner predicts them.

python -m bench.compression_setups [--json FILE]

Agarwal et al. 2022 (arXiv:2103.00543) compared PowerSGD, top-K and signSGD with DDP in more than 200 set-ups in a data
centre, and found a speed-up in 6. Published are the models (ResNet-50, ResNet-101, BERT), the methods, up to 96 V100 in
hosts of four, and 10 Gbit/s between hosts. The rest is assumed here, and printed with the result: which batches and
numbers of GPUs make up the grid, what a step computes, and what encoding costs in PyTorch's operations. DDP's messages
are those of the planner's model of NCCL and overlap with backward; the methods encode after backward and overlap with
nothing, as theirs did.

The same grid is counted again with encoders at the speed of memory, as fused kernels have, and at other bandwidths; and
at 10 Gbit/s with each assumption changed alone, to see on which of them the count depends. It takes a few seconds.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.common import output, pages
from dtcomm.planner.hardware import System, find_port, find_system
from dtcomm.planner.job import Network
from dtcomm.planner.training_model import Bucket, even_buckets, replay

GPUS = (8, 16, 32, 64, 96)
PER_HOST = 4
RATES = ("10gbit", "25gbit")
ENCODERS = ("pytorch", "memory")
REACH = 0.57  # of the peak in fp32: 360 images a second of ResNet-50 on a V100
LAUNCH = 10e-6  # seconds of an operation of PyTorch
#: Until PyTorch 1.11, topk of one vector ran in one block: a pass for each of 16 digits and two to gather, on one of a
#: V100's multiprocessors.
SELECT_PASSES, MULTIPROCESSORS = 18, 80
SCATTER = 1e11  # bytes a second of scattered writes
CLEAR = 1.1  # a speed-up that is outside of the error of the prediction
#: What is changed → factors of the encoders' times, of the batches, and of the time of computing.
CHANGES: dict[str, dict[str, float]] = {
    "as assumed": {},
    "encoders 2 times as slow": {"coding": 2.0},
    "encoders 4 times as slow": {"coding": 4.0},
    "batches 2 times as large": {"batch": 2.0},
    "batches 4 times as large": {"batch": 4.0},
    "computing 2 times as slow": {"compute": 2.0},
    "batches 2 times as large, encoders 2 times as slow": {"batch": 2.0, "coding": 2.0},
    "batches 4 times as large, encoders 2 times as slow": {"batch": 4.0, "coding": 2.0},
}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model: parameters, matrices, the sum of rows and columns of these, and GFLOPs of a sample in a step."""

    name: str
    parameters: float
    matrices: int
    rows_and_columns: float
    gflops: float
    batches: tuple[int, ...]


MODELS = (
    # 4.1 and 7.8 G multiplications of an image, three passes. Rows and columns: of convolutions as matrices.
    Workload(
        name="ResNet-50", parameters=25.6e6, matrices=54, rows_and_columns=92e3, gflops=24.6, batches=(32, 64)
    ),
    Workload(
        name="ResNet-101", parameters=44.5e6, matrices=105, rows_and_columns=168e3, gflops=46.8, batches=(32, 64)
    ),
    # 85M parameters in layers and sequences of 512 tokens.
    Workload(
        name="BERT-base", parameters=110e6, matrices=75, rows_and_columns=195e3, gflops=290.0, batches=(8, 12)
    ),
)  # fmt: skip
METHODS = (
    *(("powersgd", float(rank)) for rank in (4, 8, 16)),
    *(("topk", share) for share in (0.01, 0.1, 0.2)),
    ("signsgd", 1.0),
)
ASSUMED = (
    f"the grid: {len(MODELS)} models x 2 batches x {len(METHODS)} methods x {len(GPUS)} numbers of GPUs",
    "batches of 32 and 64 images, of 8 and 12 sequences of 512 tokens; 8, 16, 32, 64 and 96 GPUs",
    f"computing in fp32 at {REACH:.0%} of a V100's peak",
    f"PyTorch's operations take {LAUNCH * 1e6:.0f} us each: 20 + 10 rank for a matrix in PowerSGD; torch.topk makes "
    f"{SELECT_PASSES} passes on one of {MULTIPROCESSORS} multiprocessors",
    "top-K and signSGD gather what all ranks send, PowerSGD sums two factors",
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A set-up with its predicted steps in seconds."""

    model: str
    batch: int
    method: str
    gpus: int
    rate: str
    encoder: str
    plain: float
    compressed: float

    @property
    def speedup(self) -> float:
        """The step of DDP by that of the method."""
        return self.plain / self.compressed


def coding_seconds(
    model: Workload, method: str, value: float, ranks: int, system: System, encoder: str
) -> float:
    """Return the seconds of encoding and decoding a step's gradients."""
    device = system.device
    memory = device.memory_gbytes * 1e9 * device.reach
    elements = model.parameters
    eager = encoder == "pytorch"
    if method == "powersgd":
        # Products, residual and copies; and ten for each column, which the reference makes orthonormal one by one.
        operations = model.matrices * (20 + 10 * value)
        products = 6 * elements * value / (device.peak_flops("fp32") * 0.5)
        return products + (6 if eager else 3) * 4 * elements / memory + operations * LAUNCH * eager
    if method == "topk":
        kept = value * elements
        select = 4 * elements * (SELECT_PASSES * MULTIPROCESSORS if eager else 3) / memory
        return select + 3 * 4 * elements / memory + ranks * kept * 8 / (SCATTER if eager else memory)
    # Signs: encode, then read every rank's bits, and in PyTorch's operations add them up one rank after the other.
    votes = ranks * elements * (8.125 if eager else 0.125) / memory
    return (4 if eager else 1) * 4 * elements / memory + votes + 4 * elements / memory


def message_seconds(model: Workload, method: str, value: float, network: Network, ranks: int) -> float:
    """Return the seconds of a method's communication."""
    if method == "powersgd":
        nbytes = 4 * value * model.rows_and_columns
        return 2 * network.collective("all_reduce", ranks, 1, nbytes / 2)
    share = 8 * value if method == "topk" else 0.125
    return network.collective("all_gather", ranks, 1, ranks * share * model.parameters)


def _bucket_seconds(network: Network, ranks: int, bucket: Bucket) -> float:
    return network.collective("all_reduce", ranks, 1, bucket.nbytes)


def setups(
    rate: str, encoder: str, *, coding: float = 1.0, batch: float = 1.0, compute: float = 1.0
) -> Iterator[Setup]:
    """Yield the grid with its predictions; the last three are factors of what is assumed."""
    for gpus in GPUS:
        base = find_system("v100").resized(gpus // PER_HOST, PER_HOST)
        system = replace(base, between=find_port(rate), nics=1)
        network = Network(system, torch.float32)
        for model in MODELS:
            for samples in model.batches:
                flops = batch * samples * model.gflops * 1e9
                computing = compute * flops / (system.device.peak_flops("fp32") * REACH)
                buckets, rest = even_buckets(model.parameters, 4, computing)
                plain = replay(buckets, rest, functools.partial(_bucket_seconds, network, gpus)).seconds
                for method, value in METHODS:
                    encoding = coding * coding_seconds(model, method, value, gpus, system, encoder)
                    messages = message_seconds(model, method, value, network, gpus)
                    yield Setup(
                        model=model.name,
                        batch=round(batch * samples),
                        method=f"{method}:{value:g}",
                        gpus=gpus,
                        rate=rate,
                        encoder=encoder,
                        plain=plain,
                        compressed=computing + encoding + messages,
                    )


def counts(found: Sequence[Setup]) -> dict[str, Any]:
    """Return how many set-ups are faster, by method too."""
    faster = [setup for setup in found if setup.speedup > 1]
    methods = {setup.method: 0 for setup in found}
    for setup in faster:
        methods[setup.method] += 1
    best = max(found, key=lambda setup: setup.speedup)
    return {
        "setups": len(found),
        "faster": len(faster),
        "clearly_faster": sum(setup.speedup >= CLEAR for setup in found),
        "by_method": methods,
        "best": f"{best.speedup:.2f}x: {best.method}, {best.model}, batch {best.batch}, {best.gpus} GPUs",
    }


def page(result: dict[str, Any]) -> str:
    """Return the table of docs/guides/planning.md."""
    rows = [
        [
            row["rate"],
            {"pytorch": "PyTorch's operations", "memory": "at the speed of memory"}[row["encoder"]],
            str(row["setups"]),
            f"{row['faster']}",
            f"{row['clearly_faster']}",
            row["best"],
        ]
        for row in result["counts"]
    ]
    columns = ("between hosts", "encoders", "set-ups", "faster", f"by {CLEAR - 1:.0%} or more", "best")
    changed = [
        [row["change"], str(row["faster"]), str(row["clearly_faster"]), row["best"]]
        for row in result["sensitivity"]
    ]
    changed_columns = (f"{RATES[0]}, PyTorch's operations", "faster", f"by {CLEAR - 1:.0%} or more", "best")
    return "\n".join(
        [
            pages.markdown(columns, rows),
            "",
            pages.markdown(changed_columns, changed),
            "",
            "Assumed:",
            "",
            *(f"- {text}." for text in result["assumed"]),
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print and keep the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", help="where the result goes (default bench/results)")
    arguments = parser.parse_args(argv)
    rows = [
        {"rate": rate, "encoder": encoder, **counts(list(setups(rate, encoder)))}
        for encoder in ENCODERS
        for rate in RATES
    ]
    sensitivity = [
        {"change": change, **counts(list(setups(RATES[0], "pytorch", **factors)))}
        for change, factors in CHANGES.items()
    ]
    result = {
        "published": {"setups": "more than 200", "faster": 6},
        "assumed": list(ASSUMED),
        "counts": rows,
        "sensitivity": sensitivity,
    }
    output.table(
        "set-ups in which gradient compression is predicted to be faster than DDP (Agarwal et al.: 6 of over 200)",
        ("between hosts", "encoders", "set-ups", "faster", f"by {CLEAR - 1:.0%}", "best"),
        [
            [
                row["rate"],
                row["encoder"],
                *(str(row[key]) for key in ("setups", "faster", "clearly_faster", "best")),
            ]
            for row in rows
        ],
    )
    for row in rows:
        print(row["rate"], row["encoder"], row["by_method"])
    for row in sensitivity:
        print(f"{RATES[0]}, {row['change']}: {row['faster']} of {row['setups']} faster, {row['by_method']}")
    print("assumed:", *ASSUMED, sep="\n- ")
    output.write("compression_setups", result, arguments.json, timed=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
