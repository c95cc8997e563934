"""Train a character-level GPT with several kinds of parallelism on one mesh, compressed on every axis.

    torchrun --nproc-per-node 8 examples/train_gpt_mesh.py --dp 2 --tp 2 --pp 2 --codec int8

Axes (their product is the number of ranks): ``--dp`` replicas, ``--fsdp`` shards of the parameters, ``--tp`` parts of
each layer, ``--pp`` pipeline stages, ``--cp`` parts of each sequence, ``--ep`` ranks of experts. Rank 0 prints the
losses and, in the end, the held-out loss and the bytes that it has sent along each axis.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import dtcomm
from dtcomm.cli.demo.train import (
    GPT,
    VOCABULARY,
    Block,
    ModelShape,
    held_out_batches,
    load_corpus,
    training_batch,
)

#: Name → schedule, and stages of each rank.
SCHEDULES: dict[str, tuple[Any, int]] = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
    "zero-bubble": (ScheduleInterleavedZeroBubble, 2),
}
OFF = "off"  # no compression: DDP, FSDP and pipeline stages are left to torch
CHOICES = 2  # experts of each token


class Experts(nn.Module):
    """A mixture of experts in place of a block's MLP; this rank has its share of the experts."""

    def __init__(self, width: int, experts: int, codec: str, mesh: Any) -> None:
        super().__init__()
        self.codec, self.total, self.group = codec, experts, mesh.get_group()
        self.router = nn.Linear(width, experts)
        every = [
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(experts)
        ]
        local = experts // mesh.size()
        first = mesh.get_local_rank() * local
        self.experts = nn.ModuleList(every[first : first + local])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(CHOICES)
        rows, route = dtcomm.moe.dispatch(
            tokens,
            chosen,
            self.total,
            codec=self.codec,
            combine_codec=self.codec,
            backward_codec=self.codec,
            group=self.group,
        )
        outputs = [expert(part) for expert, part in zip(self.experts, route.split(rows), strict=True)]
        y = dtcomm.moe.combine(torch.cat(outputs), route, weights)
        return y.view_as(x)


class MixtureBlock(Block):
    """The demo's block with experts."""

    def __init__(self, shape: ModelShape, experts: int, codec: str, mesh: Any) -> None:
        super().__init__(shape)
        del self.up, self.down
        self.moe = Experts(shape.width, experts, codec, mesh)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.moe(x)
        return y


class Stage(nn.Module):
    """Consecutive layers of the GPT, with the embeddings in the first stage and the head in the last one."""

    def __init__(self, gpt: GPT, layers: range, first: bool, last: bool, recompute: bool) -> None:
        super().__init__()
        self.symbols, self.positions = (gpt.symbols, gpt.positions) if first else (None, None)
        self.blocks = nn.ModuleList(gpt.blocks[number] for number in layers)
        self.norm, self.head = (gpt.norm, gpt.head) if last else (None, None)
        self.recompute = recompute

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        if self.symbols is not None and self.positions is not None:
            if positions is None:
                positions = torch.arange(x.shape[1])
            x = self.symbols(x) + self.positions(positions)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


class Trainer:
    """The parts of the model that this rank has, its optimizer, and the states of compression, by axis."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        sizes = {axis: getattr(options, axis) for axis in dtcomm.mesh.AXES}
        self.mesh = dtcomm.mesh.make_mesh(
            **sizes,
            heads=options.heads,
            layers=options.layers,
            experts=options.experts or None,
            batch=options.batch,
        )
        self._require_supported(sizes)
        self.codec = "none" if options.codec == OFF else options.codec
        self.states: dict[str, Any] = {}
        # The ranks whose tokens differ, over which gradients are averaged.
        self.data = dtcomm.mesh.flatten_axes(self.mesh, "dp", "fsdp", "ep", "cp")
        self.replicas = dtcomm.mesh.flatten_axes(self.mesh, "dp", "fsdp", "ep")
        self.stages = self._build()
        self.schedule = self._pipeline() if options.pp > 1 else None
        parameters = [p for stage in self.stages for p in stage.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=options.rate)
        self.step_number = 0

    def _require_supported(self, sizes: dict[str, int]) -> None:
        options = self.options
        if options.ep > 1 and not options.experts:
            raise ValueError("--ep: needs --experts, the number of experts of a layer")
        for a, b in (("pp", "cp"), ("pp", "ep"), ("ep", "fsdp"), ("ep", "cp")):
            if sizes[a] > 1 and sizes[b] > 1:
                raise ValueError(
                    f"--{a} {sizes[a]} --{b} {sizes[b]}: this script does not combine these two axes"
                )
        if options.accumulate > 1 and options.pp > 1:
            raise ValueError("--accumulate: with --pp the micro-batches accumulate gradients; use --micro")

    def _build(self) -> list[nn.Module]:
        """Make the whole model, the same on all ranks, and keep this rank's part of it, tensor-parallel and sharded."""
        options, mesh = self.options, self.mesh
        torch.manual_seed(options.seed)
        shape = ModelShape(
            vocabulary=VOCABULARY,
            context=options.context,
            layers=options.layers,
            width=options.width,
            heads=options.heads,
        )
        gpt = GPT(shape)
        if options.experts:
            blocks = [MixtureBlock(shape, options.experts, self.codec, mesh["ep"]) for _ in gpt.blocks]
            gpt.blocks = nn.Sequential(*blocks)
            if options.ep > 1:
                self.states["ep"] = dtcomm.moe.MoEState(mesh["ep"].get_group())
        each = SCHEDULES[options.schedule][1] if options.pp > 1 else 1
        total, own = options.pp * each, mesh["pp"].get_local_rank()
        layers = dtcomm.pipeline.split_layers(options.layers, total)
        stages: list[nn.Module] = []
        for number in range(own, total, options.pp):
            stage: nn.Module = Stage(
                gpt, layers[number], number == 0, number == total - 1, options.checkpoint
            )
            stages.append(self._wrap(stage, number))
        return stages

    def _wrap(self, stage: nn.Module, number: int) -> nn.Module:
        options, mesh = self.options, self.mesh
        if options.tp > 1:
            plan = {"blocks.*.qkv": "column_packed3", "blocks.*.projection": "row"}
            if not options.experts:
                plan |= {"blocks.*.up": "column", "blocks.*.down": "row"}
            self.states[f"tp {number}"] = dtcomm.tp.compress(
                stage, mesh["tp"], self.codec, plan, backward_codec=self.codec, latency=False
            )
        if options.compile:
            for block in stage.blocks:
                block.compile(backend=options.compile)
        if options.fsdp > 1:
            # Ranks with other parts of the same sequences are shards too.
            shards = dtcomm.mesh.flatten_axes(mesh, "fsdp", "cp")
            for block in stage.blocks:
                fully_shard(block, mesh=shards)
            fully_shard(stage, mesh=shards)
            if options.codec != OFF:
                self.states[f"fsdp {number}"] = dtcomm.fsdp.compress(
                    stage,
                    gradients=self.codec,
                    parameters=self.codec,
                    replicas=mesh["dp"] if options.dp > 1 else None,
                )
        elif self.data.size() > 1:
            experts = [name for name, _ in stage.named_parameters() if ".experts." in name]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(stage, experts)
            stage = DistributedDataParallel(stage, process_group=self.data.get_group())
            if options.codec != OFF:
                self.states[f"dp {number}"] = dtcomm.ddp.compress(stage, self.codec)
        return stage

    def _pipeline(self) -> Any:
        options, own = self.options, self.mesh["pp"].get_local_rank()
        schedule, each = SCHEDULES[options.schedule]
        total = options.pp * each
        # Example tensors give the shapes of all messages. Otherwise torch would run the modules once to learn them,
        # which DDP does not support.
        parts = self.replicas.size() * options.micro
        rows, rest = divmod(options.batch, parts)
        if rest:
            raise ValueError(
                f"--batch {options.batch}: not divisible by the {parts} micro-batches of all replicas"
            )
        symbols = torch.zeros(rows, options.context, dtype=torch.int64)
        activation = torch.zeros(rows, options.context, options.width, requires_grad=True)
        logits = torch.zeros(rows, options.context, VOCABULARY, requires_grad=True)
        stages = []
        for i, stage in enumerate(self.stages):
            number = own + options.pp * i
            stages.append(
                PipelineStage(
                    stage,
                    number,
                    total,
                    torch.device("cpu"),
                    input_args=symbols if number == 0 else activation,
                    output_args=logits if number == total - 1 else activation,
                    group=self.mesh["pp"].get_group(),
                )
            )
        if options.codec != OFF:
            self.states["pp"] = dtcomm.pipeline.compress(stages, self.codec)
        return schedule(stages[0] if each == 1 else stages, options.micro, loss_fn=token_loss)

    def step(self, symbols: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
        """Train on the batch of all ranks; return its mean loss and the norm of the gradients."""
        self.optimizer.zero_grad()
        loss = self._loss(symbols, targets, train=True)
        self._average_experts()
        sharded = {"*": self.mesh["pp"], "*.experts.*": self.mesh["ep"]}
        norm = dtcomm.mesh.clip_grad_norm_(self.stages, self.options.clip, sharded=sharded)
        self.optimizer.step()
        self.step_number += 1
        return loss, float(norm)

    def evaluate(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        """Return the mean loss of batches of all ranks, each of the size of a step's."""
        with torch.no_grad():
            losses = [self._loss(symbols, targets, train=False) for symbols, targets in batches]
        return sum(losses) / len(losses)

    def _loss(self, symbols: torch.Tensor, targets: torch.Tensor, train: bool) -> float:
        """Return the mean loss of the batch of all ranks; compute gradients if ``train``."""
        options = self.options
        replica, replicas = self.replicas.get_local_rank(), self.replicas.size()
        symbols, targets = (whole.chunk(replicas)[replica].contiguous() for whole in (symbols, targets))
        with torch.autocast("cpu", torch.bfloat16, enabled=options.bf16):
            if self.schedule is None:
                loss = self._run_model(symbols, targets, train)
            else:
                loss = self._run_schedule(symbols, targets, train)
        # Only the last stage knows the loss.
        sums = torch.tensor([loss, 1.0]) if loss is not None else torch.zeros(2)
        dist.all_reduce(sums)
        return float(sums[0] / sums[1])

    def _run_model(self, symbols: torch.Tensor, targets: torch.Tensor, train: bool) -> float:
        (model,), accumulate, total = self.stages, self.options.accumulate, 0.0
        for number, (x, y) in enumerate(
            zip(symbols.chunk(accumulate), targets.chunk(accumulate), strict=True)
        ):
            positions, tokens = torch.arange(x.shape[1]), y.numel()
            x, y = x.clone(), y.clone()
            with (
                self._synchronization(model, last=number == accumulate - 1),
                self._sequence_parts(x, y, positions),
            ):
                # The sum over this rank's tokens, scaled so that the mean over all ranks is that over all tokens.
                logits = model(x, positions).flatten(0, 1)
                loss = functional.cross_entropy(logits, y.flatten(), ignore_index=-100, reduction="sum")
                loss = loss * self.mesh["cp"].size() / (tokens * accumulate)
                if train:
                    loss.backward()
            total += float(loss.detach())
        return total

    @contextmanager
    def _sequence_parts(self, *buffers: torch.Tensor) -> Iterator[None]:
        """Within the context the buffers are this rank's part of the sequence, and attention is that of all parts."""
        if self.options.cp == 1:
            yield
            return
        with dtcomm.context_parallel.context_parallel(
            self.mesh["cp"],
            buffers=buffers,
            buffer_seq_dims=[1, 1, 0],
            pad_values=[0, -100, 0],
            kv_codec=self.codec,
        ) as state:
            self.states.setdefault("cp", state)  # it counts what later steps send, too
            yield

    @contextmanager
    def _synchronization(self, model: Any, last: bool) -> Iterator[None]:
        """Average gradients only in the last of the accumulated backward passes."""
        if self.options.fsdp > 1:
            model.set_requires_gradient_sync(last)
        with nullcontext() if last or not isinstance(model, DistributedDataParallel) else model.no_sync():
            yield

    def _run_schedule(self, symbols: torch.Tensor, targets: torch.Tensor, train: bool) -> float | None:
        own, last = self.mesh["pp"].get_local_rank(), self.options.pp - 1
        losses: list[torch.Tensor] = []
        assert self.schedule is not None
        run = self.schedule.step if train else self.schedule.eval
        run(
            *([symbols] if own == 0 else []),
            target=targets if own == last else None,
            losses=losses if own == last else None,
        )
        return float(torch.stack(losses).detach().mean()) if own == last else None

    def _average_experts(self) -> None:
        """Average the gradients of experts, which have those of all tokens that were sent to them."""
        experts = [p for stage in self.stages for name, p in stage.named_parameters() if ".experts." in name]
        for parameter in experts:
            assert parameter.grad is not None
            parameter.grad /= self.options.ep  # the mean over the ranks whose tokens they are
        if experts and self.options.dp > 1:
            gradients = [parameter.grad for parameter in experts]
            dtcomm.all_reduce_coalesced(gradients, "avg", codec=self.codec, group=self.mesh["dp"].get_group())

    def sent_bytes(self) -> dict[str, tuple[int, int]]:
        """Return axis → bytes that this rank has sent, and bytes that these messages stand for; the lengths of
        messages are left out."""
        totals: dict[str, tuple[int, int]] = {}
        for name, state in self.states.items():
            axis, report = name.partition(" ")[0], state.report()
            sent, plain = totals.get(axis, (0, 0))
            totals[axis] = sent + report.wire_bytes, plain + report.plain_bytes
        return totals

    def save(self, folder: str) -> None:
        """Write this rank's state."""
        torch.save(self.state_dict(), Path(folder) / f"rank{dist.get_rank()}.pt")

    def load(self, folder: str) -> None:
        """Continue with what `save` has written, on the same mesh."""
        self.load_state_dict(torch.load(Path(folder) / f"rank{dist.get_rank()}.pt", weights_only=False))

    def state_dict(self) -> dict[str, Any]:
        return {
            "stages": [stage.state_dict() for stage in self.stages],
            "optimizer": self.optimizer.state_dict(),
            "compression": {name: state.state_dict() for name, state in self._resumable()},
            "step": self.step_number,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for stage, state in zip(self.stages, saved["stages"], strict=True):
            stage.load_state_dict(state)
        self.optimizer.load_state_dict(saved["optimizer"])
        for name, state in self._resumable():
            state.load_state_dict(saved["compression"][name])
        self.step_number = saved["step"]

    def _resumable(self) -> list[tuple[str, Any]]:
        """The states that keep something from step to step; tensor and context parallelism do not."""
        return [(name, state) for name, state in self.states.items() if hasattr(state, "load_state_dict")]


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for axis, what in dtcomm.mesh.AXES.items():
        parser.add_argument(f"--{axis}", type=int, default=1, help=f"ranks among which to divide: {what}")
    parser.add_argument(
        "--codec", default="int8", help=f"on every axis; {OFF}: leave DDP, FSDP and PP to torch"
    )
    parser.add_argument("--schedule", default="1f1b", choices=list(SCHEDULES), help="of the pipeline")
    parser.add_argument("--micro", type=int, default=4, help="micro-batches of the pipeline")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64, help="characters of a sequence")
    parser.add_argument("--experts", type=int, default=0, help="experts of each layer; 0: an MLP")
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step, all ranks together")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--evaluate", type=int, default=16, help="held-out batches after the last step")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradients")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1, help="backward passes of a step")
    parser.add_argument(
        "--checkpoint", action="store_true", help="recompute activations in the backward pass"
    )
    parser.add_argument("--bf16", action="store_true", help="compute in bf16 (autocast)")
    parser.add_argument(
        "--compile", metavar="BACKEND", help="compile blocks, with inductor or aot_eager, say"
    )
    parser.add_argument("--save", metavar="FOLDER", help="where to write each rank's state in the end")
    parser.add_argument("--resume", metavar="FOLDER", help="continue with what --save has written")
    return parser.parse_args(arguments)


def run(arguments: list[str], say: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Train; return the losses and norms of the steps, the held-out loss, and the bytes of each axis."""
    options = parse(arguments)
    torch.set_num_threads(1)
    trainer = Trainer(options)
    if options.resume:
        trainer.load(options.resume)
    corpus = load_corpus(limit=1_000_000)
    losses, norms = [], []
    for step in range(trainer.step_number, options.steps):
        batch = training_batch(
            corpus, seed=options.seed, step=step, rank=0, size=options.batch, length=options.context
        )
        loss, norm = trainer.step(*batch)
        losses.append(loss)
        norms.append(norm)
        if say is not None and (step % 10 == 0 or step + 1 == options.steps):
            say(f"step {step:4d}  loss {loss:.4f}  norm {norm:.3f}")
    totals = trainer.sent_bytes()
    held_out = None
    if options.evaluate:
        windows = options.evaluate * options.batch
        held_out = trainer.evaluate(
            held_out_batches(
                corpus, windows=windows, size=options.batch, length=options.context, rank=0, ranks=1
            )
        )
        if say is not None:
            say(f"held-out loss {held_out:.4f}")
    if options.save:
        trainer.save(options.save)
    for axis, (sent, plain) in totals.items():
        if say is not None:
            say(f"{axis:>4}: sent {sent / 1e6:.3f} MB instead of {plain / 1e6:.3f} MB")
    return {"losses": losses, "norms": norms, "held_out": held_out, "bytes": totals}


if __name__ == "__main__":
    parse()  # before ranks are needed, for --help
    dist.init_process_group("gloo")
    run(sys.argv[1:], print if dist.get_rank() == 0 else None)
    dist.destroy_process_group()
