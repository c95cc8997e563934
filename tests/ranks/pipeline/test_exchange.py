"""Pipeline stages on several ranks compared to the whole model in one process."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

import dtcomm
from dtcomm.errors import PeerLost
from dtcomm.launch.ranks import run_ranks, send_to_parent, spawn_ranks

WIDTH, BATCH = 48, 8


def stages(n: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(n)]


def inputs(number: int) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(number))


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def run_stage(
    rank: int, n: int, codec: str, feedback: bool, micro_batches: int, warmup: int
) -> list[torch.Tensor]:
    """Return the gradients of this rank's stage; ``warmup`` micro-batches go forward before the first backward."""
    stage = stages(n)[rank]
    receiver = dtcomm.pipeline.Receiver(rank - 1, codec, feedback=feedback) if rank else None
    sender = dtcomm.pipeline.Sender(rank + 1, codec) if rank < n - 1 else None
    pending: list[torch.Tensor] = []

    def run_backward() -> None:
        pending.pop(0).backward()

    for number in range(micro_batches):
        x = inputs(number) if receiver is None else receiver((BATCH, WIDTH))
        y = stage(x)
        pending.append(y.square().mean() if sender is None else sender(y))
        if len(pending) > warmup * (n - 1 - rank):
            run_backward()
    while pending:
        run_backward()
    for end in (receiver, sender):
        if end is not None:
            end.flush()
            plain_bytes = 4 * BATCH * WIDTH * micro_batches
            assert end.sent_bytes == plain_bytes if codec == "none" else end.sent_bytes < 0.3 * plain_bytes
    return gradients(stage)


def whole_model_gradients(n: int, micro_batches: int) -> list[list[torch.Tensor]]:
    model = stages(n)
    for number in range(micro_batches):
        nn.Sequential(*model)(inputs(number)).square().mean().backward()
    return [gradients(stage) for stage in model]


@pytest.mark.parametrize(
    ("codec", "feedback", "tolerance"), [("none", False, 0.0), ("int8", False, 0.03), ("int8", True, 0.03)]
)
@pytest.mark.parametrize(("n", "micro_batches", "warmup"), [(2, 1, 0), (3, 6, 1), (2, 70, 70)])
def test_gradients_equal_those_of_the_whole_model(
    n: int, micro_batches: int, warmup: int, codec: str, feedback: bool, tolerance: float
) -> None:
    actual = run_ranks(run_stage, n, codec, feedback, micro_batches, warmup)
    for stage, (expected, stage_gradients) in enumerate(
        zip(whole_model_gradients(n, micro_batches), actual, strict=True)
    ):
        for a, b in zip(expected, stage_gradients, strict=True):
            error = torch.linalg.vector_norm(a - b)
            assert error <= tolerance * torch.linalg.vector_norm(a), (stage, float(error))


def mean_gradient(rank: int, n: int, feedback: bool) -> torch.Tensor:
    """Repeat one micro-batch and return the mean gradient that reaches the first stage."""
    if rank == 1:
        end = dtcomm.pipeline.Receiver(0, "none", "int2", feedback=feedback)
        for _ in range(40):
            (end((BATCH, WIDTH)) * inputs(1)).sum().backward()
        end.flush()
        return torch.zeros(0)
    link = dtcomm.pipeline.Sender(1, "none", "int2")
    x = inputs(0).requires_grad_()
    for _ in range(40):
        link(x).backward()
    assert x.grad is not None
    return x.grad / 40


def test_feedback_compensates_the_encoding_error() -> None:
    errors = [
        float(torch.linalg.vector_norm(run_ranks(mean_gradient, 2, feedback)[0] - inputs(1)))
        for feedback in (False, True)
    ]
    assert errors[1] < 0.1 * errors[0]


def send_to_dead_stage(rank: int, n: int) -> str:
    if rank == 1:
        dtcomm.pipeline.Receiver(0)((BATCH, WIDTH))
        send_to_parent("running")
        time.sleep(60)
    link = dtcomm.pipeline.Sender(1)
    zero = link(inputs(0).requires_grad_())
    with pytest.raises(PeerLost) as error:
        zero.backward()
    return str(error.value)


@pytest.mark.parametrize("end", [dtcomm.pipeline.Sender, dtcomm.pipeline.Receiver])
def test_codecs_that_messages_cannot_have_are_refused(end: Any) -> None:
    for codecs, message in (
        (("lossless",), "codec: lossless has payloads of a length that depends on the data"),
        (("int8", "exact"), "backward_codec: exact is for sums"),
        (("none", "int9"), "backward_codec: unknown codec 'int9'"),
    ):
        with pytest.raises(ValueError, match=message):
            end(1, *codecs)


def test_a_killed_stage_is_named() -> None:
    with spawn_ranks(send_to_dead_stage, 2) as ranks:
        assert ranks.receive(1, 60) == "running"
        ranks.kill(1)
        outcomes = ranks.join(20)
    assert outcomes[0].ok and "rank 1" in outcomes[0].result
