"""The step and the memory of a layout: bubbles, what is exposed, and what memory consists of."""

import math
from dataclasses import replace

import pytest
import torch

from dtcomm.extensions.jobs import (
    ExpertRoutes,
    Job,
    Layout,
    ModelShape,
    Network,
    find_model,
    job_memory,
    job_step,
)
from dtcomm.extensions.jobs.hardware import System, find_port, find_system


def job_on(hosts: int = 2, model: str = "llama3-8b", batch: int = 64, **changes: object) -> Job:
    system = find_system("h100").resized(hosts, 8)
    fields = {"model": find_model(model), "system": system, "batch": batch, "seq": 8192, **changes}
    return Job(**fields)  # type: ignore[arg-type]


def slow(hosts: int) -> System:
    return replace(find_system("h100").resized(hosts, 8), between=find_port("10gbit"), nics=1)


@pytest.mark.parametrize("micro_batches", [4, 16])
def test_the_bubble_of_each_schedule(micro_batches: int) -> None:
    job = job_on(1, batch=micro_batches)
    p, m = 4, micro_batches
    base = Layout(tp=2, pp=p)
    gpipe = job_step(job, replace(base, schedule="gpipe"))
    plain = job_step(job, base)
    interleaved = job_step(job, replace(base, schedule="interleaved", chunks=2))
    zero = job_step(job, replace(base, schedule="zero-bubble"))
    # Without communication the share of GPipe is (p - 1) / (m + p - 1); sums of tp belong to a micro-batch.
    busy = gpipe.compute + gpipe.exposed["tp"]
    assert gpipe.bubble / (gpipe.bubble + busy) == pytest.approx((p - 1) / (m + p - 1))
    assert plain.bubble == gpipe.bubble
    assert interleaved.bubble == pytest.approx(plain.bubble / 2)
    assert zero.bubble < plain.bubble / 2
    # GPipe keeps all micro-batches, 1F1B as many as there are stages.
    assert gpipe.memory.activations_kept / plain.memory.activations_kept == pytest.approx(
        m / min(m, p), rel=0.15
    )


def test_the_step_is_the_sum_of_its_parts_and_mfu_follows() -> None:
    job = job_on()
    step = job_step(job, Layout(dp=16, stage="fsdp", recompute="full"))
    parts = step.compute + step.bubble + step.exposed_total + step.optimizer
    assert step.seconds == pytest.approx(parts)
    flops = job.tokens * job.model.flops_per_token(job.seq)
    assert step.mfu == pytest.approx(flops / step.seconds / 16 / 989.4e12)
    assert 0 < step.efficiency <= 1 and step.recompute < step.compute / 3
    assert job_step(job, Layout(dp=16, stage="fsdp")).compute == pytest.approx(step.compute - step.recompute)


@pytest.mark.parametrize("axis", ["dp", "params", "tp", "ep", "pp"])
def test_a_codec_shortens_the_axis_that_is_exposed(axis: str) -> None:
    model = find_model("mixtral-8x7b" if axis == "ep" else "llama3-8b")
    job = Job(model=model, system=slow(4), batch=32, seq=4096)
    layout = {
        "dp": Layout(dp=32),
        "params": Layout(dp=32, stage="fsdp"),
        "tp": Layout(tp=32 if model.experts else 16, dp=2),
        "ep": Layout(dp=8, tp=4, ep=8, stage="fsdp"),
        "pp": Layout(dp=8, pp=4),
    }[axis]
    network = Network(job.system, job.dtype)
    plain, coded = (job_step(job, entry, network) for entry in (layout, layout.with_codec(axis, "int8")))
    # Of four messages of experts only the first is coded.
    assert coded.exposed[axis] < (0.9 if axis == "ep" else 0.75) * plain.exposed[axis]
    assert coded.layout.codec(axis) == "int8" and coded.seconds < plain.seconds


def test_ring_attention_is_hidden_by_long_sequences_only() -> None:
    system = slow(4)
    long = Job(model=find_model("llama3-8b"), system=system, batch=8, seq=131072)
    short = replace(long, seq=4096, batch=32)
    layout = Layout(cp=4, tp=8)
    assert job_step(short, layout).exposed["cp"] > 0
    share = [
        job_step(job, layout).exposed["cp"] / job_step(job, layout).communication["cp"]
        for job in (short, long)
    ]
    assert share[1] < share[0]


def test_memory_of_the_stages_of_zero() -> None:
    job = job_on()
    count = job.model.parameters
    stages = [job_memory(job, Layout(dp=16, stage=stage)) for stage in ("ddp", "zero-1", "zero-2", "fsdp")]
    ddp, zero1, zero2, fsdp = stages
    # bf16 weights, fp32 gradients, and Adam with an fp32 copy: 2 + 4 + 12 bytes for a parameter.
    assert (ddp.parameters, ddp.gradients, ddp.optimizer) == pytest.approx((2 * count, 4 * count, 12 * count))
    assert zero1.optimizer == pytest.approx(12 * count / 16) and zero1.gradients == ddp.gradients
    assert zero2.gradients == pytest.approx(4 * count / 16) and zero2.parameters == ddp.parameters
    assert fsdp.parameters == 0 and fsdp.buffers > zero2.buffers
    assert ddp.total > zero1.total > zero2.total > fsdp.total
    assert fsdp.largest[0] == "activations"


def test_memory_of_activations_residuals_and_experts() -> None:
    job = job_on()
    kept, full = (job_memory(job, Layout(dp=16, stage="fsdp", recompute=kind)) for kind in ("none", "full"))
    assert kept.activations == kept.activations_kept == full.activations_kept
    assert full.activations == full.activations_full < kept.activations / 4
    # Only codecs that need feedback have fp32 residuals, under DDP and FSDP.
    needing = replace(job, feedback=("int8",))
    for stage in ("ddp", "fsdp"):
        compressed = Layout(dp=16, stage=stage).with_codec("dp", "int8")
        assert job_memory(job, compressed).residuals == 0
        assert job_memory(needing, compressed).residuals == 4 * job.model.parameters
    experts = job_on(model="mixtral-8x7b")
    one, eight = (job_memory(experts, Layout(dp=16, ep=ep)) for ep in (1, 8))
    saved = experts.model.expert_parameters * 7 / 8 * 2
    assert one.parameters - eight.parameters == pytest.approx(saved)
    scores = job_memory(replace(job, flash=False), Layout(dp=16))
    selective = job_memory(replace(job, flash=False), Layout(dp=16, recompute="selective"))
    assert scores.activations > 2 * selective.activations


def test_activations_are_those_of_korthikanti() -> None:
    # Equation 2 of arXiv:2205.05198: s b h (10 + 24 / t + 5 a s / (h t)) bytes for a layer of GPT.
    model = ModelShape(
        name="gpt", layers=96, hidden=12288, heads=96, kv_heads=96, head_dim=128, ffn=4 * 12288, vocab=51200,
        gated=False, biased=True, tied=True, positions=2048,
    )  # fmt: skip
    system = find_system("a100").resized(8, 8)
    job = Job(model=model, system=system, batch=64, seq=2048, flash=False, sequence_parallel=False)
    from dtcomm.extensions.jobs.rank_costs import activation_bytes

    sbh, scores = 2048 * 12288, 5 * 96 * 2048 / 12288
    for tp in (1, 8):
        between, kept = activation_bytes(job, Layout(tp=tp, dp=64 // tp))
        assert between == pytest.approx(sbh * (10 + 24 / tp))
        assert kept == pytest.approx(sbh * scores / tp)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(dp=8), "dp x tp x pp x cp = 8 is not the 16 ranks"),
        (Layout(tp=16, pp=1, dp=1, ep=2), "ep=2: llama3-8b has no experts"),
        (Layout(dp=16, micro_batch=8), "do not divide a batch of 64"),
        (Layout(dp=1, pp=16, schedule="interleaved", chunks=4), "pp=16 needs more layers than 32"),
        (Layout(dp=8, pp=2, chunks=2), "chunks=2: only for interleaved"),
    ],
)
def test_layouts_that_are_not_possible(layout: Layout, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        job_step(job_on(), layout)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stage": "zero-3"}, "stage: 'zero-3' is not one of ddp, zero-1, zero-2, fsdp"),
        ({"schedule": "1f1"}, "did you mean '1f1b'"),
        ({"codecs": (("pd", "int8"),)}, "codecs: 'pd' is not one of dp, params"),
        ({"tp": 0}, "tp: must be at least 1, got 0"),
    ],
)
def test_wrong_fields_of_a_layout(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(**fields)


def test_a_group_has_its_share_of_the_host_and_of_the_switches() -> None:
    system = replace(find_system("h100").resized(16, 8), leaf_hosts=4, oversubscription=2.0)
    network = Network(system, torch.bfloat16)
    port = find_port("ndr").gbytes
    inside, across = network.group(8, 1), network.group(4, 8)
    assert (inside.hosts, inside.per_host) == (1, 8) and (across.hosts, across.per_host) == (4, 1)
    assert across.between.gbytes == pytest.approx(port)
    assert network.group(16, 8).between.gbytes == pytest.approx(port / 2)
    assert network.group(32, 1).per_host == 8 and network.group(32, 1).host_bandwidth == pytest.approx(
        8e9 * port
    )
    alone = network.collective("all_reduce", 16, 8, 2**28)
    assert alone > Network(replace(system, leaf_hosts=0), torch.bfloat16).collective(
        "all_reduce", 16, 8, 2**28
    )
    assert network.collective("all_reduce", 1, 1, 2**20) == 0 == network.transfer(8, 0)


def rows_of(routes: ExpertRoutes, outside: bool) -> float:
    """Return the rows that a rank sends to other hosts, or to the other ranks of its host."""
    return sum(count * rows for leaves, count, rows in routes.messages() if leaves is outside)


def test_experts_send_a_token_to_a_rank_or_host_once() -> None:
    flat, by_hosts = (
        ExpertRoutes(tokens=1000, experts=256, top_k=8, hosts=4, per_host=8, hierarchical=hierarchical)
        for hierarchical in (False, True)
    )
    # 8 of 256 experts: a rank has 8 of them, a host 64.
    assert flat.share(1) == pytest.approx(1 - math.comb(248, 8) / math.comb(256, 8))
    assert rows_of(flat, True) == pytest.approx(24_000 * flat.share(1))
    assert rows_of(by_hosts, True) == pytest.approx(3000 * by_hosts.share(8))
    assert rows_of(flat, True) < 24_000 and rows_of(by_hosts, True) < rows_of(flat, True) / 1.7
    assert rows_of(by_hosts, False) == pytest.approx(4 * rows_of(flat, False))
    assert ExpertRoutes(tokens=1, experts=8, top_k=2, hosts=2, per_host=4).by_hosts
    assert not ExpertRoutes(tokens=1, experts=8, top_k=2, hosts=1, per_host=8).by_hosts
    # With one expert a token, on as many ranks as experts, nothing is saved.
    assert rows_of(ExpertRoutes(tokens=8, experts=8, top_k=1, hosts=1, per_host=8), False) == pytest.approx(7)
