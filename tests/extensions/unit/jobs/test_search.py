"""The search over layouts, and training across sites."""

import time
from dataclasses import replace

import pytest

from dtcomm.extensions.jobs import Job, JobPlan, Layout, WideArea, across_sites, find_model, job_step, search
from dtcomm.extensions.jobs.hardware import find_port, find_system
from dtcomm.extensions.jobs.search import FAMILIES, family, layouts


def job_on(model: str, hosts: int, system: str = "h100", batch: int = 512, seq: int = 8192) -> Job:
    return Job(model=find_model(model), system=find_system(system).resized(hosts, 8), batch=batch, seq=seq)


def winner_of(plan: JobPlan):
    assert plan.winner is not None
    return plan.winner


def test_the_winner_is_the_fastest_that_fits_and_is_found_in_time() -> None:
    begin = time.process_time()
    plan = search(job_on("llama3-70b", 8))
    assert time.process_time() - begin < 5
    best = winner_of(plan)
    assert best.fits() and best.layout.ranks == 64 and best.layout.tp <= 8
    assert 0.35 < best.mfu < 0.6
    assert all(best.seconds <= step.seconds * 1.001 and step.fits() for step in plan.steps)
    possible, fitting = plan.tried
    assert possible > fitting > 100 and {misfit.family for misfit in plan.misfits} <= {"DDP", "ZeRO"}


def test_rows_are_the_best_of_each_family_the_winner_first() -> None:
    plan = search(job_on("llama3-8b", 2))
    families = [family(step.layout) for step in plan.rows]
    assert plan.rows[0] is plan.winner and len(set(families)) == len(families)
    assert {"FSDP", "FSDP + TP", "3-D"} <= set(families) <= set(FAMILIES)
    for layout, name in (
        (Layout(dp=16), "DDP"),
        (Layout(dp=16, stage="zero-2"), "ZeRO"),
        (Layout(dp=8, tp=2), "3-D"),
        (Layout(dp=8, cp=2, stage="fsdp"), "3-D"),
    ):
        assert family(layout) == name


def test_lora_needs_less_memory_communication_and_time() -> None:
    whole = job_on("llama2-7b", 2)
    lora, layout = replace(whole, trainable=20e6), Layout(dp=16, stage="ddp", recompute="full")
    before, after = job_step(whole, layout), job_step(lora, layout)
    assert after.memory.optimizer == pytest.approx(12 * 20e6, rel=1e-3)
    assert after.memory.gradients == pytest.approx(4 * 20e6, rel=1e-3)
    assert after.memory.parameters == before.memory.parameters
    assert (
        after.communication["dp"] < before.communication["dp"] / 50 and after.compute < 0.9 * before.compute
    )
    sharded = replace(layout, stage="fsdp")
    kept = job_step(lora, sharded).memory.parameters
    assert kept == pytest.approx(2 * whole.model.parameters / 16, rel=0.01)
    with pytest.raises(ValueError, match="trainable"):
        replace(whole, trainable=1e12)


def test_slow_links_make_codecs_pay() -> None:
    fast = job_on("llama3-8b", 4, batch=64)
    slow = replace(fast, system=replace(fast.system, between=find_port("10gbit"), nics=1))
    assert winner_of(search(fast)).layout.codecs == ()
    # Pipelines between hosts avoid slow links without codecs; data parallelism does not.
    plan = search(slow, ["int8", "int4"], {"pp": 1})
    assert plan.speedup > 1.1 and winner_of(plan).layout.codecs
    assert winner_of(plan).seconds < plan.steps[0].seconds


def test_what_does_not_fit_is_named_with_its_largest_part() -> None:
    plan = search(job_on("llama3-405b", 2))
    assert plan.winner is None and plan.steps == ()
    assert [misfit.family for misfit in plan.misfits] == list(FAMILIES)
    fsdp = plan.misfits[-1]
    assert fsdp.memory.largest[0] == "optimizer" and fsdp.memory.total > 12 * 405e9 / 16
    job = job_on("llama3-8b", 1, "a100", batch=64)
    only = search(job, fixed={"stage": "ddp", "tp": 1, "pp": 1})
    assert only.winner is None and only.misfits[0].memory.largest[0] == "optimizer"


def test_experts_are_divided_and_fixed_parts_are_kept() -> None:
    plan = search(job_on("mixtral-8x7b", 8, seq=4096), fixed={"ep": 8, "tp": 1, "schedule": "1f1b"})
    assert {(step.layout.ep, step.layout.tp, step.layout.schedule) for step in plan.steps} == {(8, 1, "1f1b")}
    job = job_on("llama3-8b", 1, batch=8)
    for layout in layouts(job, {"pp": 2}):
        assert layout.pp == 2 and layout.problem(job) is None


def test_what_cannot_be_is_refused_with_its_reason() -> None:
    job = job_on("llama3-8b", 1)
    with pytest.raises(ValueError, match=r"fixed: tp=3.*dp x tp x pp x cp = 6 is not the 8 ranks"):
        search(job, fixed={"tp": 3})
    with pytest.raises(ValueError, match="'zz' is not one of dp, tp"):
        search(job, fixed={"zz": 3})
    with pytest.raises(ValueError, match="batch: must be at least 1"):
        replace(job, batch=0)
    with pytest.raises(ValueError, match="no peak FLOP/s is known for the device cpu"):
        replace(job, system=find_system("local"))


def test_methods_across_sites() -> None:
    step = winner_of(search(job_on("llama3-8b", 1, batch=64)))
    link = WideArea(sites=2, port=find_port("1gbit"), rtt_ms=75, every=100)
    methods = {(entry.method, entry.codec): entry for entry in across_sites(step, link)}
    ddp, int4 = methods["DDP", "none"], methods["DDP", "int4"]
    plain, streaming = methods["DiLoCo", "none"], methods["Streaming DiLoCo", "int4"]
    # Two sites send each gradient once, in bf16.
    assert ddp.bytes_per_step == pytest.approx(2 * step.job.model.parameters)
    assert ddp.exposed > 0.9 * ddp.bytes_per_step / link.port.bandwidth - step.seconds
    assert int4.bytes_per_step < ddp.bytes_per_step / 3
    assert plain.bytes_per_step == pytest.approx(4 * step.job.model.parameters / 100)
    assert plain.exposed == pytest.approx((4 * step.job.model.parameters / link.port.bandwidth + 0.075) / 100)
    assert streaming.exposed <= methods["DiLoCo", "int4"].exposed and streaming.peak_gbit is not None
    assert ddp.seconds > int4.seconds > streaming.seconds >= step.seconds
    fewer = across_sites(step, replace(link, every=10))
    assert (
        next(entry for entry in fewer if (entry.method, entry.codec) == ("DiLoCo", "none")).exposed
        > plain.exposed
    )


@pytest.mark.parametrize(
    ("fields", "message"), [({"sites": 1}, "sites"), ({"every": 0}, "every"), ({"rtt_ms": -1.0}, "rtt_ms")]
)
def test_wrong_links_between_sites(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"{message}: must be at least"):
        WideArea(**{"sites": 2, "port": find_port("1gbit"), **fields})
