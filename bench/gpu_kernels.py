"""The CUDA kernels beside a device copy of the bytes they must move: python -m bench.gpu_kernels [--mib 64 1024]
[--json PATH] [--codecs int8 int4 …].

`rate` is bytes read and written over the median of device-timed runs, `of copy` that beside a copy of 1 GiB timed in
turn with it. Several sets of buffers are used in turn, so that no run finds its input in the cache. Peers that can be
imported (bitsandbytes, torchao, Transformer Engine) quantise the same input in blocks as near as they have them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from dtcomm.codecs import codec
from dtcomm.kernels.call import Combine

FIRST_TIER = (
    "fp16",
    "bf16",
    "int8",
    "int8:block=128",
    "int4",
    "int4:block=128",
    "fp8_e4m3:block=32",
    "fp8_e4m3",
)
OTHERS = (
    "none",
    "int8:round=stochastic",
    "int8:block=64,scale=fp32,symmetric=false",
    "int8:block=4096",
    "int5",
    "int4:rotate=hadamard",
    "int2:spikes=1",
    "fp8_e5m2",
    "mxfp8",
    "mxfp4",
    "sign",
)
PAYLOADS = 8
CACHE = 256 << 20  # bytes that buffers used in turn must exceed together
Run = Callable[[int], None]


def median_seconds(run: Run, sets: int, repeats: int = 20) -> float:
    """Of ``run(set)`` on the current stream, between device events."""
    for warm in range(sets):
        run(warm)
    times = []
    for repeat in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run(repeat % sets)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def verbs(spec: str, numel: int, sets: int) -> Iterator[tuple[str, int, Run]]:
    """(verb, bytes that it must move, how to run it on one of `sets` sets of buffers)."""
    from dtcomm.kernels import cuda

    each = codec(spec)
    wire, floats = each.wire_bytes(numel), 4 * numel
    x = [torch.randn(numel, device="cuda") for _ in range(sets)]
    out = [torch.empty(numel, device="cuda") for _ in range(sets)]
    sent = [
        [torch.empty(wire, dtype=torch.uint8, device="cuda") for _ in range(PAYLOADS)] for _ in range(sets)
    ]
    made = [torch.empty(wire, dtype=torch.uint8, device="cuda") for _ in range(sets)]

    def combine(**what: Any) -> None:
        cuda.combine(Combine(codec=each, numel=numel, dtype=torch.float32, **what))

    for i in range(sets):
        for payload in sent[i]:
            combine(local=x[i], payload_out=payload)
    yield "encode", floats + wire, lambda i: combine(local=x[i], payload_out=made[i])
    yield "decode", wire + floats, lambda i: cuda.decode(each, sent[i][0], numel, torch.float32, out[i])
    yield (
        f"reduce {PAYLOADS}",
        PAYLOADS * wire + floats,
        lambda i: combine(payloads=tuple(sent[i]), out=out[i]),
    )
    yield (
        "reduce_encode 7 + local",
        PAYLOADS * wire + floats,
        lambda i: combine(payloads=tuple(sent[i][1:]), local=x[i], payload_out=made[i]),
    )
    # The residual is read and rewritten; `out` stands in for it.
    for tensor in out:
        tensor.zero_()
    yield (
        "encode with residual",
        3 * floats + wire,
        lambda i: combine(local=x[i], residual=out[i], payload_out=made[i]),
    )


def peers(numel: int, sets: int) -> Iterator[tuple[str, int, Run]]:
    """Others' quantisation of `numel` fp32; bytes as for the nearest codec here."""
    x = [torch.randn(numel // 1024, 1024, device="cuda") for _ in range(sets)]
    try:
        from bitsandbytes import functional as bitsandbytes  # type: ignore[import-not-found]
    except ImportError:
        pass
    else:
        yield (
            "bitsandbytes quantize_4bit, block 64",
            numel * 4 + numel // 2 + numel // 16,
            lambda i: bitsandbytes.quantize_4bit(x[i], blocksize=64),
        )
    try:
        from torchao.quantization import quant_primitives as torchao  # type: ignore[import-not-found]
    except ImportError:
        pass
    else:

        def affine(i: int) -> None:
            scale, zero = torchao.choose_qparams_affine(
                x[i], torchao.MappingType.SYMMETRIC, (1, 32), torch.int8
            )
            torchao.quantize_affine(x[i], (1, 32), scale, zero, torch.int8)

        yield "torchao int8, block 32", numel * 5 + numel // 8, affine
    try:
        import transformer_engine.pytorch.tensor.mxfp8_tensor as engine  # type: ignore[import-not-found]
        from transformer_engine_torch import DType  # type: ignore[import-not-found]
    except ImportError:
        pass
    else:
        quantizer = engine.MXFP8Quantizer(DType.kFloat8E4M3, rowwise=True, columnwise=False)
        yield "Transformer Engine mxfp8", numel * 5 + numel // 32, lambda i: quantizer(x[i])


def measure(mib: int, specs: list[str]) -> list[dict[str, Any]]:
    """One row for each codec and verb, of fp32 tensors of `mib` MiB."""
    numel = mib << 18
    sets = max(2, min(8, CACHE // (numel * 4) + 1))
    ends = [torch.empty(1 << 28, device="cuda") for _ in range(2)]
    rows = []

    def add(name: str, verb: str, moved: int, run: Run) -> None:
        copied = median_seconds(lambda _: ends[1].copy_(ends[0]) and None, 1, 5)
        seconds = median_seconds(run, sets)
        rate = moved / seconds / 1e9
        copy = 2 * ends[0].nbytes / copied / 1e9
        rows.append(
            {
                "codec": name,
                "verb": verb,
                "mib": mib,
                "microseconds": seconds * 1e6,
                "bytes": moved,
                "gigabytes_per_second": rate,
                "copy_gigabytes_per_second": copy,
                "of_copy": rate / copy,
            }
        )
        print(
            f"{mib:>5} MiB  {name:<42} {verb:<24} {seconds * 1e6:>8.1f} µs {rate:>6.0f} GB/s {rate / copy:>5.2f}"
        )

    for spec in specs:
        for verb, moved, run in verbs(spec, numel, sets):
            add(spec, verb, moved, run)
    for name, moved, run in peers(numel, sets):
        add(name, "encode", moved, run)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 1024], help="sizes of the fp32 tensor")
    parser.add_argument(
        "--codecs", nargs="+", default=[*FIRST_TIER, *OTHERS], help="which; default all below"
    )
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench.gpu_kernels: torch sees no CUDA device", file=sys.stderr)
        return 1
    properties = torch.cuda.get_device_properties(0)
    print(f"{properties.name}: bytes moved per second, and beside a copy of 1 GiB")
    rows = [row for mib in options.mib for row in measure(mib, options.codecs)]
    if options.json:
        result = {"device": properties.name, "capability": [properties.major, properties.minor], "rows": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
