"""Which parameter gets which codec or compressor: an ordered tuple of rules, of which the first that matches decides.

A policy prints as one line and parses back::

    ndim<2 -> none; numel<1024 -> none; name=*.embed* -> fp16; * -> int8

What no rule can override is decided last, in `Policy.choose`: a dtype the codec cannot carry, and a payload
that would not be smaller than the tensor, both go uncompressed, and the choice says why.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from dtcomm.codecs import codec
from dtcomm.compress.powersgd import PowerSGD
from dtcomm.compress.spec import Scheme, matrix_shape, parse_scheme, wire_codec

#: Below one granule a payload is mostly scales and padding, and there is next to nothing to save.
SMALL = 1024
#: How a condition begins, and the field of `Rule` that it sets.
CONDITIONS = {"ndim<": "ndim_below", "numel<": "numel_below", "name=": "name", "module=": "module"}


@dataclass(frozen=True, kw_only=True)
class CodecChoice:
    """What a tensor gets; ``why`` says, for one that stays uncompressed, why it does."""

    codec: Scheme
    why: str = ""

    def instead(self, wanted: Scheme, tensor: torch.Tensor) -> CodecChoice:
        """Where a guard wants another scheme; what goes uncompressed stays so."""
        none = codec("none")
        if self.codec == none or wanted == self.codec:
            return self
        return CodecChoice(codec=none, why="guard") if wanted == none else choose(wanted, tensor)


#: Of everything, where there is nobody to send it to.
SINGLE_RANK = CodecChoice(codec=codec("none"), why="one rank alone")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Tensors that meet every condition given get ``codec``; a rule without conditions matches everything.

    ``ndim_below`` and ``numel_below`` are exclusive bounds; ``name`` is a shell pattern (``*.bias``), ``module`` one
    for the type of the module that holds the parameter (``Conv*``, ``Embedding``).
    """

    codec: Scheme
    ndim_below: int | None = None
    numel_below: int | None = None
    name: str | None = None
    module: str | None = None

    def matches(self, name: str, tensor: torch.Tensor, module: str = "") -> bool:
        return (
            (self.ndim_below is None or tensor.ndim < self.ndim_below)
            and (self.numel_below is None or tensor.numel() < self.numel_below)
            and (self.name is None or fnmatch.fnmatchcase(name, self.name))
            and (self.module is None or fnmatch.fnmatchcase(module, self.module))
        )

    def condition(self) -> str:
        parts = []
        if self.ndim_below is not None:
            parts.append(f"ndim<{self.ndim_below}")
        if self.numel_below is not None:
            parts.append(f"numel<{self.numel_below}")
        if self.name is not None:
            parts.append(f"name={self.name}")
        if self.module is not None:
            parts.append(f"module={self.module}")
        return " ".join(parts) or "*"

    def __str__(self) -> str:
        return f"{self.condition()} -> {self.codec}"

    @staticmethod
    def parse(text: str) -> Rule:
        left, arrow, right = text.partition("->")
        if not arrow:
            raise ValueError(f"policy rule {text.strip()!r}: want 'condition -> codec'")
        conditions: dict[str, str] = {}
        for part in left.split():
            for prefix, what in CONDITIONS.items():
                if part.startswith(prefix):
                    conditions[what] = part[len(prefix) :]
                    break
            else:
                if part != "*":
                    raise ValueError(
                        f"policy condition {part!r}: want one of 'ndim<N', 'numel<N', 'name=PATTERN', "
                        "'module=PATTERN', '*'"
                    )
        try:
            ndim, numel = (
                int(conditions[bound]) if bound in conditions else None
                for bound in ("ndim_below", "numel_below")
            )
        except ValueError:
            raise ValueError(f"policy rule {text.strip()!r}: the bound must be an integer") from None
        return Rule(
            codec=parse_scheme(right.strip()),
            ndim_below=ndim,
            numel_below=numel,
            name=conditions.get("name"),
            module=conditions.get("module"),
        )


@dataclass(frozen=True, kw_only=True)
class Policy:
    """An ordered tuple of rules; `a | b` asks ``a`` first. What no rule matches stays uncompressed.

    ``modules`` says which type of module holds each parameter, by name; `of` looks it up.
    """

    rules: tuple[Rule, ...]
    modules: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def of(self, model: torch.nn.Module) -> Policy:
        """This policy, knowing the model's parameters."""
        held = {
            f"{path}.{name}" if path else name: type(module).__name__
            for path, module in model.named_modules()
            for name, _ in module.named_parameters(recurse=False)
        }
        return replace(self, modules=held)

    def choose(self, name: str, tensor: torch.Tensor) -> CodecChoice:
        """The codec for the gradient of ``tensor``, whose dtype and shape are the gradient's.

        ValueError where a rule asks for a module's type and nobody has said which model it is (`of`).
        """
        none = codec("none")
        if not self.modules and (asks := [rule for rule in self.rules if rule.module is not None]):
            raise ValueError(
                f"policy: '{asks[0]}' wants the types of modules: compress(model, …) knows them, elsewhere give "
                "Policy.parse(…).of(model)"
            )
        module = self.modules.get(name, "")
        rule = next((rule for rule in self.rules if rule.matches(name, tensor, module)), None)
        if rule is None:
            return CodecChoice(codec=none, why="no rule matches")
        if rule.codec == none:
            return CodecChoice(codec=none, why=f"policy: {rule.condition()}")
        return choose(rule.codec, tensor)

    def __or__(self, other: Policy) -> Policy:
        return Policy(rules=self.rules + other.rules, modules={**other.modules, **self.modules})

    def __str__(self) -> str:
        return "; ".join(map(str, self.rules))

    @staticmethod
    def parse(text: str) -> Policy:
        """The inverse of ``str``; ValueError names the rule that is wrong."""
        return Policy(rules=tuple(Rule.parse(part) for part in text.split(";") if part.strip()))


def choose(chosen: Scheme, tensor: torch.Tensor) -> CodecChoice:
    """`chosen` for a gradient of this dtype and shape, or none and why."""
    none = codec("none")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.dtype not in chosen.dtypes:
        return CodecChoice(codec=none, why=f"{chosen} does not take {dtype}")
    if isinstance(chosen, PowerSGD):
        return _low_rank(chosen, tensor)
    if wire_codec(chosen).wire_bytes(tensor.numel(), tensor.dtype) >= none.wire_bytes(
        tensor.numel(), tensor.dtype
    ):
        return CodecChoice(codec=none, why=f"{chosen} would not make {dtype} smaller")
    return CodecChoice(codec=chosen)


def _low_rank(chosen: PowerSGD, tensor: torch.Tensor) -> CodecChoice:
    none = codec("none")
    if tensor.ndim < 2:
        return CodecChoice(codec=none, why="powersgd needs a matrix")
    rows, columns = matrix_shape(tensor)
    if chosen.payload_bytes(rows, columns) >= none.wire_bytes(tensor.numel(), tensor.dtype):
        return CodecChoice(codec=none, why=f"{chosen} would not make {rows}x{columns} smaller")
    return CodecChoice(codec=chosen)


def default_policy(matrices: Scheme | str) -> Policy:
    """Biases, norms and other vectors, and matrices below `SMALL` elements, uncompressed; the rest
    ``matrices``.

    Vectors hold few elements and models are sensitive to them, so they cost little and are worth much.
    """
    none = codec("none")
    return Policy(
        rules=(
            Rule(codec=none, ndim_below=2),
            Rule(codec=none, numel_below=SMALL),
            Rule(codec=parse_scheme(matrices)),
        )
    )


def as_policy(spec: str | Scheme | Policy) -> Policy:
    """A codec or compressor (or its spec) under the default policy; a `Policy`, or its text (with ``->``), as it is."""
    if isinstance(spec, Policy):
        return spec
    if isinstance(spec, str) and "->" in spec:
        return Policy.parse(spec)
    return default_policy(spec)
