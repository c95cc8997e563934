"""Compression schemes and their spec strings.

A scheme is a codec, a codec for each level of a hierarchy of hosts (`LevelCodecs`), or a compressor with state of its
own (`PowerSGD`, `DGC`). Policies, the DDP hook and `LocalSGD` parse specs here. Pipelines, experts and attention parse
the codecs of their messages here, which are sent and not summed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from dtcomm import env
from dtcomm.arguments import errors_name, suggest
from dtcomm.codecs import Codec, codec, names, parse_levels
from dtcomm.codecs.spec import VARIABLE_LENGTH
from dtcomm.compress.feedback import DGC, DGC_NAME, Feedback
from dtcomm.compress.powersgd import NAME as POWERSGD_NAME
from dtcomm.compress.powersgd import PowerSGD
from dtcomm.kernels import dispatch, ops

#: The largest relative error of one encoding where what it loses is never sent, measured on Gaussian numbers
#: (`gaussian_error`).
MAX_ERROR = 0.2
AUTO = "auto"  # the spec with which `dtcomm.ddp` chooses by trials
GAUSSIAN_ELEMENTS = 2**14  # of the sample of `gaussian_error`: whole granules of every codec


@dataclass(frozen=True)
class LevelCodecs:
    """The scheme ``A/B``: codec A inside hosts and codec B between hosts; on one host only A is used.

    Attributes:
        inside: The codec inside hosts.
        between: The codec between hosts.

    Raises:
        ValueError: The ranks of one of the codecs agree on a representation, which has no levels.

    Example:
        >>> from dtcomm.compress.spec import parse_scheme
        >>> scheme = parse_scheme("int8/int4:block=64")
        >>> str(scheme.inside), str(scheme.between)
        ('int8', 'int4:block=64')
    """

    inside: Codec
    between: Codec

    def __post_init__(self) -> None:
        for level_codec in (self.inside, self.between):
            if level_codec.needs_agreement:
                raise ValueError(
                    f"codec: {self}: {level_codec} uses one representation on all levels of a hierarchy; give it alone"
                )

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes that both codecs encode."""
        return tuple(dtype for dtype in self.inside.dtypes if dtype in self.between.dtypes)

    def lossless(self, dtype: torch.dtype) -> bool:
        """Return whether both codecs keep every bit of a dtype."""
        return self.inside.lossless(dtype) and self.between.lossless(dtype)

    def __str__(self) -> str:
        return f"{self.inside}/{self.between}"


Scheme: TypeAlias = Codec | LevelCodecs | PowerSGD | DGC

#: Parsers of the compressors, by the name that their specs start with.
COMPRESSORS: dict[str, Callable[[str], PowerSGD | DGC]] = {POWERSGD_NAME: PowerSGD.parse, DGC_NAME: DGC.parse}
#: The option that names the codec of what a sparse or low-rank scheme sends.
INNER_CODEC_OPTIONS = {"topk": "values", "randk": "values", DGC_NAME: "values", POWERSGD_NAME: "factors"}


def parse_scheme(spec: str | Scheme, argument: str = "codec") -> Scheme:
    """Return the scheme that a spec describes; a scheme is returned unchanged. Errors begin with ``argument``.

    A spec is that of a codec (``int8:block=64``), two of them (``int8/int4``: int8 inside hosts, int4 between hosts),
    or that of a compressor (``powersgd:rank=4``, ``dgc:ratio=0.001``).

    Raises:
        TypeError: ``spec`` is neither a string nor a scheme.
        ValueError: The spec is wrong; the message names the part and what is valid there. Of the specs ``A/B`` those
            are refused in which A is a compressor, or sends a share of the elements of which B would send all.
    """
    with errors_name(argument):
        return _parse_scheme(spec)


def _parse_scheme(spec: str | Scheme) -> Scheme:
    if isinstance(spec, LevelCodecs | PowerSGD | DGC):
        return spec
    if not isinstance(spec, str):
        return codec(spec)
    if "=>" in spec:
        raise ValueError(f"a rule of a policy is written with ->, as '* -> int8'; got {spec!r}")
    head, slash, tail = spec.strip().partition("/")
    name, colon, _ = head.partition(":")
    if name in ("ef", "loco", "delta"):
        raise ValueError(
            f"{name!r} is a prefix of dtcomm.fsdp.compress; error feedback is here the argument feedback="
        )
    if not slash:
        if name in COMPRESSORS:
            return COMPRESSORS[name](spec)
        valid = (*names(), *VARIABLE_LENGTH, *COMPRESSORS)
        if name not in valid:
            hint = suggest(name, valid, lambda guess: spec.replace(name, guess, 1))
            raise ValueError(f"unknown codec or compressor {name!r}{hint}; valid names: {', '.join(valid)}")
        return codec(spec)
    meaning = "A/B means codec A inside hosts and codec B between hosts"
    if option := INNER_CODEC_OPTIONS.get(name):
        between = None if name in COMPRESSORS else codec(tail)
        if between is None or not between.sparse:
            raise ValueError(
                f"{spec}: {meaning}; the codec of what {name} sends is an option: "
                f"{head}{',' if colon else ':'}{option}={tail}"
            )
    if tail.partition(":")[0] in COMPRESSORS:
        raise ValueError(f"{spec}: {meaning}; {tail} is a compressor, which has no levels")
    inside, between = parse_levels(spec.strip())
    assert between is not None  # because of the slash
    return LevelCodecs(inside, between)


def message_codec(spec: str | Codec, argument: str, messages: str, carried: str = "") -> Codec:
    """Return the codec that a spec describes, if messages can have it.

    Errors begin with ``argument`` and name ``messages``, what is sent and not summed, as a plural: ``"rows"``.
    ValueError if the spec is wrong, has two levels or payloads of variable length, is for sums, or drops too much of
    what is ``carried`` (`require_accurate`); empty: any codec is accurate enough.

    Example:
        >>> from dtcomm.compress.spec import message_codec
        >>> str(message_codec("int8", "codec", "rows"))
        'int8'
    """
    with errors_name(argument):
        parsed = _parse_message(spec, messages, carried)
    return codec("none") if env.disabled() else parsed


@functools.lru_cache(maxsize=256)
def _parse_message(spec: str | Codec, messages: str, carried: str) -> Codec:
    """`message_codec` where compression is not turned off, which may change in a process."""
    if isinstance(spec, str) and "/" in spec:
        raise ValueError(
            f"{spec!r} names a codec for each level of hosts; {messages} have one codec on all their way"
        )
    parsed = codec(spec)
    if parsed.variable_length:
        raise ValueError(
            f"{parsed} has payloads of a length that depends on the data, and {messages} have a fixed one"
        )
    if parsed.reproducible:
        raise ValueError(f"{parsed} is for sums, and {messages} are sent and not summed")
    if carried:
        require_accurate(parsed, "codec", carried)
    return parsed


def wire_codec(scheme: Codec | DGC) -> Codec:
    """Return the codec in which the payload of a scheme is sent."""
    return scheme.topk if isinstance(scheme, DGC) else scheme


@functools.cache
def gaussian_error(scheme: Codec) -> float:
    """Return the relative error (L2 norms) of encoding Gaussian numbers once, without a residual.

    It is a property of the codec that tells what destroys a tensor: 0.005 for int8, 0.1 for int4, 0.66 for int2, 0.6
    for sign, 0.96 for topk with a ratio of 0.01, and 9 for randk, which scales what it sends.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(GAUSSIAN_ELEMENTS, generator=generator, dtype=torch.float32, device="cpu")
    decoded = ops.decode(scheme, ops.encode(scheme, x), x.numel())
    return float(torch.linalg.vector_norm(decoded - x) / torch.linalg.vector_norm(x))


def require_accurate(codec: Codec, argument: str, carried: str, remedy: str = "") -> None:
    """Raise ValueError for a codec that drops too much of the values, where no error feedback resends them.

    The message names the ``argument``, what the codec carries, such as ``"tokens"``, and as a ``remedy`` an argument
    with which the codec is accepted, besides ``allow_inaccurate=True``.
    """
    if (error := gaussian_error(codec)) > MAX_ERROR:
        instead = f", or {remedy}" if remedy else ""
        raise ValueError(
            f"{argument}: {codec} loses {error:.0%} of the {carried} (relative error; the limit is {MAX_ERROR:.0%}), "
            f"and no error feedback resends it; use 4 bits or more{instead}; allow_inaccurate=True allows it"
        )


def require_kernels(schemes: Iterable[Scheme], tensors: Iterable[torch.Tensor], argument: str) -> None:
    """Raise an error that begins with ``argument`` if the tensors are on a CUDA device that cannot run the schemes.

    It is a ValueError for a codec without a CUDA kernel, and a RuntimeError if dtcomm was built without CUDA kernels.
    Codecs on whose representation ranks agree are exempt: operators of torch make it.
    """
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if device is None:
        return
    for scheme in schemes:
        levels = (scheme.inside, scheme.between) if isinstance(scheme, LevelCodecs) else (scheme,)
        for level in levels:
            sent = codec("none") if isinstance(level, PowerSGD) else wire_codec(level)
            sent = codec("none") if sent.needs_agreement else sent
            dispatch.require_cuda_kernel(sent, f"{argument}: the model is on {device}")


def needs_feedback(scheme: Scheme) -> bool:
    """Return whether gradients in a scheme lose so much that training does not converge without error feedback.

    A codec of more than `MAX_ERROR`, on any level, and every compressor does. int4 loses 10 % and does not need it: in
    the runs of docs/results/training.md feedback changes its held-out loss by less than another seed does.
    """
    if isinstance(scheme, LevelCodecs):
        return needs_feedback(scheme.inside) or needs_feedback(scheme.between)
    return isinstance(scheme, PowerSGD | DGC) or gaussian_error(scheme) > MAX_ERROR


def choose_feedback(
    feedback: bool | str | Feedback, schemes: Iterable[Scheme]
) -> tuple[bool | str | Feedback, str]:
    """Return what an argument ``feedback`` means for gradients in ``schemes``, and why if it is ``"auto"``.

    ``"auto"`` is True if one of the schemes needs feedback (`needs_feedback`), and else False. Other values are
    returned as they are.

    Example:
        >>> from dtcomm.compress.spec import choose_feedback, parse_scheme
        >>> choose_feedback("auto", [parse_scheme("int8")])
        (False, 'auto: int8 loses 0.5%')
    """
    if not isinstance(feedback, str) or feedback != AUTO:
        return feedback, ""
    lossy = [scheme for scheme in dict.fromkeys(schemes) if not scheme.lossless(torch.float32)]
    needing = [scheme for scheme in lossy if needs_feedback(scheme)]
    return bool(needing), f"auto: {', '.join(map(_describe_loss, needing or lossy))}" if lossy else ""


def _describe_loss(scheme: Scheme) -> str:
    """Return how much a scheme loses, for log lines and reports."""
    if isinstance(scheme, LevelCodecs):
        return f"{_describe_loss(scheme.inside)}, {_describe_loss(scheme.between)}"
    if isinstance(scheme, PowerSGD | DGC):
        return f"{scheme} leaves out a part"
    error = gaussian_error(scheme)
    return f"{scheme} loses {error:.1%}" if error < 0.01 else f"{scheme} loses {error:.0%}"


def matrix_shape(tensor: torch.Tensor) -> tuple[int, int]:
    """Return (rows, columns) of a gradient as compressors see it: the first dimension by all others."""
    rows = tensor.shape[0]
    return rows, tensor.numel() // rows if rows else 0
