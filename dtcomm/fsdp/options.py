"""The options of sharded models, and compression specs: what is done to gradients and parameters, as text.

A spec is a codec's spec, or two of them separated by a slash: ``int8/int4`` is int8 inside hosts and int4 between
hosts. A prefix may precede them:

- ``delta:`` (parameters) sends differences from the values that the peers have, instead of the values: the weight
  differences of SDP4Bit (Jia et al. 2024, arXiv:2410.15526).
- ``ef:`` (gradients) is error feedback: the error of each encoding is added to the next gradient.
- ``loco:`` (gradients) is the error feedback of LoCo (Xie et al. 2024, arXiv:2407.04480): a moving average of the
  error, in 8 bits, which is reset every 1024 calls.

`require_accurate` refuses specs that lose too much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypedDict

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dtcomm.arguments import errors_name, require_bool, suggest
from dtcomm.codecs import Codec, codec, names, parse_levels
from dtcomm.codecs.spec import VARIABLE_LENGTH
from dtcomm.compress.guard import Guard
from dtcomm.compress.spec import AUTO, COMPRESSORS, MAX_ERROR, LevelCodecs, choose_feedback, gaussian_error


class StateOptions(TypedDict, total=False):
    """What `compress`, `attach` and `ShardedOptimizer` take beside codecs; the texts are those of `Options` too.

    Attributes:
        gradients: Spec of the gradients' reduce-scatter: a codec, or two (``"int8/int4"`` is int8 inside hosts and int4
            between hosts), optionally prefixed by ``ef:`` or ``loco:`` for error feedback (see `dtcomm.fsdp.options`).
            Default: the preset's, or ``"int8"``.
        parameters: Spec of the parameters' all-gather: one or two codecs, optionally prefixed by ``delta:``, which
            sends differences. FSDP1 supports only ``"none"``; `ShardedOptimizer` needs no memory for ``delta:``,
            because the model itself is the reference. Default: the preset's, or ``"none"``.
        preset: ``"zero++"`` (Wang et al. 2023, arXiv:2306.10209), ``"loco"`` (Xie et al. 2024, arXiv:2407.04480) or
            ``"sdp4bit"`` (Jia et al. 2024, arXiv:2410.15526) set both specs; ``gradients`` and ``parameters`` override
            the preset's. Default: none.
        feedback: Error feedback: add the error of each gradient's encoding to the next gradient. True is the same as
            the prefix ``ef:``, and takes an fp32 copy of every module's whole gradient on every rank; ``loco:`` takes a
            quarter of that. ``"auto"`` is True for codecs that lose more than 20 % of Gaussian numbers in one encoding
            (int3, int2, sign, topk, randk), else False; the log and the report say which. Default: ``"auto"``.
        residual: How ``ef:`` stores residuals between steps: ``"fp32"``, ``"bf16"`` or ``"int8"``
            (`dtcomm.compress.residuals`). Default: ``"fp32"``.
        save_residuals: Whether checkpoints have the residuals, in bf16 if they are kept so, else in fp32, so that a
            resumed run continues bit for bit. False: smaller checkpoints, and feedback starts anew. Default: True.
        exclude: Shell patterns of what is sent uncompressed: FSDP modules, with all that they contain, or parameters,
            if they are all parameters of an FSDP module, because a module's parameters are sent as one tensor. The root
            module itself is ``"(root)"``. Default: nothing.
        replicas: Mesh dimension or process group of the replicas of this model, which is sharded over one dimension
            only; their gradients are averaged in the codec of ``gradients``. This is HSDP with both collectives
            compressed. With torch's own HSDP (a two-dimensional mesh in `fully_shard`) the all-reduce between replicas
            is torch's, uncompressed, and the report says so. Default: no replicas.
        guard: Limits and actions that protect training (`dtcomm.compress.guard`): the guard raises the precision of a
            module's gradients or parameters, or stops compressing, when compression does harm. `FSDPState.observe`
            passes the loss to it. None: no guard. Default: ``Guard()``.
        sample_every: Steps from one measurement of encoding errors to the next, of gradients and of parameters, for
            report and guard; 0: never, and gradients are not compared over windows of steps either. Default: 50.
        seed: Seed of stochastic rounding. Default: 0.
        allow_inaccurate: Accept codecs that lose too much in one encoding of Gaussian numbers. The limits (relative
            error) are 20 % for parameters and for gradients without feedback, and 50 % for the differences of
            ``delta:``. Default: False.
        verify: How many pairs of steps, with compression and with codec none, are measured at the start of the run. The
            report can then say whether compression paid. 0: none. Default: 0.
        algorithm: Name of the algorithm of the compressed collectives over the shards, one that reduce_scatter and
            all_gather both have, built in or registered (`dtcomm.algorithms.register`). Default: ``"auto"``.
    """

    preset: str | None
    feedback: bool | str
    residual: str
    save_residuals: bool
    exclude: str | Sequence[str]
    guard: Guard | None
    sample_every: int
    seed: int
    allow_inaccurate: bool
    verify: int


class Options(StateOptions, total=False):
    replicas: DeviceMesh | dist.ProcessGroup | None
    algorithm: str


Options.__doc__ = StateOptions.__doc__
STATE_DEFAULTS: StateOptions = {
    "preset": None,
    "feedback": "auto",
    "residual": "fp32",
    "save_residuals": True,
    "exclude": (),
    "guard": Guard(),
    "sample_every": 50,
    "seed": 0,
    "allow_inaccurate": False,
    "verify": 0,
}
DEFAULTS: Options = {**STATE_DEFAULTS, "replicas": None, "algorithm": "auto"}

#: Prefixes that are valid for gradients, and for parameters; the empty one is no prefix.
FEEDBACKS = ("", "ef", "loco")
PARAMETER_PREFIXES = ("", "delta")

#: The largest relative error of an encoding of differences (``delta:``), whose error is part of the next difference.
#: With error e parameters stay e / (1 - e) updates behind, if differences look Gaussian: with 0.5, one update. Codecs
#: beyond it (sign, topk) stay tens of updates behind, because what they leave out repeatedly is not Gaussian.
MAX_DIFFERENCE_ERROR = 0.5


@dataclass(frozen=True)
class Preset:
    """The specs of a published method."""

    parameters: str
    gradients: str


DEFAULT_SPECS = Preset(parameters="none", gradients="int8")
PRESETS = {
    # qwZ is block-quantized weights; qgZ is 4-bit gradients, which each hop quantizes once, after a rotation.
    "zero++": Preset("int8:block=256", "int4:block=128,rotate=hadamard/int4:block=128,rotate=hadamard"),
    "loco": Preset("none", "loco:int4:block=128"),
    "sdp4bit": Preset("delta:int4:block=128", "int8:block=128/int4:block=128,rotate=hadamard"),
}


@dataclass(frozen=True)
class CompressionSpec:
    """A parsed spec: codec ``inside`` hosts, or everywhere if ``between`` is None, and one of the prefixes or none."""

    inside: Codec
    between: Codec | None
    prefix: str

    @property
    def codec_spec(self) -> str | Codec:
        """The codec, or the spec of both, as the collectives take it."""
        return self.inside if self.between is None else f"{self.inside}/{self.between}"

    def codecs(self) -> tuple[Codec, ...]:
        """Return the codecs of all levels."""
        return (self.inside,) if self.between is None else (self.inside, self.between)

    @property
    def is_none(self) -> bool:
        """Whether the codecs of all levels are ``none``."""
        return all(level.name == "none" for level in self.codecs())

    def obstacle(self, dtype: torch.dtype, numel: int) -> str:
        """Return why ``numel`` elements that are encoded together cannot be compressed; empty if they can.

        A codec may not support the dtype, or no payload would be smaller.
        """
        if self.is_none:
            return ""
        dtype_name = str(dtype).removeprefix("torch.")
        for level in self.codecs():
            if dtype not in level.dtypes:
                return f"{level} does not support {dtype_name}"
        if any(level.variable_length for level in self.codecs()):
            return ""  # wire_bytes is a bound; what would not become smaller is sent as it is
        plain_bytes = codec("none").wire_bytes(numel, dtype)
        # Reproducible codecs are chosen for their sums, whatever their size.
        if any(level.reproducible or level.wire_bytes(numel, dtype) < plain_bytes for level in self.codecs()):
            return ""
        return f"{self.codec_spec} would not make {dtype_name} smaller"

    def lossless(self, dtype: torch.dtype) -> bool:
        """Return whether the codecs of all levels keep every bit of a dtype."""
        return all(level.lossless(dtype) for level in self.codecs())

    def __str__(self) -> str:
        return f"{self.prefix}:{self.codec_spec}" if self.prefix else str(self.codec_spec)


class Specs(NamedTuple):
    """What is compressed with what; ``reason`` says why feedback is on or off if ``"auto"`` decided."""

    gradients: CompressionSpec
    parameters: CompressionSpec
    reason: str


def parse_specs(
    gradients: str | Codec | None, parameters: str | Codec | None, options: StateOptions
) -> Specs:
    """Return the specs of a call; None is the preset's, or the default."""
    require_bool("allow_inaccurate", options["allow_inaccurate"])
    preset = DEFAULT_SPECS if options["preset"] is None else find_preset(options["preset"])
    asked = parse_spec(preset.gradients if gradients is None else gradients, FEEDBACKS, "gradients")
    spec, reason = with_feedback(asked, options["feedback"])
    sent = preset.parameters if parameters is None else parameters
    return Specs(spec, parse_spec(sent, PARAMETER_PREFIXES, "parameters"), reason)


#: The spec of a module that is excluded.
UNCOMPRESSED = CompressionSpec(codec("none"), None, "")


def parse_spec(spec: str | Codec, prefixes: tuple[str, ...], argument: str) -> CompressionSpec:
    """Parse a spec, which may have one of ``prefixes``, `FEEDBACKS` or `PARAMETER_PREFIXES`.

    TypeError or ValueError, which name the ``argument``, if it is no spec, or a prefix or a codec is wrong.
    """
    parsed = _parse(spec, prefixes, argument)
    variable = next((level for level in parsed.codecs() if level.variable_length), None)
    if variable is not None and prefixes == FEEDBACKS:
        raise ValueError(
            f"{argument}: '{variable}' cannot be summed, because the length of its payloads depends on the data; "
            "valid: codecs of fixed length, and 'lossless' for parameters"
        )
    if variable is not None and parsed.between is not None:
        raise ValueError(f"{argument}: '{variable}' has one level; valid: '{variable}' alone")
    return parsed


def _parse(spec: str | Codec, prefixes: tuple[str, ...], argument: str) -> CompressionSpec:
    """`parse_spec`, without the checks of codecs whose payloads vary in length."""
    if isinstance(spec, Codec):
        return CompressionSpec(spec, None, "")
    if isinstance(spec, LevelCodecs):
        return CompressionSpec(spec.inside, spec.between, "")
    if not isinstance(spec, str):
        raise TypeError(
            f"{argument}: expected a spec or a Codec, got {type(spec).__name__}; compressors and policies are for "
            "dtcomm.ddp.compress (here exclude= leaves modules uncompressed)"
        )
    if "->" in spec:
        raise ValueError(
            f"{argument}: {spec!r} is a policy, which is for dtcomm.ddp.compress; here a module's parameters are sent "
            "as one tensor with one codec, and exclude= leaves modules uncompressed"
        )
    prefix, colon, codecs = spec.strip().partition(":")
    if not colon or prefix not in (*FEEDBACKS, *PARAMETER_PREFIXES):
        prefix, codecs = "", spec.strip()
    elif prefix not in prefixes:
        raise ValueError(
            f"{argument}: '{prefix}:' is not valid here; use a codec, optionally prefixed by {_quoted(prefixes)}"
        )
    for level in codecs.split("/"):
        if (name := level.partition(":")[0].strip()) not in (*names(), *VARIABLE_LENGTH):
            raise ValueError(f"{argument}: " + _explain_unknown_name(name, spec, prefix, prefixes))
    with errors_name(argument):
        return CompressionSpec(*parse_levels(codecs), prefix)


def _explain_unknown_name(name: str, spec: str, prefix: str, prefixes: tuple[str, ...]) -> str:
    """Return what is wrong with a spec in which ``name`` stands where a codec should, and what is valid."""
    if name == AUTO or name in COMPRESSORS:
        return f"{name!r} is for dtcomm.ddp.compress; valid codecs here: {', '.join(names())}"
    if prefix and name in (*FEEDBACKS, *PARAMETER_PREFIXES):
        return f"{spec!r} has two prefixes; use one prefix before the codec, of {_quoted(prefixes)}"
    known = [*filter(None, prefixes)] if not prefix else []
    if all(part.partition(":")[0] in names() for part in name.split(",")):
        hint = f" (did you mean {spec.replace(',', '/')!r}?)"
    else:
        hint = suggest(name, [*known, *names()], lambda guess: spec.replace(name, guess, 1))
    return (
        f"unknown codec or prefix {name!r} in {spec!r}{hint}; valid codecs: {', '.join(names())}; "
        f"valid prefixes: {_quoted(prefixes)}"
    )


def _quoted(prefixes: tuple[str, ...]) -> str:
    return ", ".join(f"'{name}:'" for name in prefixes if name)


def with_feedback(gradients: CompressionSpec, feedback: bool | str) -> tuple[CompressionSpec, str]:
    """Return the spec of gradients with the error feedback that ``feedback`` asks for, and why if it is ``"auto"``.

    One with a prefix has it already. ValueError if ``feedback`` contradicts the prefix.
    """
    valid = "valid: True, False, 'auto', or a prefix of gradients, 'ef:' or 'loco:'"
    if not isinstance(feedback, bool | str):
        raise TypeError(f"feedback: got {type(feedback).__name__}; {valid}")
    if feedback in ("ef21", "diana"):
        raise ValueError(f"feedback: {feedback!r} is for dtcomm.ddp.compress; {valid}")
    if isinstance(feedback, str) and feedback != AUTO:
        raise ValueError(f"feedback: got {feedback!r}; {valid}")
    if gradients.prefix:
        if feedback is False:
            raise ValueError(
                f"feedback: False contradicts gradients={str(gradients)!r}, whose prefix is error feedback"
            )
        return gradients, ""
    chosen, reason = choose_feedback(feedback, gradients.codecs())
    return (replace(gradients, prefix="ef") if chosen else gradients), reason


def require_accurate(specs: Specs, options: StateOptions, residual_bytes: str) -> None:
    """Refuse codecs that lose more than `MAX_ERROR` or `MAX_DIFFERENCE_ERROR` of what they are applied to.

    With error feedback any codec of gradients is accurate enough, because what it loses is sent later. The message says
    how to allow it, and that feedback takes ``residual_bytes`` on each rank.
    """
    if options["allow_inaccurate"]:
        return
    gradients, parameters, _ = specs
    allow = "allow_inaccurate=True allows it"
    if not gradients.prefix:
        for level in gradients.codecs():
            if (error := gaussian_error(level)) > MAX_ERROR:
                raise ValueError(
                    f"gradients: {level} loses {error:.0%} (relative error; the limit is {MAX_ERROR:.0%}), "
                    "which without error feedback is never sent, so that training does not converge; use "
                    f"feedback=True, which keeps {residual_bytes} on every rank; {allow}"
                )
    if parameters.prefix == "delta":
        limit, what = MAX_DIFFERENCE_ERROR, "of each difference"
        effect = "modules would compute with parameters several updates behind; use 3 bits or more"
    else:
        limit, what = MAX_ERROR, "of the parameters"
        effect = (
            "every module would compute with the rest; use 4 bits or more, 'int8', 'fp8_e4m3' or 'delta:int4'"
        )
    for level in parameters.codecs():
        if (error := gaussian_error(level)) > limit:
            raise ValueError(
                f"parameters: {level} loses {error:.0%} {what} (relative error; the limit is {limit:.0%}), and "
                f"{effect}; {allow}"
            )


def find_preset(name: str) -> Preset:
    """Return the preset of this name; ValueError lists the valid names."""
    if not isinstance(name, str):
        raise TypeError(
            f"preset: expected the name of a preset or None, got {type(name).__name__}; valid: {', '.join(PRESETS)}"
        )
    if name not in PRESETS:
        raise ValueError(f"preset: {name!r} is not one of {', '.join(PRESETS)}{suggest(name, PRESETS)}")
    return PRESETS[name]
