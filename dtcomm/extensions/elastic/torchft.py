"""A process group for `torchft <https://github.com/pytorch/torchft>`_ whose sums are dtcomm's: pip install torchft.

torchft's ``Manager``, and with it its ``LocalSGD``, ``DiLoCo`` and ``DistributedDataParallel``, then average over the
native engine, with several connections between sites and with a codec. torchft decides who takes part.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchft.process_group import ProcessGroupWrapper

from dtcomm.codecs import Codec
from dtcomm.codecs import codec as parse_codec
from dtcomm.collectives import all_reduce, release
from dtcomm.collectives.checks import op_name
from dtcomm.work import TorchWork

NONE = parse_codec("none")


class ProcessGroup(ProcessGroupWrapper):  # type: ignore[misc]
    """The ranks of a quorum, one process of each replica group.

    - Averages and sums of floating-point tensors use ``codec``; the other operations are Gloo's.
    - Every quorum has a new default process group, which this object makes and destroys. A program therefore has no
      other default group: a replica group is one process. For islands of several ranks use `dtcomm.local_sgd.LocalSGD`.
    - There is no error feedback: torchft makes new buffers for each average, and a replica that was healed has the
      weights of another one. Codecs of 8 bits and more need none; with ``int4`` and less prefer
      `dtcomm.extensions.elastic.ElasticLocalSGD`, which keeps residuals.

    Args:
        codec: The codec of averages and sums, equal on all replicas. Default ``"int8"``.
        timeout: How long a quorum's group and its operations wait. Default 60 s.

    Raises:
        ValueError: ``codec`` is not valid.

    Example:
        With torchft's manager and its DiLoCo::

            pg = ProcessGroup("int8")
            manager = torchft.Manager(pg, load_state_dict, state_dict, min_replica_size=2, use_async_quorum=False)
            with torchft.local_sgd.DiLoCo(manager, [model], inner, outer, sync_every=30):
                train()
    """

    _pg: Any  # the quorum's process group; None: there is none

    def __init__(self, codec: str | Codec = "int8", timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__(timeout)
        self.codec = parse_codec(codec)

    def getBackendName(self) -> str:
        """The name that torchft shows."""
        return "torchft-dtcomm"

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> TorchWork:
        """Reduce tensors in place.

        Args:
            tensors: One tensor, contiguous, or several, which are reduced one after the other.
            opts: ``AllreduceOptions``, or the reduction.

        Returns:
            A handle with ``wait`` and ``get_future``, as torch's.
        """
        reduction = getattr(opts, "reduceOp", opts)
        op = op_name(getattr(reduction, "op", reduction))
        group = self.parent
        dtypes = self.codec.dtypes if op in ("sum", "avg") else ()
        codecs = [self.codec if tensor.dtype in dtypes else NONE for tensor in tensors]
        works = [
            all_reduce(tensor, op, codec=codec, group=group, async_op=True)
            for tensor, codec in zip(tensors, codecs, strict=True)
        ]
        for work in works[:-1]:
            work.wait()
        return TorchWork(works[-1], tensors)

    def abort(self, errored: bool = True) -> None:
        """End what is under way with an error, and leave the quorum."""
        if self._pg is None:
            return
        self._pg = None
        release()
        if dist.is_initialized():
            dist.destroy_process_group()

    def shutdown(self) -> None:
        """Leave the quorum."""
        self.abort(errored=False)

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        if dist.is_initialized():
            raise RuntimeError(
                "ProcessGroup: there is a default process group already; a replica group is one "
                "process, which calls init_process_group only through this object"
            )
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=self._timeout)
        return dist.group.WORLD
