"""Compare a step of FSDP, tensor parallelism, a pipeline, experts and context parallelism with and without codecs.

python -m bench.parallel [--parts fsdp tp pipeline experts context] [--gbit 0 1 10] [--repeat 5] [--quick] [--json FILE]

Two ranks of one thread each run in two network namespaces, whose link has a rate of Gbit/s (needs root and iproute2),
or, with 0, in shared memory. The first contestant, "torch", is torch's own way over Gloo in fp32; "none" is dtcomm
without a codec. Steps are forward and backward passes:

  fsdp       a small GPT under FSDP2 on few tokens, AdamW included
  tp         512 tokens through four feed-forward blocks of width 256, forward only
  pipeline   8 micro-batches through two stages, GPipe
  experts    4096 tokens of 1024 features to 2 of 8 experts and back, without the experts' computation
  context    causal attention over 2 times 1024 tokens, 8 heads

Results are checked against torch's; for fsdp, the loss must be finite. A wrong result ends the program.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

import dtcomm.context_parallel
import dtcomm.fsdp
import dtcomm.moe
import dtcomm.pipeline
import dtcomm.tp
from bench.common import harness, netns
from bench.common.ranks import contestant, rank_pool
from dtcomm.cli.demo.train import GPT, ModelShape, cross_entropy

Step = Callable[[], object]
TORCH = "torch"


def check(name: str, actual: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
    """Raise if the relative error (L2 norms) is above the limit."""
    error = float((actual.float() - expected.float()).norm() / expected.float().norm())
    if not error <= limit:
        raise AssertionError(f"{name}: relative error {error:.3g}, at most {limit:g}")


# --- FSDP -------------------------------------------------------------------------------------------------------------

SHAPE = ModelShape(vocabulary=97, context=16, layers=4, width=512, heads=8)


def make_fsdp(rank: int, ranks: int, name: str, *, options: dict[str, Any]) -> Step:
    """Return a training step of a GPT."""
    torch.manual_seed(0)
    model = GPT(SHAPE)
    mesh = init_device_mesh("cpu", (ranks,))
    blocks: list[Any] = list(model.blocks)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
    if name != TORCH:
        dtcomm.fsdp.compress(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    symbols = torch.randint(
        SHAPE.vocabulary, (1, SHAPE.context + 1), generator=torch.Generator().manual_seed(rank)
    )

    def step() -> None:
        optimizer.zero_grad()
        loss = cross_entropy(model, symbols[:, :-1], symbols[:, 1:])
        torch.autograd.backward(loss)
        optimizer.step()
        if not bool(torch.isfinite(loss)):
            raise AssertionError(f"{name}: the loss is {float(loss)}")

    return step


# --- tensor parallelism -----------------------------------------------------------------------------------------------


class FeedForward(nn.Module):
    """A residual feed-forward layer after a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return y


def make_tp(rank: int, ranks: int, name: str, *, options: dict[str, Any]) -> Step:
    """Return the forward pass of a stack of blocks."""
    torch.manual_seed(0)
    model = nn.Sequential(*(FeedForward(256) for _ in range(4))).eval()
    x = torch.randn(1, 512, 256)
    with torch.no_grad():
        expected = model(x)
    mesh = init_device_mesh("cpu", (ranks,))
    if name == TORCH:
        plan: dict[str, Any] = {f"{block}.up": ColwiseParallel() for block in range(4)}
        plan |= {f"{block}.down": RowwiseParallel(output_layouts=Replicate()) for block in range(4)}
        parallelize_module(model, mesh, plan)
    else:
        dtcomm.tp.compress(model, mesh, plan={"*.up": "column", "*.down": "row"}, chunks="auto", **options)

    def step() -> torch.Tensor:
        with torch.no_grad():
            y: torch.Tensor = model(x)
            return y

    check(name, step(), expected, 0.1)
    return step


# --- pipeline ---------------------------------------------------------------------------------------------------------

MICRO_BATCHES = 8


def make_pipeline(rank: int, ranks: int, name: str, *, options: dict[str, Any]) -> Step:
    """Return a step of a schedule; its gradients are compared with those of torch's stages."""
    x = torch.randn(4 * MICRO_BATCHES, 256, 128, generator=torch.Generator().manual_seed(0))

    def build(compressed: bool) -> tuple[nn.Module, Step]:
        torch.manual_seed(rank)
        module = FeedForward(128)
        stage = PipelineStage(module, rank, ranks, torch.device("cpu"))
        if compressed:
            dtcomm.pipeline.compress(stage, **options)
        schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=functional.mse_loss)

        def step() -> None:
            module.zero_grad()
            schedule.step(*([x] if rank == 0 else []), target=x if rank else None)

        return module, step

    def gradients(module: nn.Module) -> torch.Tensor:
        return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])

    module, step = build(name != TORCH)
    if name != TORCH:
        peer, peer_step = build(False)
        peer_step()
        step()
        check(name, gradients(module), gradients(peer), 0.1)
    return step


# --- experts ----------------------------------------------------------------------------------------------------------

TOKENS, FEATURES, EXPERTS, CHOICES = 4096, 1024, 8, 2


class _TorchExchange(torch.autograd.Function):
    """torch.distributed's all-to-all of rows, and of gradients in the other direction."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        ctx.sent, ctx.received = sent, received
        return _exchange(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _exchange(gradient.contiguous(), ctx.received, ctx.sent), None, None


def _exchange(rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    arrived = rows.new_empty((sum(received), rows.shape[1]))
    dist.all_to_all_single(arrived, rows, received, sent)
    return arrived


def torch_experts(x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Send tokens to their experts, which do nothing, and back with torch.distributed alone."""
    ranks = dist.get_world_size()
    order = torch.argsort(experts.flatten(), stable=True)
    counts = torch.bincount(experts.flatten(), minlength=EXPERTS)
    received_counts = torch.empty_like(counts)
    dist.all_to_all_single(received_counts, counts)
    sent, received = (c.view(ranks, -1).sum(1).tolist() for c in (counts, received_counts))
    numbers = torch.arange(EXPERTS // ranks).repeat(ranks).repeat_interleave(received_counts)
    by_expert = torch.argsort(numbers, stable=True)
    apply: Any = _TorchExchange.apply
    outputs = apply(x.index_select(0, order // CHOICES), sent, received).index_select(0, by_expert)
    returned = apply(outputs.index_select(0, torch.argsort(by_expert)), received, sent)
    results = returned.index_select(0, torch.argsort(order)).view(len(x), CHOICES, -1)
    y: torch.Tensor = (results * weights[:, :, None]).sum(1)
    return y


def make_experts(rank: int, ranks: int, name: str, *, options: dict[str, Any]) -> Step:
    """Return the way to the experts and back, and that of the gradients."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, FEATURES, generator=generator).requires_grad_()
    upstream = torch.randn(TOKENS, FEATURES, generator=generator)
    weights, experts = torch.rand(TOKENS, EXPERTS, generator=generator).topk(CHOICES, 1)

    def step(of_torch: bool = name == TORCH) -> torch.Tensor:
        if of_torch:
            y = torch_experts(x, experts, weights)
        else:
            rows, route = dtcomm.moe.dispatch(x, experts, EXPERTS, **options)
            y = dtcomm.moe.combine(rows, route, weights)
        return torch.autograd.grad(y, x, upstream)[0]

    check(name, step(), step(True), 0.2)
    return step


# --- context parallelism ----------------------------------------------------------------------------------------------


class _Gather(torch.autograd.Function):
    """All ranks' keys and values over Gloo, concatenated along the sequence; gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts, 3)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        parts = [part.contiguous() for part in gradient.chunk(dist.get_world_size(), 3)]
        received = [torch.empty_like(part) for part in parts]
        dist.all_to_all(received, parts)
        return torch.stack(received).sum(0)


def make_context(rank: int, ranks: int, name: str, *, options: dict[str, Any]) -> Step:
    """Return causal attention, forward and backward, with the sequence on all ranks."""
    shard = dtcomm.context_parallel.shard
    layout: Any = "contiguous" if name == TORCH else "zigzag"
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 8, 1024 * ranks, 64, generator=generator) for _ in range(4)]
    *inputs, upstream = (shard(x, 2, layout=layout).clone() for x in whole)
    for x in inputs:
        x.requires_grad_()
    tokens = upstream.shape[2]

    def step() -> torch.Tensor:
        if name == TORCH:
            q, k, v = inputs
            gather: Any = _Gather.apply
            keys, values = gather(torch.stack([k, v]))
            mask = torch.ones(tokens, keys.shape[2], dtype=torch.bool).tril(rank * tokens)
            out = functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        else:
            out = dtcomm.context_parallel.attention(*inputs, is_causal=True, **options)
        torch.autograd.grad(out, inputs, upstream)
        return out.detach()

    expected = functional.scaled_dot_product_attention(*whole[:3], is_causal=True)
    check(name, step(), shard(expected, 2, layout=layout), 0.05)
    return step


# --- the program ------------------------------------------------------------------------------------------------------

#: Part → factory, and by contestant the options of dtcomm's call.
PARTS: dict[str, tuple[Callable[..., Step], dict[str, dict[str, Any]]]] = {
    "fsdp": (
        make_fsdp,
        {
            "none": {"gradients": "none"},
            "bf16": {"gradients": "bf16", "parameters": "bf16"},
            "int8, fp8": {"gradients": "int8", "parameters": "fp8_e4m3"},
            "int4": {"gradients": "int4", "parameters": "int4"},
            "zero++": {"preset": "zero++"},
            "sdp4bit": {"preset": "sdp4bit"},
        },
    ),
    "tp": (make_tp, {spec: {"codec": spec} for spec in ("none", "int8", "int4")}),
    "pipeline": (make_pipeline, {spec: {"codec": spec} for spec in ("none", "bf16", "int8")}),
    "experts": (
        make_experts,
        {
            "none": {"codec": "none"},
            "fp8, bf16 back": {},
            "fp8 throughout": {"combine_codec": "fp8_e4m3", "backward_codec": "fp8_e4m3"},
        },
    ),
    "context": (
        make_context,
        {
            "none": {},
            "int8": {"kv_codec": "int8"},
            "int8 throughout": {"kv_codec": "int8", "backward_codec": "int8"},
        },
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = harness.parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--gbit", type=float, nargs="+", default=[0, 1, 10], help="0: shared memory")
    options = harness.parse(parser, arguments)
    if options.quick:
        options.gbit = options.gbit[:1]
    if any(options.gbit) and (reason := netns.why_unavailable()):
        sys.exit(f"bench.parallel: {reason}")
    results = harness.Results(options)
    for gbit in options.gbit:
        hosts: Any = netns.two_hosts(gbit) if gbit else contextlib.nullcontext()
        medium = f"{gbit:g} Gbit/s" if gbit else "shared memory"
        with hosts as namespaces, rank_pool(2, namespaces=namespaces, pinned=False) as pool:
            for part in options.parts:
                factory, variants = PARTS[part]
                pool.call("forget")
                measures = {
                    name: contestant(pool, name, factory, options=of_call)
                    for name, of_call in {TORCH: {}, **variants}.items()
                }
                times = harness.take_turns(measures, options.repeat, seconds=0.2)
                results.add(
                    f"a step of {part}, 2 ranks, {medium}", {"part": part, "gbit": gbit, "ranks": 2}, times
                )
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
