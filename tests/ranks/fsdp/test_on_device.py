"""FSDP's collectives and the sharded optimizer on fake CUDA tensors: the host never waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import dtcomm.collectives as C
from dtcomm.compress.guard import Guard
from dtcomm.device.streams import record_streams
from dtcomm.fsdp import ShardedOptimizer
from dtcomm.fsdp.collectives import BackwardOverlap, CompressedAllGather, CompressedReduceScatter
from dtcomm.fsdp.spec import FEEDBACKS, PARAMETER_PREFIXES, parse_spec
from dtcomm.fsdp.state import State
from dtcomm.launch.ranks import run_ranks
from tests.support.fake_cuda_ranks import fake_cuda_rank
from tests.support.fake_cuda_tensor import host_copy, to_fake_cuda, unchecked
from tests.support.stream_checker import RecordedStreams

SHARD, STEPS = 1500, 4
GRADIENTS = [f"{word}:int4" if word else "int8" for word in FEEDBACKS]
PARAMETERS = ["fp8_e4m3", "delta:int8", "none"]


class Streams:
    """FSDP's streams and the waits between them; does nothing on the CPU."""

    def __init__(self, judged: RecordedStreams | None) -> None:
        self.judged = judged
        self.own = judged.another() if judged is not None else None

    def run_on_fsdp_stream(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Run ``call`` on FSDP's stream, after the work queued on the model's stream."""
        if self.judged is None or self.own is None:
            return call(*args, **options)
        ready = self.judged.record()
        with self.judged.on(self.own.side_stream()):
            self.judged.wait(ready)
            return call(*args, **options)

    def arrived(self) -> None:
        """Make the model's stream wait for FSDP's, as FSDP does."""
        if self.judged is not None and self.own is not None:
            with self.judged.on(self.own.side_stream()):
                event = self.judged.record()
            self.judged.wait(event)


class Module:
    """A module without FSDP's state."""

    def _get_fsdp_state(self) -> SimpleNamespace:
        return SimpleNamespace(_fsdp_param_group=None)


def sharded(rank: int, judged: RecordedStreams | None, gradients: str, parameters: str) -> dict[str, Any]:
    """Return the gathered parameters and reduced gradients of some steps; in one step rank 1 has a NaN."""
    group = dist.distributed_c10d._get_default_group()
    state = State(
        parse_spec(gradients, FEEDBACKS, "gradients"),
        parse_spec(parameters, PARAMETER_PREFIXES, "parameters"),
        0,
        guard=Guard(),
        sample_every=1,
    )
    module: Any = Module()
    gather = CompressedAllGather(state, "m")
    scatter = CompressedReduceScatter(state, "m", module, BackwardOverlap())
    streams = Streams(judged)
    there = (lambda each: to_fake_cuda(each)) if judged is not None else (lambda each: each)
    own, seen = there(torch.linspace(-1, 1, SHARD) + rank), []
    for step in range(STEPS):
        state.begin_step()
        loss = there(torch.ones(()))
        state.observe(loss)
        for task in (-1, 0):  # in forward and in backward
            streams.run_on_fsdp_stream(record_streams, own)
            whole = streams.run_on_fsdp_stream(torch.empty, 2 * SHARD, device=own.device)
            with mock.patch.object(torch._C, "_current_graph_task_id", return_value=task):
                work = streams.run_on_fsdp_stream(gather, whole, own, group, async_op=True)
                streams.arrived()
                record_streams(whole)  # FSDP keeps the tensor alive until it has copied from it
                work.wait()
            seen.append(host_copy(whole * 1.0))
        gradient = torch.randn(2 * SHARD, generator=torch.Generator().manual_seed(10 * step + rank))
        if step == 1 and rank == 1:
            gradient[0] = torch.nan
        given = there(gradient)
        mean = torch.empty(SHARD, device=own.device)
        work = scatter(mean, given, group, dist.ReduceOp.AVG, async_op=True)
        work.wait()
        seen.append(host_copy(mean * 1.0))
        own = own - 0.1 * mean.nan_to_num()
    return {"seen": seen, "state": state}


def optimizer_steps(
    rank: int, judged: RecordedStreams | None, gradients: str, parameters: str
) -> dict[str, Any]:
    """Return the sharded optimizer's parameters after some steps."""
    there = (lambda each: to_fake_cuda(each)) if judged is not None else (lambda each: each)
    named = [
        (name, torch.nn.Parameter(there(torch.zeros(shape))))
        for name, shape in (("a", (40, 50)), ("b", (30,)), ("c", (33, 20)))
    ]
    optimiser = ShardedOptimizer(
        named,
        torch.optim.AdamW,
        lr=0.01,
        foreach=False,
        gradients=gradients,
        parameters_codec=parameters,
        bucket_bytes=5000,
        sample_every=1,
    )
    seen = []
    for step in range(3):
        dice = torch.Generator().manual_seed(10 * step + rank)
        for bucket in optimiser._buckets:
            for place, parameter in enumerate(bucket.parameters):
                parameter.grad = there(torch.randn(parameter.shape, generator=dice))
                optimiser._callback_queued = True  # by hand, outside of a backward pass
                optimiser._gradient_hook(bucket, place)(parameter)
        optimiser._after_backward()
        optimiser.clip_grad_norm_(1.0)
        optimiser.step()
        optimiser.zero_grad()
        seen += [host_copy(bucket.flat * 1.0) for bucket in optimiser._buckets]
    return {"seen": seen, "state": optimiser._compression}


def run(
    rank: int, world_size: int, what: Callable[..., dict[str, Any]], leave_out: str = ""
) -> list[dict[str, Any]]:
    cases = [(one, PARAMETERS[at % len(PARAMETERS)]) for at, one in enumerate(GRADIENTS)]
    here = [what(rank, None, *case) for case in cases]
    found = []
    streams = RecordedStreams(leave_out)
    with fake_cuda_rank(streams, leave_out):
        for case, expected in zip(cases, here):
            streams.faults.clear()
            made = what(rank, streams, *case)
            with unchecked():
                said, wanted = made["state"].report(), expected["state"].report()
            errors = [
                (each.relative_error, other.relative_error)
                for mine, theirs in zip(said.modules.values(), wanted.modules.values(), strict=True)
                for each, other in zip(mine.values(), theirs.values(), strict=True)
            ]
            same = [
                torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
                for a, b in zip(made["seen"], expected["seen"])
            ]
            found.append(
                {
                    "case": case,
                    "faults": list(dict.fromkeys(streams.faults)),
                    "same": same,
                    "errors": errors,
                    "events": (str(made["state"].events), str(expected["state"].events)),
                }
            )
        C.release()
    return found


@pytest.mark.parametrize("what", [sharded, optimizer_steps])
def test_nothing_waits_for_the_device(what: Callable[..., dict[str, Any]]) -> None:
    """The bits equal the CPU's."""
    for ranks in zip(*run_ranks(run, 2, what, env={"DTCOMM_RUNTIME": "process_group"}, timeout=120)):
        for said in ranks:
            assert said["faults"] == [], said["case"]
            assert all(said["same"]), said
            for here, there in said["errors"]:
                assert here == (there if there is None else pytest.approx(there, rel=1e-3))


@pytest.mark.parametrize(
    ("leave_out", "fault"), [("wait", "has not waited"), ("record_stream", "without record_stream")]
)
def test_missing_synchronization_is_detected(leave_out: str, fault: str) -> None:
    env = {"DTCOMM_RUNTIME": "process_group"}
    for ranks in zip(*run_ranks(run, 2, sharded, leave_out, env=env, timeout=120)):
        assert any(fault in each for each in ranks[0]["faults"]), ranks[0]["case"]
