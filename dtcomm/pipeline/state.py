"""The state of compressed pipeline stages: counters, times of steps, and what is kept from step to step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from dtcomm import env
from dtcomm.codecs import Codec
from dtcomm.collectives import all_gather
from dtcomm.compress import checkpoint
from dtcomm.compress.report import Report
from dtcomm.compress.reporting import Reporting
from dtcomm.compress.residuals import Residuals, SampleReferences, expand_saved, log_feedback
from dtcomm.compress.traffic import Traffic
from dtcomm.pipeline.exchange import Exchange
from dtcomm.profiling.summary import format_bytes


@dataclass(kw_only=True)
class StepTimes:
    """The times of one step on this rank, in seconds; on a CUDA device only the host's, so not those of kernels.

    ``span`` is from the start of the step to the end of its last computation.
    """

    span: float = 0.0
    forward: float = 0.0
    backward: float = 0.0

    @property
    def busy(self) -> float:
        """The time in computations."""
        return self.forward + self.backward


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of `compress`, parsed; ``reason`` says why feedback is on or off, if "auto" decided."""

    forward: Codec
    backward: Codec
    feedback: bool
    reason: str
    save_residuals: bool
    seed: int
    differences: bool
    dynamic_shapes: bool


class StageCounts(Protocol):
    """What a step has to do, of one stage."""

    traffic: dict[tuple[str, str, str], Traffic]
    references: dict[int, SampleReferences]

    @property
    def name(self) -> str: ...

    @property
    def remaining(self) -> int:
        """Computations and messages until the end of the step; -1: not known yet."""

    def detach(self) -> None: ...


class PipelineState(Reporting):
    """What `compress` did to the stages of this rank, and what they have sent since; ``str()`` gives one line.

    Args:
        group: Process group of the stages; None is the default group.
        device: Device of the stages.
        settings: The arguments of `compress`.

    Attributes:
        exchange: The messages under way.
        residuals: Residuals of the gradients' error feedback.
        times: The times of the last step; zeros before its end.
        samples: The samples of the next step's batch; None: not set.
        steps: Number of steps that have ended.
    """

    integration = "pipeline"

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, settings: Settings) -> None:
        self.arguments = {}
        self.settings, self.exchange = settings, Exchange(settings.seed)
        self.residuals = Residuals()
        self.times = StepTimes()
        self.samples: torch.Tensor | None = None
        self.steps = 0
        self._group, self._device = group, device
        self._stages: list[StageCounts] = []
        self._current = StepTimes()
        self._start: float | None = None
        self._started_work = False

    def add_stage(self, stage: StageCounts) -> None:
        """Add a stage; `compress` calls it."""
        self._stages.append(stage)

    def set_samples(self, samples: Sequence[int] | torch.Tensor) -> None:
        """Say which samples the next step's batch consists of; needed before each step with ``differences=True``.

        Args:
            samples: The number of each row of the batch in the data set, int [batch]; the same on all ranks.

        Raises:
            ValueError: It is not one-dimensional, or has a sample twice.

        Example::

            state.set_samples(indices)
            schedule.step(batch)
        """
        samples = torch.as_tensor(samples)
        if samples.ndim != 1 or samples.is_floating_point():
            raise ValueError(
                f"samples: expected integers [batch], got {samples.dtype} {tuple(samples.shape)}"
            )
        if len(set(samples.tolist())) != len(samples):
            raise ValueError("samples: a batch must not have a sample twice")
        self.samples = samples.cpu()

    def bubble_fraction(self) -> float:
        """Return the measured share of time in which the ranks waited in the last step, for each other or for messages.

        It is a collective of the stages' group. With p equally slow stages, fast links and m micro-batches GPipe and
        1F1B have (p - 1) / (m + p - 1) (Huang et al. 2019, arXiv:1811.06965).

        Returns:
            The ranks' waiting times over the number of ranks times the longest step.

        Raises:
            RuntimeError: No step has ended yet.
        """
        if not self.steps:
            raise RuntimeError("bubble_fraction: no step has ended yet; call it after schedule.step")
        own = torch.tensor([self.times.busy, self.times.span], device=self._device)
        times = torch.empty((dist.get_world_size(self._group), 2), device=self._device)
        all_gather(times, own, group=self._group)
        busy, spans = times.unbind(1)
        return float(1 - busy.sum() / (len(busy) * spans.max()))

    def report(self) -> Report:
        """Return what this rank's stages have sent, by codec and by stage. Nothing is communicated."""
        traffic = [
            (stage.name, replace(counters)) for stage in self._stages for counters in stage.traffic.values()
        ]
        references = sum(r.nbytes() for stage in self._stages for r in stage.references.values())
        return Report.of_traffic(
            traffic,
            unit="messages",
            integration=self.integration,
            rank=dist.get_rank(self._group),
            world_size=dist.get_world_size(self._group),
            policy=str(self),
            feedback=self.settings.feedback,
            feedback_reason=self.settings.reason,
            steps=self.steps,
            residual_bytes=self.residuals.nbytes() + references,
            notes=self._notes(),
        )

    def _notes(self) -> tuple[str, ...]:
        if not self.steps:
            return ()
        times = self.times
        idle = 1 - times.busy / times.span if times.span else 0.0
        return (
            f"last step on this rank: {1e3 * times.span:.3g} ms, of which {1e3 * times.forward:.3g} ms forward and "
            f"{1e3 * times.backward:.3g} ms backward passes; it waited {idle:.0%} of the time",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals and references of this rank, as plain tensors, and the number of its messages.

        Save it on every rank.
        """
        return checkpoint.seal(
            {
                "integration": self.integration,
                "messages": self.exchange.messages,
                "residuals": self.residuals.state_dict() if self.settings.save_residuals else {},
                "references": {
                    f"{stage.name}/{number}": references.state_dict()
                    for stage in self._stages
                    for number, references in stage.references.items()
                },
            }
        )

    def load_state_dict(
        self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, strict: bool = True
    ) -> None:
        """Continue with what `state_dict` returned on this rank, with the same stages.

        Args:
            state: This rank's own state.
            strict: Without effect: the options of the run that saved do not matter.

        Raises:
            ValueError: It is damaged, from other stages, or was saved without ``differences``. Nothing has changed.
        """
        checks = {
            "messages": checkpoint.COUNT,
            "residuals": checkpoint.residuals(),
            "references": checkpoint.each(checkpoint.tensors()),
        }
        checkpoint.require_intact(state, checks, integration=self.integration)
        assert isinstance(state, Mapping)
        own = {
            f"{stage.name}/{number}": references
            for stage in self._stages
            for number, references in stage.references.items()
        }
        saved = {} if env.disabled() else state["references"]
        for name, samples in saved.items():
            if name not in own:
                raise ValueError(
                    f"state: {name} keeps no references on this rank, which has "
                    f"{', '.join(stage.name for stage in self._stages)}; compress it with differences=True"
                )
            if odd := [sample for sample in samples if not sample.isdecimal()]:
                raise ValueError(f"state: references[{name!r}]: {odd[0]!r} is not the number of a sample")
        self.residuals.load_state_dict(expand_saved(state["residuals"]))
        for name, samples in saved.items():
            own[name].load_state_dict(samples)
        self.exchange.messages = state["messages"]

    def detach(self) -> None:
        """Undo `compress`: the stages send uncompressed, by torch, again; residuals and references are freed."""
        self.exchange.finish_sends()
        self.residuals.load_state_dict({})
        for stage in self._stages:
            stage.detach()

    def begin_step(self) -> None:
        """Note the start of a step; every stage calls it."""
        if self._start is None or self._started_work:
            if self._started_work:  # the step before has failed
                self.exchange.drop()
            self._start, self._current, self._started_work = time.perf_counter(), StepTimes(), False

    def add_time(self, *, forward: float = 0.0, backward: float = 0.0) -> None:
        """Add the seconds of a computation that has just ended."""
        self._started_work = True
        self._current.forward += forward
        self._current.backward += backward
        if self._start is not None:
            self._current.span = time.perf_counter() - self._start

    def end_step_if_done(self) -> None:
        """End the step if all its computations and messages have been started.

        Sends must be complete at the end of a step, as torch's are: the process might exit. Waiting earlier could wait
        for a rank that itself waits for a message which this rank sends later.
        """
        if any(stage.remaining for stage in self._stages):
            return
        self.exchange.finish_sends()
        self.times, self._start, self._started_work = self._current, None, False
        self.steps += 1
        self.samples = None
        if self.steps == 1:
            size = self.residuals.nbytes()
            memory = f"{format_bytes(size)} of residuals" if size else ""
            nothing_lost = self.settings.feedback and not size
            log_feedback("dtcomm.pipeline", memory, "" if nothing_lost else self.settings.reason)

    def __str__(self) -> str:
        differences = " (differences)" if self.settings.differences else ""
        return f"activations {self.settings.forward}{differences}, gradients {self.settings.backward}"
