"""Compare a step of DDP with dtcomm's schemes, torch's hooks and no hook, over limited links and in shared memory.

python -m bench.ddp [--parts step buckets] [--gbit 0 1 10] [--batch 4 256] [--only NAMES] [--repeat 5] [--quick]
                    [--json FILE]

Two ranks of one thread each run in two network namespaces, whose link has a rate of Gbit/s (needs root and iproute2),
or, with 0, on one host. Steps are forward and backward passes without an optimizer. Parts:

  step      an MLP of 25.2 M parameters, 101 MB of gradients; "compute" does not communicate. dtcomm's schemes use
            error feedback, except "no feedback". "auto" chooses from none, bf16, int8 and int4, "auto, all" from more
            schemes; a run starts once they have chosen, and the table shows the choice
  buckets   equal buckets and a backward pass that costs little: the hook with codec none beside torch's
            allreduce_hook, by bucket size; "no communication" is the step without any

Gradients are checked against the mean of those that the ranks compute alone; a wrong result ends the program.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import dtcomm.ddp
from bench.common import harness, netns, report
from bench.common.ranks import contestant, rank_pool
from dtcomm.ddp.auto import Decision
from dtcomm.torch_compat import GradBucket

MB = 1 << 20
LAYERS, WIDTH, QUICK_WIDTH = 3, 2896, 256
NO_HOOK, COMPUTE = "torch: no hook", "compute"
TORCH_HALF = {"torch: fp16": torch.float16, "torch: bf16": torch.bfloat16}
TORCH_POWERSGD = {"torch: powersgd 1": 1, "torch: powersgd 4": 4}
#: Contestant → options of `dtcomm.ddp.compress`.
OURS: dict[str, dict[str, Any]] = {
    "none": {"codec": "none"},
    "fp16": {"codec": "fp16"},
    "fp16, no feedback": {"codec": "fp16", "feedback": False},
    "bf16, stochastic": {"codec": "bf16:round=stochastic"},
    "int8": {"codec": "int8"},
    "int4": {"codec": "int4"},
    "topk 1%": {"codec": "topk:ratio=0.01"},
    "powersgd 1": {"codec": "powersgd:rank=1"},
    "powersgd 4": {"codec": "powersgd:rank=4"},
    "auto": {"codec": "auto"},
    "auto, all": {
        "codec": "auto",
        "candidates": ["fp16", "int8", "int4", "topk:ratio=0.01", "powersgd:rank=1", "powersgd:rank=4"],
    },
}
#: Largest relative error (L2 norms) of the gradients; that of the others depends on the data.
LIMITS = {NO_HOOK: 1e-5, "none": 1e-5, "int8": 0.05, "int4": 0.5}
LIMITS |= dict.fromkeys(("fp16", "fp16, no feedback", "torch: fp16"), 0.01)
LIMITS |= dict.fromkeys(("bf16, stochastic", "torch: bf16"), 0.05)
MOST_TRIAL_STEPS = 600  # where gains are as large as the noise, "auto" takes hundreds of steps
#: What each "auto" of this process has chosen.
_choices: dict[str, str] = {}


def half_hook(
    dtype: torch.dtype,
) -> Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]:
    """Return torch's fp16 or bf16 hook for any backend; DDP refuses `bf16_compress_hook` by its name on Gloo."""

    def compress_hook(group, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with types
        return default_hooks._compress_hook(dtype, group, bucket)

    return compress_hook


def make_step(rank: int, ranks: int, name: str, *, width: int, batch: int) -> Callable[[], object]:
    """Return the step of a contestant, after a check of its gradients."""
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())]
    net = nn.Sequential(*layers[:-1])
    inputs = [torch.randn(batch, width, generator=torch.Generator().manual_seed(r)) for r in range(ranks)]

    def take(model: nn.Module, x: torch.Tensor) -> None:
        torch.autograd.backward(model(x).square().mean())

    for x in inputs:
        take(net, x)
    expected = torch.cat([gradient_of(p).flatten() for p in net.parameters()]).div_(ranks)
    net.zero_grad()
    # torch's PowerSGD issues the collectives of several buckets in any order, so it gets a single bucket.
    cap = 400 if name in TORCH_POWERSGD else 25
    model: nn.Module = net if name == COMPUTE else DistributedDataParallel(net, bucket_cap_mb=cap)
    state = attach(model, name)

    def step() -> None:
        model.zero_grad(set_to_none=False)
        take(model, inputs[rank])

    for _ in range(4):  # DDP rebuilds its buckets after the first
        step()
    if OURS.get(name, {}).get("codec") == "auto":
        _choices[name] = settle(state, step)
    if name != COMPUTE:
        actual = torch.cat([gradient_of(p).flatten() for p in net.parameters()])
        error = float((actual - expected).norm() / expected.norm())
        if not (math.isfinite(error) and error <= LIMITS.get(name, math.inf)):
            raise AssertionError(f"{name}: the gradients have a relative error of {error:.3g} on rank {rank}")
    return step


def gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    """Return the gradient, which must exist."""
    assert parameter.grad is not None
    return parameter.grad


def attach(model: Any, name: str) -> Any:
    """Register the contestant's hook; return dtcomm's state, or None."""
    if name in TORCH_HALF:
        model.register_comm_hook(None, half_hook(TORCH_HALF[name]))
    elif name in TORCH_POWERSGD:
        rank = TORCH_POWERSGD[name]
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif name in OURS:
        return dtcomm.ddp.compress(model, **{"feedback": True, "sample_every": 0} | OURS[name])
    return None


def settle(state: dtcomm.ddp.DDPState, step: Callable[[], object]) -> str:
    """Take steps until "auto" has chosen, which all ranks do in the same step; return the choice."""
    for _ in range(MOST_TRIAL_STEPS):
        if decisions := [event for event in state.events if isinstance(event, Decision)]:
            return decisions[-1].action
        step()
    return f"none after {MOST_TRIAL_STEPS} steps"


def choice(rank: int, ranks: int, *, name: str) -> str:
    """Return what a contestant has chosen on this rank."""
    return _choices.get(name, "")


class EqualBuckets(nn.Module):
    """Parameters with constant gradients, so that a backward pass is mostly communication."""

    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(numel) for _ in range(count))

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        """Return the scaled sum of all weights."""
        return torch.stack([(weight * scale).sum() for weight in self.weights]).sum()


def make_buckets(rank: int, ranks: int, name: str, *, bucket: int, count: int) -> Callable[[], object]:
    """Return a step whose gradients fill ``count`` buckets of ``bucket`` bytes."""
    model = DistributedDataParallel(EqualBuckets(count, bucket // 4), bucket_cap_mb=bucket / MB)
    silent = name == "no communication"
    if name == "none":
        model.register_comm_hook(dtcomm.ddp.DDPState("none"), dtcomm.ddp.hook)
    elif not silent:
        model.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)

    def step() -> None:
        model.zero_grad(set_to_none=False)
        with model.no_sync() if silent else contextlib.nullcontext():
            torch.autograd.backward(model(torch.tensor(rank + 1.0)))

    for _ in range(3):
        step()
    expected = rank + 1 if silent else (ranks + 1) / 2
    for parameter in model.parameters():
        if not bool((gradient_of(parameter) == expected).all()):
            raise AssertionError(f"{name}: a bucket of {bucket} bytes is wrong on rank {rank}")
    return step


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = harness.parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=("step", "buckets"), default=["step", "buckets"])
    parser.add_argument("--gbit", type=float, nargs="+", default=[0, 1, 10], help="0: without a limit")
    parser.add_argument("--batch", type=int, nargs="+", default=[4, 256], help="of a rank")
    parser.add_argument("--only", nargs="+", choices=list(OURS), default=list(OURS), help="of dtcomm")
    parser.add_argument(
        "--buckets", type=report.parse_size, nargs="+", default=[MB // 4, MB, 5 * MB, 25 * MB]
    )
    options = harness.parse(parser, arguments)
    width = WIDTH
    if options.quick:
        options.gbit, options.batch, options.buckets = options.gbit[:1], options.batch[:1], [MB // 4]
        width = QUICK_WIDTH
    if any(options.gbit) and (reason := netns.why_unavailable()):
        sys.exit(f"bench.ddp: {reason}")
    results = harness.Results(options)
    names = [NO_HOOK, *TORCH_HALF, *TORCH_POWERSGD, *options.only, COMPUTE]
    for gbit in options.gbit:
        hosts: Any = netns.two_hosts(gbit) if gbit else contextlib.nullcontext()
        medium = f"{gbit:g} Gbit/s" if gbit else "shared memory"
        case: dict[str, Any] = {"gbit": gbit, "ranks": 2}
        with hosts as namespaces, rank_pool(namespaces=namespaces, pinned=False, timeout=1800) as pool:
            for batch in options.batch if "step" in options.parts else []:
                pool.call("forget")
                measures = {
                    name: contestant(pool, name, make_step, width=width, batch=batch) for name in names
                }
                chosen = {
                    name: {"chosen": pool.call("run", function=choice, arguments={"name": name})[0]}
                    for name in names
                }
                times = harness.take_turns(measures, options.repeat, seconds=0.2)
                size = LAYERS * (width + 1) * width
                title = f"a DDP step of {size / 1e6:.1f} M parameters, batch {batch}, 2 ranks, {medium}"
                results.add(
                    title, {"part": "step", **case, "batch": batch, "parameters": size}, times, chosen
                )
            for bucket in options.buckets if "buckets" in options.parts else []:
                pool.call("forget")
                count = max(2, min(8, 200 * MB // bucket))
                measures = {
                    name: contestant(pool, name, make_buckets, bucket=bucket, count=count)
                    for name in ("torch: allreduce_hook", "none", "no communication")
                }
                times = harness.take_turns(measures, options.repeat, seconds=0.1)
                title = f"a DDP step with {count} buckets of {report.size_name(bucket)}, 2 ranks, {medium}"
                fields = {"part": "buckets", **case, "bucket_bytes": bucket, "buckets": count}
                results.add(title, fields, times)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
