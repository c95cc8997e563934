"""Bootstrap of a communicator for CUDA tensors."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtcomm import _C, env
from dtcomm.errors import DtcommError
from dtcomm.kernels import dispatch
from dtcomm.runtime.bootstrap.cpu import CpuBootstrap
from dtcomm.runtime.bootstrap.rendezvous import StoreExchange, require_equal
from dtcomm.runtime.cuda_peer import PeerRuntime
from dtcomm.runtime.cuda_peer.launch import RAN_BETWEEN_GPUS, FusedRanks, launcher_for, layout_for
from dtcomm.runtime.cuda_peer.memory import describe_gpu, map_peers, missing_nvlink, why_not_peers
from dtcomm.runtime.process_groups import Deadline
from dtcomm.runtime.torchdist.runtime import TorchDistRuntime
from dtcomm.runtime.torchdist.transport import GroupTransport, NcclTransport, Transport
from dtcomm.runtime.types import Runtime
from dtcomm.streams import Streams, streams_of

#: Torch's engines of NCCL, and whether their constructor takes the device: ``nccl`` until 2.14 and ``nccl-legacy``;
#: ``nccl2``, which 2.15 also calls ``nccl``; ``nccl-lazy``.
NCCL_ENGINES = {"ProcessGroupNCCL": False, "ProcessGroupNCCL2": True, "ProcessGroupNCCLLazy": True}


class CudaBootstrap(CpuBootstrap):
    """Bootstrap of a communicator for tensors on a CUDA device.

    If the group has NCCL for the device, a private NCCL group is made, whose work is queued on streams; otherwise Gloo
    carries messages through host memory. Where all ranks can map each other's memory, fused kernels over that serve
    the operations that have one, and the group's backend the rest; see ``launch.RAN_BETWEEN_GPUS``.
    """

    def __init__(
        self,
        device: torch.device,
        rank: int,
        ranks: list[int],
        group: dist.ProcessGroup,
        name: str,
        deadline: Deadline | None = None,
        is_pair: bool = False,
    ) -> None:
        super().__init__(rank, ranks, group, name, deadline)
        self._device = device
        self._is_pair = is_pair  # two ranks that send and receive

    def _attempt(self, exchange: StoreExchange) -> Runtime:
        if env.get("DTCOMM_RUNTIME") == "native":
            raise DtcommError(
                f"DTCOMM_RUNTIME=native: the engine moves CPU tensors; this one is on {self._device}"
            )
        if env.get("DTCOMM_EMULATE_LINK"):
            raise DtcommError(
                f"DTCOMM_EMULATE_LINK: emulated links carry CPU tensors; this one is on {self._device}"
            )
        backend = backend_of(self._group, self._device)
        infos = exchange.all_gather(
            {
                **self._base_info(),
                "backend": backend,
                "gpu": describe_gpu(self._device),
                "kernels": dispatch.installed(),
                "table": env.tune_text() if self.rank == 0 else "",
            }
        )
        self._read_base_info(infos)
        self.tuning_table = infos[0]["table"]
        require_equal(infos, "backend", f"the group's backend for {self._device.type}")
        require_equal(infos, "kernels", "whether dtcomm._cuda is built")
        return self._choose_runtime(exchange, infos, backend)

    def _choose_runtime(
        self, exchange: StoreExchange, infos: Sequence[dict[str, Any]], backend: str
    ) -> Runtime:
        streams = streams_of(self._device)
        fallback = self._backend_runtime(streams, backend)
        try:
            return self._peer_runtime(exchange, infos, backend, streams, fallback) or fallback
        except BaseException:
            fallback.close()
            raise

    def _peer_runtime(
        self,
        exchange: StoreExchange,
        infos: Sequence[dict[str, Any]],
        backend: str,
        streams: Streams,
        fallback: Runtime,
    ) -> Runtime | None:
        """The runtime of fused kernels, or None where the group's backend serves alone; sets ``reason``."""
        self.reason = f"the group has {backend} for {self._device.type}"
        forced = env.get("DTCOMM_RUNTIME") == "peer"
        if env.get("DTCOMM_RUNTIME") == "process_group":
            return None
        if self._is_pair and not forced:  # no call of a pair would use the memory
            self.reason += "; send and recv have no fused kernels"
            return None
        if not forced and not RAN_BETWEEN_GPUS:
            self.reason += (
                "; fused kernels have not run between GPUs yet, so only DTCOMM_RUNTIME=peer uses them"
            )
            return None
        gpus = [info["gpu"] for info in infos]
        memory, failure = None, why_not_peers(gpus, self.groups, forced)
        if not failure:
            layout = layout_for(gpus)
            size, ids = _C.fused_bytes(self.size, layout), [gpu["id"] for gpu in gpus]
            memory, failure = map_peers(exchange, self.names, self._group, self._device, size, self.rank, ids)
        if memory is not None:
            pads = [memory.own[_C.MISSING_OFFSET :][:4].view(torch.int32)]
            timeout_ns = min(int(self._timeout.total_seconds() * 1e9), 2**63 - 1)
            launcher = launcher_for(self._device)
            fused = FusedRanks(launcher, layout, memory.addresses, pads, self.rank, 1, timeout_ns)
            notes = [f"no {failure}" if failure else "", missing_nvlink(gpus)]
            self.reason = "; ".join(filter(None, ["all ranks reach each other's memory", *notes]))
            return PeerRuntime(fused, streams, fallback, self.names, memory.kind, memory, forced)
        if forced:
            raise DtcommError(f"DTCOMM_RUNTIME=peer, but {failure}")
        self.reason += f"; no fused kernels: {failure}"
        return None

    def _backend_runtime(self, streams: Streams, backend: str) -> Runtime:
        if backend != "nccl":
            return self._message_runtime(self._private_backend("gloo"), streams)
        transport = self._nccl_transport()
        compare = self._compare if env.get("DTCOMM_CHECK") == "1" else None
        return TorchDistRuntime(transport, streams, self.rank, compare=compare)

    def _nccl_transport(self) -> Transport:
        """A private communicator of the group's engine; of an engine that torch does not have, the group's own."""
        engine = nccl_engine(self._group, self._device)
        if engine is None:
            return GroupTransport(self._group, "nccl", self.ranks)
        store = c10d.PrefixStore(f"{self._prefix}/nccl", self._store)
        backend = make_nccl(engine, store, self.rank, self.ranks, self._timeout, self._device)
        return NcclTransport(backend, "nccl", self._device)

    def _compare(self, text: str, value: object) -> None:
        call = text.partition(":")[0].replace(" ", "")
        prefix, deadline = f"{self._prefix}/{call}", Deadline(self._timeout)
        exchange = StoreExchange(self._store, prefix, self.rank, self.ranks, deadline)
        exchange.require_same_operation(text, self.names)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the group's backend for tensors of ``device``; ValueError if it has none.

    All engines of NCCL are "nccl": since torch 2.15 that of the backend "nccl" calls itself "nccl2".
    """
    if dist.get_backend(group) == "dtcomm":  # it uses NCCL for CUDA tensors if torch has it
        return "nccl" if dist.is_nccl_available() else "gloo"
    try:
        name = str(group._get_backend(device).name()).lower()
        return "nccl" if name.startswith("nccl") else name
    except RuntimeError:
        raise ValueError(
            f"group: its backend, {dist.get_backend(group)}, moves no tensors of {device.type}; make the group with "
            'backend "cpu:gloo,cuda:nccl", "nccl" or "gloo"'
        ) from None


def nccl_engine(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """The class of `NCCL_ENGINES` that serves the group's CUDA tensors; None if it is another one."""
    if dist.get_backend(group) == "dtcomm":
        return "ProcessGroupNCCL"
    backend = group._get_backend(device)
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
    name = type(backend).__name__
    return name if name in NCCL_ENGINES else None


def make_nccl(
    engine: str,
    store: c10d.Store,
    rank: int,
    ranks: Sequence[int],
    timeout: timedelta,
    device: torch.device,
) -> Any:
    """A backend of NCCL outside any process group, bound to ``device``; ``ranks`` are global."""
    make: Any = getattr(c10d, engine)
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.is_high_priority_stream = False
    options.global_ranks_in_group = list(ranks)
    if NCCL_ENGINES[engine]:
        return make(store, rank, len(ranks), options, device)
    backend = make(store, rank, len(ranks), options)
    if hasattr(backend, "bound_device_id"):
        backend.bound_device_id = device
    return backend
