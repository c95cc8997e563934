"""The context in which torch's attention is context-parallel: buffers, models, and what users combine with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dtcomm import context_parallel as cp
from dtcomm import ddp
from dtcomm.cli.demo import train as demo
from dtcomm.context_parallel.state import METHODS
from dtcomm.launch.ranks import run_ranks
from tests.support.rank_tests import on_ranks

SHAPE = demo.ModelShape(vocabulary=demo.VOCABULARY, context=32, layers=2, width=32, heads=4)


class Model(nn.Module):
    """The demo's GPT with positions that the caller gives."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gpt = demo.GPT(SHAPE)

    def forward(self, symbols: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.gpt.symbols(symbols) + self.gpt.positions(positions)
        logits: torch.Tensor = self.gpt.head(self.gpt.norm(self.gpt.blocks(x)))
        return logits


def batch(size: int, length: int, seed: int = 0) -> list[torch.Tensor]:
    """Return symbols, targets and positions of whole sequences."""
    generator = torch.Generator().manual_seed(seed)
    symbols = torch.randint(demo.VOCABULARY, (2, size, length), generator=generator)
    return [symbols[0], symbols[1], torch.arange(length)]


def loss_of(
    model: Any, symbols: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Return the sum over the tokens that count."""
    logits = model(symbols, positions)
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")


def gradients(model: nn.Module) -> torch.Tensor:
    """Return all gradients in one tensor, and clear them."""
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return flat


def sharded_gradients(model: nn.Module, run: Any, length: int, **options: Any) -> torch.Tensor:
    """Return the gradients of the loss of whole sequences, computed on shards; check that buffers are restored."""
    buffers, originals = batch(3, length), batch(3, length)
    with cp.context_parallel(buffers=buffers, buffer_seq_dims=[1, 1, 0], pad_values=[0, -100, 0], **options):
        padded = cp.padded_length(length, dist.get_world_size())
        assert buffers[0].shape == (3, padded // dist.get_world_size())
        loss_of(run, *buffers).backward()
    assert all(map(torch.equal, buffers, originals))
    flat = gradients(model)
    dist.all_reduce(flat)
    return flat


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def compare_models(rank: int, ranks: int) -> None:
    model = Model()
    for length in (24, 21):
        loss_of(model, *batch(3, length)).backward()
        expected = gradients(model)
        for method in METHODS:
            assert relative(sharded_gradients(model, model, length, method=method), expected) < 1e-5
        assert relative(sharded_gradients(model, model, length, kv_codec="int8"), expected) < 0.02
    assert functional.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_model_computes_the_gradients_of_whole_sequences(ranks: int) -> None:
    if ranks == 3:  # 4 heads: ulysses is refused, which test_attention checks
        run_ranks(compare_ring_on_three_ranks, ranks)
    else:
        run_ranks(compare_models, ranks)


def compare_ring_on_three_ranks(rank: int, ranks: int) -> None:
    model = Model()
    loss_of(model, *batch(3, 21)).backward()
    expected = gradients(model)
    for method in ("ring", "all_gather"):
        assert relative(sharded_gradients(model, model, 21, method=method), expected) < 1e-5


@on_ranks(2)
def test_checkpointing_and_autocast(rank: int, ranks: int) -> None:
    """Activation checkpointing and accumulation give the same bits; bf16 by autocast comes close."""
    model = Model()

    def recomputed(symbols: torch.Tensor, positions: torch.Tensor) -> Any:
        return checkpoint(model, symbols, positions, use_reentrant=False)

    for method in METHODS:
        options = {"method": method, "kv_codec": "int8"}
        expected = sharded_gradients(model, model, 24, **options)
        assert torch.equal(sharded_gradients(model, recomputed, 24, **options), expected)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = sharded_gradients(model, model, 24, **options)
        assert 0 < relative(rounded, expected) < 0.05


@pytest.mark.slow
@on_ranks(2, timeout=600)
def test_compiled_code_without_graph_breaks(rank: int, ranks: int) -> None:
    model = Model()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for method in METHODS:
        options = {"method": method, "kv_codec": "int8"}
        torch.compiler.reset()  # the context replaces the function that compiled code has
        expected = sharded_gradients(model, model, 24, **options)
        assert torch.equal(sharded_gradients(model, compiled, 24, **options), expected)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def attend(q: torch.Tensor) -> torch.Tensor:
        return cp.attention(q, q, q, is_causal=True, kv_codec="int8")

    q = torch.randn(1, 2, 8, 8)
    assert torch.equal(attend(q), cp.attention(q, q, q, is_causal=True, kv_codec="int8"))


def train_on_mesh(rank: int, ranks: int, codec: str, gradient_codec: str) -> tuple[float, torch.Tensor]:
    """Train with data x context parallelism = 2 x 2, DDP's gradients compressed; return the last loss and weights."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model = Model()
    # The loss is a mean over a rank's tokens, so DDP averages over all ranks: those of one sequence and the replicas.
    parallel = DistributedDataParallel(model)
    state = ddp.compress(parallel, gradient_codec)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    last = torch.zeros(())
    for step in range(12):
        buffers = batch(4, 24, seed=2 * (step % 2) + mesh["dp"].get_local_rank())
        with cp.context_parallel(
            mesh["cp"], buffers=buffers, buffer_seq_dims=[1, 1, 0], kv_codec=codec
        ) as context:
            loss = loss_of(parallel, *buffers) / buffers[1].numel()
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        last = loss.detach()
        assert (context.report().wire_bytes > 0) and state.report().wire_bytes > 0
    dist.all_reduce(last)
    return float(last) / ranks, torch.cat([p.detach().flatten() for p in model.parameters()])


def test_data_and_context_parallelism_compressed_together() -> None:
    plain = run_ranks(train_on_mesh, 4, "none", "none", timeout=120)
    compressed = run_ranks(train_on_mesh, 4, "int8", "int8", timeout=120)
    for results in (plain, compressed):
        assert all(torch.equal(weights, results[0][1]) for _, weights in results)
    assert plain[0][0] < 4.3  # it started at log(97) = 4.57
    assert abs(compressed[0][0] - plain[0][0]) < 0.02 * plain[0][0]


@on_ranks(2)
def test_wrong_arguments_are_refused_and_the_context_ends_after_an_error(rank: int, ranks: int) -> None:
    buffers = batch(2, 21)
    torch_function = functional.scaled_dot_product_attention

    def enter(**options: Any) -> None:
        with cp.context_parallel(**options):
            raise AssertionError("entered")

    with pytest.raises(ValueError, match=r"buffers: 21 tokens do not divide among 2 ranks.*pads to 24"):
        enter(buffers=buffers, buffer_seq_dims=[1, 1, 0])
    with pytest.raises(ValueError, match="buffer_seq_dims: 1 dimensions for 3 buffers"):
        enter(buffers=buffers, buffer_seq_dims=[1])
    with pytest.raises(ValueError, match="pad_values: 1 values for 3 buffers"):
        enter(buffers=buffers, buffer_seq_dims=[1, 1, 0], pad_values=[0])
    with pytest.raises(ValueError, match=r"buffers: sequences of \[2, 21\] tokens"):
        enter(buffers=buffers, buffer_seq_dims=[0, 1, 0])
    with pytest.raises(ValueError, match="no_restore_buffers: contains a tensor"):
        enter(buffers=buffers[:1], buffer_seq_dims=[1], no_restore_buffers=buffers[1:2])
    with pytest.raises(TypeError, match=r"buffers\[0\]: expected a tensor without a gradient"):
        enter(buffers=[nn.Parameter(torch.ones(4))], buffer_seq_dims=[0])
    with pytest.raises(ValueError, match="kv_codec: topk"):
        enter(kv_codec="topk:ratio=0.01")
    with pytest.raises(
        ValueError, match=r"group: expected a mesh with one dimension, got 2: pass mesh\['cp'\]"
    ):
        enter(group=init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp")))
    assert functional.scaled_dot_product_attention is torch_function
    q = torch.randn(1, 2, 4, 8)
    dropped = q.clone()
    with cp.context_parallel(buffers=[dropped], buffer_seq_dims=[2], no_restore_buffers=[dropped]):
        with pytest.raises(RuntimeError, match="is replaced already"):
            enter()
        with pytest.raises(ValueError, match="attn_mask: context-parallel attention takes none"):
            functional.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(4, 4, dtype=torch.bool))
        with pytest.raises(ValueError, match=r"dropout_p=0\.1: context-parallel attention has no dropout"):
            functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
    assert dropped.shape == (1, 2, 2, 8)
    with pytest.raises(ZeroDivisionError), cp.context_parallel():
        raise ZeroDivisionError
    assert functional.scaled_dot_product_attention is torch_function
