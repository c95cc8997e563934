"""What every parameter is compressed with, and the layouts of DDP's buckets that follow from it.

A `Chooser` is a fixed policy or the tuner of "auto" (`dtcomm.ddp.auto`). `BucketLayouts` asks it, the guard and the
warm-up when the reducer needs the layout of a bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from dtcomm.codecs import codec
from dtcomm.compress.bucket import BucketAverager, BucketLayout, Member, Segment, build_layout
from dtcomm.compress.feedback import DGC
from dtcomm.compress.guard import Event
from dtcomm.compress.monitor import Monitor
from dtcomm.compress.policy import SINGLE_RANK, CodecChoice, Policy
from dtcomm.compress.powersgd import PowerSGD
from dtcomm.compress.spec import Scheme
from dtcomm.torch_compat import GradBucket

NONE = codec("none")


class Chooser:
    """Chooses what the gradient of each parameter is compressed with, the same on all ranks; this one asks a policy.

    Attributes:
        schemes: All schemes that may ever be chosen.
        revision: Changes whenever a choice may have changed.
        bypass: Whether buckets are averaged by the group's own backend, uncompressed, as DDP does it without a hook.
        in_stages: Whether a scheme in force takes several collectives (PowerSGD).
        decisions: The decisions so far, for reports.
        rows: What the last decision compared, for reports.
    """

    revision = 0
    bypass = in_stages = False
    decisions: Sequence[Event] = ()
    rows: Sequence[dict[str, Any]] = ()

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.schemes: tuple[Scheme, ...] = tuple(rule.codec for rule in policy.rules)
        self.in_stages = any(isinstance(scheme, PowerSGD) for scheme in self.schemes)

    def __str__(self) -> str:
        return str(self._policy)

    def choose(self, name: str, gradient: torch.Tensor) -> CodecChoice:
        """Return what a parameter is compressed with now."""
        return self._policy.choose(name, gradient)

    def state_dict(self) -> dict[str, Any]:
        """Return the choices in force as plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the choices of a `state_dict`."""


class SparseLayout(BucketLayout):
    """The layout of a bucket that is one sparse gradient: its values are sent uncompressed, without error feedback.

    A residual would have to be dense, as large as the table that sparse gradients avoid, and codecs without feedback
    have errors that add up over the steps.
    """


class BucketLayouts:
    """Builds the layout of each bucket, and keeps it until the parameters of the bucket or their schemes change.

    Attributes:
        current: The layout of each bucket, by its index.
        retired: The layouts that were replaced; they hold counts for reports.

    Args:
        warmup: The number of uncompressed steps at the start.
        parameters: (name, parameter) pairs. Without them a parameter is named when a bucket first contains it.
    """

    def __init__(
        self,
        chooser: Chooser,
        monitor: Monitor,
        averager: BucketAverager,
        warmup: int,
        parameters: Iterable[tuple[str, torch.Tensor]] | None,
    ) -> None:
        self.current: dict[int, BucketLayout] = {}
        self.retired: list[BucketLayout] = []
        self._chooser, self._monitor, self._averager, self._warmup = chooser, monitor, averager, warmup
        # The parameters themselves are kept so that an id is never reused.
        self._parameters = {id(parameter): (name, parameter) for name, parameter in parameters or ()}
        self._are_named = parameters is not None
        self._dgc_schemes = [scheme for scheme in chooser.schemes if isinstance(scheme, DGC)]

    def sizes(self) -> dict[str, int] | None:
        """Return the number of real elements of each parameter; None without ``parameters``."""
        if not self._are_named:
            return None
        return {
            name: parameter.numel() * (2 if parameter.is_complex() else 1)
            for name, parameter in self._parameters.values()
        }

    def under_revision(self, chooser_revision: int) -> tuple[list[BucketLayout], dict[int, BucketLayout]]:
        """Return the retired and the current layouts as if the chooser still had an earlier revision, for reports."""
        retired, current = list(self.retired), dict(self.current)
        for index, layout in self.current.items():
            for place, old in enumerate(retired):
                if old.parameter_ids == layout.parameter_ids and old.revision[2] == chooser_revision:
                    retired[place], current[index] = layout, old
        return retired, current

    def of(self, bucket: GradBucket, buffer: torch.Tensor, step: int, ranks: int) -> BucketLayout:
        """Return the layout of a bucket in a step; TypeError if it is sparse, and DGC is among the schemes."""
        parameter_ids = tuple(map(id, bucket.parameters()))
        dgc_stages = [dgc.warmup_stage(step) for dgc in self._dgc_schemes] if self._dgc_schemes else None
        revision = step < self._warmup, self._monitor.revision, self._chooser.revision, dgc_stages
        layout = self.current.get(bucket.index())
        if layout is not None:
            same_buffer = layout.parameter_ids == parameter_ids and layout.dtype == buffer.dtype
            if same_buffer and layout.revision == revision:
                return layout
            self.retired.append(layout)
        for old in self.retired:  # compression takes turns with plain DDP while it is verified
            if (old.parameter_ids, old.dtype, old.revision) == (parameter_ids, buffer.dtype, revision):
                self.retired.remove(old)
                self.current[bucket.index()] = old
                return old
        layout = (
            self._sparse_layout(bucket, buffer, parameter_ids, ranks)
            if buffer.is_sparse
            else build_layout(
                buffer,
                zip(self.names(bucket), _gradients(bucket, buffer), strict=True),
                parameter_ids,
                lambda name, gradient: SINGLE_RANK if ranks == 1 else self._choose(name, gradient, step),
            )
        )
        layout.revision, layout.level_shares = revision, self._averager.level_shares(buffer)
        self.current[bucket.index()] = layout
        return layout

    def names(self, bucket: GradBucket) -> list[str]:
        """Return the names of a bucket's parameters, in order."""
        return [self._name(parameter) for parameter in bucket.parameters()]

    def _sparse_layout(
        self, bucket: GradBucket, buffer: torch.Tensor, parameter_ids: tuple[int, ...], ranks: int
    ) -> SparseLayout:
        """Return the layout of a sparse gradient, which DDP passes in a bucket of its own."""
        (name,) = self.names(bucket)
        if self._dgc_schemes:
            raise TypeError(
                f"bucket {bucket.index()}: {name}: a sparse gradient does not go with dgc, which keeps a dense "
                "momentum of every parameter; use another scheme, or create the embedding with sparse=False"
            )
        # The parameter is dense and has the shape of its gradient, and so it has the gradient's choice.
        choice = SINGLE_RANK if ranks == 1 else self._chooser.choose(name, bucket.parameters()[0])
        if choice.codec != NONE:
            choice = CodecChoice(codec=NONE, reason="sparse gradient", refused=True)
        member = Member(name, buffer.numel(), choice.reason, choice.refused)
        segment = Segment(0, buffer.numel(), NONE, buffer.dtype, [member])
        return SparseLayout(parameter_ids, buffer.dtype, [segment])

    def _choose(self, name: str, gradient: torch.Tensor, step: int) -> CodecChoice:
        """Return what was chosen, unless training warms up or the guard replaces it."""
        choice = self._chooser.choose(name, gradient)
        if choice.codec == NONE:
            return choice
        if step < self._warmup:
            return CodecChoice(codec=NONE, reason=f"warm-up until step {self._warmup}")
        scheme = self._monitor.scheme_for(name, choice.codec, step)
        if isinstance(scheme, DGC):
            scheme = scheme.at(step)
        return choice.replaced_by(scheme, gradient)

    def _name(self, parameter: torch.Tensor) -> str:
        if id(parameter) not in self._parameters:
            self._parameters[id(parameter)] = (f"parameter.{len(self._parameters)}", parameter)
        return self._parameters[id(parameter)][0]


def _gradients(bucket: GradBucket, buffer: torch.Tensor) -> list[torch.Tensor]:
    """Return views of the buffer for the gradients of its parameters.

    torch passes a bucket of complex gradients as real numbers, twice as many, but counts offsets and sizes of its views
    in complex ones. Here such a gradient is a view of real and imaginary parts, with one dimension more.
    """
    gradients: list[torch.Tensor] = bucket.gradients()
    if not any(parameter.is_complex() for parameter in bucket.parameters()):
        return gradients
    numbers = torch.view_as_complex(buffer.view(-1, 2))
    origin = buffer.storage_offset()
    return [
        torch.view_as_real(numbers[begin : begin + gradient.numel()].view(gradient.shape))
        for gradient in gradients
        for begin in [int(gradient.storage_offset()) - origin]
    ]
