"""The codecs of experts' rows, and counters of what is sent."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TypedDict

import torch
import torch.distributed as dist

from dtcomm.arguments import require_bool
from dtcomm.codecs import Codec
from dtcomm.codecs import codec as parse
from dtcomm.compress.report import GroupTraffic, group_name
from dtcomm.compress.spec import message_codec, require_accurate
from dtcomm.work import Work

#: Default of what comes back, and of gradients, where the rows travel in a lossy codec.
COMBINE_CODEC = BACKWARD_CODEC = "bf16"
#: Argument → what its codec carries.
CARRIED = {"codec": "tokens", "combine_codec": "experts' outputs", "backward_codec": "gradients"}


class CodecOptions(TypedDict, total=False):
    """What `dispatch` and `dispatch_padded` take; the texts are those of their other common arguments too.

    Attributes:
        x: This rank's tokens, [tokens, features]; fp32, fp16 or bf16. The number of tokens may differ between ranks
            and may be 0; everything else is the same on all ranks.
        num_experts: Number of experts on all ranks together; divisible by the number of ranks.
        priorities: [tokens, choices], for example the router's weights: pairs with the lowest ones are dropped.
            Default: the last ones.
        encoded: Whether the rows are returned as they arrived. Default: False, they are decoded.
        group: Process group. Default: all ranks.
        codec: Codec of the tokens, a spec or a `Codec`. Default: ``"fp8_e4m3"``.
        combine_codec: Codec of the experts' outputs on their way back. Default: ``"bf16"``, because models lose more
            quality by 8-bit outputs than by 4-bit tokens; ``"none"`` if ``codec`` is.
        backward_codec: Codec of the gradients of both. Default: ``"bf16"``; ``"none"`` if both other codecs are.
        allow_inaccurate: Whether codecs are allowed that lose more than a fifth of what they carry. Default: False.
    """

    codec: str | Codec
    combine_codec: str | Codec | None
    backward_codec: str | Codec | None
    allow_inaccurate: bool


DEFAULTS: CodecOptions = {
    "codec": "fp8_e4m3",
    "combine_codec": None,
    "backward_codec": None,
    "allow_inaccurate": False,
}


@dataclass(frozen=True, kw_only=True)
class RowCodecs:
    """The codecs of a route: of tokens, of the experts' outputs, and of the gradients of both."""

    dispatch: Codec
    combine: Codec
    backward: Codec

    @property
    def identity(self) -> str:
        """What ranks compare."""
        return " ".join(codec.identity for codec in (self.dispatch, self.combine, self.backward))


@functools.lru_cache(maxsize=256)
def make_codecs(
    codec: str | Codec,
    combine_codec: str | Codec | None,
    backward_codec: str | Codec | None,
    allow_inaccurate: bool,
) -> RowCodecs:
    """Check what users wrote and fill in the defaults; see `dtcomm.moe.dispatch`."""
    require_bool("allow_inaccurate", allow_inaccurate)
    forward = _parse(codec, "codec", allow_inaccurate)
    none = parse("none")
    if combine_codec is None:
        combine_codec = none if forward == none else COMBINE_CODEC
    combine = _parse(combine_codec, "combine_codec", allow_inaccurate)
    if backward_codec is None:
        backward_codec = none if forward == combine == none else BACKWARD_CODEC
    backward = _parse(backward_codec, "backward_codec", allow_inaccurate)
    return RowCodecs(dispatch=forward, combine=combine, backward=backward)


def _parse(spec: str | Codec, argument: str, allow_inaccurate: bool) -> Codec:
    """Return a codec that may carry rows."""
    codec = message_codec(spec, argument, "rows")
    if not allow_inaccurate:
        require_accurate(codec, argument, CARRIED[argument])
    return codec


class State(GroupTraffic):
    """Counts what experts' rows send over a process group on this rank, from now on; ``str()`` gives one line.

    Forward and backward passes of `dispatch`, `combine` and their padded forms are counted.

    Args:
        group: Process group. Default: all ranks.

    Raises:
        RuntimeError: No process group is initialized.

    Example::

        state = dtcomm.moe.State()
        train(model)  # calls dtcomm.moe.dispatch and combine
        state.print_report()
    """

    integration = "experts"


def record(
    group: dist.ProcessGroup | None,
    level: str,
    what: str,
    codec: str,
    dtype: torch.dtype,
    numel: int,
    work: Work,
) -> None:
    """Count a completed all-to-all; ``level`` says between which ranks it was, the rest is as of `State.record`."""
    if State.is_counting():
        State.record(group_name(group), level, what, codec, dtype, numel, work)
