"""FSDP's ranks in one thread, with the same flat tensors, engine and bytes as in processes.

The gradients of the ranks are computed one after the other. What `fully_shard` and `dtcomm.fsdp` would do with them and
with the parameters is done by the native state machines of all ranks, stepped in one thread; a test compares the bits.
Specs of two levels run on two hosts with half of the ranks each.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dtcomm import algorithms
from dtcomm.codecs import Codec
from dtcomm.fsdp import spec
from dtcomm.fsdp.flat_layout import ParameterShape, ShardedLayout
from dtcomm.fsdp.residual_store import FullResidual, LoCoResidual, ResidualStore
from dtcomm.fsdp.spec import FEEDBACKS, PARAMETER_PREFIXES, UNCOMPRESSED, CompressionSpec, parse_spec
from dtcomm.kernels import counter_rng
from dtcomm.kernels.ops import encode, reduce, reduce_encode
from dtcomm.measure.virtual_ranks import Operation, Simulation, run_simulated
from dtcomm.runtime.types import Buffers, OpSpec, TensorSpec

Tensors = dict[str, torch.Tensor]
PIECE = 256 * 1024


@dataclass(frozen=True, kw_only=True)
class Method:
    """Arguments of `dtcomm.fsdp.compress`; `name` is the method's name on the page."""

    name: str
    gradients: str = "none"
    parameters: str = "none"


def _preset(name: str, called: str) -> Method:
    preset = spec.PRESETS[name]
    return Method(name=called, gradients=preset.gradients, parameters=preset.parameters)


ZERO = spec.PRESETS["zero++"]
METHODS = {
    method.name: method
    for method in (
        Method(name="uncompressed"),
        Method(name="defaults", gradients="int8"),
        Method(name="int8, fp8", gradients="int8", parameters="fp8_e4m3"),
        Method(name="qwZ", parameters=ZERO.parameters),
        Method(name="qgZ", gradients=ZERO.gradients),
        Method(name="ZeRO++", gradients=ZERO.gradients, parameters=ZERO.parameters),
        Method(name="int4, feedback", gradients="ef:int4:block=128"),
        _preset("loco", "LoCo"),
        _preset("sdp4bit", "SDP4Bit"),
    )
}


class Shards:
    """A model whose units (each module of `blocks`, and the remaining parameters) are sharded over `ranks` ranks."""

    def __init__(self, model: nn.Module, blocks: Sequence[str], method: Method, ranks: int) -> None:
        self.ranks = ranks
        self.gradients = parse_spec(method.gradients, FEEDBACKS, "gradients")
        self.parameters = parse_spec(method.parameters, PARAMETER_PREFIXES, "parameters")
        self.wire_bytes = self.plain_bytes = 0  # of all ranks
        kinds = {"": None, "ef": FullResidual, "loco": LoCoResidual}
        kind = kinds[self.gradients.prefix]
        self._errors: list[ResidualStore | None] = [kind() if kind else None for _ in range(ranks)]
        self._references: Tensors = {}
        self._last = 0
        units: dict[str, list[ParameterShape]] = {}
        for name, parameter in model.named_parameters():
            unit = next((block for block in blocks if name.startswith(f"{block}.")), "")
            units.setdefault(unit, []).append(ParameterShape(name, parameter.shape))
        self._flats = {unit: ShardedLayout(tuple(pieces)) for unit, pieces in units.items()}

    def gather(self, exact: Mapping[str, torch.Tensor]) -> Tensors:
        """Return the parameters that every rank computes with, from exact parameters by name."""
        gathered: Tensors = {}
        for unit, flat in self._flats.items():
            exact_flat = flat.join(exact, self.ranks)
            reference = self._references.get(unit)
            parameters = self._usable(self.parameters, exact_flat)
            if self.parameters.prefix != "delta":
                received = self._all_gather(exact_flat, parameters)
            elif reference is None:
                received = self._all_gather(exact_flat, UNCOMPRESSED)
            else:
                received = reference + self._all_gather(exact_flat - reference, parameters)
            if self.parameters.prefix == "delta":
                self._references[unit] = received
            # Backward gathers the parameters again, except the root's; differences are known by then.
            if unit:
                self.plain_bytes += 4 * exact_flat.numel() * (self.ranks - 1)
                self.wire_bytes += 0 if self.parameters.prefix == "delta" else self._last
            gathered |= flat.split(received, self.ranks)
        return {name: value.view(exact[name].shape) for name, value in gathered.items()}

    def scatter(self, gradients: Sequence[Mapping[str, torch.Tensor]]) -> Tensors:
        """Return the mean of ``gradients[rank]`` as the ranks receive it."""
        means: Tensors = {}
        for unit, flat in self._flats.items():
            inputs = [flat.join(of_rank, self.ranks) for of_rank in gradients]
            spec = self._usable(self.gradients, inputs[0])
            residuals = [
                None if errors is None or spec.is_none else errors.take(unit, flat_input)
                for errors, flat_input in zip(self._errors, inputs, strict=True)
            ]
            outputs = [flat_input.new_empty(flat_input.numel() // self.ranks) for flat_input in inputs]
            if spec.between is None:
                self._run("reduce_scatter", "avg", spec.inside, inputs, outputs, residuals)
            else:
                self._by_levels(inputs, outputs, residuals)
            for rank, (errors, residual) in enumerate(zip(self._errors, residuals, strict=True)):
                if errors is not None and residual is not None:
                    errors.put(unit, residual, counter_rng.mix_key(0, rank, 0))
            means |= flat.split(torch.cat(outputs), self.ranks)
        return {name: value.view(gradients[0][name].shape) for name, value in means.items()}

    def _usable(self, spec: CompressionSpec, flat: torch.Tensor) -> CompressionSpec:
        """Return the spec of a flat tensor's collective: none where no payload of a shard would be smaller."""
        return UNCOMPRESSED if spec.obstacle(flat.dtype, flat.numel() // self.ranks) else spec

    def _all_gather(self, flat: torch.Tensor, codecs: CompressionSpec) -> torch.Tensor:
        inputs = list(flat.clone().view(self.ranks, -1))
        outputs = [torch.empty_like(flat) for _ in inputs]
        self._run("all_gather", "sum", codecs.inside, inputs, outputs, [None] * self.ranks)
        if not all(torch.equal(outputs[0], output) for output in outputs):
            raise AssertionError(f"{codecs}: the ranks have different parameters")
        return outputs[0]

    def _run(
        self,
        collective: str,
        op: str,
        codec: Codec,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        residuals: Sequence[torch.Tensor | None],
    ) -> None:
        """Run a collective on the native engine, which has one codec for all levels."""
        numel = min(inputs[0].numel(), outputs[0].numel())
        schedule = algorithms.build("one_shot", collective, self.ranks)
        shape = OpSpec(collective, op, (TensorSpec(numel, inputs[0].dtype, codec),), "one_shot")
        operations = [
            [Operation(shape=shape, schedule=schedule, buffers=[Buffers(flat_input, output, residual)])]
            for flat_input, output, residual in zip(inputs, outputs, residuals, strict=True)
        ]
        world = Simulation(ranks=self.ranks, seed=0, delay=0.0, piece_bytes=PIECE, slot_bytes=2 * PIECE)
        outcomes = run_simulated(world, operations)
        if any(outcome.status != "done" for outcome in outcomes):
            raise AssertionError(f"{collective}: {outcomes}")
        self._last = sum(outcome.wire_bytes for outcome in outcomes)
        self.wire_bytes += self._last
        self.plain_bytes += 4 * numel * self.ranks * (self.ranks - 1)

    def _by_levels(
        self,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        residuals: Sequence[torch.Tensor | None],
    ) -> None:
        """Run the hierarchical reduce-scatter over two hosts, transfer by transfer."""
        numel, half = outputs[0].numel(), self.ranks // 2
        schedule = algorithms.build(
            "hierarchical", "reduce_scatter", self.ranks, hosts=(half, self.ranks - half)
        )
        levels = (self.gradients.inside, self.gradients.between or self.gradients.inside)
        values = [list(arrived.view(self.ranks, -1)) for arrived in inputs]
        last = schedule.transfers[-1].step
        encoded_sums: dict[tuple[int, int], torch.Tensor] = {}  # sums that were encoded in the same pass

        def slot(rank: int, chunk: int) -> torch.Tensor | None:
            residual = residuals[rank]
            return None if residual is None else residual.view(self.ranks, -1)[chunk]

        for number, step in itertools.groupby(schedule.transfers, key=lambda transfer: transfer.step):
            arriving: dict[tuple[int, int, int], dict[int, torch.Tensor]] = {}
            for transfer in step:
                source, chunk = transfer.src, transfer.chunk
                payload = encoded_sums.get((source, chunk))
                if payload is None:
                    payload = encode(
                        levels[transfer.level], values[source][chunk], residual=slot(source, chunk)
                    )
                self.wire_bytes += payload.numel()
                arriving.setdefault((transfer.dst, chunk, transfer.level), {})[source] = payload
            for (rank, chunk, level), arrived in arriving.items():
                payloads = [arrived[source] for source in sorted(arrived)]
                place = sum(source < rank for source in arrived)
                local = values[rank][chunk]
                if number == last:
                    outputs[rank].copy_(
                        reduce(
                            levels[level], payloads, numel, local=local, position=place, divisor=self.ranks
                        )
                    )
                elif levels[0] == levels[1] and chunk != rank:
                    encoded_sums[rank, chunk] = reduce_encode(
                        levels[0], payloads, numel, local=local, position=place, residual=slot(rank, chunk)
                    )
                else:
                    values[rank][chunk] = reduce(levels[level], payloads, numel, local=local, position=place)
        self.plain_bytes += 4 * numel * self.ranks * (self.ranks - 1)
