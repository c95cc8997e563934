"""``dtcomm perf --virtual``: all ranks in one process, each call one launch of the fused kernels.

On a GPU this compares the kernels with the memory floor. In the emulator the same source runs on the CPU: output and
checks can be seen without a GPU, but times and shares are not those of a device.
"""

from __future__ import annotations

import os
import platform

import torch

from dtcomm import planner
from dtcomm.cli.perf import placement, timing
from dtcomm.cli.perf.args import PerfOptions, Variant
from dtcomm.cli.perf.backends.base import TransportUsed
from dtcomm.cli.perf.collectives import COLLECTIVES
from dtcomm.cli.perf.placement import RankInfo, available_memory
from dtcomm.cli.perf.report import Measurement, PerfReport, PerfRow, ProgressListener
from dtcomm.cli.perf.runner import RowGroup, measure_rows, row_groups, size_limit, timed_values
from dtcomm.cli.perf.verify import Case, CheckResult, check_result, check_values, checksum, combine_results
from dtcomm.codecs import codec
from dtcomm.measure import device as device_info
from dtcomm.measure.device import Clock, Run, make_clock
from dtcomm.measure.memory_floor import TimedCopy, minimum_bytes_moved
from dtcomm.measure.virtual_ranks import VirtualRanks
from dtcomm.runtime.cuda_peer.launch import FusedPlan

EMULATED_COPY = 4 << 20  # bytes; the share of the floor is meaningless in the emulator
WARNING = "emulated on the CPU: times and shares of the memory floor are not those of a device"


def run(options: PerfOptions, listener: ProgressListener, clock: Clock | None = None) -> PerfReport:
    """Measure in this process; ``clock`` is by default that of the device."""
    device = torch.device("cuda", torch.cuda.current_device()) if options.device == placement.CUDA else None
    bench = VirtualBench(options, device or torch.device("cpu"), clock)
    description = f"{device} {torch.cuda.get_device_name(device)}" if device else "emulated on the CPU"
    report = PerfReport(
        options=options,
        ranks=[
            RankInfo(rank=rank, pid=os.getpid(), hostname=platform.node(), device=f"virtual, {description}")
            for rank in range(options.virtual)
        ],
        backends={"virtual": f"{options.virtual} ranks in one launch of the fused kernels"},
        gpus=[{"host": platform.node(), "device": str(device), **device_info.describe_gpu(device)}]
        if device
        else [],
        warnings=[] if device else [WARNING],
    )
    try:
        limit = size_limit(options, report, int(0.8 * _free(device) / options.virtual))
        return measure_rows(
            options, listener, report, row_groups(options, options.virtual, limit), bench.measure_row
        )
    finally:
        listener.stop()


def _free(device: torch.device | None) -> int:
    return torch.cuda.mem_get_info(device)[0] if device else available_memory()


class VirtualBench:
    """Measures cases on virtual ranks, beside the timed copy they are compared with."""

    def __init__(self, options: PerfOptions, device: torch.device, clock: Clock | None = None) -> None:
        self._options, self._device = options, device
        self._clock = clock or make_clock(device, options.report_cputime)
        self._virtual = VirtualRanks(options.virtual, device)
        self._copy = TimedCopy(
            device, self._clock, TimedCopy.LARGE if device.type == "cuda" else EMULATED_COPY
        )

    def measure_row(self, variant: Variant, group: RowGroup) -> PerfRow:
        """Measure one line of the table."""
        collective, ranks = COLLECTIVES[self._options.collective], self._options.virtual
        cases = [group.case(collective, rank, ranks) for rank in range(ranks)]
        count, dtype = cases[0].count, cases[0].dtype
        algorithm, schedule = variant.algorithm, variant.schedule
        if schedule is None:
            whole = count * (ranks if collective.sharded else 1)
            layout = codec(variant.codec)
            algorithm = planner.select(collective.name, whole, dtype, layout, ranks, algorithm=algorithm)
        plan = self._virtual.plan(
            collective.name,
            count,
            dtype,
            variant.codec,
            algorithm=algorithm,
            op=cases[0].reduce_op,
            root=cases[0].root,
            schedule=schedule,
        )
        wire = codec(variant.codec).wire_bytes(count, dtype)
        bytes_moved = minimum_bytes_moved(collective.name, algorithm, ranks, count, dtype.itemsize, wire)
        sources = [case.inputs(0, timed_values(dtype)).to(self._device) for case in cases]
        buffers = [torch.empty(case.buffer_numel, dtype=dtype, device=self._device) for case in cases]
        placements = [False] if collective.needs_two_tensors else [False, True]
        if not self._options.out_of_place and not collective.needs_two_tensors:
            placements = [True]
        measurements = {
            in_place: self._measure(plan, variant, cases, sources, buffers, in_place, bytes_moved)
            for in_place in placements
        }
        return PerfRow(
            size=collective.size(count, dtype, ranks),
            count=count,
            datatype=group.datatype,
            op=group.op,
            root=group.root,
            variant=variant,
            wire_bytes=plan.sent_bytes,
            out_of_place=measurements.get(False),
            in_place=measurements.get(True),
            transport=TransportUsed(f"fused:{algorithm}"),
        )

    def _measure(
        self,
        plan: FusedPlan,
        variant: Variant,
        cases: list[Case],
        sources: list[torch.Tensor],
        buffers: list[torch.Tensor],
        in_place: bool,
        bytes_moved: int | None,
    ) -> Measurement:
        pairs = [
            case.output_and_input(buffer, source, in_place)
            for case, buffer, source in zip(cases, buffers, sources, strict=True)
        ]
        outputs, inputs = [output for output, _ in pairs], [source for _, source in pairs]
        run = self._call(plan, cases, inputs, outputs)

        def refill() -> None:
            for tensor, source in zip(inputs, sources, strict=True):
                tensor.copy_(source)

        first = cases[0]
        self._copy.time(3)
        measured = timing.time_operation(
            self._options,
            run,
            refill if in_place else None,
            self._clock,
            lambda: None,
            safe=timing.calls_before_overflow(first.dtype, first.op, first.ranks),
            gather=lambda times: [times],
        )
        self._copy.time(3)
        self._virtual.check()
        rate, seconds = self._copy.bytes_per_second(reset=True), measured.statistics.p50
        share = None
        if bytes_moved and seconds > 0 and not self._options.report_cputime:
            share = bytes_moved / rate / seconds
        checked = self._check(run, variant, cases, inputs, outputs)
        if not in_place and checked is not None:  # the check overwrote the inputs
            for case, source in zip(cases, sources, strict=True):
                source.copy_(case.inputs(0, timed_values(case.dtype)))
        return Measurement(timing=measured, check=checked, memory_floor_share=share)

    def _call(
        self, plan: FusedPlan, cases: list[Case], inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> Run:
        """Return a function that makes the call with the tensors its API takes.

        broadcast and reduce work on one tensor; of rooted collectives only the root has all shards. all_reduce can read
        one tensor and write another.
        """
        name, roots = cases[0].collective, [case.rank == case.root for case in cases]
        copies = name in ("broadcast", "reduce") and outputs[0] is not inputs[0]
        sources: list[torch.Tensor | None] = list(outputs if copies else inputs)
        targets: list[torch.Tensor | None] = list(outputs)
        if name == "scatter":
            sources = [tensor if root else None for tensor, root in zip(sources, roots, strict=True)]
        if name in ("reduce", "gather"):
            targets = [tensor if root else None for tensor, root in zip(targets, roots, strict=True)]

        def call() -> None:
            if copies:
                for output, source in zip(outputs, inputs, strict=True):
                    output.copy_(source)
            self._virtual.run(plan, sources, targets)

        return call

    def _check(
        self,
        run: Run,
        variant: Variant,
        cases: list[Case],
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
    ) -> CheckResult | None:
        checks: list[CheckResult] = []
        for seed in range(1, self._options.check + 1):
            for case, tensor in zip(cases, inputs, strict=True):
                tensor.copy_(case.inputs(seed, check_values(variant, case.dtype)))
            run()
            self._virtual.check()
            checks += _check_results(variant, cases, outputs, seed)
        return combine_results(checks) if checks else None


def _check_results(
    variant: Variant, cases: list[Case], outputs: list[torch.Tensor], seed: int
) -> list[CheckResult]:
    same_bits = len({checksum(output) for output in outputs}) == 1
    return [
        check_result(output, case, variant, seed, lambda _: same_bits)
        for case, output in zip(cases, outputs, strict=True)
    ]
