"""One case on one backend as this rank takes part in it: its tensors, timed and checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dtcomm.cli.perf import timing as perf_measure
from dtcomm.cli.perf.backends.base import Backend, Call, Moved
from dtcomm.cli.perf.collectives import COLLECTIVES
from dtcomm.cli.perf.options import Options, Variant
from dtcomm.cli.perf.report import Measurement
from dtcomm.cli.perf.verify import Case, Verdict, combined, equal_on_all_ranks, judge, values_for
from dtcomm.measure import exact_inputs

BUFFERS_IN_FLIGHT = 4  # -m starts more operations than this on the same tensors in turn


class Bench:
    """One case on one backend, with the tensors for it."""

    def __init__(self, options: Options, backend: Backend, variant: Variant, case: Case) -> None:
        self._options, self._backend, self._variant, self._case = options, backend, variant, case
        self._clock = backend.place.clock(options.report_cputime)
        self._values = values_for(variant, case.dtype)
        # What is timed looks like gradients; what is checked may have to be made so that sums are exact.
        self._timed_values = timed_values(case.dtype)
        given = case.inputs(0, self._timed_values)
        self._source = backend.empty(given.numel(), case.dtype).copy_(given)
        buffers = min(options.agg_iters, BUFFERS_IN_FLIGHT)
        self._buffers = [backend.empty(case.span, case.dtype) for _ in range(buffers)]

    def measure(self, in_place: bool) -> Measurement:
        options, case = self._options, self._case
        calls = [self._call(buffer, in_place) for buffer in self._buffers]
        many = options.agg_iters
        repeats = -(-many // len(calls))  # of one tensor, in one iteration
        run = self._backend.operation(calls[0]) if many == 1 else self._several(calls, many)
        timing = perf_measure.timed(
            options,
            run,
            (lambda: self._refill(calls)) if in_place else None,
            self._clock,
            dist.barrier,
            safe=max(1, perf_measure.safe_calls(case.dtype, case.op, case.ranks) // repeats),
        )
        return Measurement(timing=timing, verdict=self._checked(calls[0]))

    def wire(self) -> tuple[int | None, Moved]:
        """Bytes sent by the rank that sends most, where the backend counts, and what moved them."""
        call = self._call(self._buffers[0], in_place=not COLLECTIVES[self._case.collective].separate)
        if not self._backend.in_place:
            call = self._call(self._buffers[0], in_place=False)
        self._refill([call])
        before = self._backend.tally()
        work = self._backend.operation(call, asynchronous=True)()
        work.wait()
        seen: list[Any] = [None] * self._case.ranks
        dist.all_gather_object(seen, getattr(work, "wire_bytes", None))
        return None if None in seen else max(seen), self._backend.moved(before)

    def _call(self, buffer: torch.Tensor, in_place: bool) -> Call:
        case, variant = self._case, self._variant
        output, source = case.arranged(buffer, self._source, in_place)
        return Call(
            collective=case.collective,
            output=output,
            input=source,
            op=case.op,
            root=case.root,
            codec=variant.codec,
            algorithm=variant.algorithm,
            schedule=variant.schedule,
        )

    def _refill(self, calls: list[Call]) -> None:
        for call in calls:
            if call.input is not self._source:
                call.input.copy_(self._source)

    def _several(self, calls: list[Call], many: int) -> Callable[[], None]:
        starts = [self._backend.operation(call, asynchronous=True) for call in calls]
        order = [starts[index % len(starts)] for index in range(many)]

        def run() -> None:
            works = [start() for start in order]
            for work in works:
                work.wait()

        return run

    def _checked(self, call: Call) -> Verdict | None:
        verdicts = []
        for seed in range(1, self._options.check + 1):
            call.input.copy_(self._case.inputs(seed, self._values))
            self._backend.operation(call)()
            verdicts.append(judge(call.output, self._case, self._variant, seed, equal_on_all_ranks))
            if call.input is self._source:
                self._source.copy_(self._case.inputs(0, self._timed_values))
        if not verdicts:
            return None
        everyone: list[list[Verdict]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, verdicts)
        return combined([verdict for theirs in everyone for verdict in theirs])


def timed_values(dtype: torch.dtype) -> exact_inputs.ValueSource:
    """What is timed: numbers like gradients, where the type has such."""
    return exact_inputs.normal if dtype.is_floating_point else exact_inputs.integers
