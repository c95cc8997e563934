"""Checkpoints of compressor state: its format, other numbers of ranks, and torch.distributed.checkpoint.

The state of one rank is a dict of plain values and tensors that ``torch.load(..., weights_only=True)`` reads:
``version``, ``steps`` and ``seed`` are the same on all ranks, ``rank`` and ``world_size`` say which rank saved it, and
``residuals`` maps a parameter's name to a flat tensor, fp32 or bf16, or to a payload of int8
(`dtcomm.compress.residuals.expand_saved`). ``options`` says how the run compresses that saved it, and
``checksums`` has a checksum of each other entry, because torch does not notice a damaged file.
Residuals differ between ranks, so every rank saves its own state. With torch.distributed.checkpoint::

    saved = {"model": ..., "compression": Checkpointed(state)}
    torch.distributed.checkpoint.save(saved, checkpoint_id=path)
    torch.distributed.checkpoint.load(saved, checkpoint_id=path)          # on the same number of ranks
    restore(state, path, "compression")                                   # on any number of ranks
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import logging
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

from dtcomm import _C
from dtcomm.compress.residuals import expand_saved, redistribute

VERSION = 3
CHECKSUMS = "checksums"

_log = logging.getLogger("dtcomm")

SavedState: TypeAlias = Mapping[str, Any]
T = TypeVar("T")
#: Raises ValueError unless a value, whose name is the first argument, may be loaded.
Check: TypeAlias = Callable[[str, Any], None]


class Compressor(Protocol):
    """What can be checkpointed: the states of the integrations, `dtcomm.fsdp.ShardedOptimizer`, `LocalSGD`."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> None: ...


class Checkpointed:
    """Wraps a compressor so that torch.distributed.checkpoint saves the state of every rank.

    torch.distributed.checkpoint keeps one value for each key and takes values that are not sharded for identical on all
    ranks. This wrapper therefore saves each rank's state under a key of its own. Loading needs the number of ranks
    that saved; `restore` accepts any number.

    Args:
        state: The compressor, such as the state that `dtcomm.ddp.compress` returned.
    """

    def __init__(self, state: Compressor) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        """Return one key, this rank's, whose value is opaque to the checkpoint."""
        packed = io.BytesIO()
        torch.save(self._state.state_dict(), packed)
        return {_rank_key(dist.get_rank(), dist.get_world_size()): packed.getvalue()}

    def load_state_dict(self, saved: Mapping[str, bytes]) -> None:
        """Load what `state_dict` returned on this rank."""
        self._state.load_state_dict(_unpack(saved[_rank_key(dist.get_rank(), dist.get_world_size())]))


def restore(state: Compressor, checkpoint_id: str | PathLike[str], key: str) -> None:
    """Load what `Checkpointed` saved under ``key``, on any number of ranks; the sum of the residuals is kept.

    Every rank reads the states of all ranks that saved.

    Args:
        state: The compressor to restore.
        checkpoint_id: The folder of the checkpoint.
        key: The key of the `Checkpointed` in the dict that was saved.

    Raises:
        ValueError: The checkpoint has no compressor under ``key``.
    """
    metadata = FileSystemReader(checkpoint_id).read_metadata()
    pattern = re.compile(re.escape(key) + r"\.rank (\d+) of (\d+)")
    keys_by_rank = {
        int(match[1]): name for name in metadata.state_dict_metadata if (match := pattern.fullmatch(name))
    }
    if not keys_by_rank:
        keys = sorted({name.partition(".")[0] for name in metadata.state_dict_metadata})
        raise ValueError(f"key: no compressor was saved under {key!r}; the checkpoint has {', '.join(keys)}")
    values: dict[str, Any] = dict.fromkeys(keys_by_rank.values(), b"")
    load(values, checkpoint_id=checkpoint_id)
    states = [_unpack(values[keys_by_rank[rank]]) for rank in sorted(keys_by_rank)]
    same_size = len(states) == dist.get_world_size()
    state.load_state_dict(states[dist.get_rank()] if same_size else states)


def rank_and_size(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """Return this rank and the number of ranks; (0, 1) in a process without a process group."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def gather(value: T) -> list[T]:
    """Return the value of every rank of the default group; all ranks must call it."""
    values: list[Any] = [value] * rank_and_size()[1]
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def seal(state: SavedState) -> dict[str, Any]:
    """Return a state with its version and a checksum of each entry; one that was sealed is sealed anew."""
    kept = {name: value for name, value in {"version": VERSION, **state}.items() if name != CHECKSUMS}
    return {**kept, CHECKSUMS: {name: _checksum(value) for name, value in kept.items()}}


def require_intact(
    state: object,
    checks: Mapping[str, Check] | None = None,
    *,
    integration: str = "",
) -> None:
    """Check whose state it is, its version, the checksum of each entry, and each entry itself.

    Args:
        state: What may be a state.
        checks: Entry → its check.
        integration: The integration that loads the state, which must have saved it; empty: any.

    Raises:
        ValueError: It names the entry that is missing, damaged or not valid.
    """
    MAPPING("state", state)
    assert isinstance(state, Mapping)
    version, checksums = state.get("version"), state.get(CHECKSUMS)
    saved_by = state.get("integration", integration)
    if integration and saved_by != integration:
        raise ValueError(
            f"state: integration: saved by {str(saved_by)[:40]}; valid: a state of {integration}"
        )
    if version is None:
        raise ValueError(
            "state: has no version, so it is not what state_dict() of this kind of state returned"
        )
    if version != VERSION:
        raise ValueError(f"state of version {version!r}: expected {VERSION}")
    MAPPING(f"state: {CHECKSUMS}", checksums)
    assert isinstance(checksums, Mapping)
    for name in {**state, **checksums}.keys() - {CHECKSUMS}:
        if name not in state or checksums.get(name) != _checksum(state[name]):
            raise ValueError(
                f"state: the entry {name!r} is not what was saved: it is damaged, was changed, or is another rank's; "
                "in torch.distributed.checkpoint wrap the state in dtcomm.compress.checkpoint.Checkpointed"
            )
    for name, check in (checks or {}).items():
        if name not in state:
            raise ValueError(f"state: the entry {name!r} is missing")
        check(f"state: {name}", state[name])


def plain(valid: str, test: Callable[[Any], bool]) -> Check:
    """Return the check of a value that ``test`` accepts; ``valid`` says in errors what it accepts."""

    def check(name: str, value: Any) -> None:
        if not test(value):
            shown = repr(value) if isinstance(value, bool | int | float | str) else type(value).__name__
            raise ValueError(f"{name}: expected {valid}, got {shown[:100]}")

    return check


INTEGER = plain("an integer", lambda value: type(value) is int)
COUNT = plain("an integer of at least 0", lambda value: type(value) is int and value >= 0)
BOOL = plain("True or False", lambda value: isinstance(value, bool))
TEXT = plain("text", lambda value: isinstance(value, str))
TENSOR = plain("a tensor", lambda value: isinstance(value, torch.Tensor))
MAPPING = plain("a mapping", lambda value: isinstance(value, Mapping))
LIST = plain("a list", lambda value: isinstance(value, list))


def each(check: Check, kind: Check = MAPPING) -> Check:
    """Return the check of a mapping from text to values for ``check``, or of a `LIST` of them."""

    def check_each(name: str, values: Any) -> None:
        kind(name, values)
        for key, value in enumerate(values) if kind is LIST else values.items():
            if kind is MAPPING:
                TEXT(f"{name}: key", key)
            check(f"{name}[{key!r}]", value)

    return check_each


def entries(*, may_be_empty: bool = False, **checks: Check) -> Check:
    """Return the check of a mapping with these entries; with ``may_be_empty`` also of one without any."""

    def check_entries(name: str, value: Any) -> None:
        MAPPING(name, value)
        for entry, check in checks.items() if value or not may_be_empty else ():
            if entry not in value:
                raise ValueError(f"{name}: the entry {entry!r} is missing")
            check(f"{name}[{entry!r}]", value[entry])

    return check_entries


def tensors(sizes: Mapping[str, int] | None = None, *, finite: bool = True) -> Check:
    """Return the check of fp32 tensors by name, of which each has as many elements as ``sizes`` says; None: any."""

    def check_tensor(name: str, tensor: Any) -> None:
        TENSOR(name, tensor)
        if tensor.dtype != torch.float32 or (finite and not torch.isfinite(tensor).all()):
            raise ValueError(f"{name}: expected an fp32 tensor without NaN and Inf, got {tensor.dtype}")

    def check_tensors(name: str, values: Any) -> None:
        each(check_tensor)(name, values)
        for key, tensor in values.items():
            here = tensor.numel() if sizes is None else sizes.get(key, "no such parameter")
            if tensor.numel() != here:
                raise ValueError(f"{name}[{key!r}] has {tensor.numel()} elements, the model {here}")

    return check_tensors


def residuals(sizes: Mapping[str, int] | None = None) -> Check:
    """Return the check of residuals in the form in which they were kept, as of `tensors`."""

    def check_residuals(name: str, values: Any) -> None:
        MAPPING(name, values)
        tensors(sizes)(name, expand_saved(values))

    return check_residuals


def shaped_like(own: Mapping[str, torch.Tensor]) -> Check:
    """Return the check of tensors with the names, shapes and dtypes of ``own``."""

    def check_shapes(name: str, values: Any) -> None:
        MAPPING(name, values)
        for key in {**own, **values}:
            here, saved = (
                (getattr(of.get(key), "shape", None), getattr(of.get(key), "dtype", None))
                for of in (own, values)
            )
            if here != saved:
                raise ValueError(f"{name}[{key!r}] has the shape and dtype {saved}, the model {here}")

    return check_shapes


#: What the states of all integrations have.
_COMMON_CHECKS = {
    "seed": INTEGER,
    "rank": COUNT,
    "world_size": plain("an integer of at least 1", lambda value: type(value) is int and value >= 1),
    "options": each(TEXT),
}
#: What a guard decided: how many codecs finer each parameter is sent, and until which step uncompressed.
WATCH_CHECK = entries(
    may_be_empty=True,
    finer=each(plain("an integer from 0 to 64", lambda value: type(value) is int and 0 <= value <= 64)),
    plain_until=COUNT,
)


@contextlib.contextmanager
def loaded_optimizer(name: str, optimizer: torch.optim.Optimizer, saved: Any) -> Iterator[None]:
    """Load an optimizer's state, the entry ``name``; undo it if that (ValueError) or the body fails."""
    before = optimizer.state, optimizer.param_groups
    try:
        try:
            optimizer.load_state_dict(copy.deepcopy(saved))  # which it would change
        except Exception as error:  # torch raises KeyError, AttributeError and others
            raise ValueError(f"state: {name}: {type(error).__name__}: {error}") from error
        yield
    except BaseException:
        optimizer.state, optimizer.param_groups = before
        raise


def select_share(
    saved: SavedState | Sequence[SavedState],
    rank: int,
    world_size: int,
    checks: Mapping[str, Check],
    integration: str = "",
) -> tuple[SavedState, dict[str, torch.Tensor]]:
    """Return a state with the counters, and the residuals with which ``rank`` of ``world_size`` ranks starts.

    ``saved`` is this rank's own state, or the states of all ranks of the run that saved them, in rank order. From a
    list the residuals may be loaded into another number of ranks; their sum over ranks is kept. ValueError if a state
    is not intact (`require_intact`, which takes the other arguments), the list is not complete, or a single state comes
    from another rank or another number of ranks.
    """
    states = [saved] if isinstance(saved, Mapping) else list(saved)
    if not states:
        raise ValueError("states: got none")
    for state in states:
        require_intact(state, {**_COMMON_CHECKS, **checks}, integration=integration)
    first = states[0]
    saved_ranks = first["world_size"]
    if isinstance(saved, Mapping):
        if saved_ranks != world_size:
            raise ValueError(
                f"state: saved by one of {saved_ranks} ranks, the group has {world_size}: pass the list of all ranks' "
                "states"
            )
        if first["rank"] != rank:
            raise ValueError(
                f"state: saved by rank {first['rank']}, this is rank {rank}: every rank saves and loads its own; in "
                "torch.distributed.checkpoint wrap it in dtcomm.compress.checkpoint.Checkpointed"
            )
        return first, expand_saved(first["residuals"])
    if [state["rank"] for state in states] != list(range(saved_ranks)):
        raise ValueError(
            f"states of ranks {[state['rank'] for state in states]}: expected all {saved_ranks}, in rank order"
        )
    if saved_ranks == world_size:
        return first, expand_saved(states[rank]["residuals"])
    return first, redistribute([expand_saved(state["residuals"]) for state in states], rank, world_size)


def has_options(saved: SavedState, options: Mapping[str, str], strict: bool) -> bool:
    """Return whether a state was saved with these options; ValueError if one differs, and ``strict`` is True.

    What belongs to an option, such as PowerSGD's factors, is of no use with another one; residuals are. If not
    ``strict``, the log says what differs.
    """
    differences = [
        f"{name}={saved['options'].get(name)!r} (here {value!r})"
        for name, value in options.items()
        if saved["options"].get(name) != value
    ]
    if differences and strict:
        raise ValueError(
            f"state: saved with {', '.join(differences)}; strict=False loads its residuals all the same"
        )
    if differences:
        _log.warning(
            "loading at most the residuals of a state that was saved with %s", ", ".join(differences)
        )
    return not differences


def _checksum(value: object, before: int = 0) -> int:
    """Return a checksum of values and tensors; it depends neither on devices nor on the order of mappings.

    ``before`` is the checksum of what precedes them.
    """
    if isinstance(value, DTensor):
        value = value.to_local()
    parts: Iterable[object] = ()
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous()
        text = f"{data.dtype}{tuple(data.shape)}{_C.crc32c(data.data_ptr(), data.nbytes)}"
    elif isinstance(value, Mapping):
        text = f"mapping of {len(value)}"
        parts = itertools.chain.from_iterable((key, value[key]) for key in sorted(value, key=repr))
    elif isinstance(value, list | tuple):
        text, parts = f"sequence of {len(value)}", value
    else:  # the text of other objects may have their address
        is_plain = value is None or isinstance(value, bool | int | float | complex | str | bytes)
        text = f"{type(value).__name__} {value!r}" if is_plain else type(value).__name__
    checksum = zlib.crc32(f"{text};".encode(), before)
    for part in parts:
        checksum = _checksum(part, checksum)
    return checksum


def _rank_key(rank: int, world_size: int) -> str:
    return f"rank {rank} of {world_size}"


def _unpack(packed: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(packed), weights_only=True)
    except Exception as error:  # torch.load has no error of its own for a damaged file
        raise ValueError(f"state: it cannot be read: {type(error).__name__}: {error}") from error
