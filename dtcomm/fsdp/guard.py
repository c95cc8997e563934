"""The guard of a sharded model: applies a `dtcomm.compress.guard.Guard` to each FSDP module or optimizer bucket.

In every ``sample_every``-th step each rank measures the errors of its gradients' encodings, and of the encoding of its
own shard of the parameters. In every step sketches of the gradients before and after their reduction are added up
(`dtcomm.compress.measurements`). Before the next forward pass, if there is something to compare, the ranks average
the measurements, a few floats, so that all ranks take the same decisions. Gradients and parameters of a module are
guarded apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dtcomm.arguments import require_int
from dtcomm.codecs import Codec
from dtcomm.collectives import all_reduce
from dtcomm.compress.guard import Event, Guard, as_guard
from dtcomm.compress.measurements import ErrorSample, Fidelity, GradientSketch, Reading, l2_norm
from dtcomm.compress.monitor import Monitor
from dtcomm.fsdp.options import CompressionSpec
from dtcomm.streams import AsyncHostCopy

ROOT = "(root)"  # the guard's name of the root module, whose own name is empty
SKETCHED_SHARDS = 4  # of a gradient: the cost of a sketch must not grow with the number of ranks


def parameters_name(module: str) -> str:
    """Return the guard's name of a module's parameters; that of its gradients is the module's."""
    return f"{module or ROOT}, parameters"


def _sends_most_elements(scheme: Codec) -> bool:
    """Return whether one encoding sends (nearly) the values of all elements."""
    return not hasattr(scheme, "ratio") and scheme.name != "sign"


class GradientShards:
    """A flat gradient that is cut into equal shards, or the shard of one rank, as the guard sketches it.

    ``shards`` are those that the tensor holds, in order, of ``total`` shards of the whole gradient.
    """

    def __init__(
        self, module: str, codec: Codec, shard_numel: int, shards: Sequence[int], total: int
    ) -> None:
        self._module, self._codec = module, codec
        self._shard_numel, self._shards = shard_numel, shards
        self._every = -(-total // SKETCHED_SHARDS)
        self._sketch: GradientSketch | None = None

    @property
    def schemes(self) -> dict[str, Codec]:
        """What the gradient is compressed with."""
        return {self._module: self._codec}

    def sketch(self, device: torch.device) -> GradientSketch:
        """Return the map to the sketch. It does not depend on where in the tensor a shard lies."""
        if self._sketch is None:
            self._sketch = GradientSketch(
                [
                    (f"{self._module}/{shard}", place * self._shard_numel, self._shard_numel)
                    for place, shard in enumerate(self._shards)
                    if shard % self._every == 0
                ],
                device,
            )
        return self._sketch


class ShardGuard:
    """Samples encoding errors, compares gradients and holds the guard's decisions.

    Args:
        guard: Limits and actions; None: errors are measured for the report only.
        every: Steps from one measurement to the next; 0: nothing is measured.

    Attributes:
        steps: Number of steps begun.
        sampling: Whether errors are measured in the current step.
    """

    def __init__(self, guard: Guard | None, every: int) -> None:
        require_int("sample_every", every, 0)
        self._monitor = Monitor(as_guard(guard))
        self._every = every
        self._evaluation_due = False
        self._device: torch.device | None = None  # of the gradients
        self._pending_stats: AsyncHostCopy | None = None  # averaged statistics on their way to the host
        self._sampled_parameters: set[str] = set()  # modules whose parameters were sampled in this step
        self._layouts: dict[tuple[Any, ...], GradientShards] = {}
        self.steps = 0
        self.sampling = False

    @property
    def events(self) -> tuple[Event, ...]:
        """What the guard detected and did, in order; the same on all ranks of the group."""
        return tuple(self._monitor.events)

    @property
    def fidelity(self) -> Fidelity | None:
        """How the gradients of the last window compare with the uncompressed ones, the same on all ranks."""
        return self._monitor.fidelity

    def observe_loss(self, loss: float | torch.Tensor) -> None:
        """Record this step's loss on this rank."""
        self._monitor.observe_loss(loss)

    def begin_step(
        self, group: dist.ProcessGroup | None, agreeing_groups: Sequence[dist.ProcessGroup] = ()
    ) -> list[str]:
        """Begin a step, on all ranks of ``group``: evaluate the measurements of the one before.

        On devices the averaged measurements are read one step later, so that the host does not wait for the device. The
        ranks of ``agreeing_groups`` have the same modules, and make the same decisions: otherwise the parameters that
        all of them have would be encoded differently. Returns the modules whose residuals must be reset.

        Raises:
            CompressionHarmful: The guard's action is "error".
        """
        monitor = self._monitor
        monitor.group, monitor.agreeing_groups = group, agreeing_groups
        if self._pending_stats is not None:
            pending, self._pending_stats = self._pending_stats, None
            monitor.evaluate(self.steps, pending.get())
        monitor.begin_step(self.steps)
        if self._evaluation_due or monitor.window_is_complete:
            if (stats := monitor.stats_tensor(self._device)) is not None:
                all_reduce(stats, "avg", group=group)
                monitor.average_over_agreeing_groups(stats)
                if stats.is_cpu:
                    monitor.evaluate(self.steps, stats)
                else:
                    self._pending_stats = AsyncHostCopy(stats)
        resets = ["" if name == ROOT else name for name in monitor.pop_resets()]
        self._evaluation_due = self._every > 0 and self.steps % self._every == 0
        self.sampling = self._evaluation_due
        self._sampled_parameters.clear()
        self.steps += 1
        return resets

    def current_spec(self, name: str, spec: CompressionSpec) -> CompressionSpec:
        """Return the spec that is used now instead of the requested ``spec``.

        ``name`` is a module, for its gradients, or its `parameters_name`.
        """
        step = max(0, self.steps - 1)  # the current one
        inside, between = (
            codec and self._monitor.scheme_for(name or ROOT, codec, step)
            for codec in (spec.inside, spec.between)
        )
        assert isinstance(inside, Codec) and (between is None or isinstance(between, Codec))
        return CompressionSpec(inside, between, spec.prefix)

    def take_sample(
        self, module: str, spec: CompressionSpec, gradient: torch.Tensor, residual: torch.Tensor
    ) -> ErrorSample:
        """Return a sample of a gradient that is about to be encoded."""
        norm = l2_norm(gradient)
        self._device = gradient.device
        # A codec may send a part of the elements only where feedback sends the others later.
        held_to_error = not spec.prefix or _sends_most_elements(spec.inside)
        self._monitor.register_sample(module or ROOT, spec.inside, held_to_error)
        nonfinite = ~torch.isfinite(norm)
        self._monitor.report_nonfinite(nonfinite, nonfinite)
        return ErrorSample.take(module or ROOT, spec.inside, norm, gradient, residual)

    def sketch_gradient(
        self, module: str, spec: CompressionSpec, gradient: torch.Tensor, shards: int
    ) -> Reading | None:
        """Read a flat gradient of all ``shards`` shards before it is reduced, for `compare_mean`."""
        if not self._every:
            return None
        self._device = gradient.device
        layout = self._layout(module, spec, gradient.numel() // shards, range(shards), shards)
        return self._monitor.sketch_gradient(layout, gradient)

    def compare_mean(
        self,
        gradient: Reading,
        module: str,
        spec: CompressionSpec,
        mean: torch.Tensor,
        shards: int,
        shard: int | None,
    ) -> None:
        """Record a reduced gradient, with what `sketch_gradient` returned of this rank's own.

        ``mean`` is that over the ranks: the ``shard`` of this number, or all of it if that is None.
        """
        own = range(shards) if shard is None else (shard,)
        layout = self._layout(module, spec, mean.numel() // len(own), own, shards)
        # The average over ranks of the sketches of their shards is a share of the sketch of the whole.
        share = layout.sketch(mean.device).read(mean)._replace(scale=shards / len(own))
        self._monitor.add_sketches(gradient, share)

    def _layout(
        self, module: str, spec: CompressionSpec, shard_numel: int, shards: Sequence[int], total: int
    ) -> GradientShards:
        key = (module, spec.inside, shard_numel, len(shards), total)
        if key not in self._layouts:
            self._layouts[key] = GradientShards(module or ROOT, spec.inside, shard_numel, shards, total)
        return self._layouts[key]

    def take_parameter_sample(
        self, module: str, spec: CompressionSpec, shard: torch.Tensor, sent: torch.Tensor
    ) -> ErrorSample | None:
        """Return a sample of a shard of parameters that is about to be encoded; None if none is due.

        Only the first gather of a module in a sampled step is sampled. ``sent`` is what is encoded: the shard, or its
        difference from the reference.
        """
        if not self.sampling or module in self._sampled_parameters:
            return None
        self._sampled_parameters.add(module)
        self._device = shard.device
        name = parameters_name(module)
        held_to_error = spec.prefix != "delta" or _sends_most_elements(spec.inside)
        self._monitor.register_sample(name, spec.inside, held_to_error)
        return ErrorSample.take(name, spec.inside, l2_norm(shard), sent, None)

    def record_parameter_error(self, sample: ErrorSample, lost: torch.Tensor) -> float | torch.Tensor:
        """Record the error of a shard's encoding and return its norm relative to that of the shard.

        On a device the result is a tensor on that device.
        """
        return self._record(sample, lost, l2_norm(lost), torch.as_tensor(sample.gradient_norm))

    def record_error(self, sample: ErrorSample, lost: torch.Tensor) -> float | torch.Tensor:
        """Record the encoding's error and return it relative to the encoder's input, over the sampled elements.

        On a device the result is a tensor on that device.
        """
        error = torch.linalg.vector_norm(lost[:: sample.stride])
        return self._record(sample, lost, error, torch.linalg.vector_norm(sample.encoder_input))

    def _record(
        self, sample: ErrorSample, lost: torch.Tensor, error: torch.Tensor, signal: torch.Tensor
    ) -> float | torch.Tensor:
        self._monitor.record_error(sample, lost)
        relative = torch.where(signal > 0, error / signal, 0.0)
        return float(relative) if relative.is_cpu else relative

    def state_dict(self) -> dict[str, Any]:
        """Return the step and the current decisions as plain values."""
        return {"steps": self.steps, "monitor": self._monitor.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; an empty mapping resets the guard."""
        self.steps, self._evaluation_due, self._pending_stats = state.get("steps", 0), False, None
        self._monitor.load_state_dict(state.get("monitor", {}))
