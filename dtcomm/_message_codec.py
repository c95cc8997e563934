"""The codec of messages that are sent and not summed: what pipelines, experts and attention accept."""

from __future__ import annotations

from dtcomm.codecs import Codec, codec
from dtcomm.compress.spec import MAX_ERROR, gaussian_error


def message_codec(spec: str | Codec, argument: str, messages: str) -> Codec:
    """Return the codec that a spec describes, if messages can have it.

    Args:
        spec: The spec, or a codec.
        argument: Name of the argument, with which error messages begin.
        messages: What is sent, as a plural: ``"rows"``.

    Raises:
        TypeError: ``spec`` is neither a string nor a `Codec`.
        ValueError: It is wrong, has two levels or payloads of variable length, or is for sums.

    Example:
        >>> str(message_codec("int8", "codec", "rows"))
        'int8'
    """
    if isinstance(spec, str) and "/" in spec:
        raise ValueError(
            f"{argument}: {spec!r} names a codec for each level of hosts; {messages} have one codec on all their way"
        )
    try:
        parsed = codec(spec)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{argument}: {str(error).removeprefix('codec: ')}") from None
    if parsed.variable_length:
        raise ValueError(
            f"{argument}: {parsed} has payloads of a length that depends on the data, and {messages} have a fixed one"
        )
    if parsed.reproducible:
        raise ValueError(f"{argument}: {parsed} is for sums, and {messages} are sent and not summed")
    return parsed


def require_accurate(codec: Codec, argument: str, carried: str, remedy: str = "") -> None:
    """Raise a ValueError if a codec loses too much of what nothing sends later.

    Args:
        codec: The codec.
        argument: Name of the argument.
        carried: What it carries: ``"tokens"``.
        remedy: An argument with which the codec is accepted, besides ``allow_inaccurate=True``. Default: none.
    """
    if (error := gaussian_error(codec)) > MAX_ERROR:
        instead = f", or {remedy}" if remedy else ""
        raise ValueError(
            f"{argument}: {codec} loses {error:.0%} of the {carried} (relative error; the limit is {MAX_ERROR:.0%}), "
            f"and nothing sends that later; use 4 bits or more{instead}; allow_inaccurate=True allows it"
        )
