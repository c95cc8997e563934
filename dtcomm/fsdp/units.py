"""The FSDP modules of a model, and which of them ``exclude`` leaves uncompressed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from dtcomm import torch_compat
from dtcomm.arguments import suggest
from dtcomm.compress.models import wrong_type
from dtcomm.compress.policy import exclusions
from dtcomm.fsdp.collectives import CompressedAllGather
from dtcomm.fsdp.guard import ROOT
from dtcomm.fsdp.storage import parameter_names
from dtcomm.torch_compat import clean_tensor_name

MAX_NAMES = 8  # modules that an error lists


@dataclass(frozen=True)
class Unit:
    """An FSDP module; the root module's name is empty.

    ``parameters`` are those that it gathers and reduces itself, as one tensor. ``trainable_numel`` counts elements of
    those that have gradients, on all ranks together.
    """

    name: str
    parameters: tuple[str, ...]
    trainable_numel: int

    @property
    def label(self) -> str:
        """The name that users see."""
        return self.name or ROOT


def find_units(model: torch.nn.Module) -> list[Unit]:
    """Return the FSDP modules of a model that `fully_shard` was applied to, or of an FSDP1 root module.

    TypeError if there is none; RuntimeError if one is compressed already.
    """
    units: list[Unit] = []
    if isinstance(model, FullyShardedDataParallel):
        for path, module in model.named_modules():
            if isinstance(module, FullyShardedDataParallel):
                unit = _fsdp1_unit(clean_tensor_name(path), module)
                if torch_compat.fsdp1_hook(module) is not None:
                    raise _already_compressed(unit, "has a communication hook, or is compressed already")
                units.append(unit)
    elif isinstance(model, torch.nn.Module):
        names = parameter_names("", model)
        for path, module in model.named_modules():
            if isinstance(module, FSDPModule):
                groups = torch_compat.fsdp2_parameter_groups(module)
                parameters = [parameter.sharded_param for group in groups for parameter in group.fsdp_params]
                numel = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
                unit = Unit(path, tuple(names.get(id(parameter), "") for parameter in parameters), numel)
                if any(
                    isinstance(torch_compat.fsdp2_all_gather(group), CompressedAllGather) for group in groups
                ):
                    raise _already_compressed(unit, "is compressed already")
                units.append(unit)
    if not units:
        raise wrong_type("model", "a module to which fully_shard was applied", model)
    return units


def _fsdp1_unit(name: str, module: FullyShardedDataParallel) -> Unit:
    flat = torch_compat.fsdp1_flat_parameter(module)
    if flat is None:
        return Unit(name, (), 0)
    parameters = tuple(f"{name}.{path}" if name else path for path in flat.names)
    return Unit(name, parameters, sum(shape.numel() for shape in flat.shapes))


def _already_compressed(unit: Unit, what: str) -> RuntimeError:
    return RuntimeError(
        f"model: {unit.label} {what}; call detach() on the FSDPState that compress returned for it, then compress again"
    )


def excluded_units(patterns: str | Sequence[str], units: Sequence[Unit]) -> dict[str, str]:
    """Return the units that ``exclude`` leaves uncompressed, each with the pattern that it matches.

    Patterns are those of modules, or of all parameters of a unit. TypeError if one is not a string; ValueError if one
    matches nothing, or a part of a unit, or if no unit is left.
    """
    exclusions(patterns)  # raises TypeError
    patterns = (patterns,) if isinstance(patterns, str) else patterns
    excluded: dict[str, str] = {}
    for pattern in patterns:
        matched = [unit.name for unit in units if _matches(unit, pattern)]
        if not matched:
            valid = [unit.label for unit in units]
            listed = ", ".join(valid[:MAX_NAMES]) + (", ..." if len(valid) > MAX_NAMES else "")
            raise ValueError(
                f"exclude: {pattern!r} matches nothing{suggest(pattern, valid)}; FSDP modules: {listed}"
            )
        excluded |= dict.fromkeys(matched, pattern)
    if len(excluded) == len(units):
        raise ValueError(f"exclude: {', '.join(map(repr, patterns))} leaves no module to compress")
    return excluded


def _matches(unit: Unit, pattern: str) -> bool:
    """Return whether a pattern matches a unit; ValueError if it matches only a part of its parameters."""
    path = unit.name.split(".")
    # A module's name stands for all that it contains.
    modules = [".".join(path[: length + 1]) for length in range(len(path))] if unit.name else [ROOT]
    if any(fnmatchcase(module, pattern) for module in modules):
        return True
    matched = [name for name in unit.parameters if fnmatchcase(name, pattern)]
    if matched and len(matched) < len(unit.parameters):
        holder = matched[0].rpartition(".")[0] or matched[0]
        raise ValueError(
            f"exclude: {pattern!r} matches {matched[0]}, a part of {unit.label!r}, whose parameters are sent as one "
            f"tensor; apply fully_shard to {holder!r}, or exclude {unit.label!r}"
        )
    return bool(matched)
