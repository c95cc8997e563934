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
from dtcomm.fsdp import ShardedOptimizer
from dtcomm.fsdp.collectives import BackwardOverlap, CompressedAllGather, CompressedReduceScatter
from dtcomm.fsdp.options import FEEDBACKS, STATE_DEFAULTS, StateOptions, parse_specs
from dtcomm.fsdp.state import FSDPState
from dtcomm.launch.ranks import run_ranks
from dtcomm.streams import record_streams
from tests.support.fake_cuda_ranks import fake_cuda_rank
from tests.support.fake_cuda_tensor import host_copy, to_fake_cuda, unchecked
from tests.support.stream_checker import RecordedStreams

SHARD, STEPS = 1500, 4
GRADIENTS = [f"{prefix}:int4" if prefix else "int8" for prefix in FEEDBACKS]
PARAMETERS = ["fp8_e4m3", "delta:int8", "none"]


class FsdpStreams:
    """FSDP's streams and the waits between them; does nothing on the CPU."""

    def __init__(self, streams: RecordedStreams | None) -> None:
        self.streams = streams
        self.fsdp_streams = streams.another() if streams is not None else None

    def run_on_fsdp_stream(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Run ``call`` on FSDP's stream, after the work queued on the model's stream."""
        if self.streams is None or self.fsdp_streams is None:
            return call(*args, **options)
        ready = self.streams.record()
        with self.streams.on(self.fsdp_streams.side_stream()):
            self.streams.wait(ready)
            return call(*args, **options)

    def wait_for_fsdp_stream(self) -> None:
        """Make the model's stream wait for FSDP's, as FSDP does."""
        if self.streams is not None and self.fsdp_streams is not None:
            with self.streams.on(self.fsdp_streams.side_stream()):
                event = self.streams.record()
            self.streams.wait(event)


class ModuleWithoutState:
    """A module without FSDP's state."""

    def _get_fsdp_state(self) -> SimpleNamespace:
        return SimpleNamespace(_fsdp_param_group=None)


def run_collectives(
    rank: int, streams: RecordedStreams | None, gradients: str, parameters: str
) -> dict[str, Any]:
    """Return the gathered parameters and reduced gradients of some steps; in one step rank 1 has a NaN."""
    group = dist.distributed_c10d._get_default_group()
    options: StateOptions = {**STATE_DEFAULTS, "sample_every": 1}
    state = FSDPState(parse_specs(gradients, parameters, options), options)
    module: Any = ModuleWithoutState()
    gather = CompressedAllGather(state, "m")
    scatter = CompressedReduceScatter(state, "m", module, BackwardOverlap())
    fsdp_streams = FsdpStreams(streams)
    to_device = (lambda x: to_fake_cuda(x)) if streams is not None else (lambda x: x)
    shard, results = to_device(torch.linspace(-1, 1, SHARD) + rank), []
    for step in range(STEPS):
        state.begin_step()
        loss = to_device(torch.ones(()))
        state.observe(loss)
        for task in (-1, 0):  # in forward and in backward
            fsdp_streams.run_on_fsdp_stream(record_streams, shard)
            gathered = fsdp_streams.run_on_fsdp_stream(torch.empty, 2 * SHARD, device=shard.device)
            with mock.patch.object(torch._C, "_current_graph_task_id", return_value=task):
                work = fsdp_streams.run_on_fsdp_stream(gather, gathered, shard, group, async_op=True)
                fsdp_streams.wait_for_fsdp_stream()
                record_streams(gathered)  # FSDP keeps the tensor alive until it has copied from it
                work.wait()
            results.append(host_copy(gathered * 1.0))
        gradient = torch.randn(2 * SHARD, generator=torch.Generator().manual_seed(10 * step + rank))
        if step == 1 and rank == 1:
            gradient[0] = torch.nan
        device_gradient = to_device(gradient)
        mean = torch.empty(SHARD, device=shard.device)
        work = scatter(mean, device_gradient, group, dist.ReduceOp.AVG, async_op=True)
        work.wait()
        results.append(host_copy(mean * 1.0))
        shard = shard - 0.1 * mean.nan_to_num()
    return {"results": results, "state": state}


def run_optimizer(
    rank: int, streams: RecordedStreams | None, gradients: str, parameters: str
) -> dict[str, Any]:
    """Return the sharded optimizer's parameters after some steps."""
    to_device = (lambda x: to_fake_cuda(x)) if streams is not None else (lambda x: x)
    named_parameters = [
        (name, torch.nn.Parameter(to_device(torch.zeros(shape))))
        for name, shape in (("a", (40, 50)), ("b", (30,)), ("c", (33, 20)))
    ]
    options: dict[str, Any] = {"lr": 0.01, "foreach": False, "bucket_bytes": 5000, "sample_every": 1}
    optimizer = ShardedOptimizer(
        named_parameters, torch.optim.AdamW, gradients=gradients, parameters=parameters, **options
    )
    results = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        for bucket in optimizer._buckets:
            for index, parameter in enumerate(bucket.parameters):
                parameter.grad = to_device(torch.randn(parameter.shape, generator=generator))
                optimizer._callback_queued = True  # by hand, outside of a backward pass
                optimizer._gradient_hook(bucket, index)(parameter)
        optimizer._after_backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        results += [host_copy(bucket.flat * 1.0) for bucket in optimizer._buckets]
    return {"results": results, "state": optimizer._compression}


def run(
    rank: int, world_size: int, function: Callable[..., dict[str, Any]], omitted: str = ""
) -> list[dict[str, Any]]:
    cases = [(gradients, PARAMETERS[index % len(PARAMETERS)]) for index, gradients in enumerate(GRADIENTS)]
    on_cpu = [function(rank, None, *case) for case in cases]
    outcomes = []
    streams = RecordedStreams(omitted)
    with fake_cuda_rank(streams, omitted):
        for case, expected in zip(cases, on_cpu):
            streams.faults.clear()
            actual = function(rank, streams, *case)
            with unchecked():
                report, expected_report = actual["state"].report(), expected["state"].report()
            traffic, expected_traffic = (
                [kind for kinds in each.modules.values() for kind in kinds.values()]
                for each in (report, expected_report)
            )
            pairs = zip(traffic, expected_traffic, strict=True)
            errors = [(kind.relative_error, other.relative_error) for kind, other in pairs]
            same = [
                torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
                for a, b in zip(actual["results"], expected["results"])
            ]
            events = (str(actual["state"].events), str(expected["state"].events))
            faults = list(dict.fromkeys(streams.faults))
            outcomes.append(
                {"case": case, "faults": faults, "same": same, "errors": errors, "events": events}
            )
        C.release()
    return outcomes


@pytest.mark.parametrize("function", [run_collectives, run_optimizer])
def test_nothing_waits_for_the_device(function: Callable[..., dict[str, Any]]) -> None:
    """The results equal the CPU's bit for bit."""
    for ranks in zip(*run_ranks(run, 2, function, env={"DTCOMM_RUNTIME": "process_group"}, timeout=120)):
        for outcome in ranks:
            assert outcome["faults"] == [], outcome["case"]
            assert all(outcome["same"]), outcome
            for actual, expected in outcome["errors"]:
                assert actual == (expected if expected is None else pytest.approx(expected, rel=1e-3))


@pytest.mark.parametrize(
    ("omitted", "fault"), [("wait", "has not waited"), ("record_stream", "without record_stream")]
)
def test_missing_synchronization_is_detected(omitted: str, fault: str) -> None:
    env = {"DTCOMM_RUNTIME": "process_group"}
    for ranks in zip(*run_ranks(run, 2, run_collectives, omitted, env=env, timeout=120)):
        assert any(fault in message for message in ranks[0]["faults"]), ranks[0]["case"]
