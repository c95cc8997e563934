"""Patches: what turns the weights of one version into those of the next, and when they may be applied.

A patch is one block of bytes::

    "dtpatch1", u32 bytes of the head, u32 CRC32C of the head, the head (JSON), payloads, each padded to 16 bytes

The head names the model, the base version (null: the patch holds whole weights) and the new version. For each tensor,
or shard of one, it has a list in the order of `Entry`. A version is one patch or several, such as one of each rank.

`Weights.prepare` checks all patches of a version: structure, checksums, names, shapes, the base's bytes, and the new
bytes, for which it decodes every payload into memory of its own. Only then does `Weights.commit` change a byte.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtcomm.errors import DtcommError, PayloadCorrupt
from dtcomm.extensions.weights import codec, slices
from dtcomm.extensions.weights.slices import Slice as Slice
from dtcomm.extensions.weights.slices import State, bytes_of, checksum, on_cpu, slices_of
from dtcomm.kernels import ops
from dtcomm.system import printable

_HEAD = struct.Struct("<8sII")
_MAGIC, _FORMAT, _ALIGN, _LARGEST, _MOST_DIMS = b"dtpatch1", 1, 16, 2**62, 64
HEAD_BYTES = _HEAD.size
_DTYPES = {str(each).removeprefix("torch.") for each in vars(torch).values() if isinstance(each, torch.dtype)}
_CODED = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)


class PatchRefused(DtcommError):
    """A patch does not fit the weights: another base, model, layout or order. No byte was changed.

    The message names the versions and the tensor.
    """


class Entry(NamedTuple):
    """What a patch says of one tensor or shard."""

    name: str
    dtype: str
    full_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    coding: str  # "delta", "same" without a payload; of whole values "lossless" or "raw"
    size: int  # bytes of the payload
    payload_crc: int
    base_crc: int  # 0 for whole values
    crc: int  # of the new bytes
    changed: int  # elements

    def check(self, base: int | None) -> None:
        """ValueError if a type or a bound is wrong."""
        if not all(isinstance(text, str) for text in (self.name, self.dtype, self.coding)):
            raise ValueError("a name, dtype or coding is no text")
        lists, numbers = (self.full_shape, self.offset, self.shape), self[6:]
        if not all(type(each) is int and 0 <= each < _LARGEST for many in (*lists, numbers) for each in many):
            raise ValueError("a number is negative, too large or no integer")
        if self.dtype not in _DTYPES or self.coding not in (
            ("lossless", "raw") if base is None else ("delta", "same")
        ):
            raise ValueError(f"dtype {self.dtype!r:.40}, coding {self.coding!r:.40}")
        if not len(self.full_shape) == len(self.offset) == len(self.shape) <= _MOST_DIMS or not all(
            0 < extent <= whole - at
            for at, extent, whole in zip(self.offset, self.shape, self.full_shape, strict=True)
        ):
            raise ValueError("the shard is empty or not inside the tensor")
        if (self.coding == "same") != (self.size == 0):
            raise ValueError(f"{self.coding} with {self.size} bytes")

    @property
    def box(self) -> slices.Box:
        return self.offset, self.shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def layout(self) -> tuple[Any, ...]:
        """What must not change between versions."""
        return self[:5]


@dataclass(frozen=True, kw_only=True)
class Patch:
    """A patch whose structure was checked; `read` makes one of bytes.

    Attributes:
        model: The name of the model, which the publisher chose.
        base: The version that it is applied to; None: whole weights.
        version: The version that it makes.
        entries: What it says of each tensor or shard.
        data: All bytes.
        starts: Where the payload of each entry begins, and where the last one ends.
    """

    model: str
    base: int | None
    version: int
    entries: tuple[Entry, ...]
    data: memoryview
    starts: tuple[int, ...]

    def __str__(self) -> str:
        return f"patch to version {self.version} ({'whole weights' if self.base is None else f'from {self.base}'})"

    @classmethod
    def read(cls, data: bytes | bytearray | memoryview, *, head_only: bool = False) -> Patch:
        """Read a patch, and check its structure and checksums.

        Args:
            data: The bytes of the patch.
            head_only: Payloads may be missing, and are not checked.

        Returns:
            The patch.

        Raises:
            PayloadCorrupt: It is damaged or too short; the message names version and tensor.
        """
        view = memoryview(data).cast("B")
        view = memoryview(bytearray(view)) if view.readonly else view  # torch takes writable memory only
        magic, length, crc = _HEAD.unpack(view[:HEAD_BYTES]) if len(view) >= HEAD_BYTES else (b"", 0, 0)
        text = view[HEAD_BYTES : HEAD_BYTES + length]
        if magic != _MAGIC or len(text) != length or checksum(_tensor(text)) != crc:
            raise PayloadCorrupt(f"{len(view)} bytes are no patch, or its head is damaged or cut off")
        try:
            head = json.loads(bytes(text))
            if head["format"] != _FORMAT:
                raise ValueError(f"format {head['format']!r:.40}; this dtcomm reads {_FORMAT}")
            model, base, version = head["model"], head["base"], head["version"]
            numbers = [version] if base is None else [base, version]
            if not isinstance(model, str) or not all(type(each) is int and each >= 0 for each in numbers):
                raise ValueError("model or version has a wrong type")
            if numbers != sorted(set(numbers)):
                raise ValueError(f"version {version} from version {base}")
            tensors: list[Any] = [
                [tuple(f) if isinstance(f, list) else f for f in fields] for fields in head["tensors"]
            ]
            entries = tuple(Entry(*fields) for fields in tensors)
            for entry in entries:
                entry.check(base)
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise PayloadCorrupt(f"the head of a patch is not valid: {printable(str(error))}") from None
        starts = [_aligned(HEAD_BYTES + length)]
        for entry in entries:
            starts.append(starts[-1] + _aligned(entry.size))
        patch = cls(model=model, base=base, version=version, entries=entries, data=view, starts=tuple(starts))
        if head_only:
            return patch
        if starts[-1] != len(view):
            raise PayloadCorrupt(f"{patch}: {len(view)} bytes, of {starts[-1]}")
        for index, entry in enumerate(entries):
            if checksum(patch.payload(index)) != entry.payload_crc:
                raise PayloadCorrupt(f"{patch}, tensor {printable(entry.name)!r}: the payload is damaged")
        return patch

    def decode(self, index: int, old: Tensor, out: Tensor, *, checked: bool = False) -> None:
        """Write the new values of an entry; raises PayloadCorrupt before it changes a byte of ``old``.

        Args:
            index: The number of the entry.
            old: The base's values, contiguous, on the CPU.
            out: Where the new values go; may be ``old``.
            checked: The entry was decoded once with the same ``old``, so its payload is not checked again.
        """
        entry, payload = self.entries[index], self.payload(index)
        if entry.coding == "same":
            if out.data_ptr() != old.data_ptr():
                out.copy_(old)
        elif entry.coding == "delta":
            codec.decode(_coded(old), payload, _coded(out), checked=checked)
        elif entry.coding == "lossless":
            ops.decode("lossless", payload, out.numel(), out.dtype, out=out.view(-1))
        elif entry.size != out.nbytes:
            raise PayloadCorrupt(f"{entry.size} bytes for a tensor of {out.nbytes}")
        else:
            bytes_of(out).copy_(payload)

    def payload(self, index: int) -> Tensor:
        """Return the bytes of an entry's payload, in the memory of ``data``."""
        return _tensor(self.data[self.starts[index] :][: self.entries[index].size])


def diff(
    old: Tensor | State | None,
    new: Tensor | State,
    *,
    base: int = 0,
    version: int = 1,
    model: str = "",
    threads: int = 0,
    checksums: dict[str, int] | None = None,
) -> bytes:
    """Return the patch that turns ``old`` into ``new``, bit for bit.

    Args:
        old: The base: a tensor, or tensors by name, of the names, shapes and dtypes of ``new``. None: the patch holds
            whole weights, and ``base`` is ignored.
        new: The new weights: a tensor, or tensors by name; DTensors and `Slice` stand for this rank's shard.
        base: The number of the version ``old``.
        version: The number of the version ``new``, above ``base``.
        model: A name of the model; a receiver that expects another one refuses the patch.
        threads: Threads that encode; 0: as many as torch uses.
        checksums: The checksums of ``old`` by name, if they are known; they are replaced by those of ``new``.

    Returns:
        The patch.

    Raises:
        ValueError: ``old`` and ``new`` have different names, shapes or dtypes.

    Example:
        >>> from dtcomm.extensions import weights
        >>> old, new = torch.zeros(4), torch.ones(4)
        >>> weights.apply(old, weights.diff(old, new, base=0, version=1)), old
        (1, tensor([1., 1., 1., 1.]))
    """
    news, olds = slices_of(new), None if old is None else slices_of(old)
    if olds is not None:
        if not 0 <= base < version:
            raise ValueError(f"version={version}: expected more than base={base}, which is 0 or more")
        _require_alike(olds, news)
    known = {} if checksums is None else checksums
    entries: list[Entry] = []
    payloads: list[Tensor] = []
    for name, part in news.items():
        tensor = on_cpu(part.tensor)
        if not tensor.numel():
            continue
        crc, base_crc, changed = checksum(tensor), 0, tensor.numel()
        if olds is None:
            coding = "lossless" if tensor.dtype in (torch.bfloat16, torch.float32) else "raw"
            payload = ops.encode("lossless", tensor.view(-1)) if coding == "lossless" else bytes_of(tensor)
        else:
            before = on_cpu(olds[name].tensor)
            base_crc = known[name] if name in known else checksum(before)
            payload, changed = codec.encode(_coded(before), _coded(tensor), threads=threads)
            coding = "delta" if changed else "same"
            payload = payload if changed else payload[:0]
        known[name] = crc
        where = (name, str(tensor.dtype).removeprefix("torch."), part.shape, part.offset, tuple(tensor.shape))
        entries.append(Entry(*where, coding, payload.numel(), checksum(payload), base_crc, crc, changed))
        payloads.append(payload)
    return seal(entries, payloads, base=None if olds is None else base, version=version, model=model)


def seal(
    entries: Sequence[Entry], payloads: Sequence[Tensor], *, base: int | None, version: int, model: str
) -> bytes:
    """Return the bytes of a patch with these entries and their payloads."""
    head = {"format": _FORMAT, "model": model, "base": base, "version": version, "tensors": entries}
    text = json.dumps(head, separators=(",", ":")).encode()
    at = _aligned(HEAD_BYTES + len(text))
    data = bytearray(at + sum(_aligned(payload.numel()) for payload in payloads))
    data[HEAD_BYTES : HEAD_BYTES + len(text)] = text
    crc = checksum(_tensor(memoryview(data)[HEAD_BYTES : HEAD_BYTES + len(text)]))
    data[:HEAD_BYTES] = _HEAD.pack(_MAGIC, len(text), crc)
    for payload in payloads:
        _tensor(memoryview(data)[at : at + payload.numel()]).copy_(payload)
        at += _aligned(payload.numel())
    return bytes(data)


@dataclass
class Prepared:
    """A version that was checked, and that `Weights.commit` makes the current one.

    Attributes:
        version: Its number.
        patches: Its patches.
        kept: The new values of each patch's entries, where there is a second buffer.
        started: Whether bytes have been changed.
    """

    version: int
    patches: list[Patch]
    kept: list[list[Tensor | None]]
    started: bool = False


class Weights:
    """The weights of a receiver, and their version.

    A process that is killed loses them with its memory. Where an exception interrupts `commit`, ``version`` is None and
    ``interrupted`` is what was being committed: the same call again completes it, and nothing else is accepted before.

    Args:
        weights: Tensors by name, such as a state dict, on any device. A `Slice` or a DTensor is this process's part
            of a tensor. Values may be views: parts of a tensor that has another name in the engine, or a transpose.
        version: Their version, if it is known; else None, and a patch fits whose base has the same bytes.
        buffers: 1: a version is decoded in place while the engine pauses. 2: it is decoded before into a second
            buffer, which takes the memory of the weights once more, and a pause is a copy.
        model: The name of the model; empty: any.
    """

    def __init__(
        self, weights: Tensor | State, *, version: int | None = None, buffers: int = 1, model: str = ""
    ) -> None:
        if buffers not in (1, 2):
            raise ValueError(f"buffers={buffers!r}: expected 1 or 2")
        self.slices, self.version, self.model, self.buffers = slices_of(weights), version, model, buffers
        self.interrupted: Prepared | None = None
        self._is_resumed = False
        self._layout: set[tuple[Any, ...]] = set()
        self._whole: dict[tuple[Any, ...], Tensor] = {}  # shards of which these weights hold a part
        self._ahead: dict[int, tuple[Patch, list[Tensor | None]]] = {}  # what was checked, by id
        self._room = torch.empty(0, dtype=torch.uint8)

    def prepare(self, patches: Sequence[bytes | bytearray | memoryview | Patch]) -> Prepared:
        """Check that the patches are all that make a version of these weights; changes nothing.

        Args:
            patches: All patches of the version, in any order.

        Returns:
            The version, for `commit`.

        Raises:
            PatchRefused: They do not fit these weights.
            PayloadCorrupt: One is damaged.
        """
        read = [patch if isinstance(patch, Patch) else Patch.read(patch) for patch in patches]
        if self.interrupted is not None:
            raise PatchRefused(
                f"version {self.interrupted.version} is applied in part: call commit with it again"
            )
        self._require_order(read)
        self._require_layout(read)
        for patch in read:
            self.check(patch)
        return Prepared(read[0].version, read, [self._ahead[id(patch)][1] for patch in read])

    def check(self, patch: Patch) -> None:
        """Check one of the patches of a version before the others are there, for `prepare`; changes nothing.

        Args:
            patch: The patch.

        Raises:
            PatchRefused: It does not fit these weights.
            PayloadCorrupt: It is damaged.
        """
        if id(patch) not in self._ahead:
            self._require_order([patch])
            self._require_names([patch])
            self._ahead[id(patch)] = (
                patch,
                [self._checked(patch, index) for index in range(len(patch.entries))],
            )

    def commit(self, prepared: Prepared) -> int:
        """Write a version into the weights.

        Args:
            prepared: What `prepare` returned for the version that these weights have now.

        Returns:
            The version.
        """
        resumed, base = self.interrupted is prepared, prepared.patches[0].base
        fits = base is None or self.version in (None, base)
        if not resumed and (prepared.started or self.interrupted or not fits):
            raise PatchRefused(
                f"version {prepared.version} was prepared for other weights, or committed already"
            )
        self.interrupted, self.version, prepared.started = prepared, None, True
        self._is_resumed, written = resumed, set[Any]()
        for number, patch in enumerate(prepared.patches):
            for index in range(len(patch.entries)):
                self._write(patch, index, prepared.kept[number][index], written)
        self._layout = _layout(prepared.patches)
        self.version, self.interrupted = prepared.version, None
        self._ahead.clear()
        return prepared.version

    def adopt(self, heads: Sequence[Patch]) -> bool:
        """Take the number of a version whose bytes these weights have already.

        Args:
            heads: All patches of the version; their payloads are not read.

        Returns:
            Whether they have them.
        """
        self._require_layout(heads)
        for entry in (entry for patch in heads for entry in patch.entries):
            inside = self._view(entry)
            if inside is not None and (inside.shape != entry.shape or checksum(on_cpu(inside)) != entry.crc):
                return False
        self._layout, self.version = _layout(heads), heads[0].version
        return True

    def _require_order(self, patches: Sequence[Patch]) -> None:
        """Refuse patches of another model, of different versions, or for another version than the current one."""
        first = patches[0]
        if self.model and first.model != self.model:
            raise PatchRefused(
                f"{first}: of model {printable(first.model)!r}; the weights are of {self.model!r}"
            )
        for patch in patches:
            if (patch.model, patch.base, patch.version) != (first.model, first.base, first.version):
                raise PatchRefused(f"{patch} and {first} belong to different versions")
        if first.base is not None and self.version is not None and first.base != self.version:
            already = " already" if first.version <= self.version else ""
            raise PatchRefused(f"{first}: the weights have version {self.version}{already}")

    def _require_layout(self, patches: Sequence[Patch]) -> None:
        """Refuse names, shapes, dtypes and shards that are not those of the weights and of the version before."""
        first, layout = patches[0], _layout(patches)
        entries = [entry for patch in patches for entry in patch.entries]
        if layout == self._layout and len(layout) == len(entries):
            return
        if self._layout and first.base is not None and layout != self._layout:
            name = printable(min(layout ^ self._layout)[0])
            raise PatchRefused(
                f"{first}, tensor {name!r}: its shards are others than in version {self.version}"
            )
        boxes = self._require_names(patches)
        for name in {entry.name for entry in entries}:
            covered = sum(math.prod(shape) for _, shape in boxes.get(name, ()))
            if covered != self.slices[name].tensor.numel() or slices.any_overlap(boxes.get(name, ())):
                raise PatchRefused(
                    f"{first}, tensor {printable(name)!r}: give each patch of a version once; its shards are not"
                    " the whole tensor"
                )

    def _require_names(self, patches: Sequence[Patch]) -> dict[str, list[slices.Box]]:
        """Refuse other names, shapes and dtypes, and return by name which boxes of the weights are in the patches."""
        boxes: dict[str, list[slices.Box]] = {}
        for patch, entry in ((each, entry) for each in patches for entry in each.entries):
            part = self.slices.get(entry.name)
            if part is None:
                raise PatchRefused(
                    f"{patch}, tensor {printable(entry.name)!r}: the weights have no such tensor"
                )
            dtype = str(part.tensor.dtype).removeprefix("torch.")
            if (entry.dtype, entry.full_shape) != (dtype, tuple(part.shape)):
                raise PatchRefused(
                    f"{patch}, tensor {printable(entry.name)!r}: it is {entry.dtype} {list(entry.full_shape)}, and"
                    f" {dtype} {list(part.shape)} in the weights"
                )
            if shared := slices.overlap(entry.box, slices.box_of(part)):
                boxes.setdefault(entry.name, []).append(shared)
        return boxes

    def _view(self, entry: Entry) -> Tensor | None:
        """Return the weights that belong to a shard; None if there are none."""
        part = self.slices[entry.name]
        box = slices.overlap(entry.box, slices.box_of(part))
        return None if box is None else slices.inside_of(part.tensor, box, part.offset)

    def _base(self, entry: Entry, inside: Tensor) -> Tensor | None:
        """Return a shard's values on the CPU; None if these weights hold a part and no whole version came yet."""
        return on_cpu(inside) if inside.shape == entry.shape else self._whole.get(entry.layout)

    def _shared(self, entry: Entry, shard: Tensor) -> Tensor:
        """Return the part of a shard's values that this process holds."""
        box = slices.overlap(entry.box, slices.box_of(self.slices[entry.name]))
        assert box is not None
        return slices.inside_of(shard, box, entry.offset)

    def _checked(self, patch: Patch, index: int) -> Tensor | None:
        """Make all checks of a shard, and return its new values if there is a second buffer."""
        entry = patch.entries[index]
        inside, where = self._view(entry), f"{patch}, tensor {printable(entry.name)!r}"
        if inside is None:
            return None
        base = self._base(entry, inside)
        if patch.base is not None:
            if base is None:
                raise PatchRefused(
                    f"{where}: the weights hold a part of this shard, and had no whole version yet"
                )
            if (found := checksum(base)) != entry.base_crc:
                again = " but those of the new one" if found == entry.crc else ""
                raise PatchRefused(f"{where}: the weights have not the bytes of version {patch.base}{again}")
        result = (
            torch.empty(entry.shape, dtype=inside.dtype)
            if self.buffers == 2
            else self._scratch(entry, inside)
        )
        try:
            patch.decode(index, result if base is None else base, result)
        except (PayloadCorrupt, ValueError) as error:
            raise PayloadCorrupt(f"{where}: {error}") from None
        if checksum(result) != entry.crc:
            raise PayloadCorrupt(f"{where}: the payload makes other bytes than were published")
        return result if self.buffers == 2 else None

    def _scratch(self, entry: Entry, like: Tensor) -> Tensor:
        """Return memory for the values of a shard, the same each time: new memory is slow at first."""
        size = entry.numel * like.element_size()
        if self._room.numel() < size:
            self._room = torch.empty(size, dtype=torch.uint8)
        return self._room[:size].view(like.dtype).view(entry.shape)

    def _write(self, patch: Patch, index: int, kept: Tensor | None, written: set[Any]) -> None:
        """Write the new values of a shard, unless an interrupted call or a name of the same memory did so."""
        entry = patch.entries[index]
        inside = self._view(entry)
        memory = inside is not None and (inside.data_ptr(), inside.device, inside.shape, inside.stride())
        if inside is None or memory in written or (entry.coding == "same" and inside.shape == entry.shape):
            return
        written.add(memory)
        if kept is None:
            base = self._base(entry, inside)
            if base is not None and self._is_resumed and checksum(base) == entry.crc:
                kept = base
            elif base is not None and base.data_ptr() == inside.data_ptr():
                patch.decode(index, base, base, checked=True)
                return
            else:
                kept = torch.empty(entry.shape, dtype=inside.dtype)
                patch.decode(index, kept if base is None else base, kept, checked=True)
        inside.copy_(self._shared(entry, kept))
        if inside.shape != entry.shape:
            self._whole[entry.layout] = kept


def apply(
    weights: Tensor | State, patch: bytes | bytearray | memoryview | Sequence[bytes], *, model: str = ""
) -> int:
    """Change weights in place into the version that a patch makes.

    Args:
        weights: The base: a tensor, or tensors by name, on any device.
        patch: The patch, or all patches of a version.
        model: The name of the model that is expected; empty: any.

    Returns:
        The version.

    Raises:
        PatchRefused: The patch is for another base, model or layout. No byte was changed.
        PayloadCorrupt: The patch is damaged. No byte was changed.
    """
    receiver = Weights(weights, model=model)
    patches = [patch] if isinstance(patch, (bytes, bytearray, memoryview)) else patch
    return receiver.commit(receiver.prepare(patches))


def _coded(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as the codec takes it: bytes, where it does not know the dtype."""
    return tensor.view(-1) if tensor.dtype in _CODED else bytes_of(tensor)


def _require_alike(old: Mapping[str, Slice], new: Mapping[str, Slice]) -> None:
    for name in sorted(old.keys() ^ new.keys()):
        raise ValueError(f"tensor {name!r} is in {'old' if name in old else 'new'} alone")
    for name, part in new.items():
        ours, theirs = (
            f"{each.tensor.dtype} {list(each.tensor.shape)} of {list(each.shape)} at {list(each.offset)}"
            for each in (part, old[name])
        )
        if ours != theirs:
            raise ValueError(f"tensor {name!r}: {theirs} in old, {ours} in new")


def _layout(patches: Sequence[Patch]) -> set[tuple[Any, ...]]:
    return {entry.layout for patch in patches for entry in patch.entries}


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _tensor(data: memoryview) -> Tensor:
    return torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
