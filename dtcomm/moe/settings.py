"""The codecs of experts' rows: defaults and checks."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from dtcomm.codecs import Codec
from dtcomm.codecs import codec as parse
from dtcomm.compress.spec import MAX_ERROR, gaussian_error

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
    if isinstance(spec, str) and "/" in spec:
        raise ValueError(
            f"{argument}: {spec!r} names a codec for each level of hosts; rows have one codec, because a payload that "
            "comes from another host is passed on inside the host as it is"
        )
    try:
        codec = parse(spec)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{argument}: {str(error).removeprefix('codec: ')}") from None
    if codec.variable_length:
        raise ValueError(
            f"{argument}: {codec} has payloads of a length that depends on the data, and all rows take the same bytes"
        )
    if codec.reproducible:
        raise ValueError(f"{argument}: {codec} is for sums, and rows are sent and not summed")
    if not allow_inaccurate and (error_of_codec := gaussian_error(codec)) > MAX_ERROR:
        raise ValueError(
            f"{argument}: {codec} loses {error_of_codec:.0%} of the {CARRIED[argument]} (relative error; the limit is "
            f"{MAX_ERROR:.0%}), and nothing sends that later; use 4 bits or more; allow_inaccurate=True allows it"
        )
    return codec
