"""Functions of a group or of its memory that move no tensor of the user's, and questions to the planner."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtcomm import algorithms, planner, torch_compat
from dtcomm.codecs import Codec, codec, parse_levels
from dtcomm.collectives._call import Call, run, run_internal
from dtcomm.collectives._options import Group, Options
from dtcomm.collectives.planning import build_schedule, levels
from dtcomm.errors import CollectiveMismatch
from dtcomm.runtime import flight_recorder
from dtcomm.runtime.bootstrap.rendezvous import name_ranks, require_equal
from dtcomm.runtime.communicator import (
    Channel,
    Communicator,
    device_communicators,
    existing_communicator,
    get_communicator,
    get_communicator_for,
    get_communicator_for_device,
    pair_communicators,
)
from dtcomm.runtime.native.copy_policy import empty_shared
from dtcomm.runtime.process_groups import group_store, group_timeout, require_group
from dtcomm.runtime.types import TWO_SHOT_SYMMETRIC, OpSpec, TensorSpec
from dtcomm.schedule import Schedule, parse
from dtcomm.schedule.ir import trace
from dtcomm.work import Work

NONE = codec("none")
GroupOrMesh = dist.ProcessGroup | DeviceMesh | None


def process_group_of(group: GroupOrMesh, axis: str, argument: str = "group") -> Group:
    """Return the process group of one axis of a mesh, such as ``axis``; a group or None is returned unchanged."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"{argument}: expected a mesh with one dimension, got {group.ndim}: pass mesh[{axis!r}]"
            )
        return group.get_group()
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{argument}: expected a process group, a device mesh or None, got {type(group).__name__}"
        )
    return group


def barrier(*, group: Group = None, async_op: bool = False) -> Work | None:
    """Wait until all ranks of the group have called barrier.

    Args:
        group: The process group; None is the default group.
        async_op: If True, return a ``Work`` at once, which is done when all ranks have called.

    Returns:
        None when all ranks have called, or a ``Work`` if ``async_op``.

    Raises:
        CollectiveMismatch: If the ranks call different operations.
        CollectiveTimeout: If a rank does not take part within the group's timeout.
        PeerLost: If a rank died.

    Example:
        Wait until rank 0 has written a file::

            dtcomm.barrier()
    """
    flag = torch.zeros(1, dtype=torch.uint8)
    return run_internal(Call("all_reduce", flag, flag, "max"), Options("none", "one_shot", group, async_op))


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None, group: Group = None) -> torch.Tensor:
    """Allocate an uninitialised CPU tensor in memory that the other ranks of this host can map.

    If every rank's tensor is in such memory, collectives with codec ``none`` work on the tensors themselves, without a
    staging copy. Each call allocates whole pages and holds a file descriptor until the tensor is freed, so allocate few
    and large tensors. A forked child shares the memory with its parent, so what one writes the other reads.

    Args:
        *size: The shape, as integers or as one sequence, as for ``torch.empty``.
        dtype: The dtype; None is torch's default dtype.
        group: Accepted for symmetry with the collectives. The memory serves every group of the host's ranks.

    Returns:
        The tensor.

    Raises:
        OSError: If the machine has no such memory or the process no descriptor left; ``errno`` says which.
        RuntimeError: If the process already holds 4,096 such tensors.

    Example:
        >>> import dtcomm, torch
        >>> dtcomm.empty(2, 3, dtype=torch.bfloat16).shape
        torch.Size([2, 3])
    """
    shape: Any = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    return empty_shared(torch.Size(shape), dtype or torch.get_default_dtype())


def info(group: Group = None) -> dict[str, Any]:
    """Describe how the ranks of a group communicate, and why in this way.

    Args:
        group: The process group; None is the default group. If the group has made no call yet, all its ranks must call
            this function.

    Returns:
        A dictionary. ``runtime`` is ``"native"``, ``"peer"``, ``"process_group"``, or ``"none"`` for one rank, and
        ``reason`` says why. ``table`` is what "auto" decides by: a table of `dtcomm tune`, or dtcomm's own constants.
        The runtime adds ``ranks``, ``hosts``, ``transport``, ``kernels``, ``operations`` and ``wire_bytes``.
        ``leaving_bytes`` went to other hosts (not known on several hosts with several ranks each).

        The native engine has ``threads``, and ``memory``: where shared memory comes from on this rank. ``choices`` is
        what trials have chosen for each kind and size of operation. ``trials`` is ``DTCOMM_TRIALS``, or why there are
        none. If messages of send and recv were tried, ``messages`` lists their ``choices``, with the ``peer`` (its
        global rank) and whether this rank ``sends``.

        Over TCP ``connections`` carry the payloads between two ranks, and ``round_trip_ms`` is the longest between
        hosts. With several connections ``missing_connections`` have ended and are being made anew, and
        ``restored_connections`` counts those that were. ``measured_gbit`` is what they carried while busy, by host.

        If there were calls on CUDA tensors, ``devices`` has the same dictionary for each device. If there were no
        others, the dictionary itself is that of the first device.

    Raises:
        RuntimeError: If there is no such process group.

    Example:
        See which transport is in use::

            print(dtcomm.info()["transport"])  # shared memory
    """
    devices = device_communicators(group)
    communicator = existing_communicator(require_group(group)) if devices else get_communicator(group)
    for described in (*devices.values(), *([] if communicator is None else [communicator])):
        described.connect()
    descriptions = {name: _described(described) for name, described in devices.items()}
    description = next(iter(descriptions.values())) if communicator is None else _described(communicator)
    messages = [
        {"peer": peer, "sends": sends, "choices": choices}
        for peer, sends, pair in pair_communicators(group)
        if (choices := pair.info().get("choices"))
    ]
    return {
        **description,
        **({"messages": messages} if messages else {}),
        **({"devices": descriptions} if devices else {}),
    }


def _described(communicator: Communicator) -> dict[str, Any]:
    return {**communicator.info(), "table": levels(communicator)[1].source}


def flight_record(directory: str | None = None) -> dict[str, Any]:
    """Return the last operations of this process's communicators, to find out why a job hangs.

    A rank whose operation fails writes the record by itself if the variable DTCOMM_FLIGHT_DIR is set.

    Args:
        directory: If given, the record is also written there as ``rank-<n>.json``, for ``dtcomm doctor --flight``.

    Returns:
        The record: for each communicator its ranks and its last operations, how far each came, and which ranks it
        waited for.

    Raises:
        OSError: If the file cannot be written.

    Example:
        >>> import dtcomm
        >>> isinstance(dtcomm.flight_record(), dict)
        True
    """
    if directory is not None:
        flight_recorder.write(directory, "on demand")
    return flight_recorder.record("on demand")


def compression_pays(
    spec: str | Codec, numel: int, dtype: torch.dtype, group: Group = None
) -> planner.PayoffVerdict:
    """Return whether an all_reduce of a given size is expected to be faster with a codec than without.

    Latency-critical paths ask before they compress. The answer depends only on what all ranks know alike, so all ranks
    get the same answer.
    """
    return _compression_pays(get_communicator(group), codec(spec), numel, dtype)


def _compression_pays(
    communicator: Communicator, codec: Codec, numel: int, dtype: torch.dtype
) -> planner.PayoffVerdict:
    communicator.connect()
    return planner.compression_pays(
        codec,
        numel,
        dtype,
        communicator.size,
        communicator.hosts,
        communicator.tuning_table if communicator.device is None else "",
        on_device=communicator.device is not None,
    )


def nvlink_connects(tensor: Tensor, group: Group = None) -> bool:
    """Return whether all ranks are on one host whose NVLink connects as many GPUs with this one; False if unknown."""
    if tensor.device.type != "cuda":
        return False
    communicator = get_communicator_for(group, tensor, "tensor")
    links = None if communicator.hosts > 1 else torch_compat.nvlinks(tensor.device.index or 0)
    return links is not None and 0 < communicator.size - 1 <= sum(count > 0 for count in links)


def supports_two_shot_symmetric(tensor: Tensor, codec: Codec, group: Group = None) -> bool:
    """Return whether ``all_reduce(tensor, codec=codec, algorithm="two_shot_symmetric")`` can run.

    Only fused kernels over peer memory encode the owner's contribution to its own chunk. All ranks get the same answer.
    """
    communicator = get_communicator_for(group, tensor, "tensor")
    communicator.connect()
    return not why_no_fused_kernel(communicator, tensor.numel(), tensor.dtype, codec, TWO_SHOT_SYMMETRIC)


def why_no_fused_kernel(
    communicator: Communicator, numel: int, dtype: torch.dtype, codec: Codec, algorithm: str
) -> str:
    """Return why fused kernels do not serve a sum over connected ranks; empty if they do.

    ``algorithm`` is ``"one_shot"``, ``"two_shot"``, ``"two_shot_symmetric"``, or ``"direct"`` for one of the first two.
    """
    if communicator.runtime.name != "peer":
        return communicator.runtime_reason
    from dtcomm.runtime.cuda_peer.launch import why_not

    name = "two_shot" if algorithm == "direct" else algorithm
    return why_not(OpSpec("all_reduce", "sum", (TensorSpec(numel, dtype, codec),), name), communicator.size)


def sent_bytes(
    collective: str,
    numel: int,
    dtype: torch.dtype,
    spec: str | Codec,
    algorithm: str = "auto",
    group: Group = None,
) -> float | None:
    """Return how many bytes this rank sends in a call. Nothing is communicated, so one rank may ask alone.

    Args:
        numel: Elements of the whole tensor, all shards together.
        spec: The codec, or ``A/B``, of which B counts if the group has several hosts.
        algorithm: The algorithm of the call, which decides what this rank sends.

    Returns:
        The bytes; None if the group has not communicated yet, or if the length of payloads depends on the data.
    """
    communicator = _connected(group)
    if communicator is None:
        return None
    if communicator.size == 1 or numel == 0:
        return 0.0
    inside, between = parse_levels(spec)
    chosen = between if between is not None and len(levels(communicator)[0]) > 1 else inside
    if chosen.variable_length:
        return None
    schedule = _schedule_of(communicator, collective, numel, dtype, chosen, algorithm)
    sends = sum(transfer.src == communicator.rank for transfer in schedule.transfers)
    return sends / schedule.chunks * chosen.wire_bytes(numel, dtype)


def leaving_bytes(
    sent: float,
    collective: str,
    numel: int,
    dtype: torch.dtype,
    spec: str | Codec = NONE,
    algorithm: str | Schedule = "auto",
    group: Group = None,
) -> int | None:
    """Return how many bytes left this rank's host, from all its ranks, while this rank sent ``sent`` bytes.

    Nothing is communicated. The other arguments are those of `sent_bytes`, of calls of a usual size.

    Returns:
        The bytes; None if they are not known: the group has not communicated yet, or is destroyed, or this rank sends
        nothing.
    """
    communicator = _connected(group) if dist.is_initialized() else None
    if communicator is None or numel == 0:
        return None
    hosts = communicator.groups
    if len(hosts) == 1 or len(hosts) == communicator.size:
        return 0 if len(hosts) == 1 else round(sent)
    inside, between = parse_levels(spec)
    if between is not None and algorithm in ("auto", "direct"):
        algorithm = "hierarchical"
    # Codecs of variable length, and those that agree on a representation first, send about as the others do.
    codecs = [
        NONE if codec.variable_length or codec.needs_agreement else codec
        for codec in (inside, between or inside)
    ]
    schedule = _schedule_of(communicator, collective, numel, dtype, codecs[-1], algorithm)
    own = schedule.bytes_on_wire(numel, codecs, dtype)[communicator.rank]
    (host,) = (at for at, ranks in enumerate(hosts) if communicator.rank in ranks)
    return round(sent * schedule.bytes_leaving(hosts, numel, codecs, dtype)[host] / own) if own else None


def _connected(group: Group) -> Communicator | None:
    """Return the communicator of a group that has communicated, by preference that of CPU tensors."""
    communicator = existing_communicator(require_group(group))
    if communicator is None:
        communicator = next(iter(device_communicators(group).values()), None)
    return None if communicator is None or communicator.connection is not None else communicator


def _schedule_of(
    communicator: Communicator,
    collective: str,
    numel: int,
    dtype: torch.dtype,
    codec: Codec,
    algorithm: str | Schedule,
) -> Schedule:
    """Return the schedule of a call; ``algorithm`` may be a schedule's text."""
    if isinstance(algorithm, Schedule) or "\n" in algorithm:
        return parse(algorithm) if isinstance(algorithm, str) else algorithm
    groups, table = levels(communicator)
    ranks, hosts = communicator.size, len(groups)
    name = "two_shot"
    if algorithm != TWO_SHOT_SYMMETRIC:
        name = planner.select(collective, numel, dtype, codec, ranks, hosts, table, algorithm)
    return build_schedule(name, collective, ranks, 0, groups)


def level_groups(tensor: torch.Tensor, group: Group = None) -> tuple[tuple[int, ...], ...]:
    """Return the ranks inside each group that a hierarchy is made of: the hosts, or what fast links join.

    If the group has made no call on the tensor's device yet, all its ranks must call this function.
    """
    communicator = get_communicator_for(group, tensor, "tensor")
    communicator.connect()
    return levels(communicator)[0]


def level_shares(algorithm: str | Schedule, tensor: torch.Tensor, group: Group = None) -> tuple[float, float]:
    """Return how many times the size of a tensor this rank sends in an all_reduce, by the level of the encoding.

    If the group has made no call on the tensor's device yet, all its ranks must call this function.

    Args:
        algorithm: ``hierarchical``, with or without the names of its levels, or a schedule with two levels.

    Returns:
        What was encoded with the codec inside hosts, and with the one between hosts; the latter is 0 on one host.
    """
    groups = level_groups(tensor, group)
    communicator = get_communicator_for(group, tensor, "tensor")
    schedule = (
        algorithm
        if isinstance(algorithm, Schedule)
        else algorithms.build(algorithm, "all_reduce", communicator.size, hosts=groups)
    )
    shares = [0.0, 0.0]
    for version in trace(schedule).versions:
        sends = sum(transfer.src == communicator.rank for transfer in version.sends)
        if sends:
            shares[version.level] += sends / schedule.chunks
    return shares[0], shares[1]


def host_groups(tensor: torch.Tensor, group: Group = None) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host, as positions in the group; the same on all ranks.

    If the group has made no call on the tensor's device yet, all its ranks must call this function.
    """
    communicator = get_communicator_for(group, tensor, "tensor")
    communicator.connect()
    return communicator.groups


_channels: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def next_channel(group: Group = None) -> int:
    """Return a new number for a `channel` of the group; all ranks call this in one order."""
    target = require_group(group)
    _channels[target] = _channels.get(target, 0) + 1
    return _channels[target]


def channel(group: Group, number: int) -> Any:
    """Return what collectives take in place of a group, so that they have a communicator of their own.

    Who starts collectives from a thread needs one: the clock decides their order among those of other threads.
    """
    return Channel(require_group(group), f"channel {number}")


class DeviceGroup:
    """The ranks of a group, connected for tensors of a device, the CPU or a CUDA device.

    All ranks make it together. After `dtcomm.release` its next call connects the ranks again.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group, self._device = group, device
        communicator = self._communicator()
        self.rank, self.size = communicator.rank, communicator.size

    @property
    def runtime(self) -> tuple[str, str]:
        """The name of what executes operations, and why."""
        communicator = self._communicator()
        return communicator.runtime.name, communicator.runtime_reason

    def sum_into(self, out: Tensor, inp: Tensor, codec: Codec, algorithm: str) -> None:
        """Write the sum of all ranks' ``inp`` to ``out``; both are contiguous, and may be one tensor."""
        run(self._communicator(), Call("all_reduce", inp, out), Options(codec, algorithm))

    def why_uncompressed(self, codec: Codec, numel: int, dtype: torch.dtype) -> str:
        """Return the planner's reason not to compress a sum; empty if compressing it pays. Equal on all ranks."""
        verdict = _compression_pays(self._communicator(), codec, numel, dtype)
        return "" if verdict.pays else verdict.reason

    def compress_from(self, codec: Codec) -> float | None:
        """Return from how many bytes on `dtcomm tune` has found sums of GPUs faster in a codec; None: not measured."""
        communicator = self._communicator()
        group = str(codec), communicator.size, communicator.hosts
        return {tuple(key): size for *key, size in levels(communicator)[1].compress_from}.get(group)

    def why_no_fused_kernel(self, codec: Codec, numel: int, dtype: torch.dtype, algorithm: str) -> str:
        """Return why fused CUDA kernels do not serve a sum; empty if they do. Equal on all ranks."""
        return why_no_fused_kernel(self._communicator(), numel, dtype, codec, algorithm)

    def _communicator(self) -> Communicator:
        communicator = get_communicator_for_device(self._group, self._device)
        communicator.connect()
        return communicator


#: How long a rank waits for the others to call a function that all of them must call, where it then needs them.
ANNOUNCEMENT_LIMIT_S = 20.0
#: The same where the function itself communicates, and ranks may still load their models.
CONSTRUCTOR_LIMIT_S = 60.0
_POLL_S = 0.05
#: Options that may differ between ranks.
_OWN_OPTIONS = ("seed", "timeline", "optimizer", "replicas")


class Announcement:
    """Says in the group's store that this rank has called a function, and requires that all ranks call it alike.

    The nth call of a rank belongs to the nth of every other. A rank that has not called it runs other collectives, and
    the others would wait for it; ranks with other options would average other things.

    Args:
        group: The process group.
        function: The name of the function.
        options: Its options by name; some may differ (seeds), all others must have the same text.
    """

    def __init__(self, group: Group, function: str, options: Mapping[str, object]) -> None:
        target = require_group(group)
        self._store, self._function = group_store(target), function
        # The ranks that do not call the function wait in other collectives, whose errors would come first.
        self._most_s = group_timeout(target).total_seconds() / 2
        self._ranks = dist.get_process_group_ranks(target)
        own = self._ranks.index(dist.get_rank())
        number = self._store.add(f"dtcomm/announced/{function}/{own}", 1)
        self._keys = [f"dtcomm/announced/{function}/{rank}/{number}" for rank in range(len(self._ranks))]
        texts = {name: _option_text(value) for name, value in options.items() if name not in _OWN_OPTIONS}
        self._store.set(self._keys[own], json.dumps(texts))

    def require_all(self, limit_s: float | None = None) -> None:
        """Wait until all ranks have called the function; CollectiveMismatch names who has not, or what differs.

        Args:
            limit_s: Seconds to wait, at most half of the group's timeout. Default: `ANNOUNCEMENT_LIMIT_S`.
        """
        limit_s = min(ANNOUNCEMENT_LIMIT_S if limit_s is None else limit_s, self._most_s)
        try:
            texts = self._texts(limit_s)
        except dist.DistError:
            return  # the rank that keeps the store has ended, as all ranks may after a last call; waits for it say so
        options = [{"options": json.loads(text)} for text in texts]
        require_equal(options, "options", f"options of {self._function}", self._ranks)

    def _texts(self, limit_s: float) -> list[bytes]:
        deadline = time.monotonic() + limit_s
        while not self._store.check(self._keys):
            if time.monotonic() >= deadline:
                found = [self._store.check([key]) for key in self._keys]
                missing = [rank for rank, has in zip(self._ranks, found, strict=True) if not has]
                if missing:  # they may have arrived between the two looks
                    raise CollectiveMismatch(
                        f"{self._function}: {name_ranks(missing)} did not call it within {limit_s:g} s after this rank "
                        "needed them; call it on every rank, and torch.distributed.barrier() before it if a rank only "
                        "takes longer to get there"
                    )
            time.sleep(_POLL_S)
        return list(self._store.multi_get(self._keys))

    def require_all_at_forward(self, model: torch.nn.Module) -> Any:
        """Call `require_all` before the model's next forward; return the handle of the hook."""

        def check(*_: Any) -> None:
            if not torch.compiler.is_compiling():
                self.require_all()
                handle.remove()

        handle = model.register_forward_pre_hook(torch_compat.ModuleHook(check), prepend=True)
        return handle


def _option_text(value: object) -> str:
    text = str(value)
    return type(value).__qualname__ if " at 0x" in text else text
