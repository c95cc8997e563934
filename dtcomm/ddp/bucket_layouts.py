"""How each of DDP's buckets is packed: which parameters lie in it, what they are called, what each gets."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch._C._distributed_c10d import GradBucket  # dist.GradBucket, where type checkers find it

from dtcomm.codecs import codec
from dtcomm.compress.bucket_layout import BucketLayout, build_layout
from dtcomm.compress.dgc import DGC
from dtcomm.compress.guard_monitor import Monitor
from dtcomm.compress.policy import SINGLE_RANK, CodecChoice
from dtcomm.ddp.chooser import Chooser

NONE = codec("none")


class BucketLayouts:
    """``current`` has the packing of each bucket, by its index; ``retired`` those that others took the place of."""

    def __init__(
        self,
        chooser: Chooser,
        watch: Monitor,
        warmup: int,
        parameters: Iterable[tuple[str, torch.Tensor]] | None,
    ) -> None:
        self.current: dict[int, BucketLayout] = {}
        self.retired: list[BucketLayout] = []
        self._chooser, self._watch, self._warmup = chooser, watch, warmup
        # The parameters are kept so that an id is never reused; without names, they come with the buckets.
        self._parameters = {id(parameter): (name, parameter) for name, parameter in parameters or ()}
        self._named = parameters is not None
        self._falling = [each for each in chooser.schemes if isinstance(each, DGC)]

    def sizes(self) -> dict[str, int] | None:
        """Elements of each parameter; None where nobody has named them."""
        if not self._named:
            return None
        return {name: parameter.numel() for name, parameter in self._parameters.values()}

    def of(self, bucket: GradBucket, buffer: torch.Tensor, step: int, ranks: int) -> BucketLayout:
        """The packing of a bucket, made anew where its parameters, or what they get, have changed."""
        parameters = bucket.parameters()
        layout = tuple(map(id, parameters))
        ratios = [dgc.warmup_stage(step) for dgc in self._falling]
        revision = step < self._warmup, self._watch.revision, self._chooser.revision, ratios
        packing = self.current.get(bucket.index())
        if packing is not None:
            alike = packing.parameter_ids == layout and packing.dtype == buffer.dtype
            if alike and packing.revision == revision:
                return packing
            self.retired.append(packing)
        if buffer.layout != torch.strided:
            raise TypeError(
                f"bucket {bucket.index()}: {buffer.layout} gradients cannot be compressed, only dense ones"
            )
        names = self.names(bucket)
        gradients = zip(names, bucket.gradients(), strict=True)
        packing = build_layout(
            buffer,
            gradients,
            layout,
            lambda name, gradient: SINGLE_RANK if ranks == 1 else self._choose(name, gradient, step),
        )
        packing.revision = revision
        self.current[bucket.index()] = packing
        return packing

    def names(self, bucket: GradBucket) -> list[str]:
        """Of its parameters, in order."""
        return [self._name(parameter) for parameter in bucket.parameters()]

    def _choose(self, name: str, gradient: torch.Tensor, step: int) -> CodecChoice:
        """What was chosen, unless training warms up or the guard knows better."""
        choice = self._chooser.choose(name, gradient)
        if choice.codec == NONE:
            return choice
        if step < self._warmup:
            return CodecChoice(codec=NONE, why=f"warm-up until step {self._warmup}")
        scheme = self._watch.scheme_for(name, choice.codec, step)
        if isinstance(scheme, DGC):
            scheme = scheme.at(step)
        return choice.instead(scheme, gradient)

    def _name(self, parameter: torch.Tensor) -> str:
        if id(parameter) not in self._parameters:
            self._parameters[id(parameter)] = (f"parameter.{len(self._parameters)}", parameter)
        return self._parameters[id(parameter)][0]
