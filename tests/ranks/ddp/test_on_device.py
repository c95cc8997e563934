"""The DDP hook on tensors of a device: the host waits for no compressor in any form."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

import dtcomm.collectives as C
from dtcomm import ddp
from dtcomm.codecs.spec import CODECS
from dtcomm.compress.error_state import FEEDBACKS
from dtcomm.compress.guard import Guard
from dtcomm.compress.residuals import FORMS
from dtcomm.compress.spec import COMPRESSORS
from dtcomm.ddp.auto import ProcessGroupConsensus, Tuner
from dtcomm.launch.ranks import run_ranks
from dtcomm.local_sgd import LocalSGD
from tests.support.fake_cuda_ranks import fake_cuda_rank
from tests.support.fake_cuda_tensor import fake_cuda_device, operators, to_fake_cuda, unchecked
from tests.support.stream_checker import RecordedStreams

#: More specs of a codec or compressor.
MORE = {
    "powersgd": ["powersgd:rank=3", "powersgd:rank=2,alternate=true", "powersgd:rank=2,factors=int8"],
    "exact": ["exact:bits=16"],
    "randk": ["randk:positions=shared"],
    "int8": ["int8:round=stochastic"],
}
SHAPES = {
    "bias": (28,),
    "a": (64, 33),
    "b": (40, 32),
    "c": (48, 41),
    "scale": (7,),
    "d": (40, 64),
    "e": (36, 50),
}
MATRICES = [name for name, shape in SHAPES.items() if len(shape) > 1]
BUCKETS = (("scale", "d", "e"), ("a", "bias", "b", "c"))
STEPS, BAD = 4, 1


class Bucket:
    """The methods of `GradBucket` that a hook calls."""

    def __init__(self, index: int, parameters: dict[str, torch.Tensor], on_device: bool) -> None:
        self.number, self.bucket_parameters = index, [parameters[name] for name in BUCKETS[index]]
        memory = torch.zeros(sum(parameter.numel() for parameter in self.bucket_parameters))
        self.memory = memory
        self.whole: torch.Tensor = to_fake_cuda(memory) if on_device else memory

    def index(self) -> int:
        return self.number

    def is_last(self) -> bool:
        return self.number == len(BUCKETS) - 1

    def buffer(self) -> torch.Tensor:
        return self.whole

    def parameters(self) -> list[torch.Tensor]:
        return self.bucket_parameters

    def gradients(self) -> list[torch.Tensor]:
        parts = torch.split(self.whole, [parameter.numel() for parameter in self.bucket_parameters])
        return [part.view(parameter.shape) for part, parameter in zip(parts, self.bucket_parameters)]


def run_steps(rank: int, on_device: bool, options: dict[str, Any]) -> tuple[list[torch.Tensor], ddp.DDPState]:
    """Return the means of some steps, in one of which rank 1 contributes a NaN, and the state."""
    parameters = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    state = ddp.DDPState(parameters=parameters.items(), sample_every=2, **{"feedback": True, **options})
    buckets = [Bucket(index, parameters, on_device) for index in range(len(BUCKETS))]
    means = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        for bucket in buckets:
            bucket.memory.copy_(torch.randn(bucket.memory.shape, generator=generator))
            if step == BAD and rank == 1:
                bucket.memory[-1] = torch.nan
            bucket.whole.mul_(1.0)  # as backward does, on its stream
        loss = torch.ones(1)
        state.observe(to_fake_cuda(loss) if on_device else loss)
        for bucket in buckets:
            state.reduce(bucket)  # type: ignore[arg-type]
        state._reducer._end_pass()
        for bucket in buckets:
            bucket.whole.mul_(1.0)  # as the optimiser does
            means.append(bucket.memory.clone())
    return means, state


def log_of_nvlink(rank: int, ranks: int) -> list[list[str]]:
    """What is logged where NVLink connects both GPUs, one GPU alone, and where it is not known."""
    logged = []
    with fake_cuda_rank(RecordedStreams()):
        for links in ((0, 18), (0, 0), None):
            with (
                mock.patch("dtcomm.torch_compat.nvlinks", lambda gpu, links=links: links),
                mock.patch("dtcomm.ddp.observers._log.warning") as warning,
            ):
                run_steps(rank, True, {"codec": "int8"})
            logged.append([call.args[0] % call.args[1:] for call in warning.call_args_list])
        C.release()
    return logged


def test_nvlink_on_one_host_is_said_to_leave_nothing_to_gain() -> None:
    first, second = run_ranks(log_of_nvlink, 2, env={"DTCOMM_RUNTIME": "process_group"}, timeout=120)
    said = [[line for line in lines if "NVLink" in line] for lines in first]
    assert [len(lines) for lines in said] == [1, 0, 0] and "nothing to gain" in said[0][0]
    assert not any(second)


def launches_of_passes(
    rank: int, ranks: int, guard: Guard | None, uses: bool | None, sample_every: int = 0
) -> list[list[int]]:
    """Return how many kernels and copies torch launches for each bucket, and at the end, in some passes.

    ``uses``: whether the passes use the parameters, if that is tracked.
    """
    counts = []
    with fake_cuda_rank(RecordedStreams()):
        parameters = {name: torch.zeros(shape, requires_grad=True) for name, shape in SHAPES.items()}
        state = ddp.DDPState(
            "int8", feedback=True, parameters=parameters.items(), guard=guard, sample_every=sample_every
        )
        if uses is not None:
            state._reducer.track_use(parameters.values())
        buckets = [Bucket(index, parameters, True) for index in range(len(BUCKETS))]
        for _ in range(STEPS):
            if uses:
                torch.stack([parameter.sum() for parameter in parameters.values()]).sum().backward()
            operators.clear()
            counts.append([])
            for bucket in buckets:
                state.reduce(bucket)  # type: ignore[arg-type]
                counts[-1].append(len(operators))
                operators.clear()
            state._reducer._end_pass()
            counts[-1].append(len(operators))
        C.release()
    return counts


@pytest.mark.parametrize("guard", [None, Guard()])
def test_the_guard_takes_few_launches(guard: Guard | None) -> None:
    """Besides codecs: two for each bucket, and some for all of a pass, in its first and its last bucket."""
    env = {"DTCOMM_RUNTIME": "process_group"}
    for uses in (None, True):
        for counts in run_ranks(launches_of_passes, 2, guard, uses, env=env, timeout=120):
            first, last, end = counts[-1]  # weights are copied to the device in the first passes
            if guard is None:
                assert (first, last, end) == (0, 0, 0)
            else:
                assert first <= 12 and last <= 3 and end <= 3


def test_measuring_errors_takes_two_launches_for_each_parameter() -> None:
    """And 14 for each bucket; in every pass here, in every 50th by default."""
    env = {"DTCOMM_RUNTIME": "process_group"}
    plain, measured = (
        run_ranks(launches_of_passes, 2, Guard(), None, every, env=env, timeout=120)[0][-1]
        for every in (0, 1)
    )
    assert 0 < sum(measured) - sum(plain) <= 2 * len(MATRICES) + 14 * len(BUCKETS) + 2


def test_residuals_of_unused_parameters_take_two_launches() -> None:
    counts = run_ranks(
        launches_of_passes, 2, None, False, env={"DTCOMM_RUNTIME": "process_group"}, timeout=120
    )
    assert all(sum(of_pass) == 2 * len(MATRICES) for of_pass in counts[0][1:])


def policy(specs: list[str]) -> str:
    rules = [f"name={name} -> {spec}" for name, spec in zip(MATRICES, specs)]
    return "; ".join(["ndim<2 -> none", *rules, "* -> none"])


def cases() -> Iterator[dict[str, Any]]:
    """Yield options with every scheme, one for each matrix, and with every form and kind of feedback."""
    specs = [
        spec
        for name in (*CODECS, *(compressor for compressor in COMPRESSORS if compressor != "dgc"))
        for spec in (name, *MORE.get(name, []))
    ]
    for first in range(0, len(specs), len(MATRICES)):
        yield {"codec": policy(specs[first : first + len(MATRICES)])}
    lossy = ["topk:ratio=0.1", "powersgd:rank=2", "int4"]
    for feedback in (*FEEDBACKS[1:], False):  # the cases above have the first one
        yield {"codec": policy(lossy), "feedback": feedback}
    for form in list(FORMS)[1:]:
        yield {"codec": policy(lossy), "residual": form}
    # Its momentum goes to all parameters.
    yield {"codec": policy(["dgc", "dgc:ratio=0.05,clip=1.0,warmup=2", "int8"])}


def run(rank: int, world_size: int, cases: list[dict[str, Any]], leave_out: str = "") -> list[dict[str, Any]]:
    results = []
    on_cpu = [run_steps(rank, False, options) for options in cases]
    streams = RecordedStreams(leave_out)
    with fake_cuda_rank(streams, leave_out):
        for options, (expected, plain) in zip(cases, on_cpu):
            streams.faults.clear()
            means, state = run_steps(rank, True, options)
            with unchecked():
                report, expected_report, saved = state.report(), plain.report(), state.state_dict()
            results.append(
                {
                    "cpu": expected,
                    "device": means,
                    "faults": list(dict.fromkeys(streams.faults)),
                    "errors": [
                        (a.relative_error, b.relative_error)
                        for a, b in zip(report.by_message, expected_report.by_message)
                    ],
                    "residuals": {name: on_cpu_only(kept) for name, kept in saved["residuals"].items()},
                    "events": (
                        [str(event) for event in state.events],
                        [str(event) for event in plain.events],
                    ),
                }
            )
        C.release()
    return results


def on_cpu_only(kept: torch.Tensor | dict[str, Any]) -> bool:
    """Return whether a saved residual, or the payload that stands for it, lies in host memory."""
    tensors = [kept] if isinstance(kept, torch.Tensor) else kept.values()
    found = [tensor.is_cpu for tensor in tensors if isinstance(tensor, torch.Tensor)]
    return bool(found) and all(found)


def run_on_ranks(cases: list[dict[str, Any]], leave_out: str = "") -> list[tuple[dict[str, Any], ...]]:
    env = {"DTCOMM_RUNTIME": "process_group"}
    return list(zip(*run_ranks(run, 2, cases, leave_out, env=env, timeout=120)))


def bits_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
def test_no_compressor_waits_for_the_device() -> None:
    """Bits equal the CPU's unless norms or matrix products are the device's; so do events and errors."""
    all_cases = list(cases())
    for options, ranks in zip(all_cases, run_on_ranks(all_cases), strict=True):
        for result in ranks:
            assert result["faults"] == [], options
            assert all(map(bits_equal, result["device"], ranks[0]["device"])), options
            exactly = "powersgd" not in options["codec"] and "clip" not in options["codec"]
            for at, (on_cpu, on_device) in enumerate(zip(result["cpu"], result["device"], strict=True)):
                step = at // len(BUCKETS)
                assert bool(on_cpu.isnan().any()) == (step == BAD) == bool(on_device.isnan().any())
                if exactly:
                    assert bits_equal(on_cpu, on_device), (options, at)
                elif step <= BAD:  # after the NaN the factors of PowerSGD start from other values
                    torch.testing.assert_close(on_device, on_cpu, equal_nan=True, rtol=1e-4, atol=1e-4)
            for on_cpu, on_device in result["errors"]:
                assert on_cpu == pytest.approx(on_device, rel=0.05), options
            assert all(result["residuals"].values()) and result["events"][0] == result["events"][1]


@pytest.mark.parametrize(
    ("leave_out", "fault"),
    [("wait", "has not waited"), ("record_stream", "without record_stream"), ("exchange", "has not waited")],
)
def test_missing_synchronisation_is_detected(leave_out: str, fault: str) -> None:
    options = [{"codec": "int8", "residual": "int8"}, {"codec": "powersgd"}]
    for ranks in run_on_ranks(options, leave_out):
        assert any(fault in text for text in ranks[0]["faults"]), ranks[0]["faults"]


def average_weights(rank: int, world_size: int) -> list[tuple[bool, list[str]]]:
    """Return, for two schemes, whether averaged weights equal the CPU's, and the faults."""
    results = []
    for spec in ("powersgd:rank=2", "topk:ratio=0.1"):
        streams, ends = RecordedStreams(), []
        for on_device in (False, True):
            with fake_cuda_rank(streams) if on_device else nullcontext():
                weights = {name: torch.ones(shape) for name, shape in SHAPES.items()}
                model = torch.nn.Module()
                for name, weight in weights.items():
                    model.register_parameter(
                        name, torch.nn.Parameter(to_fake_cuda(weight) if on_device else weight)
                    )
                local_sgd = LocalSGD(model, 1, spec, sample_every=1, residual="int8")
                for step in range(2):
                    generator = torch.Generator().manual_seed(10 * step + rank)
                    for weight in weights.values():
                        weight.add_(torch.randn(weight.shape, generator=generator))
                    local_sgd.step()
                ends.append(weights)
                if on_device:
                    C.release()
        same = all(torch.allclose(ends[0][name], ends[1][name], rtol=1e-4, atol=1e-5) for name in SHAPES)
        results.append((same, streams.faults))
    return results


def test_an_average_of_weights_waits_only_for_the_mean() -> None:
    for result in run_ranks(average_weights, 2, env={"DTCOMM_RUNTIME": "process_group"}, timeout=120):
        for same, faults in result:
            assert same and all("in __bool__" in fault or "in tolist" in fault for fault in faults)
            assert 0 < len(faults) < 3 * 2 * len(SHAPES)


def train_with_auto(rank: int, world_size: int) -> tuple[list[torch.Tensor], list[int], list[str]]:
    """Return the means of "auto", the steps with a fault though it decided nothing, and its decisions."""
    streams, unexpected = RecordedStreams(), []
    parameters = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    # Plain DDP uses the group's own backend, which has no device here.
    with fake_cuda_rank(streams), mock.patch.object(ProcessGroupConsensus, "emulated", lambda _: True):
        state = ddp.DDPState(
            "auto", parameters=parameters.items(), candidates=["int8", "powersgd"], sample_every=2
        )
        buckets = [Bucket(index, parameters, True) for index in range(len(BUCKETS))]
        means = []
        step = 0
        while not state.events or step < 16:
            generator = torch.Generator().manual_seed(100 * step + rank)
            tuner = state._chooser
            assert isinstance(tuner, Tuner)
            reads_nothing = not tuner.reads_clock(step)
            for bucket in buckets:
                bucket.memory.copy_(torch.randn(bucket.memory.shape, generator=generator))
                bucket.whole.mul_(1.0)
                state.reduce(bucket)  # type: ignore[arg-type]
            state._reducer._end_pass()
            if reads_nothing and streams.faults:
                unexpected.append(step)
            streams.faults.clear()
            means += [bucket.memory.clone() for bucket in buckets]
            step += 1
        C.release()
        return means, unexpected, [event.action for event in state.events]


def test_auto_waits_only_where_it_decides() -> None:
    first, second = run_ranks(train_with_auto, 2, env={"DTCOMM_RUNTIME": "process_group"}, timeout=120)
    assert first[1] == second[1] == [] and first[2] == second[2] != []
    assert all(map(bits_equal, first[0], second[0]))


def faults_of_waits(rank: int, world_size: int) -> list[str]:
    """Return the faults of all ways in which a compressor could make the host wait."""
    faults = []
    streams = RecordedStreams()
    with fake_cuda_device(streams):
        x = to_fake_cuda(torch.arange(4.0))
        for wait in (
            lambda: float(x.sum()),
            lambda: bool(x[0]),
            lambda: x[x > 1],
            lambda: x.nonzero(),
            lambda: x.cpu(),
            lambda: x.tolist(),
            lambda: torch.tensor([1.0], device=x.device),
            lambda: torch.ones(3).to(x.device),
            lambda: torch.ones(4).copy_(x),
        ):
            wait()
            faults.append(streams.faults.pop() if streams.faults else "nothing")
    return faults


def test_every_kind_of_wait_is_detected() -> None:
    assert all("the host waits" in fault for fault in faults_of_waits(0, 1))
