"""Virtual ranks: one process, every call one launch of the fused kernels for all ranks, beside the memory floor.

On a GPU that is what the kernels do with its memory. In the emulator the same source runs on the CPU, so that what is
printed and checked can be seen without a GPU; times and shares say nothing there.
"""

from __future__ import annotations

import os
import platform

import torch

from dtcomm import planner
from dtcomm.cli.perf import placement
from dtcomm.cli.perf import timing as perf_measure
from dtcomm.cli.perf.backends.base import Moved
from dtcomm.cli.perf.bench import timed_values
from dtcomm.cli.perf.collectives import COLLECTIVES, DTYPES
from dtcomm.cli.perf.host import Rank, available
from dtcomm.cli.perf.options import Options, Variant
from dtcomm.cli.perf.report import Listener, Measurement, Report, Row
from dtcomm.cli.perf.runner import groups, limited, rounds
from dtcomm.cli.perf.verify import Case, Verdict, combined, digest, judge, values_for
from dtcomm.codecs import codec
from dtcomm.measure import gpu_info
from dtcomm.measure.device_clock import Clock, Run, make_clock
from dtcomm.measure.memory_floor import TimedCopy, minimum_bytes_moved
from dtcomm.measure.virtual_ranks import VirtualRanks
from dtcomm.runtime.cuda_peer.launch import FusedPlan

EMULATED_COPY = 4 << 20  # bytes: its share of a floor says nothing anyhow
WARNING = "emulated on the CPU: times and shares of the memory floor say nothing about a device"


def run(options: Options, listener: Listener, clock: Clock | None = None) -> Report:
    """Measure in this process; ``clock``: by default that of the device."""
    device = torch.device("cuda", torch.cuda.current_device()) if options.device == placement.CUDA else None
    bench = VirtualBench(options, device or torch.device("cpu"), clock)
    where = f"{device} {torch.cuda.get_device_name(device)}" if device else "emulated on the CPU"
    report = Report(
        options=options,
        ranks=[
            Rank(rank=rank, pid=os.getpid(), hostname=platform.node(), device=f"virtual, {where}")
            for rank in range(options.virtual)
        ],
        backends={"virtual": f"{options.virtual} ranks in one launch of the fused kernels"},
        gpus=[{"host": platform.node(), "device": str(device), **gpu_info.describe_gpu(device)}]
        if device
        else [],
        warnings=[] if device else [WARNING],
    )
    try:
        limit = limited(options, report, int(0.8 * _free(device) / options.virtual))
        return rounds(options, listener, report, groups(options, options.virtual, limit), bench.row)
    finally:
        listener.stop()


def _free(device: torch.device | None) -> int:
    return torch.cuda.mem_get_info(device)[0] if device else available()


class VirtualBench:
    """All ranks of each case, with the memory that they reach, and the copy that they are compared with."""

    def __init__(self, options: Options, device: torch.device, clock: Clock | None = None) -> None:
        self._options, self._device = options, device
        self._clock = clock or make_clock(device, options.report_cputime)
        self._virtual = VirtualRanks(options.virtual, device)
        self._copy = TimedCopy(
            device, self._clock, TimedCopy.LARGE if device.type == "cuda" else EMULATED_COPY
        )

    def row(self, variant: Variant, size: int, datatype: str, op: str, root: int) -> Row:
        """One line of the table."""
        collective, dtype = COLLECTIVES[self._options.collective], DTYPES[datatype]
        ranks = self._options.virtual
        count = collective.count(size, dtype, ranks)
        cases = [
            Case(
                collective=collective.name,
                count=count,
                dtype=dtype,
                op=op,
                root=max(root, 0),
                rank=rank,
                ranks=ranks,
            )
            for rank in range(ranks)
        ]
        algorithm, schedule = variant.algorithm, variant.schedule
        if schedule is None:
            whole = count * (ranks if collective.shards else 1)
            layout = codec(variant.codec)
            algorithm = planner.select(collective.name, whole, dtype, layout, ranks, algorithm=algorithm)
        plan = self._virtual.plan(
            collective.name,
            count,
            dtype,
            variant.codec,
            algorithm=algorithm,
            op=cases[0].arithmetic,
            root=cases[0].root,
            schedule=schedule,
        )
        wire = codec(variant.codec).wire_bytes(count, dtype)
        moved = minimum_bytes_moved(collective.name, algorithm, ranks, count, dtype.itemsize, wire)
        sources = [case.inputs(0, timed_values(dtype)).to(self._device) for case in cases]
        buffers = [torch.empty(case.span, dtype=dtype, device=self._device) for case in cases]
        placements = [False] if collective.separate else [False, True]
        if not self._options.out_of_place and not collective.separate:
            placements = [True]
        found = {
            in_place: self._measure(plan, variant, cases, sources, buffers, in_place, moved)
            for in_place in placements
        }
        return Row(
            size=collective.size(count, dtype, ranks),
            count=count,
            datatype=datatype,
            op=op,
            root=root,
            variant=variant,
            wire_bytes=plan.sent_bytes,
            out_of_place=found.get(False),
            in_place=found.get(True),
            moved=Moved(f"fused:{algorithm}"),
        )

    def _measure(
        self,
        plan: FusedPlan,
        variant: Variant,
        cases: list[Case],
        sources: list[torch.Tensor],
        buffers: list[torch.Tensor],
        in_place: bool,
        moved: int | None,
    ) -> Measurement:
        pairs = [
            case.arranged(buffer, source, in_place)
            for case, buffer, source in zip(cases, buffers, sources, strict=True)
        ]
        outputs, inputs = [output for output, _ in pairs], [given for _, given in pairs]
        go = self._call(plan, cases, inputs, outputs)

        def refill() -> None:
            for given, source in zip(inputs, sources, strict=True):
                given.copy_(source)

        first = cases[0]
        self._copy.time(3)
        timing = perf_measure.timed(
            self._options,
            go,
            refill if in_place else None,
            self._clock,
            lambda: None,
            safe=perf_measure.safe_calls(first.dtype, first.op, first.ranks),
            gather=lambda times: [times],
        )
        self._copy.time(3)
        self._virtual.check()
        rate, seconds = self._copy.bytes_per_second(reset=True), timing.statistics.p50
        share = None
        if moved and seconds > 0 and not self._options.report_cputime:
            share = moved / rate / seconds
        verdict = self._checked(go, variant, cases, inputs, outputs)
        if not in_place and verdict is not None:  # the check wrote over them
            for case, source in zip(cases, sources, strict=True):
                source.copy_(case.inputs(0, timed_values(case.dtype)))
        return Measurement(timing=timing, verdict=verdict, of_floor=share)

    def _call(
        self, plan: FusedPlan, cases: list[Case], inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> Run:
        """A call as its API has it: a broadcast and a reduce work on one tensor, and under a root only that one has
        all shards. An all_reduce can read one tensor and write another.
        """
        name, roots = cases[0].collective, [case.rank == case.root for case in cases]
        copies = name in ("broadcast", "reduce") and outputs[0] is not inputs[0]
        given: list[torch.Tensor | None] = list(outputs if copies else inputs)
        taken: list[torch.Tensor | None] = list(outputs)
        if name == "scatter":
            given = [each if root else None for each, root in zip(given, roots, strict=True)]
        if name in ("reduce", "gather"):
            taken = [each if root else None for each, root in zip(taken, roots, strict=True)]

        def call() -> None:
            if copies:
                for output, source in zip(outputs, inputs, strict=True):
                    output.copy_(source)
            self._virtual.run(plan, given, taken)

        return call

    def _checked(
        self,
        go: Run,
        variant: Variant,
        cases: list[Case],
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
    ) -> Verdict | None:
        verdicts: list[Verdict] = []
        for seed in range(1, self._options.check + 1):
            for case, given in zip(cases, inputs, strict=True):
                given.copy_(case.inputs(seed, values_for(variant, case.dtype)))
            go()
            self._virtual.check()
            verdicts += _judged(variant, cases, outputs, seed)
        return combined(verdicts) if verdicts else None


def _judged(variant: Variant, cases: list[Case], outputs: list[torch.Tensor], seed: int) -> list[Verdict]:
    alike = len({digest(output) for output in outputs}) == 1
    return [
        judge(output, case, variant, seed, lambda _: alike)
        for case, output in zip(cases, outputs, strict=True)
    ]
