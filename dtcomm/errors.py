"""The errors that dtcomm raises. Wrong arguments raise ValueError or TypeError instead."""

from __future__ import annotations


class DtcommError(RuntimeError):
    """Base class of the errors below.

    Example:
        >>> import dtcomm
        >>> issubclass(dtcomm.errors.PeerLost, dtcomm.errors.DtcommError)
        True
    """


class CollectiveTimeout(DtcommError):
    """A rank did not take part before the group's timeout. The message names the rank."""


class PeerLost(DtcommError):
    """The process of a rank is gone. The message names its rank, host and pid."""


class CollectiveMismatch(DtcommError):
    """Ranks called different operations, or the same one with another dtype, size or codec.

    The message lists what each rank called.
    """


class PayloadCorrupt(DtcommError):
    """A payload is not a valid encoding, or its checksum differs from the one that was sent.

    The message names sender, receiver, operation and chunk.
    """


class CommunicatorClosed(DtcommError):
    """The group was destroyed or released on this rank, or the program exits, before the operation ended."""


class JoinRefused(DtcommError):
    """A rank may not join the others: its secret, version, model or options differ from theirs.

    The message names what differs, and both values.
    """


class ScheduleError(DtcommError):
    """A schedule does not compute what its collective promises. The message names rank, step and chunk."""
