"""The options that the collectives share: their types, their values as one argument, and their documentation.

The public functions spell their options out. `documented` appends the text of those that a docstring does not explain
itself, so that each sentence stands here alone.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar

import torch
import torch.distributed as dist

from dtcomm.codecs import Codec
from dtcomm.kernels.local_tasks import LocalTask
from dtcomm.schedule import Schedule

Group = dist.ProcessGroup | None
Algorithm = str | Schedule
"""What the argument ``algorithm`` takes: a name, or a schedule or its text."""
Op = str | dist.ReduceOp | dist.ReduceOp.RedOpType

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class NamedSchedule(NamedTuple):
    """A verified schedule of the user's, with the name by which ranks compare it."""

    name: str
    schedule: Schedule

    @classmethod
    def of(cls, schedule: Schedule) -> NamedSchedule:
        """Return the schedule under a name made of a checksum of its text."""
        return cls(f"schedule {zlib.crc32(str(schedule).encode()):08x}", schedule)

    def __hash__(self) -> int:  # that of a schedule takes long
        return hash(self.name)


class Options(NamedTuple):
    """The options of one call; the functions' documentation explains each (`documented`)."""

    codec: str | Codec = "none"
    algorithm: Algorithm | NamedSchedule = "auto"
    group: Group = None
    async_op: bool = False
    seed: int | None = None
    residual: torch.Tensor | None = None
    checksum: bool | None = None
    audit: bool = False
    epilogue: LocalTask | None = None

    def uncompressed(
        self, algorithm: Algorithm | NamedSchedule = "auto", *, async_op: bool = False
    ) -> Options:
        """The options of a message of dtcomm's own that belongs to the call."""
        return Options("none", algorithm, self.group, async_op, checksum=self.checksum)


if TYPE_CHECKING:  # the keyword arguments of the functions, for the overloads in __init__.pyi

    class ReceiveOptions(TypedDict, total=False):
        codec: str | Codec
        group: Group
        checksum: bool | None

    class SendOptions(ReceiveOptions, total=False):
        seed: int | None
        residual: torch.Tensor | None

    class CollectiveOptions(SendOptions, total=False):
        algorithm: Algorithm

    class AllReduceOptions(CollectiveOptions, total=False):
        audit: bool
        epilogue: LocalTask | None

    class CoalescedOptions(TypedDict, total=False):
        codec: str | Codec | Sequence[str | Codec]
        algorithm: Algorithm
        group: Group
        seed: int | None
        residuals: Sequence[torch.Tensor | None] | None
        bucket_bytes: int
        checksum: bool | None


_ARGUMENTS = {
    "op": """``"sum"``, ``"avg"``, ``"min"`` or ``"max"``, or torch's ``ReduceOp`` of these. avg divides the fp32 sum
        once, before its final encoding. min and max are valid with codecs none, fp16 and bf16.""",
    "codec": """The codec of the messages: a spec string such as ``"int8"``, a ``Codec``, or ``"A/B"`` with codec A
        inside hosts and B between them.""",
    "algorithm": """The algorithm's name, one of ``dtcomm.algorithms.available("{collective}")``; ``"direct"`` for
        one-shot or two-shot, as suits the codec; ``"auto"`` for the fastest by prediction or measurement. Or a
        `dtcomm.schedule.Schedule`, or its text, for the ranks of the group.""",
    "group": "The process group; None is the default group.",
    "async_op": """If True, start the operation and return a ``Work`` at once. The tensors must not be used until the
        work is done.""",
    "seed": """The key of stochastic rounding and of random positions, the same on all ranks; None is the number of the
        call.""",
    "residual": """Error feedback: an fp32 tensor with as many elements as {whole}. It is added to this rank's
        contribution and then overwritten with the error of encoding it. None means no feedback.""",
    "residuals": """Error feedback: for each tensor an fp32 tensor with as many elements as {whole}, or None. See
        ``residual`` of `all_reduce`. None means no feedback.""",
    "checksum": """If True, every payload is sent with its CRC32C, which the receiver verifies. None takes the value of
        the variable DTCOMM_CHECKSUM. It is the same on all ranks.""",
}
_RETURNS = "None when the result is complete, or a ``Work`` if ``async_op``."
_RAISES = {
    "TypeError, ValueError": "If an argument is not valid. The message names it; nothing has been started.",
    "CollectiveMismatch": "If the ranks call different operations.",
    "CollectiveTimeout": "If a rank does not take part within the group's timeout.",
    "PeerLost": "If a rank died.",
    "PayloadCorrupt": "If a checksum does not match.",
}


def documented(*, whole: str = "the tensor", **raises: str) -> Callable[[FunctionT], FunctionT]:
    """Complete a collective's docstring with the shared text: of its options, its result and its errors.

    The docstring explains the arguments of its own under ``Args:``, and ends with an ``Example:``. A residual has the
    size of ``whole``. ``raises`` are errors by name, where the function raises others or for other reasons than all do.
    """

    def complete(function: FunctionT) -> FunctionT:
        if function.__doc__ is None:  # under python -OO
            return function
        text, _, example = inspect.cleandoc(function.__doc__).partition("\n\nExample:\n")
        text, _, returned = text.partition("\n\nReturns:\n")
        parameters = inspect.signature(function).parameters
        collective = function.__name__.removesuffix("_coalesced")
        for name in parameters:
            if name in _ARGUMENTS and f"\n    {name}: " not in text:
                explained = _ARGUMENTS[name].format(collective=collective, whole=whole)
                text += f"\n    {name}: {explained}"
        if returned or "async_op" in parameters:
            text += f"\n\nReturns:\n{returned or f'    {_RETURNS}'}"
        errors = "\n".join(f"    {name}: {reason}" for name, reason in {**_RAISES, **raises}.items())
        function.__doc__ = f"{text}\n\nRaises:\n{errors}\n\nExample:\n{example}\n"
        return function

    return complete
