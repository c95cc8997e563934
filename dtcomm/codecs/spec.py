"""Spec strings (``int8:block=64,round=stochastic``) and the registry of codecs, `CODECS`; `custom` adds to it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from dtcomm.arguments import suggest
from dtcomm.codecs.base import GRANULE, Codec
from dtcomm.codecs.cast import ROUNDED, Bf16, Exact, Fp16, Lossless, RoundedExact, Uncompressed
from dtcomm.codecs.integer import Integer, Sign, VariableInteger
from dtcomm.codecs.minifloat import Float8, Mxfp4, Mxfp8, Nvfp4
from dtcomm.codecs.python_codec import (
    DecodeFunction,
    EncodeFunction,
    PythonCodec,
    SizeFunction,
    probe,
    takes_key,
)
from dtcomm.codecs.sparse import RandK, TopK


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A registered codec name: the class it makes, and the fields that the name itself sets."""

    make: Callable[..., Codec]
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def options(self) -> dict[str, dataclasses.Field[Any]]:
        """The options of this codec, by name."""
        fields = dataclasses.fields(self.make)  # type: ignore[arg-type]
        return {field.name: field for field in fields if "valid" in field.metadata}


CODECS: dict[str, Entry] = {
    "none": Entry(make=Uncompressed),
    "fp16": Entry(make=Fp16),
    "bf16": Entry(make=Bf16),
    "fp8_e4m3": Entry(make=Float8, fixed={"element": "e4m3"}),
    "fp8_e5m2": Entry(make=Float8, fixed={"element": "e5m2"}),
    "fp8_e3m4": Entry(make=Float8, fixed={"element": "e3m4"}),
    "mxfp8": Entry(make=Mxfp8),
    "mxfp4": Entry(make=Mxfp4),
    "nvfp4": Entry(make=Nvfp4),
    **{f"int{bits}": Entry(make=Integer, fixed={"bits": bits}) for bits in (8, 7, 6, 5, 4, 3, 2)},
    "intv": Entry(make=VariableInteger),
    "sign": Entry(make=Sign),
    "topk": Entry(make=TopK),
    "randk": Entry(make=RandK),
    "exact": Entry(make=Exact),
}
# Codecs whose payloads have a length that depends on the data, without options.
VARIABLE_LENGTH: dict[str, Codec] = {"lossless": Lossless()}
# Codecs that a whole spec names, without other options.
WHOLE_SPECS: dict[str, Codec] = {ROUNDED: RoundedExact()}
# Tier → its codecs, as tables and pages list them. The first tier holds exactly these variants.
TIERS: dict[str, tuple[str, ...]] = {
    "use these": ("none", "bf16:round=stochastic", "int8", "int4", "fp8_e4m3"),
    "for special cases": (
        "lossless",
        "fp16",
        "bf16",
        "fp8_e3m4",
        "fp8_e5m2",
        "int7",
        "int6",
        "int5",
        "intv",
        "exact",
    ),
    "for research": ("int3", "int2", "mxfp8", "mxfp4", "nvfp4", "sign", "topk", "randk"),
}
# The codecs that `custom` added.
REGISTERED: dict[str, PythonCodec] = {}
# What the name of a codec would mean besides a codec, in specs of the parts that take one.
RESERVED = ("auto", "powersgd", "dgc", "ef", "loco", "delta", "zero", "sdp4bit", "all")

# Floats as `repr` prints them and as people write them.
NUMBER = re.compile(r"(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)


def names() -> tuple[str, ...]:
    """The names of the codecs that every function takes.

    Returns:
        The names that a spec string may start with, but for ``lossless``: only what copies payloads takes it.

    Example:
        >>> import dtcomm
        >>> dtcomm.codecs.names()[:4]
        ('none', 'fp16', 'bf16', 'fp8_e4m3')
    """
    return (*CODECS, *REGISTERED)


def tier(spec: str) -> str:
    """Return the title of a codec's tier. Variants of codecs of the first tier are for special cases."""
    first, second, *others = TIERS
    if spec in TIERS[first]:
        return first
    name = spec.partition(":")[0]
    return next((title for title in others if name in TIERS[title]), second)


def custom(
    name: str,
    encode: EncodeFunction,
    decode: DecodeFunction,
    wire_bytes: SizeFunction,
    *,
    granularity: int = GRANULE,
) -> PythonCodec:
    """Add a codec of your own, written in Python: from then on its name is valid wherever ``codec`` is an argument.

    Its payloads are sent instead of the tensor. As with every codec a version of a chunk is encoded at most once and
    all ranks use the decoded bytes. Sums are taken in fp32 in rank order, so all ranks end with the same bits. It is
    slower than a codec of dtcomm. Register it on every rank; ranks whose functions give other bytes under one name
    raise CollectiveMismatch, over Gloo and NCCL with DTCOMM_CHECK=1.

    The functions work on torch tensors of any device, CPU threads and CUDA streams included, without gradients. They
    must not change their arguments or wait for other ranks. They are called here with small tensors to check them.

    Args:
        name: The name: a letter, then letters, digits and underscores. It takes no options.
        encode: ``encode(x) -> payload``: x is an fp32 tensor [n] with n ≥ 1; the payload is uint8, [wire_bytes(n)], on
            the device of x. The same x must give the same bytes. A function that rounds at random has another
            parameter, ``encode(x, key)``: a number below 2**64 that differs for every call, rank and chunk, the seed
            of a ``torch.Generator``.
        decode: ``decode(payload, n) -> x``: the payload as `encode` returned it, on any rank, its memory aligned to 16
            bytes; x is an fp32 tensor [n]. All ranks must compute the same bits.
        wire_bytes: ``wire_bytes(n) -> int``: the bytes of a payload of n elements, whatever they are. Payloads are
            padded to multiples of 16 bytes on the wire.
        granularity: A collective cuts a tensor into chunks at multiples of so many elements, each of which is encoded
            by one call. Default 1024; give a multiple of the block of a block-scaled codec.

    Returns:
        The codec. Its name as a spec string means the same.

    Raises:
        TypeError, ValueError: An argument is wrong, the name is taken, or a function does not do what it should; the
            message names the argument.

    Example:
        The upper half of each fp32 number, rounded towards zero::

            def encode(x: torch.Tensor) -> torch.Tensor:
                return (x.view(torch.int32) >> 16).to(torch.int16).view(torch.uint8)

            def decode(payload: torch.Tensor, n: int) -> torch.Tensor:
                return (payload.view(torch.int16).to(torch.int32) << 16).view(torch.float32)

            dtcomm.codecs.custom("upper16", encode, decode, lambda n: 2 * n)
            dtcomm.all_reduce(tensor, codec="upper16")
    """
    if not isinstance(name, str):
        raise TypeError(f"name: expected a str, got {type(name).__name__}")
    if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII):
        raise ValueError(f"name: expected a letter, then letters, digits and underscores, got {name!r}")
    if name in CODECS or name in VARIABLE_LENGTH or name in RESERVED:
        raise ValueError(
            f"name: {name!r} is taken; taken are {', '.join((*CODECS, *VARIABLE_LENGTH, *RESERVED))}"
        )
    for argument, function in (("encode", encode), ("decode", decode), ("wire_bytes", wire_bytes)):
        if not callable(function):
            raise TypeError(f"{argument}: expected a function, got {type(function).__name__}")
    if isinstance(granularity, bool) or not isinstance(granularity, int):
        raise TypeError(f"granularity: expected an int, got {type(granularity).__name__}")
    if granularity < 1:
        raise ValueError(f"granularity: expected 1 or more elements, got {granularity}")
    new = PythonCodec(
        label=name,
        fingerprint=0,
        elements=granularity,
        encode_function=encode,
        decode_function=decode,
        size_function=wire_bytes,
        takes_key=takes_key(encode),
    )
    new = dataclasses.replace(new, fingerprint=probe(new))
    if REGISTERED.get(name, new) != new:
        raise ValueError(f"name: {name!r} is registered already, with other functions; give another name")
    return REGISTERED.setdefault(name, new)


def codec(spec: str | Codec) -> Codec:
    """Parse a spec string.

    Args:
        spec: A codec name, optionally followed by a colon and options: ``name`` or ``name:option=value,option=value``.
            The names are those of :func:`names`; the options are documented with the codec classes of
            `dtcomm.codecs`. A codec is returned unchanged.

    Returns:
        The codec, a frozen value. ``str(codec)`` gives a spec string back.

    Raises:
        TypeError: `spec` is neither a string nor a codec, or a codec of a class without kernels.
        ValueError: A name, an option or a value is wrong; the message names it and lists what is valid.

    Example:
        >>> import dtcomm
        >>> codec = dtcomm.codec("int4:block=64,round=stochastic")
        >>> codec.wire_bytes(1_000_000)
        531264
        >>> str(codec)
        'int4:block=64,round=stochastic'
    """
    if isinstance(spec, Codec):
        if not spec.in_python and not spec.variable_length and not hasattr(spec, "family"):
            raise TypeError(
                f"codec: {type(spec).__name__} has no kernels; dtcomm.codecs.custom makes a codec of Python functions"
            )
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"codec: expected a spec string or a Codec, got {type(spec).__name__}")
    if (whole := WHOLE_SPECS.get(spec.strip())) is not None:
        return whole
    name, colon, rest = spec.strip().partition(":")
    if name in REGISTERED:
        if colon:
            raise ValueError(f"{name}: it takes no options, because it is written in Python; got {spec!r}")
        return REGISTERED[name]
    if name in VARIABLE_LENGTH:
        if colon:
            raise ValueError(f"{name}: it takes no options; got {spec!r}")
        return VARIABLE_LENGTH[name]
    if name not in CODECS:
        valid = (*names(), *VARIABLE_LENGTH)
        hint = suggest(name, valid, lambda guess: spec.replace(name, guess, 1))
        raise ValueError(f"codec: unknown codec {name!r}{hint}; valid names: {', '.join(valid)}")
    entry = CODECS[name]
    if colon and not rest:
        raise ValueError(f"{name}: nothing follows the colon in {spec!r}")
    if name == "exact" and "rounded" in [part.partition("=")[0].strip() for part in rest.split(",")]:
        raise ValueError(
            f"exact: rounded=true keeps every bit, so it goes with no other option; got {spec!r}; valid: {ROUNDED}, or "
            f"exact with {' and '.join(entry.options())}"
        )
    # torch.compile cannot trace `dataclasses.fields`, so a spec without options does not call it.
    return entry.make(**entry.fixed, **(options_of(name, rest, entry.options()) if rest else {}))


def parse_levels(spec: str | Codec) -> tuple[Codec, Codec | None]:
    """Return the codecs of a spec that may have two levels: ``A/B`` is codec A inside hosts and B between hosts.

    Args:
        spec: A spec of one or two levels, or a codec.

    Returns:
        The codec inside hosts, and the one between hosts, or None if it is the same.

    Example:
        >>> from dtcomm.codecs import parse_levels
        >>> [str(codec) for codec in parse_levels("int8/int4")]
        ['int8', 'int4']
        >>> str(parse_levels("int8")[1])
        'None'
    """
    if not isinstance(spec, str) or "/" not in spec:
        return codec(spec), None
    inside, between, *more = spec.split("/")
    if more:
        levels = 2 + len(more)
        raise ValueError(
            f"codec: {spec!r}: A/B is codec A inside hosts and B between hosts; got {levels} levels"
        )
    return codec(inside), codec(between)


def has_variable_length(spec: str | Codec) -> bool:
    """Return whether the payloads of a codec, or of one level of a spec, have a length that depends on the data."""
    inside, between = parse_levels(spec)
    return inside.variable_length or (between is not None and between.variable_length)


def require_fixed_length(codec: Codec, collective: str) -> None:
    """Raise ValueError if the engine cannot run a collective with the codec, because its payloads vary in length."""
    if codec.variable_length:
        raise ValueError(
            f"codec: {str(codec)!r} cannot be used here ({collective}): the length of its payloads depends on the "
            "data, and this operation works in pieces of a fixed size; it is valid in broadcast, all_gather, gather, "
            "scatter, all_to_all, send and recv, and dtcomm.encode"
        )


def options_of(name: str, rest: str, options: Mapping[str, dataclasses.Field[Any]]) -> dict[str, Any]:
    """The values of the options in ``key=value,…``. Raises ValueError, which names the part that is wrong."""
    values: dict[str, Any] = {}
    for part in rest.split(",") if rest else ():
        key, equals, text = (piece.strip() for piece in part.partition("="))
        if key not in options:
            valid = f"valid options: {', '.join(options)}" if options else "it takes no options"
            raise ValueError(f"{name}: unknown option {key!r}{suggest(key, options)}; {valid}")
        if not equals:
            raise ValueError(f"{name}: option {key!r} needs a value; valid: {options[key].metadata['valid']}")
        if key in values:
            raise ValueError(f"{name}: option {key!r} is given twice")
        values[key] = _value(name, options[key], text)
    return values


def _value(name: str, field: dataclasses.Field[Any], text: str) -> Any:
    """`text` converted to the type of the field's default."""
    if isinstance(field.default, bool):
        if text in ("true", "false"):
            return text == "true"
    elif isinstance(field.default, int):
        if text.isascii() and text.isdigit():
            return int(text)
    elif isinstance(field.default, float):
        if NUMBER.fullmatch(text):
            return float(text)
    else:
        return text
    raise ValueError(f"{name}: option {field.name!r} is {text!r}; valid: {field.metadata['valid']}")
