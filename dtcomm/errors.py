"""Every error that dtcomm raises on its own account; wrong arguments raise ValueError or TypeError."""

from __future__ import annotations


class DtcommError(RuntimeError):
    """Base of all errors below."""


class CollectiveTimeout(DtcommError):
    """A rank did not arrive within the group's timeout; the message says which."""


class PeerLost(DtcommError):
    """A rank's process is gone; the message names its rank, host and pid."""


class CollectiveMismatch(DtcommError):
    """Ranks disagree on operation, dtype, size, codec or sequence number; the message says who said what."""


class PayloadCorrupt(DtcommError):
    """Bytes that no codec of ours could have written, or that arrived with another checksum than they were sent
    with; the message then names sender, receiver, operation and chunk.
    """


class ScheduleError(DtcommError):
    """A schedule does not do what its collective promises; the message names rank, step and chunk."""
