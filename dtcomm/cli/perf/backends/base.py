"""What a backend of ``dtcomm perf`` is: who carries out a measured collective."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from dtcomm.cli.perf.collectives import COLLECTIVES
from dtcomm.cli.perf.placement import CPU, CUDA, OnHost, Place
from dtcomm.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class Call:
    """One collective on given tensors. all_reduce, broadcast and reduce work on ``output``; ``input`` is copied into
    it first where that is another tensor, since their API is in place. ``schedule`` stands for the algorithm."""

    collective: str
    output: torch.Tensor
    input: torch.Tensor
    op: str = "none"
    root: int = 0
    codec: str = "none"
    algorithm: str = "auto"
    schedule: Schedule | None = None

    @property
    def copies(self) -> bool:
        return COLLECTIVES[self.collective].whole_in_place and self.output is not self.input


class Moved(NamedTuple):
    """What moved the bytes of a call (fused, nccl, gloo, …), and why not what one would expect; empty: as expected."""

    by: str
    why: str = ""


class Backend(abc.ABC):
    """``plain``: it knows neither codecs nor algorithms. ``measures``: it has processes and a clock of its own
    (``times``), and what it computes is not seen. ``devices``: where its tensors may be. ``in_place``: it can work on
    one tensor.

    All ranks make it, in the same order, after torch.distributed is up; ValueError says why it cannot be had.
    """

    plain: ClassVar[bool] = True
    measures: ClassVar[bool] = False
    devices: ClassVar[tuple[str, ...]] = (CPU, CUDA)
    in_place: ClassVar[bool] = True

    def __init__(self, timeout: float, place: Place | None = None) -> None:
        self.place = place or OnHost()
        self.group = dist.new_group(timeout=timedelta(seconds=timeout), backend=self.moves_with())

    def moves_with(self) -> str | None:
        """The backend of its group; None: that of the ranks' own, which is Gloo."""
        return None

    @classmethod
    def refusal(cls, collective: str, datatype: str, op: str) -> str | None:
        """Why it cannot do that, or None."""
        return None

    @abc.abstractmethod
    def start(self, call: Call, asynchronous: bool) -> Callable[[], Any]:
        """A function that does the collective, or starts it and returns an object with ``wait()``."""

    def operation(self, call: Call, asynchronous: bool = False) -> Callable[[], Any]:
        """``start``, with the copy that an out-of-place call needs."""
        run = self.start(call, asynchronous)
        if not call.copies:
            return run
        copy, source = call.output.copy_, call.input

        def copied() -> Any:
            copy(source)
            return run()

        return copied

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for a tensor of a call; all ranks call it in the same order."""
        return torch.empty(numel, dtype=dtype, device=self.place.device)

    def tally(self) -> Any:
        """What ``moved`` compares with."""
        return None

    def moved(self, before: Any) -> Moved:
        """What moved the bytes since that tally."""
        return Moved(dist.get_backend(self.group))

    def why_no_graph(self) -> str:
        """Why a CUDA graph cannot capture its calls; empty where it can."""
        return ""

    def times(self, case: Any, iters: int, warmup: int) -> list[list[float]]:
        """Seconds of each call of a ``perf_check.Case``, by rank, where it ``measures``."""
        raise TypeError("abstract")

    def describe(self) -> str:
        """A few words for the header."""
        return ""

    def close(self) -> None:  # noqa: B027 - most start nothing
        """End what it started."""


def agree(trouble: str) -> str:
    """What went wrong on any rank, the first one's words; empty where all are well. All ranks call it."""
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, trouble)
    return next((f"rank {rank}: {words}" for rank, words in enumerate(said) if words), "")
