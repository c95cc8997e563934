"""The base class of codecs and their layouts. A codec is a frozen value that describes a byte layout."""

from __future__ import annotations

import abc
import dataclasses
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

# Element types of tensors with their numbers in csrc/core/types.h. Codec `none` takes all of them.
ELEMENT_TYPES: dict[torch.dtype, int] = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.float64: 3,
    torch.int8: 4,
    torch.uint8: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.int16: 8,
    torch.bool: 9,
}

FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16)

# Elements of a granule; csrc/codec/granules.h has the same.
GRANULE = 1024  # of casts and of blocks; a larger block is a granule of its own
SPARSE_GRANULE = 4096
VALUE_GRANULE = GRANULE  # of the kept values of a sparse granule: a payload of their own codec
NVFP4_GRANULE = VARIABLE_GRANULE = LOSSLESS_GRANULE = 4096
ALIGN = 16
SMALLEST_BLOCK, LARGEST_BLOCK = 16, 4096
BLOCKS = f"a power of two from {SMALLEST_BLOCK} to {LARGEST_BLOCK}"
POSITION_BITS = 12  # bits of a position within a sparse granule
SCALES = {"bf16": 0, "fp32": 1}
SCALE_BYTES = {"bf16": 2, "fp32": 4}
ROUNDINGS = ("nearest", "stochastic")
# the numbers of csrc/codec/codec.h
ELEMENTS = {
    "none": 0,
    "e4m3": 1,
    "e5m2": 2,
    "e2m1": 3,
    "bf16": 4,
    "fp16": 5,
    "fp32": 6,
    "integer": 7,
    "e3m4": 8,
}


def aligned(size: int) -> int:
    """`size` bytes rounded up to the padding of a granule."""
    return -(-size // ALIGN) * ALIGN


def count(numel: int) -> int:
    """`numel`, if it is a number of elements. TypeError or ValueError if it is not."""
    if isinstance(numel, bool) or not isinstance(numel, int):
        raise TypeError(f"numel: expected an int, got {type(numel).__name__}")
    if numel < 0:
        raise ValueError(f"numel: expected 0 or more, got {numel}")
    return numel


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The layout of a granule: scales and zero points, outliers, codes, trailer, zeros up to a multiple of 16 bytes.

    A granule of a sparse codec has three parts: a head, the values of the kept elements, and their positions. The
    values are a payload of their own, without its last padding, which the first six attributes describe.

    Attributes:
        granule: Elements of a granule.
        block: Elements that share a scale; 1 if there is no scale.
        field_bytes: Bytes of one scale or zero point.
        fields: Scales and zero points per block: 0, 1 or 2.
        spike_bytes: Bytes of the outliers of a block.
        code_bits: Bits of one element's code.
        kept: Elements that a whole granule keeps; 0 for dense codecs.
        head: Bytes of the head.
        position_bits: 12 for a list of positions, 1 for a bitmap, 0 if positions are drawn from the head.
        trailer: Bytes behind the codes of a dense granule: its own scale.
    """

    granule: int = GRANULE
    block: int = 1
    field_bytes: int = 0
    fields: int = 0
    spike_bytes: int = 0
    code_bits: int
    kept: int = 0
    head: int = 0
    position_bits: int = 0
    trailer: int = 0

    def blocks(self, numel: int) -> int:
        """Blocks of `numel` elements."""
        return -(-numel // self.block)

    def spikes_at(self, numel: int) -> int:
        """The offset in bytes of the outliers of a dense granule of `numel` elements."""
        return self.blocks(numel) * self.fields * self.field_bytes

    def codes_at(self, numel: int) -> int:
        """The offset in bytes of the codes of a dense granule of `numel` elements."""
        return self.spikes_at(numel) + self.blocks(numel) * self.spike_bytes

    def dense(self, numel: int) -> int:
        """Bytes of a dense granule of `numel` elements before the padding."""
        return self.codes_at(numel) + -(-self.blocks(numel) * self.block * self.code_bits // 8)

    def kept_of(self, numel: int) -> int:
        """How many elements a sparse granule of `numel` elements keeps."""
        return -(-self.kept * numel // self.granule)

    def values(self, numel: int) -> int:
        """Bytes of the values of a sparse granule of `numel` elements."""
        count = self.kept_of(numel)
        whole = (count - 1) // VALUE_GRANULE
        return whole * aligned(self.dense(VALUE_GRANULE)) + self.dense(count - whole * VALUE_GRANULE)

    def positions(self, numel: int) -> int:
        """Bytes of the positions of a sparse granule of `numel` elements."""
        return -(-(numel if self.position_bits == 1 else self.kept_of(numel) * self.position_bits) // 8)

    def used(self, numel: int) -> int:
        """Bytes of a granule of `numel` elements before the padding."""
        if not self.kept:
            return self.dense(numel) + self.trailer
        return self.head + self.values(numel) + self.positions(numel)

    def bytes(self, numel: int) -> int:
        """Bytes of a granule of `numel` elements."""
        return aligned(self.used(numel))

    def payload_bytes(self, numel: int) -> int:
        """Bytes of `numel` elements: whole granules and a last one cut to whole blocks."""
        whole, rest = divmod(numel, self.granule)
        return whole * self.bytes(self.granule) + (self.bytes(rest) if rest else 0)


def block_layout(
    block: int, field_bytes: int, code_bits: int, *, fields: int = 1, spike_bytes: int = 0
) -> Layout:
    """The layout of codecs with one or two fields per block."""
    return Layout(
        granule=max(GRANULE, block),
        block=block,
        field_bytes=field_bytes,
        fields=fields,
        spike_bytes=spike_bytes,
        code_bits=code_bits,
    )


def option(*, default: Any, valid: str = "", choices: tuple[Any, ...] = ()) -> Any:
    """A dataclass field that a spec string may set; the type of ``default`` is that of the option.

    ``valid`` has the valid values in words, for error messages; default: ``choices``, the valid values if they can be
    listed. A codec refuses others, and tests enumerate them.
    """
    valid = valid or ", ".join(map(_text, choices))
    return dataclasses.field(default=default, metadata={"valid": valid, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class Codec(abc.ABC):
    """A frozen description of a byte layout, with options as fields.

    ``str(codec)`` is its spec string; :func:`codec` parses it back to an equal value. Codecs are hashable, hold no
    state and know no ranks. :func:`dtcomm.encode` and :func:`dtcomm.decode` run them.

    Example:
        >>> import dtcomm
        >>> codec = dtcomm.codec("int8:block=64")
        >>> str(codec), codec.wire_bytes(1024), codec.granularity
        ('int8:block=64', 1056, 1024)
    """

    codec_name: ClassVar[str]  # its name, if no option decides it
    family: ClassVar[int]  # the number of its family in csrc/codec/codec.h
    reference: ClassVar[str]  # the module of dtcomm.kernels.reference with its `encode` and `decode`
    # Capabilities, which callers ask for instead of the class.
    elementwise: ClassVar[bool] = False  # the bytes of an element do not depend on its neighbours
    sparse: ClassVar[bool] = False  # only a part of the elements is sent; option `values` is their codec
    stores_positions: ClassVar[bool] = False  # payloads hold positions, which a corrupt one may have wrong
    reproducible: ClassVar[bool] = False  # sums have the same bits in any order of additions; can be audited
    blocks_compete: ClassVar[bool] = False  # a block's codes depend on the other blocks of its granule
    has_cuda_kernel: ClassVar[bool] = True  # `dtcomm._cuda` encodes and decodes it
    variable_length: ClassVar[bool] = False  # payloads' lengths depend on the data; `wire_bytes` is the bound

    @property
    def name(self) -> str:
        """The name that its spec string starts with."""
        return self.codec_name

    @abc.abstractmethod
    def layout(self, dtype: torch.dtype = torch.float32) -> Layout:
        """The layout of a tensor of `dtype`; only ``none`` depends on the type."""

    @property
    def in_python(self) -> bool:
        """Whether torch encodes and decodes it: it has no layout and no kernel."""
        return False

    @property
    def identity(self) -> str:
        """What ranks compare: its spec string, and a checksum of what no spec says."""
        return str(self)

    def lossless(self, dtype: torch.dtype) -> bool:
        """Whether decoding returns every number of a tensor of `dtype` unchanged."""
        return False

    @property
    def granularity(self) -> int:
        """Elements of a granule. Payloads may be cut at multiples of it."""
        return self.layout().granule

    @property
    def needs_agreement(self) -> bool:
        """Whether ranks agree on a representation (exponents, positions) before they sum; see `sum_messages`."""
        return False

    @property
    def operations(self) -> tuple[str, ...]:
        """The reductions that this codec supports."""
        return ("sum",)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The element types of tensors that this codec encodes."""
        return FLOAT_TYPES

    def wire_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """The size of a payload in bytes. It never depends on the data, but is a bound for codecs of `variable_length`.

        Args:
            numel: Elements of the tensor.
            dtype: The type of the tensor; only ``none`` depends on it.

        Raises:
            TypeError: `numel` is not an int.
            ValueError: `numel` is negative.
        """
        return self.layout(dtype).payload_bytes(count(numel))

    def sum_messages(
        self, numel: int, collective: str = "all_reduce", dtype: torch.dtype | None = None
    ) -> list[tuple[int, Codec, torch.dtype]]:
        """The messages of a sum of `numel` elements: (elements, codec, dtype) of each, in order.

        It is one message, the tensor itself, unless ranks agree on a representation first (`needs_agreement`).
        ``dtype`` is that of the tensor; None stands for float32.
        """
        return [(numel, self, torch.float32)]

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """The type of an element in the payload of a tensor of `dtype`; None if payloads hold codes."""
        return None

    def native(self) -> bytes:
        """The 16 bytes of ``Codec`` in csrc/codec/codec.h, from the fields and options of these names."""
        values: dict[str, Any] = {name: getattr(self, name, 0) for name in ("bits", "block")}
        return pack(
            self.family,
            scale=SCALES[getattr(self, "scale", "bf16")],
            symmetric=getattr(self, "symmetric", True),
            stochastic=getattr(self, "round", "nearest") == "stochastic",
            rotate=getattr(self, "rotate", "none") == "hadamard",
            spikes=getattr(self, "spikes", 0) == 1,
            element=ELEMENTS[getattr(self, "element", "none")],
            **values,
        )

    @cached_property
    def native_bytes(self) -> bytes:
        """What :meth:`native` returns, kept for the calls of kernels: making it takes longer than a small encoding."""
        return self.native()

    def options(self) -> dict[str, Any]:
        """The options whose values differ from their defaults."""
        changed = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if "valid" in field.metadata and value != field.default:
                changed[field.name] = value
        return changed

    def __str__(self) -> str:
        options = ",".join(f"{key}={_text(value)}" for key, value in self.options().items())
        return f"{self.name}:{options}" if options else self.name

    def __post_init__(self) -> None:
        """Check the block, and the options whose valid values are listed. Raises ValueError for a wrong value."""
        block = getattr(self, "block", SMALLEST_BLOCK)
        known = isinstance(block, int) and not isinstance(block, bool)
        if not known or not SMALLEST_BLOCK <= block <= LARGEST_BLOCK or block & (block - 1):
            raise self._refuse("block")
        for field in dataclasses.fields(self):
            choices, value = field.metadata.get("choices"), getattr(self, field.name)
            if choices and (type(value) is not type(field.default) or value not in choices):
                raise self._refuse(field.name)

    def _refuse(self, option: str) -> ValueError:
        (field,) = (field for field in dataclasses.fields(self) if field.name == option)
        value = _text(getattr(self, option))
        return ValueError(f"{self.name}: option {option!r} is {value}; valid: {field.metadata['valid']}")


def pack(
    family: int,
    *,
    bits: int = 0,
    scale: int = 0,
    symmetric: bool = True,
    stochastic: bool = False,
    rotate: bool = False,
    spikes: bool = False,
    element: int = 0,
    block: int = 0,
    kept: int = 0,
) -> bytes:
    """``Codec`` of csrc/codec/codec.h as bytes."""
    return struct.pack(
        "<8B2I", family, bits, scale, symmetric, stochastic, rotate, spikes, element, block, kept
    )


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
