"""The codecs of experts' rows, and counters of what is sent."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dtcomm.codecs import Codec
from dtcomm.codecs import codec as parse
from dtcomm.compress.report import GroupTraffic, group_name
from dtcomm.compress.spec import message_codec, require_accurate
from dtcomm.work import Work

#: Default of what comes back, and of gradients, where the rows travel in a lossy codec.
COMBINE_CODEC = BACKWARD_CODEC = "bf16"
#: Argument → what its codec carries.
CARRIED = {"codec": "tokens", "combine_codec": "experts' outputs", "backward_codec": "gradients"}


@dataclass(frozen=True, kw_only=True)
class RowCodecs:
    """The codecs of a route.

    Attributes:
        dispatch: Codec of tokens on their way to the experts.
        combine: Codec of the experts' outputs.
        backward: Codec of the gradients of both.
    """

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
    if not isinstance(allow_inaccurate, bool):
        raise TypeError(f"allow_inaccurate: expected a bool, got {type(allow_inaccurate).__name__}")
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
