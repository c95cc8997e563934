"""The state that error feedback keeps from step to step on one rank, by parameter name.

It consists of residuals (`residuals`), or of references (`ef21`) or of what a user's own feedback keeps (`feedback`),
and with DGC of velocities (`feedback`).
`ErrorState.prepare` turns a gradient into what a collective averages, `ErrorState.finish` stores what the encoding lost
once the mean has arrived. The DDP hook, `LocalSGD` and the simulated ranks of the tests call them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dtcomm.compress import checkpoint
from dtcomm.compress.bucket import BucketLayout, Segment
from dtcomm.compress.feedback import DGC, Feedback, FeedbackStates, References, Velocities, common_momentum
from dtcomm.compress.measurements import l2_norms
from dtcomm.compress.residuals import Residuals, average_states, describe_size, expand_saved, log_feedback
from dtcomm.compress.spec import Scheme
from dtcomm.profiling.summary import format_bytes
from dtcomm.streams import record_streams

# Steps over which the residual of a parameter that is no longer compressed is added to its gradients.
REPAYMENT_STEPS = 32
FEEDBACKS = ("residual", "ef21", "diana")
DIANA_RATE = 0.5


@dataclass
class PendingGradient:
    """One lossy segment of a bucket while its collective is in flight.

    Attributes:
        gradient: The gradient, flat; it is to become the mean.
        sent: The tensor that is averaged in place, often the gradient itself.
        residual: The collective adds it to ``sent`` and leaves there what the encoding lost; None without feedback.
        encoder_input: A copy of what was offered to the encoder; with DGC only.
        deferred_residual: The residual that is withheld in this step because the parameter is unused; what the encoding
            lost is added to it afterwards.
        has_update: A bool tensor without dimensions, with DGC only: whether the velocity took the gradient in. On a
            device the host does not read it.
    """

    segment: Segment
    gradient: torch.Tensor
    sent: torch.Tensor
    residual: torch.Tensor | None
    encoder_input: torch.Tensor | None = None
    deferred_residual: torch.Tensor | None = None
    has_update: torch.Tensor | None = None


@dataclass
class PreparedBucket:
    """What of a bucket is averaged: a tensor and a residual, or None, for each segment.

    ``pending`` are the lossy segments, ``norms`` those of their gradients, where errors are measured, else None.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    residuals: list[torch.Tensor | None] = field(default_factory=list)
    pending: list[PendingGradient] = field(default_factory=list)
    norms: torch.Tensor | None = None


class ErrorState:
    """Residuals or references, and velocities, of all parameters on one rank.

    Args:
        feedback: True or "residual": error feedback; "ef21" or "diana": differences to shared references; a
            `Feedback`: the user's own; False: nothing is kept. `choose_feedback` has replaced "auto".
        form: How residuals are kept between steps: "fp32", "bf16" or "int8".
        schemes: All schemes that may be used. If DGC is one of them, every parameter gets its momentum.
    """

    def __init__(
        self, feedback: bool | str | Feedback = True, form: str = "fp32", schemes: Sequence[Scheme] = ()
    ) -> None:
        own = feedback if isinstance(feedback, Feedback) else None
        kind = (
            "residual"
            if feedback is True
            else feedback
            if isinstance(feedback, bool | str)
            else str(feedback)
        )
        if own is None and kind is not False and kind not in FEEDBACKS:
            valid = f"True, False, 'auto', {', '.join(map(repr, FEEDBACKS))}, or a dtcomm.ddp.Feedback"
            raise ValueError(f"feedback: {feedback!r}; valid: {valid}")
        self._momentum = common_momentum(schemes)
        if self._momentum is not None and kind != "residual":
            raise ValueError(
                f"feedback: {feedback!r} does not go with dgc, which keeps residuals; valid: True"
            )
        self.kind = kind
        self._residuals = Residuals(form)
        if kind is False and form != "fp32" and not all(scheme.lossless(torch.float32) for scheme in schemes):
            raise ValueError(
                f"residual: {form!r} is for error feedback, which is off; valid: 'fp32', or feedback=True"
            )
        self._references: References | FeedbackStates | None = None if own is None else FeedbackStates(own)
        if kind in ("ef21", "diana"):
            self._references = References(1.0 if kind == "ef21" else DIANA_RATE)
        self._velocities = Velocities()
        #: Whether residuals are kept as they were before a step until the next one, for `begin_step`.
        self.keeps_backups = False
        # Steps left until a residual is repaid; it stays whole until the last of them.
        self._repaying: dict[str, int] = {}

    def repay_residual(self, name: str) -> None:
        """Add the residual of a parameter that is no longer compressed to its next gradients, in equal parts.

        Sparse schemes may have a hundred gradients in a residual; added at once it would be a jump.
        """
        if name in self._residuals:
            self._repaying[name] = REPAYMENT_STEPS

    def prepare_bucket(
        self,
        layout: BucketLayout,
        buffer: torch.Tensor,
        ranks: int,
        *,
        unused: Collection[str] = (),
        sampled: bool = False,
    ) -> PreparedBucket:
        """Return what to average of a bucket; the other arguments are those of `prepare`.

        ``unused`` are parameters without a gradient of this rank.
        """
        bucket = PreparedBucket()
        segments = list(zip(layout.segments, layout.split(buffer), strict=True))
        if sampled and layout.lossy:
            bucket.norms = l2_norms([gradient for segment, gradient in segments if not segment.lossless])
        for segment, gradient in segments:
            if segment.lossless:
                self.prepare_uncompressed(segment, gradient)
                bucket.tensors.append(gradient)
                bucket.residuals.append(None)
                continue
            used = segment.name not in unused
            prepared = self.prepare(segment, gradient, ranks, used=used, sampled=sampled)
            bucket.pending.append(prepared)
            bucket.tensors.append(prepared.sent)
            bucket.residuals.append(prepared.residual)
        return bucket

    def prepare(
        self,
        segment: Segment,
        gradient: torch.Tensor,
        ranks: int,
        *,
        used: bool = True,
        sampled: bool = False,
    ) -> PendingGradient:
        """Return what to average for a lossy segment, which holds one parameter; the flat gradient may be changed.

        Args:
            used: Whether this rank has used the parameter. If not, its residual is withheld: DDP drops the mean of a
                parameter that no rank used.
            sampled: The error is measured in this step, so a residual is needed even without feedback.
        """
        name, scheme = segment.name, segment.codec
        if self._repaying:
            self._stop_repaying(name)
        if self.kind is False:
            lost = None
            if sampled:
                lost = torch.zeros(gradient.numel(), dtype=torch.float32, device=gradient.device)
            return PendingGradient(segment, gradient, gradient, lost)
        if self._references is not None:
            return PendingGradient(segment, gradient, *self._references.begin(name, gradient))
        if self.keeps_backups:
            self._residuals.back_up(name)
        residual, deferred = self._residuals.get(name, gradient), None
        if not used:
            residual, deferred = torch.zeros_like(residual), residual
        if not isinstance(scheme, DGC):
            if self._momentum is not None:
                self.prepare_uncompressed(segment, gradient, used)
            return PendingGradient(segment, gradient, gradient, residual, deferred_residual=deferred)
        max_norm = scheme.clip / ranks**0.5
        velocity, has_update = self._velocities.update(name, gradient, scheme.momentum, max_norm, used)
        # The velocity, which is always finite, moves to the residual, in fp32, and takes the gradient's place.
        gradient.masked_fill_(has_update, 0.0)
        residual.addcmul_(velocity, has_update.float())
        return PendingGradient(
            segment,
            gradient,
            gradient,
            residual,
            encoder_input=residual.clone(),
            deferred_residual=deferred,
            has_update=has_update,
        )

    def prepare_uncompressed(self, segment: Segment, gradient: torch.Tensor, used: bool = True) -> None:
        """Apply what a segment without DGC needs, in place: DGC's momentum, if others use it, and repayments.

        The momentum of a parameter that was not ``used`` stays as it is.
        """
        if self._momentum is None and not self._repaying:
            return
        start = 0
        for member in segment.members:
            part = gradient[start : start + member.numel]
            start += member.numel
            if member.name in self._repaying:
                self._repay_part(member.name, part)
            if self._momentum is None or not part.is_floating_point():
                continue
            velocity, has_update = self._velocities.update(
                member.name, part, self._momentum, max_norm=0.0, used=used
            )
            part.copy_(torch.where(has_update, velocity, part))

    def finish(self, pending: PendingGradient, key: int) -> None:
        """Store what the encoding lost, once the mean has arrived; ``key`` chooses how that is rounded."""
        name, residual = pending.segment.name, pending.residual
        if residual is None:
            return
        # These were allocated on the gradients' stream; the current one may be another.
        if not residual.is_cpu:
            references = () if self._references is None else self._references.get(name)
            record_streams(
                pending.gradient,
                pending.sent,
                residual,
                pending.encoder_input,
                pending.deferred_residual,
                pending.has_update,
                self._velocities.get(name),
                *references,
            )
        if self.kind is False:  # it was for a measurement
            return
        if self._references is not None:
            self._references.finish(name, pending.gradient, pending.sent, residual)
            return
        if pending.encoder_input is not None and pending.has_update is not None:
            # What was sent leaves little of itself behind. What was not is in the residual as a whole, and on the rank
            # that encodes the sum together with what others sent, which now and then cancels part of it. Values of few
            # bits leave more behind; then the element of the mean shows whether it was sent.
            kept, whole = residual.abs(), pending.encoder_input.abs()
            was_sent = (kept < whole / 8) | ((kept < whole / 2) & (pending.gradient != 0))
            self._velocities.mask(name, was_sent & pending.has_update)
        if pending.deferred_residual is not None:
            pending.deferred_residual.add_(residual)
        self._residuals.put(name, key)

    def scale(self, factor: float) -> None:
        """Multiply all state by ``factor``, if the loss scale of mixed-precision training changed by it."""
        self._residuals.scale(factor)
        self._velocities.scale(factor)
        if self._references is not None:
            self._references.scale(factor)

    def begin_step(self, *, undo: bool) -> None:
        """Forget the backups of the step before; with ``undo`` set the residuals to them first.

        The optimizer has skipped that step, so what the residuals added to its gradients was not applied.
        """
        if undo:
            self._residuals.restore()
        self._residuals.drop_backups()

    def drop_backups(self, names: Iterable[str]) -> None:
        """Forget the backups of these parameters: what was sent of them has been applied."""
        self._residuals.drop_backups(names)

    def reset(self, name: str) -> None:
        """Drop the state of a parameter; to be called on all ranks in the same step."""
        self._residuals.reset(name)
        self._repaying.pop(name, None)
        self._velocities.reset(name)
        if self._references is not None:
            self._references.reset(name)

    def log_memory(self, integration: str, numel: int, reason: str) -> None:
        """Log the memory that ``numel`` elements will take between steps, unless a user's own feedback decides.

        With a ``reason``, that of "auto", it is a warning, and a line says that feedback is off if it is.
        """
        if self.kind == "residual" and numel:
            log_feedback(integration, describe_size(numel, self._residuals.form), reason)
        elif self.kind in ("ef21", "diana") and numel:
            log_feedback(integration, f"{format_bytes(8 * numel)} of references", reason)
        elif self.kind is False:
            log_feedback(integration, "", reason)

    def nbytes(self) -> dict[str, int]:
        """Return the bytes that are kept between steps, and within a step in addition, by kind; zeros are left out."""
        sizes = {
            f"residuals in {self._residuals.form}": self._residuals.nbytes(),
            "references": 0 if self._references is None else self._references.nbytes(),
            "velocities": self._velocities.nbytes(),
            "fp32 within a step": self._residuals.max_expanded_bytes,
        }
        return {kind: size for kind, size in sizes.items() if size}

    def persistent_bytes(self) -> int:
        """Return the bytes that are kept between steps."""
        references = 0 if self._references is None else self._references.nbytes()
        return self._residuals.nbytes() + self._velocities.nbytes() + references

    def state_dict(self, *, residuals: bool = True) -> dict[str, Any]:
        """Return this rank's state as entries of a checkpoint (`compress.checkpoint`), without residuals if so asked.

        Of a residual that is being repaid it holds the part that is left.
        """
        saved = self._residuals.state_dict() if residuals else {}
        for name, left in self._repaying.items() if residuals else ():
            saved[name] = expand_saved({name: saved[name]})[name] * (left / REPAYMENT_STEPS)
        return {
            "residuals": saved,
            "velocities": self._velocities.state_dict(),
            "references": {} if self._references is None else self._references.state_dict(),
        }

    def checks(self, sizes: Mapping[str, int] | None) -> dict[str, checkpoint.Check]:
        """Return the checks of these entries (`compress.checkpoint`); ``sizes`` are those of the parameters."""
        own = (
            checkpoint.tensors(finite=False)
            if isinstance(self._references, FeedbackStates)
            else checkpoint.tensors(sizes)
        )
        return {
            "residuals": checkpoint.residuals(sizes),
            "velocities": checkpoint.tensors(sizes),
            "references": checkpoint.entries(may_be_empty=True, local=own, shared=own),
        }

    def load(
        self,
        saved: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        residuals: Mapping[str, torch.Tensor],
        rank: int,
        world_size: int,
        *,
        residuals_only: bool = False,
    ) -> None:
        """Continue from a checkpoint: this rank's state, or the list of all ranks' states.

        If ``world_size`` differs from the saved one, the sum of the residuals over ranks is kept, and the mean of the
        velocities and of the references. ``residuals`` are this rank's, as `select_share` returns them for ``saved``.
        With ``residuals_only`` it starts with no velocities and no references. All states fulfil `checks`.
        """
        states = [saved] if isinstance(saved, Mapping) else list(saved)
        same_size = states[0]["world_size"] == world_size
        own = states[0] if isinstance(saved, Mapping) else states[rank if same_size else 0]
        if residuals_only:
            own, states = {}, [{}]
        velocities = own.get("velocities", {})
        references = dict(own.get("references", {}))
        if not same_size:  # nothing has changed yet if the tensors of the ranks cannot be added
            velocities = average_states([state.get("velocities", {}) for state in states])
            if isinstance(self._references, FeedbackStates) and references:
                references["local"] = average_states([state["references"]["local"] for state in states])
        self._residuals.load_state_dict(residuals)
        self._repaying.clear()
        self._velocities.load_state_dict(velocities)
        if self._references is not None:
            self._references.load_state_dict(references, same_world_size=same_size)

    def _repay_part(self, name: str, gradient: torch.Tensor) -> None:
        # One pass over memory: the residual stays as it is, and each step adds the same share of it.
        gradient.add_(self._residuals.get(name, gradient), alpha=1 / REPAYMENT_STEPS)
        self._repaying[name] -= 1
        if not self._repaying[name]:
            del self._repaying[name]
            self._residuals.reset(name)

    def _stop_repaying(self, name: str) -> None:
        """The parameter is compressed again: its residual is what was not repaid yet."""
        if left := self._repaying.pop(name, 0):
            self._residuals.scale(left / REPAYMENT_STEPS, [name])
