"""Compare the verbs of every codec on one core with memcpy and with plain torch, for each instruction set.

python -m bench.kernels [--parts codecs topk epilogue python] [--kernels NAMES] [--codecs SPEC ...] [--sizes 1M 64M]
                        [--cpu N] [--repeat 8] [--quick] [--json FILE]

Parts:

  codecs     the verbs of each codec on fp32 (lossless: on weights in bf16 and fp32), beside memcpy of the same input, a
             streaming copy, and the same in torch's operations where that has a plain form
  topk       keeping 1 % of 16 Mi elements with and without residual, beside torch.topk alone; the floor with a
             residual is residual.add_(x), which reads and writes as much
  epilogue   bias, residual stream and RMS norm in the pass that decodes a sum, beside the same in torch after it
  python     all_reduce of two ranks in an int8 written in Python, beside the native int8

GB/s count the input, for decoding the output. "floor" is the share of the memory floor: the time in which the faster of
the two copies moves the bytes that must be read and written. The first three parts take the clock of their thread.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional

import dtcomm
from bench.common import harness, report, torch_codecs
from bench.common.harness import Measure
from bench.common.pool import pin
from bench.common.ranks import contestant, rank_pool
from dtcomm import _C
from dtcomm.cli.codecs import default_codecs
from dtcomm.codecs import Codec, codec
from dtcomm.kernels import available, cpu, ops
from dtcomm.kernels.epilogue import epilogue

KB, MB = 1 << 10, 1 << 20
PARTS = ("codecs", "topk", "epilogue", "python")
SKEW = 276 << 10  # buffers whose addresses are equal modulo the cache size evict each other
PLACEMENTS = 4  # allocations of the buffers: which pages they get changes a result by up to a fifth
MORE = ("int8:rotate=hadamard", "int4:spikes=1,round=stochastic")  # beside the default codecs
COPIES = ("memcpy", "streaming copy")
RATIO = 0.01  # of the elements that topk keeps
WARM_STEPS = 8  # of error feedback, so that the residual is like that of a training run
FEATURES, EPS = 4096, 1e-6
BLOCK = 32  # of the int8 in Python
Call = Callable[[], object]


class Contestant(NamedTuple):
    """What ``run(n)`` does n times, and the bytes that any implementation must read and write."""

    run: Callable[[int], object]
    moved: int = 0


class Buffers:
    """Tensors in one arena, each at an offset that differs from the previous one in the cache sets."""

    def __init__(self, size: int) -> None:
        self._arena = torch.zeros(9 * (size + 2 * SKEW), dtype=torch.uint8)
        self._at = -self._arena.data_ptr() % 4096

    def take(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a tensor."""
        size = numel * dtype.itemsize
        tensor = self._arena[self._at : self._at + size].view(dtype)
        self._at += -(-(size + SKEW) // 64) * 64
        return tensor


def combine(
    kernel: str,
    tested: Codec,
    n: int,
    repeats: int,
    *,
    local: torch.Tensor | None = None,
    payloads: tuple[torch.Tensor, ...] = (),
    payload_out: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> None:
    """Call the native kernel ``repeats`` times, without Python between the calls."""
    address = [0 if t is None else t.data_ptr() for t in (local, residual, payload_out, out)]
    streams = [t is not None and t.numel() * t.itemsize >= cpu.STREAM_BYTES for t in (payload_out, out)]
    addresses = [payload.data_ptr() for payload in payloads]
    _C.repeat_kernel(
        kernel, tested.native(), addresses, *address[:2], n, *address[2:], *streams, repeats=repeats
    )


def copy(kernel: str, x: torch.Tensor, y: torch.Tensor, stream: bool, repeats: int) -> None:
    """Copy fp32 ``repeats`` times: decoding codec ``none`` without ``stream`` is libc's memcpy."""
    addresses, n = [x.data_ptr()], x.numel()
    _C.repeat_kernel(
        kernel, codec("none").native(), addresses, 0, 0, n, 0, y.data_ptr(), False, stream, repeats=repeats
    )


def copies(kernel: str, x: torch.Tensor, y: torch.Tensor) -> dict[str, Contestant]:
    """Return the two copies that everything is compared with."""
    return {
        name: Contestant(partial(copy, kernel, x, y, stream), 2 * x.nbytes)
        for name, stream in zip(COPIES, (False, True), strict=True)
    }


def repeated(function: Call) -> Callable[[int], object]:
    """Return a function that calls ``function`` so many times."""

    def run(repeats: int) -> None:
        for _ in range(repeats):
            function()

    return run


def sums(kernel: str, size: int, buffers: Buffers) -> dict[str, Contestant]:
    """Return the sums of uncompressed floats, torch's addition and the copies."""
    n, none = size // 4, codec("none")
    x, y, z, w = (buffers.take(n).normal_() for _ in range(4))
    entries = copies(kernel, x, y)
    entries["torch: add"] = Contestant(repeated(partial(torch.add, x, z, out=w)), 3 * size)
    for count in (2, 4):
        payloads = (z.view(torch.uint8),) * (count - 1)
        run = partial(combine, kernel, none, n, local=x, payloads=payloads, out=w)
        entries[f"sum of {count}"] = Contestant(run, 3 * size)
    return entries


def weights(out: torch.Tensor) -> torch.Tensor:
    """Fill ``out`` like trained weights: Gaussian rows of 1024, whose deviations differ by about a third."""
    rows = out.view(-1, math.gcd(out.numel(), 1024))
    deviations = 0.02 * torch.randn(rows.shape[0], 1).mul_(0.3).exp_()
    rows.copy_(torch.randn(rows.shape).mul_(deviations))
    return out


def lossless(kernel: str, size: int, buffers: Buffers) -> dict[str, Contestant]:
    """Return the lossless codec's verbs at ``size`` bytes of weights in bf16 and in fp32, and the copies."""
    entries: dict[str, Contestant] = {}
    for dtype in (torch.bfloat16, torch.float32):
        n, width = size // dtype.itemsize, dtype.itemsize
        x, y = weights(buffers.take(n, dtype)), buffers.take(n, dtype)
        payload = buffers.take(codec("lossless").wire_bytes(n, dtype), torch.uint8).data_ptr()
        length = _C.encode_lossless(kernel, x.data_ptr(), n, width, payload)
        if not entries:
            entries = copies(kernel, x.view(torch.float32), y.view(torch.float32))
        calls: dict[str, Call] = {
            "encode": partial(_C.encode_lossless, kernel, x.data_ptr(), n, width, payload),
            "decode": partial(_C.decode_lossless, kernel, payload, length, n, width, y.data_ptr()),
        }
        for verb, call in calls.items():
            name = f"{verb}, {str(dtype).removeprefix('torch.')}"
            entries[name] = Contestant(repeated(call), size + length)
    return entries


def verbs(kernel: str, tested: Codec, size: int, buffers: Buffers) -> dict[str, Contestant]:
    """Return every verb of a codec at ``size`` bytes of fp32, the same in torch, and the copies."""
    if tested.variable_length:
        return lossless(kernel, size, buffers)
    n, wire = size // 4, tested.wire_bytes(size // 4)
    x, y, residual = (buffers.take(n) for _ in range(3))
    x.normal_()
    residual.zero_()
    payload, other, again = (buffers.take(wire, torch.uint8) for _ in range(3))
    call = partial(combine, kernel, tested, n)
    for into in (payload, other):
        call(1, local=x, payload_out=into)
    entries = copies(kernel, x, y)
    entries |= {
        "encode": Contestant(partial(call, local=x, payload_out=again), size + wire),
        "decode": Contestant(partial(call, payloads=(payload,), out=y), size + wire),
        "reduce of 2": Contestant(partial(call, payloads=(payload, other), out=y), size + 2 * wire),
        "reduce_encode of 2": Contestant(
            partial(call, local=x, payloads=(payload,), payload_out=again), size + 2 * wire
        ),
        "encode with residual": Contestant(
            partial(call, local=x, residual=residual, payload_out=again), 3 * size + wire
        ),
    }
    for verb, function in torch_codecs.peers(tested, x).items():
        entries[f"torch: {verb}"] = Contestant(repeated(function))
    return entries


def topk(kernel: str, numel: int, buffers: Buffers) -> dict[str, Contestant]:
    """Return the selection of the largest elements: torch's, dtcomm's, and what bounds them."""
    x, y, residual = (buffers.take(numel) for _ in range(3))
    x.normal_()
    residual.zero_()
    count, size = max(1, round(RATIO * numel)), 4 * numel
    entries = {"torch.topk(x.abs(), k)": Contestant(repeated(lambda: torch.topk(x.abs(), count)))}
    entries |= copies(kernel, x, y)
    entries["residual.add_(x)"] = Contestant(repeated(lambda: y.add_(x)), 3 * size)
    for spec in ("topk", "topk:values=fp32", "topk:values=int8", "randk"):
        tested = codec(f"{spec}{',' if ':' in spec else ':'}ratio={RATIO!r}")
        wire = tested.wire_bytes(numel)
        payload = buffers.take(wire, torch.uint8)
        call = partial(combine, kernel, tested, numel)
        if spec == "topk":
            feedback = partial(call, local=x, residual=residual, payload_out=payload)
            feedback(WARM_STEPS)
            entries["topk encode with residual"] = Contestant(feedback, 3 * size + wire)
        entries[f"{spec} encode"] = Contestant(partial(call, local=x, payload_out=payload), size + wire)
        if ":" not in spec:
            entries[f"{spec} decode"] = Contestant(partial(call, payloads=(payload,), out=y), size + wire)
    return entries


def on_thread(run: Callable[[int], object]) -> Measure:
    """Return what measures ``run`` by its thread's clock, on which other processes of the core do not count."""

    def measure(calls: int) -> float:
        start = time.thread_time()
        run(calls)
        return (time.thread_time() - start) / calls

    return measure


def measure_placed(
    results: harness.Results,
    options: argparse.Namespace,
    title: str,
    case: Mapping[str, object],
    size: int,
    make: Callable[[Buffers], dict[str, Contestant]],
) -> None:
    """Measure contestants in several placements of their buffers, and add GB/s and the share of the floor."""
    placements = min(PLACEMENTS, options.repeat)
    times: dict[str, list[float]] = {}
    moved: dict[str, int] = {}
    for _ in range(placements):
        entries = make(Buffers(size))
        measures = {name: on_thread(entry.run) for name, entry in entries.items()}
        moved = {name: entry.moved for name, entry in entries.items()}
        for name, series in harness.take_turns(measures, -(-options.repeat // placements), 0.002).items():
            times.setdefault(name, []).extend(series)
    medians = {name: statistics.median(series) for name, series in times.items()}
    rate = 2 * size / min(medians[name] for name in COPIES)
    extra: dict[str, dict[str, object]] = {
        name: {
            "GB/s": round(size / median / 1e9, 2),
            "floor": f"{moved[name] / rate / median:.0%}" if moved[name] else "",
        }
        for name, median in medians.items()
    }
    results.add(title, {**case, "bytes": size}, times, extra)


def measure_codecs(results: harness.Results, options: argparse.Namespace) -> None:
    """Measure the verbs of codecs."""
    default = [str(each) for each in default_codecs() if str(each) != "none"]
    specs = options.codecs or list(dict.fromkeys([*default, *MORE]))
    if options.quick and not options.codecs:
        specs = ["int8", "lossless"]
    for kernel in options.kernels:
        for size in options.sizes:
            case: dict[str, object] = {"part": "codecs", "kernel": kernel}
            title = f"{kernel}, one core, {report.size_name(size)}"
            make = partial(sums, kernel, size)
            measure_placed(results, options, f"none: {title}", {**case, "codec": "none"}, size, make)
            for spec in specs:
                wire = codec(spec).wire_bytes(size // 4) / size
                fields = {**case, "codec": spec, "payload": round(wire, 4)}
                make = partial(verbs, kernel, codec(spec), size)
                measure_placed(results, options, f"{spec}: {title}", fields, size, make)


def measure_topk(results: harness.Results, options: argparse.Namespace) -> None:
    """Measure the selection of the largest elements."""
    numel = MB if options.quick else 16 * MB
    for kernel in options.kernels:
        title = f"{RATIO:.0%} of {numel >> 20} Mi elements of fp32, {kernel}, one core"
        case = {"part": "topk", "kernel": kernel, "ratio_kept": RATIO}
        measure_placed(results, options, title, case, 4 * numel, partial(topk, kernel, numel))


def epilogues(spec: str, tokens: int, dtype: torch.dtype) -> dict[str, Call]:
    """Return the epilogue in torch after a decode, and in one pass, on the same payload and buffers."""
    x, residual = (torch.randn(tokens, FEATURES).to(dtype) for _ in range(2))
    bias, weight = (torch.randn(FEATURES).to(dtype) for _ in range(2))
    payload = ops.encode(spec, x)
    out, normed = torch.empty_like(x), torch.empty_like(x)

    def apart() -> None:
        ops.decode(spec, payload, x.numel(), dtype, out.view(-1))
        torch.add(out, bias, out=out)
        torch.add(out, residual, out=out)
        functional.rms_norm(out, (FEATURES,), weight, EPS)

    def together() -> None:
        runs = [(payload, x.numel())]
        epilogue(spec, runs, out, bias=bias, addend=residual, weight=weight, eps=EPS, norm_out=normed)

    return {"apart": apart, "one pass": together}


def measure_epilogue(results: harness.Results, options: argparse.Namespace) -> None:
    """Measure the fused epilogue."""
    for dtype in (torch.float32, torch.bfloat16):
        for spec in options.codecs or ("none", "int8", "int4"):
            for tokens in (16,) if options.quick else (1, 16, 512, 4096):
                calls = epilogues(spec, tokens, dtype)
                measures = {name: on_thread(repeated(call)) for name, call in calls.items()}
                name = str(dtype).removeprefix("torch.")
                case = {"part": "epilogue", "codec": spec, "dtype": name, "tokens": tokens}
                title = f"epilogue of {tokens} x {FEATURES} in {name}, {spec}"
                results.add(title, case, harness.take_turns(measures, options.repeat, 0.02))


def encode(x: torch.Tensor) -> torch.Tensor:
    """Return a bf16 scale for each block of 32 elements, then the blocks as int8."""
    rows = functional.pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    scale = (rows.abs().amax(1) / 127).bfloat16()
    wide = scale.float()
    inverse = torch.where(wide > 0, 1 / wide, 0.0)
    codes = (rows * inverse[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat([scale.view(torch.uint8), codes.view(torch.uint8).view(-1)])


def decode(payload: torch.Tensor, n: int) -> torch.Tensor:
    """Return the elements of a payload."""
    blocks = -(-n // BLOCK)
    scale = payload[: 2 * blocks].view(torch.bfloat16).float()
    codes = payload[2 * blocks :].view(torch.int8).view(-1, BLOCK)
    return (codes.float() * scale[:, None]).view(-1)[:n]


def wire_bytes(n: int) -> int:
    """Return the bytes of a payload of n elements."""
    return (2 + BLOCK) * -(-n // BLOCK)


def make_all_reduce(rank: int, ranks: int, name: str, *, numel: int) -> Call:
    """Return an all_reduce in the codec ``name``, after a check of its result."""
    if name == "int8_in_python":
        dtcomm.codecs.custom(name, encode, decode, wire_bytes)
    parts = [torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(ranks)]
    tensor, exact = parts[rank].clone(), torch.stack(parts).mean(0)
    dtcomm.all_reduce(tensor, "avg", codec=name)
    error = float((tensor - exact).norm() / exact.norm())
    if not error <= 0.05:
        raise AssertionError(f"{name}: relative error {error:.3g} on rank {rank}")
    return partial(dtcomm.all_reduce, tensor, "avg", codec=name)


def measure_python(results: harness.Results, options: argparse.Namespace) -> None:
    """Measure a codec written in Python; its name is registered once for each size, with the same functions."""
    sizes = [64 * KB] if options.quick else [64 * KB, MB, 16 * MB]
    for size in sizes:
        with rank_pool(2, pinned=False) as pool:
            measures = {
                name: contestant(pool, name, make_all_reduce, numel=size // 4)
                for name in ("int8", "int8_in_python")
            }
            times = harness.take_turns(measures, options.repeat)
        case = {"part": "python", "bytes": size, "ranks": 2}
        results.add(f"all_reduce of {report.size_name(size)}, 2 ranks", case, times)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    names = [name for name in available() if name != "reference"]
    parser = harness.parser(__doc__, rounds=8)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--kernels", nargs="+", choices=names, default=names)
    parser.add_argument("--codecs", nargs="+", metavar="SPEC", help="of the parts codecs and epilogue")
    parser.add_argument("--sizes", type=report.parse_size, nargs="+", default=[MB // 2, 64 * MB])
    parser.add_argument("--cpu", type=int, default=0, help="which of this process's CPUs to run on")
    options = harness.parse(parser, arguments)
    if options.quick:
        options.sizes = options.sizes[:1]
    results = harness.Results(options)
    if "python" in options.parts:
        measure_python(
            results, options
        )  # before this process is bound to a core, which the ranks would inherit
    pin(options.cpu)
    torch.set_num_threads(1)
    parts: dict[str, Callable[[harness.Results, Any], None]] = {
        "codecs": measure_codecs,
        "topk": measure_topk,
        "epilogue": measure_epilogue,
    }
    for name, measure in parts.items():
        if name in options.parts:
            measure(results, options)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
