"""randk at positions that all ranks draw alike: what is added up is the values alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dtcomm.codecs import RandK
from dtcomm.kernels import counter_rng
from dtcomm.kernels.reference.floats import INFINITY, NAN, Floats, canonical, magnitude
from dtcomm.kernels.reference.sparse import Places, positions


class _Granule(NamedTuple):
    elements: slice
    values: slice
    places: Places


def gather(
    codec: RandK, key: int, offset: int, x: Floats, residual: Floats | None
) -> tuple[Floats, Floats, Floats]:
    """(values, what was owed of them, the residual as it is until they are sent)."""
    values, owed = [], []
    left = np.zeros(0, np.float32) if residual is None else residual.copy()
    for granule in _granules(codec, key, offset, len(x)):
        part = x[granule.elements]
        total = part if residual is None else part + residual[granule.elements]
        taken = part[granule.places]
        if residual is not None:
            owed.append(residual[granule.elements][granule.places])
        if (magnitude(total) >= INFINITY).any():
            taken = np.full(len(taken), NAN)
        elif residual is not None:
            left[granule.elements] = total
        values.append(taken)
    none = [np.zeros(0, np.float32)]
    return np.concatenate(none + values), np.concatenate(none + owed), left


def scatter(codec: RandK, key: int, offset: int, scaled: bool, values: Floats, numel: int) -> Floats:
    """The tensor that the values stand for; `scaled`: by a granule's elements over the kept ones."""
    out = np.zeros(numel, np.float32)
    for granule in _granules(codec, key, offset, numel):
        part, given = out[granule.elements], values[granule.values]
        if np.isnan(given[0]):
            part[:] = NAN
        else:
            factor = np.float32(len(part)) / np.float32(len(given)) if scaled else np.float32(1)
            part[granule.places] = canonical(given * factor)
    return out


def settle(codec: RandK, key: int, offset: int, owed: Floats, residual: Floats) -> Floats:
    """The residual with what is owed of the values in its place."""
    out = residual.copy()
    for granule in _granules(codec, key, offset, len(out)):
        out[granule.elements][granule.places] = owed[granule.values]
    return out


def _granules(codec: RandK, key: int, offset: int, numel: int) -> Iterator[_Granule]:
    layout, at = codec.layout(), 0
    for start in range(0, numel, layout.granule):
        n = min(layout.granule, numel - start)
        kept = layout.kept_of(n)
        granule_key = counter_rng.absorb(key, counter_rng.GOLDEN_RATIO, offset + start)
        yield _Granule(slice(start, start + n), slice(at, at + kept), positions(granule_key, n, kept))
        at += kept
