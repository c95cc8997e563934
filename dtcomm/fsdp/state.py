"""What the compressed collectives of a sharded model remember between calls, and count."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dtcomm.codecs import Codec, codec
from dtcomm.compress.checkpoint import VERSION, select_share
from dtcomm.compress.guard import Event, Guard, count_events
from dtcomm.device.streams import Streams, record_streams, streams_of
from dtcomm.fsdp.buffer_pool import Pool
from dtcomm.fsdp.cpu_overlap import Overlap
from dtcomm.fsdp.flat_layout import Layout
from dtcomm.fsdp.guard import Watching
from dtcomm.fsdp.report import Report, Traffic
from dtcomm.fsdp.residual_store import Errors, Exact, MovingAverage
from dtcomm.fsdp.spec import Recipe
from dtcomm.kernels import counter_rng
from dtcomm.profiling import Metric, Timeline


class State:
    """Made by `dtcomm.fsdp.compress`; one for all modules of a model."""

    def __init__(
        self,
        gradients: Recipe,
        parameters: Recipe,
        seed: int,
        residual: str = "fp32",
        guard: Guard | None = None,
        sample_every: int = 0,
    ) -> None:
        self.gradients, self.parameters = gradients, parameters
        self.seed = seed
        self.calls = 0
        # Of the group that parameters are cut over, which in a mesh of two dimensions is not the world.
        self.shards, self.shard = dist.get_world_size(), dist.get_rank()
        self.pool = Pool()
        self.references: dict[str, torch.Tensor] = {}
        self.written: dict[str, tuple[Streams, Any]] = {}  # on devices: the events behind what wrote them
        self._own_references: dict[str, torch.Tensor] = {}
        self._flats: dict[str, Layout | None] = {}
        self._errors: Errors | None = _errors(gradients.word, residual)
        self._report = Report()
        self.timeline = Timeline("fsdp")
        self.watching = Watching(guard, sample_every)
        self.group: dist.ProcessGroup | None = None  # of the shards; None: all ranks
        self.overlap = Overlap()

    def report(self) -> Report:
        """What was sent, by module, and for whatever was not compressed, why."""
        self._report.residual_bytes = 0 if self._errors is None else self._errors.nbytes()
        self._report.reference_bytes = sum(each.nbytes for each in self.references.values())
        self._report.buffer_bytes = self.pool.nbytes()
        self._report.events = count_events(self.events)
        self._report.read()
        if self.pool.why:
            self.note(self.pool.why)
        return self._report

    def metrics(self) -> list[Metric]:
        """The report's, and the timeline's where one is kept, for `dtcomm.profiling.write_prometheus` and
        `write_tensorboard`.
        """
        return self.report().metrics() + self.timeline.metrics()

    def trace(self, path: str | os.PathLike[str]) -> str:
        """Write this rank's kept steps for Perfetto; see `dtcomm.ddp.State.trace`. ``timeline.start()`` comes first."""
        return self.timeline.trace(path, dist.get_rank())

    @property
    def events(self) -> tuple[Event, ...]:
        """What the guard saw and did, in order."""
        return self.watching.events

    def observe(self, loss: float | torch.Tensor) -> None:
        """Tell the guard this step's loss, once a step and before its backward, on every rank."""
        self.watching.observe(loss)

    def begin(self) -> None:
        """A training step begins; called by the model's forward."""
        for module in self.watching.begin(self.group):
            if self._errors is not None:
                self._errors.forget(module)

    def note(self, text: str) -> None:
        """Something that torch does beside us, or that could not be done; said once."""
        if text not in self._report.notes:
            self._report.notes.append(text)

    def traffic(self, module: str, kind: str, recipe: Recipe) -> Traffic:
        """The counter of a module's "parameters" or "gradients"."""
        return self._report.modules.setdefault(module, {}).setdefault(kind, Traffic(str(recipe)))

    def know(self, module: str, flat: Layout | None) -> None:
        """How a module's gradients lie in its flat tensor."""
        self._flats[module] = flat

    def next_seed(self) -> int:
        """Of stochastic rounding: the same on all ranks, which call the same collectives in the same order."""
        self.calls += 1
        return self.seed + self.calls

    def take_residual(self, module: str, like: torch.Tensor) -> torch.Tensor | None:
        """What this rank's gradients of a module have left so far, fp32; None without feedback."""
        return None if self._errors is None else self._errors.take(self._key(module, like), like)

    def give_residual(self, module: str, residual: torch.Tensor | None) -> None:
        """The same tensor, after the collective has rewritten it."""
        if self._errors is not None and residual is not None:
            key = counter_rng.mix_key(self.seed, dist.get_rank(), self.calls)
            self._errors.give(self._key(module, residual), residual, key)

    def _key(self, module: str, like: torch.Tensor) -> str:
        """Where some parameters got no gradient the flat tensor is another one, with errors of its own."""
        flat = self._flats.get(module)
        if flat is None or flat.numel(self.shards) == like.numel():
            return module
        return f"{module} [{like.numel()}]"

    def rescale(self, factor: float) -> None:
        """Multiply the residuals by ``factor``: for a loss scale that changed by it between two steps."""
        if self._errors is not None:
            self._errors.scale(factor)

    def resync(self) -> None:
        """Send whole parameters at the next gather instead of differences: they were changed by something else than
        the optimiser. Loading a state_dict into the model does this by itself.
        """
        self.references.clear()
        self.written.clear()
        self._own_references.clear()

    def overwritten(self) -> None:
        """The same after a state_dict was loaded into the model; references that were loaded beside it stay, since
        what peers held when it was saved is what the differences after it were taken to.
        """
        self.references.clear()
        self.written.clear()

    def take_own_reference(self, module: str) -> torch.Tensor | None:
        """This rank's part of the reference, from a checkpoint, once."""
        return self._own_references.pop(module, None)

    def keep_reference(self, module: str, reference: torch.Tensor) -> None:
        """It has been written on the current stream."""
        self.references[module] = reference
        if not reference.is_cpu:
            streams = self.written.get(module, (streams_of(reference.device), None))[0]
            self.written[module] = streams, streams.record()

    def reference(self, module: str) -> torch.Tensor | None:
        """For the current stream, which is FSDP's for gathers now and the model's then."""
        if module in self.written:
            streams, event = self.written[module]
            streams.wait(event)
        record_streams(self.references.get(module))
        return self.references.get(module)

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals by parameter name, its references, and the counters; every rank saves its own.

        Plain values and CPU tensors, which torch.load takes with its defaults.
        """
        residuals: dict[str, torch.Tensor] = {}
        whole = {} if self._errors is None else self._errors.decoded()
        for module, flat in whole.items():
            layout = self._flats.get(module)
            known = layout is not None and layout.numel(self.shards) == flat.numel()
            residuals |= layout.split(flat, self.shards) if layout and known else {f"[{module}]": flat}
        return {
            "version": VERSION,
            "calls": self.calls,
            "seed": self.seed,
            "rank": dist.get_rank(),
            "world_size": dist.get_world_size(),
            "watching": self.watching.state_dict(),
            "counts": {} if self._errors is None else dict(self._errors.counts),
            "residuals": residuals,
            "references": {
                name: reference.view(self.shards, -1)[self.shard].detach().to("cpu", copy=True)
                for name, reference in self.references.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Continue from `state_dict`: this rank's own, or those of all ranks of the run that saved them, in rank order.

        With all of them the number of ranks may have changed: residuals keep their sum, and differences start from
        whole parameters. ValueError where one alone comes from another number of ranks.
        """
        ranks = dist.get_world_size()
        first, residuals = select_share(state, dist.get_rank(), ranks)
        self.calls, self.seed = first["calls"], first["seed"]
        self.watching.load_state_dict(first.get("watching", {}))
        self.resync()
        same = first["world_size"] == ranks
        if same:
            own = state if isinstance(state, Mapping) else state[dist.get_rank()]
            self._own_references = dict(own["references"])
        if self._errors is None:
            return
        whole: dict[str, torch.Tensor] = {}
        for module, layout in self._flats.items():
            if layout and all(piece.name in residuals for piece in layout.pieces):
                whole[module] = layout.join(residuals, self.shards)
        if same:
            whole |= {name[1:-1]: flat for name, flat in residuals.items() if name.startswith("[")}
        self._errors.load(whole, first["counts"])


def _errors(word: str, residual: str) -> Errors | None:
    """What keeps errors under the word of a recipe. ValueError where ``residual`` is no form, or has no use."""
    if word == "ef":
        return Exact(residual)
    if residual != "fp32":
        raise ValueError(
            f"residual: {residual!r} goes with ef: gradients alone; {word or 'without a word'}: has its own"
        )
    return MovingAverage() if word else None


def fitting(recipe: Recipe, tensor: torch.Tensor, traffic: Traffic) -> str | Codec:
    """The recipe's codecs, or none where one does not take the tensor's type; the report says so."""
    refused = next((each for each in recipe.codecs() if tensor.dtype not in each.dtypes), None)
    traffic.codec, traffic.why = str(recipe), ""
    if refused is None:
        return recipe.spec
    traffic.codec, traffic.why = "none", f"{refused} does not take {str(tensor.dtype).removeprefix('torch.')}"
    return codec("none")
