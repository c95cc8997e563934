"""What communication takes of the cores of CPU ranks in a training step.

CPU ranks compute and communicate on the same cores, so computing waits for what communication takes of them, also where
the link itself is hidden. The constants were fitted to DDP's steps of an MLP of 25 M parameters and a click model of
1 M, on a Xeon with a core for each rank. docs/results/training.md has the error on models that were not used. GPUs
have cores of their own for this, and nothing is counted.
"""

from __future__ import annotations

import torch

from dtcomm.codecs.base import Codec
from dtcomm.extensions.jobs.estimate import LINK_REACH, Estimate, chunk_elements
from dtcomm.extensions.jobs.hardware import System
from dtcomm.extensions.jobs.traffic_profile import profile

#: Of a bucket of DDP besides its data: the hook, and threads that take turns with computing.
BUCKET_SECONDS = 2e-3
#: Of each element that is encoded or decoded, and has left the caches.
ELEMENT_SECONDS = 0.4e-9
#: Of each byte that is sent or received through sockets.
BYTE_SECONDS = 0.15e-9


def cores_per_rank(system: System) -> float:
    """Return the cores of a CPU rank; less than 1 if ranks share them."""
    return system.cores / system.per_host if system.cores else 1.0


def bucket_seconds(system: System) -> float:
    """Return the seconds of a core that a bucket of DDP takes besides its data."""
    return 0.0 if system.device.generation or system.ranks == 1 else BUCKET_SECONDS


def message_seconds(system: System, message: Estimate, codec: Codec, dtype: torch.dtype) -> float:
    """Return the seconds of a core that a message takes on the busiest rank.

    Args:
        system: The hardware.
        message: The estimate of the message.
        codec: Its codec.
        dtype: The dtype of the tensor.
    """
    if system.device.generation:
        return 0.0
    loads = profile(message.algorithm, message.collective, system.ranks, system.per_host)
    assert loads is not None, f"{message.algorithm} has an estimate, so its profile is known"
    total = loads.total()
    chunk = chunk_elements(loads, message.nbytes // dtype.itemsize, codec.granularity)
    payload = codec.wire_bytes(chunk, dtype)
    # Cores copy what ranks of a host exchange. Between hosts a rank receives as much as it sends.
    inside = total.inside * payload / (system.inside.bandwidth * LINK_REACH[system.engine])
    coded = (total.encode + total.decode) * chunk
    return coded * ELEMENT_SECONDS + 2 * total.between * payload * BYTE_SECONDS + inside
