"""Training of the demo: its text, its model, and what one rank does.

The text is the source of Python's standard library, which is present on every machine. The model is a character-level
GPT in plain torch; the benchmarks and the examples use it too. `train` trains several models that differ only in the
compression of their gradients. The runs take turns of a few steps, so that other load of the machine affects all of
them equally. They start from the same weights and read the same batches in the same order.
"""

from __future__ import annotations

import contextlib
import io
import os
import statistics
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from dtcomm import ddp

#: Printable ASCII and the newline; all other characters become the last symbol.
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
VOCABULARY = len(ALPHABET) + 1

_SKIPPED = set("test tests idle_test site-packages dist-packages __pycache__ lib2to3 ensurepip".split())


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Training and held-out symbols, uint8 [characters], from disjoint sets of files."""

    training: torch.Tensor
    held_out: torch.Tensor
    files: int


def load_corpus(root: Path | None = None, limit: int = 8_000_000) -> Corpus:
    """Read up to ``limit`` characters of the library's modules, in the order of their names.

    A tenth of the files, chosen by a checksum of their names, is held out. Order and split depend only on the names, so
    every rank and every run reads the same text. ValueError if that is too little.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    texts: dict[bool, list[str]] = {False: [], True: []}
    total = files = 0
    for path in sorted(_modules(root)):
        parts = path.relative_to(root).parts
        text = path.read_text(encoding="utf-8", errors="replace").expandtabs(4)
        texts[zlib.crc32("/".join(parts).encode()) % 10 == 0].append(text)
        files += 1
        total += len(text)
        if total >= limit:
            break
    training, held_out = ("".join(texts[held_out]) for held_out in (False, True))
    if min(len(training), len(held_out)) < 10_000:
        raise ValueError(f"{root}: {files} Python files with {total} characters are too little to train on")
    return Corpus(training=_symbols(training), held_out=_symbols(held_out), files=files)


def _modules(root: Path) -> Iterator[Path]:
    for folder, names, files in os.walk(root):
        names[:] = set(names) - _SKIPPED  # not entered: installed packages are many times the library
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def training_batch(
    corpus: Corpus, *, seed: int, step: int, rank: int, size: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets, int64 [size, length], which depend only on seed, step and rank."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 4099 + rank)
    starts = torch.randint(corpus.training.numel() - length - 1, (size,), generator=generator)
    return _windows(corpus.training, starts, length)


def held_out_batches(
    corpus: Corpus, *, windows: int, size: int, length: int, rank: int, ranks: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return this rank's share of ``windows`` evenly spaced held-out windows, in batches of ``size``."""
    starts = torch.linspace(0, corpus.held_out.numel() - length - 1, windows).long()[rank::ranks]
    return [_windows(corpus.held_out, part, length) for part in torch.split(starts, size)]


def _symbols(text: str) -> torch.Tensor:
    table = torch.full((256,), VOCABULARY - 1, dtype=torch.uint8)
    for symbol, character in enumerate(ALPHABET):
        table[ord(character)] = symbol
    # One byte per character: characters outside latin-1 become "?", others outside ASCII the last symbol.
    data = torch.frombuffer(bytearray(text.encode("latin-1", errors="replace")), dtype=torch.uint8)
    return table[data.long()]


def _windows(symbols: torch.Tensor, starts: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    windows = symbols[starts[:, None] + torch.arange(length + 1)].long()
    return windows[:, :-1], windows[:, 1:]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of the model; the default has one million parameters."""

    vocabulary: int
    context: int = 96
    layers: int = 4
    width: int = 144
    heads: int = 4


class Block(nn.Module):
    """Causal self-attention and an MLP, each after a layer norm; maps [batch, length, width] to the same shape."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.before_attention = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.projection = nn.Linear(shape.width, shape.width)
        self.before_mlp = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        # -1 heads: with tensor parallelism a rank has only a part of the heads.
        qkv = self.qkv(self.before_attention(x)).view(batch, length, 3, -1, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = self.attend(query, key, value)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        x = x + self.mlp(self.before_mlp(x))
        return x

    # Classes derived from this one may have another attention and another second branch.

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return the causal attention of [batch, heads, length, width of a head]."""
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the second branch adds."""
        y: torch.Tensor = self.down(functional.gelu(self.up(x)))
        return y


class GPT(nn.Module):
    """Maps symbols, int64 [batch, length], to logits [batch, length, vocabulary]."""

    def __init__(self, shape: ModelShape, block: Callable[[ModelShape], nn.Module] = Block) -> None:
        super().__init__()
        self.symbols = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*(block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # Residual branches are scaled down with depth, as in GPT-2. GPT-2's 0.02 would make so narrow a
                # model learn hundreds of steps later.
                added = name.endswith(("projection.weight", "down.weight"))
                std = shape.width**-0.5 / (2 * shape.layers) ** 0.5 if added else shape.width**-0.5
                nn.init.normal_(parameter, std=0.02 if name == "head.weight" else std)

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(symbols.shape[1], device=symbols.device)
        x = self.symbols(symbols) + self.positions(positions)
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def cross_entropy(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy in nats per character."""
    logits = model(inputs)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


#: Name of the run without a hook: DDP's all-reduce over the backend of its process group.
PLAIN = "plain DDP"
#: Pairs of steps, with compression and without it, that `measure_payoff` compares; at four steps each.
PAIRS = 10
#: The first steps are not measured, and the last pair ends with the step after it.
STEPS_TO_VERIFY = 4 * PAIRS + 8


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the demo; ``runs`` are codec specs or `PLAIN`."""

    runs: tuple[str, ...]
    steps: int
    seed: int
    batch: int = 6
    learning_rate: float = 2e-3
    turn: int = 5
    evaluations: int = 8
    windows: int = 256


@dataclass
class Run:
    """State of one run; times are in seconds, one entry per step."""

    name: str
    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    state: ddp.DDPState | None
    losses: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)


Progress = Callable[[str, int, float], None]


def train(settings: Settings, progress: Progress | None = None) -> list[dict[str, Any]]:
    """Train all runs; all ranks must call it. ``progress(run, step, loss)`` is called after each turn.

    Returns one dict for each run. Times and bytes are this rank's; everything else is equal on all ranks.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    corpus = load_corpus()
    shape = ModelShape(vocabulary=VOCABULARY)
    runs = [_start(name, settings, shape) for name in settings.runs]
    evaluation_interval = -(-settings.steps // settings.evaluations)
    for first in range(0, settings.steps, settings.turn):
        steps = range(first, min(first + settings.turn, settings.steps))
        # The order rotates, so that each run is first equally often.
        shift = (first // settings.turn) % len(runs)
        for run in runs[shift:] + runs[:shift]:
            dist.barrier()
            for step in steps:
                _step(run, corpus, settings, shape, step, rank)
                if (step + 1) % evaluation_interval == 0 and step + 1 < settings.steps:
                    windows = settings.windows // 4
                    run.held_out.append(
                        (step + 1, _held_out(run, corpus, settings, shape, windows, rank, ranks))
                    )
            if progress:
                progress(run.name, len(run.losses), run.losses[-1])
    return [_finish(run, corpus, settings, shape, rank, ranks) for run in runs]


def measure_payoff(settings: Settings, codec: str) -> str:
    """Train for a few steps more, from the start, and return rank 0's report, which says whether ``codec`` paid.

    Half of the steps are not compressed, so these steps are no part of the runs that `train` compares.
    """
    corpus, shape = load_corpus(), ModelShape(vocabulary=VOCABULARY)
    run = _start(codec, settings, shape, verify=PAIRS)
    for step in range(STEPS_TO_VERIFY):
        _step(run, corpus, settings, shape, step, dist.get_rank())
    assert run.state is not None
    with contextlib.redirect_stdout(io.StringIO()) as text:
        run.state.print_report()
    return text.getvalue()


def _start(name: str, settings: Settings, shape: ModelShape, verify: int = 0) -> Run:
    torch.manual_seed(settings.seed)
    model = DistributedDataParallel(GPT(shape))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.05
    )
    state = None if name == PLAIN else ddp.compress(model, name, seed=settings.seed, verify=verify)
    return Run(name, model, optimizer, state)


def _step(run: Run, corpus: Corpus, settings: Settings, shape: ModelShape, step: int, rank: int) -> None:
    inputs, targets = training_batch(
        corpus, seed=settings.seed, step=step, rank=rank, size=settings.batch, length=shape.context
    )
    for group in run.optimizer.param_groups:
        group["lr"] = _learning_rate(settings, step)
    start = time.perf_counter()
    loss = cross_entropy(run.model, inputs, targets)
    run.optimizer.zero_grad()
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.optimizer.step()
    run.step_seconds.append(time.perf_counter() - start)
    run.losses.append(loss.item())


def _learning_rate(settings: Settings, step: int) -> float:
    """Return the learning rate: a short warm-up, then a linear decay to a tenth."""
    warm_up = max(1, settings.steps // 15)
    if step < warm_up:
        return settings.learning_rate * (step + 1) / warm_up
    return settings.learning_rate * (1 - 0.9 * (step - warm_up) / max(1, settings.steps - warm_up))


@torch.no_grad()
def _held_out(
    run: Run, corpus: Corpus, settings: Settings, shape: ModelShape, windows: int, rank: int, ranks: int
) -> float:
    """Return the mean loss over ``windows`` held-out windows, which are divided among the ranks."""
    total = torch.zeros(2, dtype=torch.float64)
    for inputs, targets in held_out_batches(
        corpus, windows=windows, size=4 * settings.batch, length=shape.context, rank=rank, ranks=ranks
    ):
        total[0] += cross_entropy(run.model.module, inputs, targets).double() * targets.numel()
        total[1] += targets.numel()
    dist.all_reduce(total)
    return float(total[0] / total[1])


def _finish(
    run: Run, corpus: Corpus, settings: Settings, shape: ModelShape, rank: int, ranks: int
) -> dict[str, Any]:
    final = _held_out(run, corpus, settings, shape, settings.windows, rank, ranks)
    run.held_out.append((settings.steps, final))
    losses = torch.tensor(run.losses, dtype=torch.float64)
    dist.all_reduce(losses)
    losses /= ranks
    tail = max(1, min(20, settings.steps // 4))
    # The first steps create buckets, buffers and connections and are not counted.
    warm = min(10, len(run.step_seconds) // 4)
    gradient_bytes = sum(parameter.numel() * parameter.element_size() for parameter in run.model.parameters())
    report = run.state.report() if run.state else None
    steps = (report.steps if report else None) or 1
    return {
        "name": run.name,
        "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
        "gradient_bytes": gradient_bytes,
        "losses": losses.tolist(),
        "held_out": run.held_out,
        "final_training_loss": float(losses[-tail:].mean()),
        "final_held_out_loss": final,
        "bytes_per_step": report.wire_bytes / steps if report else 2 * (ranks - 1) / ranks * gradient_bytes,
        "bytes_are": "counted" if report else "computed: 2(n-1)/n of the gradients",
        "step_seconds": run.step_seconds,
        "step_ms": statistics.median(run.step_seconds[warm:]) * 1e3,
        "report": report.to_dict() if report else None,
    }
