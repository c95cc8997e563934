"""Codecs written in Python: a user's functions on torch tensors. `dtcomm.codecs.custom` checks and registers them.

`dtcomm.kernels.eager` runs them; the runtimes move their payloads as bytes.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch

from dtcomm.codecs.base import Codec, Layout, aligned, count

PROBE_SIZES = (1, 15, 1000, 2500)  # elements of the tensors that `probe` encodes
PROBE_KEYS = (1, 2**63)

EncodeFunction = Callable[..., torch.Tensor]  # of the tensor, and of `key` if it has such a parameter
DecodeFunction = Callable[[torch.Tensor, int], torch.Tensor]
SizeFunction = Callable[[int], int]


@dataclass(frozen=True, kw_only=True)
class PythonCodec(Codec):
    """A codec of `dtcomm.codecs.custom`.

    A tensor is not encoded granule by granule: each chunk of a collective's schedule is one call of the functions.

    Attributes:
        label: The name that it was registered under.
        fingerprint: A checksum of probes' payloads and of what they decode to. Ranks compare it.
        elements: Elements at whose multiples collectives cut a tensor into chunks.
        encode_function, decode_function, size_function: The user's functions.
        takes_key: Whether `encode_function` has a parameter `key`.
    """

    has_cuda_kernel: ClassVar[bool] = False

    label: str
    fingerprint: int
    elements: int
    encode_function: EncodeFunction = field(repr=False)
    decode_function: DecodeFunction = field(repr=False)
    size_function: SizeFunction = field(repr=False)
    takes_key: bool

    @property
    def name(self) -> str:
        return self.label

    @property
    def in_python(self) -> bool:
        return True

    @property
    def granularity(self) -> int:
        return self.elements

    @property
    def identity(self) -> str:
        return f"{self.label} (probe {self.fingerprint:08x})"

    def layout(self, dtype: torch.dtype = torch.float32) -> Layout:
        raise self._no_kernel()

    def native(self) -> bytes:
        raise self._no_kernel()

    def wire_bytes(self, numel: int, dtype: torch.dtype = torch.float32) -> int:
        """The size of a payload in bytes: what the user's function says, rounded up to a multiple of 16."""
        return aligned(self.payload_bytes(count(numel)))

    def payload_bytes(self, numel: int) -> int:
        """The size of a payload without its padding; 0 for no elements."""
        if numel == 0:
            return 0
        size = self.size_function(numel)
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"wire_bytes: of {numel} elements is {size!r}; expected an int")
        if size < 0:
            raise ValueError(f"wire_bytes: of {numel} elements is {size}; expected 0 or more")
        return size

    def encode(self, x: torch.Tensor, key: int) -> torch.Tensor:
        """Call the user's function on an fp32 tensor [n]; returns its payload, which has been checked."""
        payload = self.encode_function(x, key=key) if self.takes_key else self.encode_function(x)
        self._require("encode", payload, torch.uint8, self.payload_bytes(x.numel()), x)
        return payload

    def decode(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        """Call the user's function on a payload without padding; returns an fp32 tensor [numel], checked."""
        decoded = self.decode_function(payload, numel)
        self._require("decode", decoded, torch.float32, numel, payload)
        return decoded

    def _require(
        self, argument: str, value: object, dtype: torch.dtype, numel: int, like: torch.Tensor
    ) -> None:
        where = f"codec {self.label!r}: {argument}: returned"
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{where} {type(value).__name__}; expected a tensor")
        if value.dtype != dtype:
            raise TypeError(f"{where} {value.dtype}; expected {dtype}")
        if value.shape != (numel,):
            size = " elements: what wire_bytes says" if argument == "encode" else ""
            raise ValueError(f"{where} shape {tuple(value.shape)}; expected ({numel},){size}")
        if value.device != like.device:
            raise ValueError(f"{where} a tensor on {value.device}; expected {like.device}, as its argument")

    def _no_kernel(self) -> ValueError:
        return ValueError(
            f"codec: {self.label!r} is written in Python: it has no kernel and no layout that dtcomm knows; valid "
            "where kernels are needed (simulated ranks, fused kernels): the codecs of dtcomm"
        )


def takes_key(encode: EncodeFunction) -> bool:
    """Whether a user's function for encoding has a parameter `key`."""
    try:
        return "key" in inspect.signature(encode).parameters
    except (TypeError, ValueError):  # a built-in function without a signature
        return False


def probe(codec: PythonCodec) -> int:
    """Encode and decode some tensors, and return the fingerprint of the results.

    TypeError or ValueError, naming the function, if one raises, returns something else than it should, changes its
    argument, or gives other bytes the second time.
    """
    fingerprint = 0
    for numel in PROBE_SIZES:
        try:
            codec.payload_bytes(numel)
        except Exception as error:
            if str(error).startswith("wire_bytes: "):
                raise
            raise ValueError(f"wire_bytes: raised {error!r} for {numel} elements") from error
    for numel in PROBE_SIZES:
        index = torch.arange(numel)
        # Numbers of both signs, of all 24 bits and of 16 orders of magnitude, and some zeros.
        x = (index * 7_654_321 % 33_554_393 - 16_777_196).float() * torch.exp2(-(index % 53).float())
        x[2::7] = 0
        for key in PROBE_KEYS:
            payload = _repeat("encode", codec, x, partial(codec.encode, x, key)).contiguous()
            decoded = _repeat("decode", codec, payload, partial(codec.decode, payload, numel))
            for tensor in (payload, decoded):
                fingerprint = zlib.crc32(tensor.contiguous().numpy().tobytes(), fingerprint)
        with torch.inference_mode():
            decoded = codec.decode(codec.encode(torch.zeros(numel), 1).contiguous(), numel)
        if not decoded.isfinite().all():
            raise ValueError(
                f"encode: {numel} zeros decode to NaN or Inf, as a division by a scale of 0 gives; a tensor of zeros "
                "must decode to finite numbers"
            )
    return fingerprint


def _repeat(
    argument: str, codec: PythonCodec, operand: torch.Tensor, call: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """Make a call of a user's function twice; returns its result."""
    before = operand.clone()
    with torch.inference_mode():
        try:
            first, second = call(), call()
        except (TypeError, ValueError) as error:
            if str(error).startswith(f"codec {codec.label!r}: "):
                raise type(error)(str(error).partition(": ")[2]) from None
            raise _raised(argument, operand, error) from error
        except Exception as error:
            raise _raised(argument, operand, error) from error
        if not torch.equal(before.view(torch.uint8), operand.view(torch.uint8)):
            raise ValueError(f"{argument}: changed its argument; it must leave it as it is")
        if not torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8)):
            hint = (
                "; random numbers come from a torch.Generator with the seed `key`, an argument that encode may have"
                if argument == "encode"
                else ""
            )
            raise ValueError(f"{argument}: gave other bytes when it was called again{hint}")
        return first.clone()


def _raised(argument: str, operand: torch.Tensor, error: Exception) -> ValueError:
    return ValueError(
        f"{argument}: raised {error!r} for {operand.dtype} of {operand.numel()} elements on {operand.device}"
    )
