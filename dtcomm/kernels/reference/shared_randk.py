"""Local tasks of randk with shared positions, in numpy: all ranks draw the same positions and sum only the values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dtcomm.codecs import RandK
from dtcomm.kernels import counter_rng
from dtcomm.kernels.reference.floats import INFINITY, NAN, Floats, canonical, magnitude
from dtcomm.kernels.reference.sparse import Positions, positions


class _Granule(NamedTuple):
    elements: slice
    values: slice
    places: Positions


def gather(
    codec: RandK, key: int, offset: int, x: Floats, residual: Floats | None
) -> tuple[Floats, Floats, Floats]:
    """The values, the residual at their positions, and the residual after x was added to it.

    In granules with NaN or Inf the values are NaN and the residual stays.
    """
    values, value_residuals = [], []
    updated = np.zeros(0, np.float32) if residual is None else residual.copy()
    for granule in _granules(codec, key, offset, len(x)):
        part = x[granule.elements]
        total = part if residual is None else part + residual[granule.elements]
        taken = part[granule.places]
        if residual is not None:
            value_residuals.append(residual[granule.elements][granule.places])
        if (magnitude(total) >= INFINITY).any():
            taken = np.full(len(taken), NAN)
        elif residual is not None:
            updated[granule.elements] = total
        values.append(taken)
    none = [np.zeros(0, np.float32)]
    return np.concatenate(none + values), np.concatenate(none + value_residuals), updated


def scatter(codec: RandK, key: int, offset: int, scaled: bool, values: Floats, numel: int) -> Floats:
    """The tensor of the values; `scaled`: multiplied by a granule's elements over its kept elements."""
    out = np.zeros(numel, np.float32)
    for granule in _granules(codec, key, offset, numel):
        part, given = out[granule.elements], values[granule.values]
        if np.isnan(given[0]):
            part[:] = NAN
        else:
            factor = np.float32(len(part)) / np.float32(len(given)) if scaled else np.float32(1)
            part[granule.places] = canonical(given * factor)
    return out


def restore_residual(codec: RandK, key: int, offset: int, value_residual: Floats, residual: Floats) -> Floats:
    """The residual with `value_residual` at the positions of the values."""
    out = residual.copy()
    for granule in _granules(codec, key, offset, len(out)):
        out[granule.elements][granule.places] = value_residual[granule.values]
    return out


def _granules(codec: RandK, key: int, offset: int, numel: int) -> Iterator[_Granule]:
    layout, at = codec.layout(), 0
    for start in range(0, numel, layout.granule):
        n = min(layout.granule, numel - start)
        kept = layout.kept_of(n)
        granule_key = counter_rng.absorb(key, counter_rng.GOLDEN_RATIO, offset + start)
        yield _Granule(slice(start, start + n), slice(at, at + kept), positions(granule_key, n, kept))
        at += kept
