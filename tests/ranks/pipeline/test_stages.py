"""Compressed stages of torch.distributed.pipelining, in every schedule, beside torch's own stages."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.torch_version import TorchVersion

from dtcomm.errors import PeerLost
from dtcomm.launch.ranks import run_ranks, send_to_parent, spawn_ranks
from dtcomm.pipeline import compress
from tests.support.rank_tests import on_ranks

WIDTH, BATCH, MICRO = 32, 8, 4
#: Schedule → stages of each rank.
SCHEDULES: dict[Any, int] = {ScheduleGPipe: 1, Schedule1F1B: 1, ScheduleInterleaved1F1B: 2}
SCHEDULES |= {ScheduleInterleavedZeroBubble: 2}
# Since torch 2.13 stages keep notes of the tensors that they receive, with or without examples.
HAS_NOTES = TorchVersion(torch.__version__) >= (2, 13)
if HAS_NOTES:  # before, torch's own schedule sends tensors from a rank to itself, which Gloo cannot
    SCHEDULES |= {ScheduleZBVZeroBubble: 2}


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def batch(step: int, rows: int = BATCH, length: int = 6) -> torch.Tensor:
    return torch.randn(rows, length, WIDTH, generator=torch.Generator().manual_seed(step))


def stages_of(rank: int, ranks: int, schedule: Any) -> list[PipelineStage]:
    each = SCHEDULES[schedule]
    total = each * ranks
    numbers = [rank + ranks * i for i in range(each)]
    if schedule is ScheduleZBVZeroBubble:
        numbers = [rank, total - 1 - rank]
    return [PipelineStage(Layer(number), number, total, torch.device("cpu")) for number in numbers]


def make_schedule(schedule: Any, stages: list[PipelineStage], micro: int = MICRO) -> Any:
    own = stages[0] if SCHEDULES[schedule] == 1 else stages
    return schedule(own, micro, loss_fn=lambda y, target: (y - target).square().mean())


def run_step(schedule: Any, stages: list[PipelineStage], x: torch.Tensor) -> list[torch.Tensor]:
    """Run a step; return this rank's losses and gradients, which are cleared."""
    losses: list[torch.Tensor] = []
    has_first = any(stage.is_first for stage in stages)
    has_last = any(stage.is_last for stage in stages)
    schedule.step(
        *([x] if has_first else []),
        target=torch.sin(x) if has_last else None,
        losses=losses if has_last else None,
    )
    results = [loss.detach().clone() for loss in losses]
    for stage in stages:
        for parameter in stage.submod.parameters():
            assert parameter.grad is not None
            results.append(parameter.grad.clone())
            parameter.grad = None
    return results


def every_schedule(rank: int, ranks: int, codec: str) -> dict[str, list[float]]:
    """Return for each schedule the relative errors beside torch's stages, and check the report."""
    errors: dict[str, list[float]] = {}
    for schedule, each in SCHEDULES.items():
        plain, compressed = (stages_of(rank, ranks, schedule) for _ in range(2))
        state = compress(compressed, codec)
        of_torch, ours = make_schedule(schedule, plain), make_schedule(schedule, compressed)
        own = errors[schedule.__name__] = []
        for x in (batch(0), batch(1)):
            pairs = zip(run_step(ours, compressed, x), run_step(of_torch, plain, x), strict=True)
            own += [float((a - b).norm() / b.norm()) for a, b in pairs]
        report = state.report()
        # With V-shaped schedules one of the boundaries is inside a rank.
        boundaries = each * ranks - 1 - (schedule is ScheduleZBVZeroBubble)
        sent = torch.tensor(report.messages)
        dist.all_reduce(sent)
        assert int(sent) == 2 * 2 * MICRO * boundaries, (schedule.__name__, report.messages)
        assert report.steps == 2 and "waited" in report.notes[0]
        if codec == "none":
            assert report.wire_bytes == report.plain_bytes
        else:
            assert report.wire_bytes < 0.3 * report.plain_bytes
        assert 0 < state.bubble_fraction() < 1
    return errors


@pytest.mark.parametrize(("codec", "tolerance"), [("none", 0.0), ("int8", 0.05)])
def test_every_schedule_matches_torchs_stages(codec: str, tolerance: float) -> None:
    for errors in run_ranks(every_schedule, 2, codec):
        for schedule, values in errors.items():
            assert max(values) <= tolerance, (schedule, values)
            assert tolerance == 0.0 or max(values) > 0


@on_ranks(3)
def test_a_stage_in_the_middle_bf16_evaluation_and_detaching(rank: int, ranks: int) -> None:
    """Three stages, bf16 activations, evaluation in between, detaching."""
    plain, compressed = (stages_of(rank, ranks, Schedule1F1B) for _ in range(2))
    for stage in (*plain, *compressed):
        stage.submod.to(torch.bfloat16)
    state = compress(compressed, "int8", backward_codec="fp8_e5m2")
    of_torch, ours = make_schedule(Schedule1F1B, plain), make_schedule(Schedule1F1B, compressed)
    x = batch(0).bfloat16()
    for _ in range(2):
        for a, b in zip(run_step(ours, compressed, x), run_step(of_torch, plain, x), strict=True):
            assert (a - b).float().norm() < 0.2 * b.float().norm()
        outputs = [
            schedule.eval(*([x] if rank == 0 else []), target=x if rank == ranks - 1 else None)
            for schedule in (ours, of_torch)
        ]
        if rank == ranks - 1:
            assert (outputs[0] - outputs[1]).float().norm() < 0.1 * outputs[1].float().norm()
    whats = {(row.what, row.codec, row.dtype) for row in state.report().rows}
    expected = {("activations", "int8", "bfloat16")} if rank < ranks - 1 else set()
    assert whats == expected | ({("gradients", "fp8_e5m2", "bfloat16")} if rank else set())
    state.detach()
    for a, b in zip(run_step(ours, compressed, x), run_step(of_torch, plain, x), strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(not HAS_NOTES, reason="this torch refuses shapes that differ from the first step's")
@on_ranks(2)
def test_shapes_change_from_step_to_step_and_within_one(rank: int, ranks: int) -> None:
    for schedule in (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B):
        stages = stages_of(rank, ranks, schedule)
        compress(stages, "none", dynamic_shapes=True)
        ours = make_schedule(schedule, stages)
        for step, (rows, length) in enumerate([(8, 6), (8, 3), (10, 9), (8, 6)]):  # 10 rows: 3, 3, 2, 2
            x = batch(step, rows, length)
            actual = run_step(ours, stages, x)
            layers = [Layer(number) for number in range(ranks * SCHEDULES[schedule])]
            losses = []
            for part in x.tensor_split(MICRO):
                loss = (nn.Sequential(*layers)(part) - torch.sin(part)).square().mean()
                (loss / MICRO).backward()
                losses.append(loss.detach())
            gradients = [p.grad for stage in stages for p in layers[stage.stage_index].parameters()]
            has_last = any(stage.is_last for stage in stages)
            for a, b in zip(actual, [*(losses if has_last else []), *gradients], strict=True):
                assert b is not None
                torch.testing.assert_close(a, b)


def epochs(rank: int, ranks: int, spec: str, options: dict[str, Any]) -> list[float]:
    """Train two epochs on two batches without updates; return the errors of the last step's losses and gradients."""
    plain, compressed = (stages_of(rank, ranks, ScheduleGPipe) for _ in range(2))
    state = compress(compressed, spec, **options)
    of_torch, ours = make_schedule(ScheduleGPipe, plain), make_schedule(ScheduleGPipe, compressed)
    samples = torch.arange(2 * BATCH).view(2, BATCH)
    errors: list[float] = []
    for step in range(8):
        if options.get("differences"):
            state.set_samples(samples[step % 2])
        actual, expected = (
            run_step(schedule, stages, batch(step % 2))
            for schedule, stages in ((ours, compressed), (of_torch, plain))
        )
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(actual, expected, strict=True)]
        if step == 3:
            saved = state.state_dict()
            state.load_state_dict(saved)  # continues bit for bit: both ends keep the same references
    report = state.report()
    if options.get("differences"):
        # Both ends keep the activations of all samples.
        assert report.residual_bytes == samples.numel() * 6 * WIDTH * 4
        whole = [row for row in report.rows if row.reason == "first time of these samples"]
        assert len(whole) == (rank == 0) and all(row.calls == 2 * MICRO for row in whole)
        with pytest.raises(ValueError, match="differences: call set_samples before each step"):
            run_step(ours, compressed, batch(0))
    return errors


def test_differences_to_the_last_epoch_need_few_bits() -> None:
    plain = run_ranks(epochs, 2, "int4", {"backward_codec": "none"})[1]
    differences = run_ranks(epochs, 2, "int4", {"backward_codec": "none", "differences": True})[1]
    assert max(differences) < 0.05 * max(plain)


def repeat_gradients(rank: int, ranks: int, feedback: bool) -> list[torch.Tensor]:
    """Return the sum of the gradients of 20 equal steps, in int4."""
    stages = stages_of(rank, ranks, ScheduleGPipe)
    state = compress(stages, "none", backward_codec="int3", feedback=feedback, allow_inaccurate=True)
    schedule = make_schedule(ScheduleGPipe, stages)
    totals: list[torch.Tensor] = []
    for _ in range(20):
        results = run_step(schedule, stages, batch(0))
        totals = [a + b for a, b in zip(totals, results, strict=True)] if totals else results
    assert (state.report().residual_bytes > 0) == (feedback and rank == 1)
    return totals


def test_feedback_compensates_what_gradients_lose() -> None:
    exact = run_ranks(epoch_gradients, 2)[0]
    errors = []
    for feedback in (False, True):
        totals = run_ranks(repeat_gradients, 2, feedback)[0]
        errors.append(max(float((a / 20 - b).norm() / b.norm()) for a, b in zip(totals, exact, strict=True)))
    assert errors[1] < 0.2 * errors[0]


def epoch_gradients(rank: int, ranks: int) -> list[torch.Tensor]:
    stages = stages_of(rank, ranks, ScheduleGPipe)
    return run_step(make_schedule(ScheduleGPipe, stages), stages, batch(0))


@on_ranks(2)
def test_stochastic_rounding_follows_the_seed_and_continues_from_a_checkpoint(rank: int, ranks: int) -> None:
    def two_steps(resume: bool, **options: int) -> list[torch.Tensor]:
        results = []
        state = None
        for number in range(2):
            if state is None or resume:
                saved = None if state is None else state.state_dict()
                stages = stages_of(rank, ranks, ScheduleGPipe)
                state = compress(stages, "int4:round=stochastic", **options)
                if saved is not None:
                    state.load_state_dict(saved)
            results += run_step(make_schedule(ScheduleGPipe, stages), stages, batch(number))
        return results

    first = two_steps(False, seed=3)
    for resume, options, equal in (
        (True, {"seed": 3}, True),
        (False, {}, False),
        (False, {"seed": 0}, False),
    ):
        assert all(map(torch.equal, first, two_steps(resume, **options))) == equal


class Slow(torch.autograd.Function):
    """The identity, in 20 ms forward and 40 ms backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.04)
        return gradient


class SlowLayer(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Slow.apply(super().forward(x))  # type: ignore[no-untyped-call]
        return y


def measure_bubble(rank: int, ranks: int, kind: Any, micro: int) -> float:
    stage = PipelineStage(SlowLayer(rank), rank, ranks, torch.device("cpu"))
    state = compress(stage, "int8")
    schedule = make_schedule(kind, [stage], micro)
    computed, measured = (ranks - 1) / (micro + ranks - 1), []
    for step in range(7):
        run_step(schedule, [stage], batch(step))
        measured.append(state.bubble_fraction())
    # The first step connects the stages; in others a rank may have waited for its core.
    return min(measured[1:], key=lambda fraction: abs(fraction - computed))


@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
def test_the_measured_bubble_is_that_of_the_formula(schedule: Any) -> None:
    for measured in run_ranks(measure_bubble, 2, schedule, 4):
        assert measured == pytest.approx(1 / 5, abs=0.05)


def lose_a_stage(rank: int, ranks: int) -> str:
    stages = stages_of(rank, ranks, ScheduleGPipe)
    compress(stages, "int8")
    schedule = make_schedule(ScheduleGPipe, stages)
    run_step(schedule, stages, batch(0))
    if rank == 1:
        send_to_parent("running")
        time.sleep(60)
    with pytest.raises(PeerLost) as error:
        run_step(schedule, stages, batch(1))
    return str(error.value)


def step_with_examples(rank: int, ranks: int, requires_grad: bool) -> None:
    example = torch.zeros(2, WIDTH, requires_grad=requires_grad)
    stage = PipelineStage(Layer(rank), rank, ranks, torch.device("cpu"), example, example)
    compress(stage, "int8")
    schedule = Schedule1F1B(stage, MICRO, loss_fn=nn.functional.mse_loss)
    x = torch.randn(2 * MICRO, WIDTH)
    schedule.step(x) if rank == 0 else schedule.step(target=x)
    assert stage.submod.linear.weight.grad.abs().sum() > 0


@pytest.mark.skipif(
    not HAS_NOTES, reason="this torch computes the gradients of all outputs, also of unused ones"
)
def test_examples_that_do_not_require_gradients_are_named() -> None:
    run_ranks(step_with_examples, 2, True)
    with pytest.raises(ValueError, match="output_args"):
        run_ranks(step_with_examples, 2, False)


def test_a_killed_stage_is_named() -> None:
    with spawn_ranks(lose_a_stage, 2) as ranks:
        assert ranks.receive(1, 60) == "running"
        ranks.kill(1)
        outcomes = ranks.join(20)
    assert outcomes[0].ok and "rank 1" in outcomes[0].result
