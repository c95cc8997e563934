"""Policies: which parameter gets which codec or compressor.

A policy is an ordered tuple of rules, of which the first that matches decides. It prints as one line and parses back::

    ndim<2 -> none; numel<1024 -> none; name=*.embed* -> fp16; * -> int8

`Policy.choose` decides last what no rule can override: a dtype that the codec cannot carry and a payload that would not
be smaller than the tensor go uncompressed, and the choice says why. A reproducible codec need not be smaller: it is
chosen for the bits of its sums.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from dtcomm.arguments import suggest
from dtcomm.codecs import codec
from dtcomm.compress.powersgd import PowerSGD
from dtcomm.compress.spec import LevelCodecs, Scheme, matrix_shape, parse_scheme, wire_codec

NONE = codec("none")
#: Below one granule a payload is mostly scales and padding, and there is next to nothing to save.
MIN_COMPRESSED_ELEMENTS = 1024
#: How a condition begins, and the field of `Rule` that it sets.
CONDITIONS = {"ndim<": "ndim_below", "numel<": "numel_below", "name=": "name", "module=": "module"}


@dataclass(frozen=True, kw_only=True)
class CodecChoice:
    """What a tensor is compressed with; ``reason`` is the reason if it stays uncompressed.

    ``refused`` says that a scheme was asked for that does not apply to the tensor.
    """

    codec: Scheme
    reason: str = ""
    refused: bool = False

    def replaced_by(self, scheme: Scheme, tensor: torch.Tensor) -> CodecChoice:
        """Return the choice after a guard asked for ``scheme``; what is uncompressed stays so."""
        if self.codec == NONE or scheme == self.codec:
            return self
        return CodecChoice(codec=NONE, reason="guard") if scheme == NONE else choose_for(scheme, tensor)


#: The choice for every tensor if there is only one rank.
SINGLE_RANK = CodecChoice(codec=NONE, reason="one rank alone")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Gives a scheme to the tensors that meet all of its conditions; a rule without conditions matches everything.

    Attributes:
        codec: The scheme.
        ndim_below: The tensor has fewer dimensions. Default None: no condition.
        numel_below: The tensor has fewer elements. Default None.
        name: A shell pattern for the parameter's name, such as ``*.bias``. Default None.
        module: A shell pattern for the type of the module that holds the parameter, such as ``Conv*``. Default None.
    """

    codec: Scheme
    ndim_below: int | None = None
    numel_below: int | None = None
    name: str | None = None
    module: str | None = None

    def matches(self, name: str, tensor: torch.Tensor, module: str = "") -> bool:
        """Return whether a tensor meets all conditions."""
        return (
            (self.ndim_below is None or tensor.ndim < self.ndim_below)
            and (self.numel_below is None or tensor.numel() < self.numel_below)
            and (self.name is None or fnmatch.fnmatchcase(name, self.name))
            and (self.module is None or fnmatch.fnmatchcase(module, self.module))
        )

    def condition(self) -> str:
        """Return the conditions as text."""
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
        """Parse the output of ``str``; ValueError says what is wrong."""
        left, arrow, right = text.partition("->")
        if not arrow:
            raise ValueError(f"policy rule {text.strip()!r}: expected 'condition -> codec'")
        if "->" in right:
            raise ValueError(f"policy rule {text.strip()!r}: two arrows; rules are separated by semicolons")
        conditions: dict[str, str] = {}
        for part in left.split():
            for prefix, field_name in CONDITIONS.items():
                if part.startswith(prefix):
                    conditions[field_name] = part[len(prefix) :]
                    break
            else:
                if part != "*":
                    raise ValueError(
                        f"policy condition {part!r}: expected one of 'ndim<N', 'numel<N', 'name=PATTERN', "
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
    """An ordered tuple of rules; what no rule matches stays uncompressed. ``a | b`` asks ``a`` first.

    Attributes:
        rules: The rules.
        modules: The type of the module that holds each parameter, by the parameter's name; `for_model` fills it in.

    Example:
        >>> from dtcomm.compress.policy import Policy
        >>> str(Policy.parse("name=*.embed* -> fp16") | Policy.parse("* -> int8"))
        'name=*.embed* -> fp16; * -> int8'
    """

    rules: tuple[Rule, ...]
    modules: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def for_model(self, model: torch.nn.Module) -> Policy:
        """Return this policy with the module types of a model's parameters, for rules with ``module=``."""
        modules = {
            f"{path}.{name}" if path else name: type(module).__name__
            for path, module in model.named_modules()
            for name, _ in module.named_parameters(recurse=False)
        }
        return replace(self, modules=modules)

    def choose(self, name: str, tensor: torch.Tensor) -> CodecChoice:
        """Return the choice for a gradient.

        Args:
            name: The parameter.
            tensor: A tensor with the gradient's dtype and shape.

        Raises:
            ValueError: A rule asks for a module's type, and `for_model` was not called.
        """
        if not self.modules and (with_module := [rule for rule in self.rules if rule.module is not None]):
            raise ValueError(
                f"policy: '{with_module[0]}' wants the types of modules: compress(model, …) knows them, elsewhere give "
                "Policy.parse(…).for_model(model)"
            )
        module = self.modules.get(name, "")
        rule = next((rule for rule in self.rules if rule.matches(name, tensor, module)), None)
        if rule is None:
            return CodecChoice(codec=NONE, reason="no rule matches")
        if rule.codec == NONE:
            return CodecChoice(codec=NONE, reason=f"policy: {rule.condition()}")
        return choose_for(rule.codec, tensor)

    def __or__(self, other: Policy) -> Policy:
        return Policy(rules=self.rules + other.rules, modules={**other.modules, **self.modules})

    def __str__(self) -> str:
        return "; ".join(map(str, self.rules))

    @staticmethod
    def parse(text: str) -> Policy:
        """Parse the output of ``str``; ValueError names the rule that is wrong."""
        return Policy(rules=tuple(Rule.parse(part) for part in text.split(";") if part.strip()))


def exclusions(patterns: str | Sequence[str], names: Collection[str] | None = None) -> Policy:
    """Return the rules that leave parameters uncompressed; ``exclusions(...) | policy`` applies them first.

    ``patterns`` are shell patterns of parameters, or of modules with all that they contain, such as ``lm_head`` or
    ``*.norm``. TypeError if they are not strings; ValueError if one matches none of ``names``, unless that is None.
    """
    if not isinstance(patterns, Collection):
        raise TypeError(f"exclude: expected patterns of names, got {type(patterns).__name__}")
    given = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    rules = []
    for pattern in given:
        if not isinstance(pattern, str):
            raise TypeError(f"exclude: expected patterns of names, got {type(pattern).__name__}")
        both = (pattern, f"{pattern}.*")
        if names is not None and not any(fnmatch.filter(names, each) for each in both):
            parts = {name.rsplit(".", count)[0] for name in names for count in range(name.count(".") + 1)}
            raise ValueError(
                f"exclude: {pattern!r} matches no parameter and no module{suggest(pattern, sorted(parts))}"
            )
        rules += [Rule(codec=NONE, name=each) for each in both]
    return Policy(rules=tuple(rules))


def excluded_names(patterns: str | Sequence[str], names: Collection[str]) -> dict[str, str]:
    """Return which of ``names`` `exclusions` leave uncompressed, each with the first pattern that it matches."""
    rules = [str(rule.name) for rule in exclusions(patterns, names).rules]
    return {
        name: next(rule for rule in rules if fnmatch.fnmatchcase(name, rule)).removesuffix(".*")
        for name in names
        if any(fnmatch.fnmatchcase(name, rule) for rule in rules)
    }


def choose_for(scheme: Scheme, tensor: torch.Tensor) -> CodecChoice:
    """Return ``scheme`` for a gradient of this dtype and shape, or none if it does not apply, and why."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.dtype not in scheme.dtypes:
        return CodecChoice(codec=NONE, reason=f"{scheme} does not take {dtype}", refused=True)
    plain_bytes = NONE.wire_bytes(tensor.numel(), tensor.dtype)
    if isinstance(scheme, PowerSGD):
        if tensor.ndim < 2:
            return CodecChoice(codec=NONE, reason="powersgd needs a matrix", refused=True)
        rows, columns = matrix_shape(tensor)
        if scheme.payload_bytes(rows, columns) >= plain_bytes:
            reason = f"{scheme} would not make {rows}x{columns} smaller"
            return CodecChoice(codec=NONE, reason=reason, refused=True)
    else:
        codecs = (scheme.inside, scheme.between) if isinstance(scheme, LevelCodecs) else (wire_codec(scheme),)
        if any(
            level.reproducible or level.wire_bytes(tensor.numel(), tensor.dtype) < plain_bytes
            for level in codecs
        ):
            return CodecChoice(codec=scheme)
        return CodecChoice(codec=NONE, reason=f"{scheme} would not make {dtype} smaller", refused=True)
    return CodecChoice(codec=scheme)


def default_policy(matrices: Scheme | str) -> Policy:
    """Return the policy of a plain spec: matrices of `MIN_COMPRESSED_ELEMENTS` or more get the scheme.

    Biases, norms and other vectors stay uncompressed: they hold few elements, and models are sensitive to them.
    """
    return Policy(
        rules=(
            Rule(codec=NONE, ndim_below=2),
            Rule(codec=NONE, numel_below=MIN_COMPRESSED_ELEMENTS),
            Rule(codec=parse_scheme(matrices)),
        )
    )


def as_policy(spec: str | Scheme | Policy) -> Policy:
    """Return a policy unchanged or parsed from text with ``->``; a scheme or its spec under the default policy."""
    if isinstance(spec, Policy):
        return spec
    if isinstance(spec, str) and "->" in spec:
        return Policy.parse(spec)
    return default_policy(spec)
