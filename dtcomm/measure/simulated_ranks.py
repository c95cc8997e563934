"""Compressors of several ranks in one thread, their collectives the one-shot all-reduce, to the bit.

Every rank has memories and factors of its own, as in processes; what they average goes through the kernels in the
order of the ranks, so that a run here and one of DDP with ``algorithm="one_shot"`` end with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtcomm.codecs import RandK, codec
from dtcomm.collectives import Work
from dtcomm.compress.bucket_averager import Averager
from dtcomm.compress.bucket_layout import Packing, pack
from dtcomm.compress.dgc import DGC
from dtcomm.compress.error_state import Handed, Memory
from dtcomm.compress.policy import Choice, Policy, as_policy
from dtcomm.compress.spec import Scheme
from dtcomm.kernels import counter_rng, local_steps, ops


@dataclass
class _Call:
    tensors: Sequence[torch.Tensor]
    codecs: Sequence[Any]
    residuals: Sequence[torch.Tensor | None]
    seed: int


class _Pending(Work):
    """Done when the call of the last rank is."""

    wire_bytes = 0
    seconds = 0.0

    def wait(self) -> None:
        return None


class Meeting:
    """Where the calls of all ranks meet; each of them makes its calls in order, and the last one runs them."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.payload_bytes = 0  # of one rank, all calls together
        self._calls: list[_Call] = []

    def reduce(self) -> Callable[..., Work]:
        """The collective of the next rank, with the arguments of `all_reduce_coalesced` that matter here."""

        def call(tensors: Sequence[torch.Tensor], op: str, **options: Any) -> Work:
            if op != "avg":
                raise ValueError(f"op: {op!r}; valid here: avg")
            self._calls.append(_Call(tensors, options["codec"], options["residuals"], options["seed"]))
            if len(self._calls) == self.ranks:
                calls, self._calls = self._calls, []
                self._run(calls)
            return _Pending(tensors)

        return call

    def _run(self, calls: list[_Call]) -> None:
        first = calls[0]
        for position, (tensor, which) in enumerate(zip(first.tensors, first.codecs, strict=True)):
            if which.needs_agreement:
                self._run_shared(which, calls, position)
                continue
            payloads = [
                ops.encode(
                    which,
                    call.tensors[position],
                    key=counter_rng.mix_key(call.seed, rank, 0),
                    residual=call.residuals[position],
                )
                for rank, call in enumerate(calls)
            ]
            self.payload_bytes += payloads[0].numel()
            mean = ops.reduce(which, payloads, tensor.numel(), divisor=self.ranks, dtype=tensor.dtype)
            for call in calls:
                call.tensors[position].copy_(mean)

    def _run_shared(self, which: RandK, calls: list[_Call], position: int) -> None:
        """One tensor whose values are added at positions that all ranks draw."""
        numel, seed = calls[0].tensors[position].numel(), calls[0].seed
        key, kept, values = local_steps.shared_key(seed), which.kept_in(numel), which.value_codec()
        payloads, owed = [], []
        for rank, call in enumerate(calls):
            x, residual = call.tensors[position], call.residuals[position]
            found = torch.empty(kept)
            owed.append(None if residual is None else torch.empty(kept))
            local_steps.gather(which, key, 0, x, residual, found, owed[-1])()
            rounding = counter_rng.mix_key(seed, rank, 0)
            payloads.append(ops.encode(values, found, key=rounding, residual=owed[-1]))
        self.payload_bytes += payloads[0].numel()
        mean = ops.reduce(values, payloads, kept, divisor=self.ranks)
        for call, debt in zip(calls, owed, strict=True):
            residual = call.residuals[position]
            if residual is not None and debt is not None:
                local_steps.settle(which, key, 0, debt, residual)()
            local_steps.scatter(which, key, 0, residual is None, mean, call.tensors[position])()


class Simulated:
    """The gradients of `parameters` ((name, tensor) pairs), averaged over `ranks` under `spec`.

    feedback, residual, seed: as `dtcomm.ddp.State` takes them.
    """

    def __init__(
        self,
        spec: str | Scheme | Policy,
        ranks: int,
        parameters: Sequence[tuple[str, torch.Tensor]],
        *,
        feedback: bool | str = True,
        residual: str = "fp32",
        seed: int = 0,
    ) -> None:
        self.policy = as_policy(spec)
        self.parameters = list(parameters)
        self.meeting = Meeting(ranks)
        schemes = [rule.codec for rule in self.policy.rules]
        self.memories = [Memory(feedback, residual, schemes) for _ in range(ranks)]
        reduces = [self.meeting.reduce() for _ in range(ranks)]
        self._averagers = [Averager("one_shot", None, seed, reduce=reduce) for reduce in reduces]
        self._packings: dict[tuple[int, ...], Packing] = {}
        self.steps = 0

    def average(self, gradients: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """The mean of ``gradients[rank]``, those of every parameter in order; all of one dtype."""
        ranks, step = self.meeting.ranks, self.steps
        self.steps += 1
        buffers = [torch.cat([gradient.flatten() for gradient in mine]) for mine in gradients]
        packing = self._packing(buffers[0], step)
        handed: list[list[Handed]] = []
        running = []
        for memory, averager, buffer in zip(self.memories, self._averagers, buffers, strict=True):
            tensors: list[torch.Tensor] = []
            residuals: list[torch.Tensor | None] = []
            mine: list[Handed] = []
            for segment, tensor in zip(packing.segments, packing.cut(buffer), strict=True):
                if segment.lossless:
                    memory.plain(segment, tensor)
                    tensors.append(tensor)
                    residuals.append(None)
                else:
                    mine.append(memory.hand(segment, tensor, ranks))
                    tensors.append(mine[-1].sent)
                    residuals.append(mine[-1].residual)
            handed.append(mine)
            running.append(averager.stages(packing, tensors, residuals, None, step))
        while [work for stages in running if (work := next(stages, None)) is not None]:
            pass
        for rank, (memory, mine) in enumerate(zip(self.memories, handed, strict=True)):
            for each in mine:
                memory.take(each, counter_rng.mix_key(self._averagers[rank].seed, rank, step))
        return self._cut(buffers[0])

    def _packing(self, buffer: torch.Tensor, step: int) -> Packing:
        def choose(name: str, gradient: torch.Tensor) -> Choice:
            choice = self.policy.choose(name, gradient)
            return Choice(codec=choice.codec.at(step)) if isinstance(choice.codec, DGC) else choice

        schemes = [rule.codec for rule in self.policy.rules]
        stage = tuple(scheme.stage(step) for scheme in schemes if isinstance(scheme, DGC))
        if stage not in self._packings:
            names = [name for name, _ in self.parameters]
            named = zip(names, self._cut(buffer), strict=True)
            self._packings[stage] = pack(buffer, named, stage, choose)
        return self._packings[stage]

    def _cut(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        sizes = [parameter.numel() for _, parameter in self.parameters]
        return [
            part.view(parameter.shape)
            for part, (_, parameter) in zip(torch.split(buffer, sizes), self.parameters, strict=True)
        ]


def plain_bytes(parameters: Sequence[tuple[str, torch.Tensor]]) -> int:
    """Of the same gradients uncompressed."""
    return sum(codec("none").wire_bytes(parameter.numel(), parameter.dtype) for _, parameter in parameters)
