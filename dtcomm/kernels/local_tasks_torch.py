"""The tasks of `local_tasks` on CUDA tensors, as operators of torch: the CPU's bits, without waiting for the device."""

from __future__ import annotations

import torch

from dtcomm import _C
from dtcomm.codecs import Exact, RandK
from dtcomm.kernels import counter_rng
from dtcomm.kernels.reference.reproducible import NAN_BLOCK
from dtcomm.kernels.reference.sparse import ROUNDS, positions

_M32 = 0xFFFFFFFF


def measure_exponents(
    codec: Exact, x: torch.Tensor, residual: torch.Tensor | None, exponents: torch.Tensor
) -> None:
    """:func:`dtcomm.kernels.local_tasks.measure_exponents`."""
    size = _rows(_sum_of(x, residual), codec.block).view(torch.int32) & 0x7FFFFFFF
    top = size.amax(1)
    measured = torch.where((top > 0) & (top >> 23 == 0), 1, top >> 23)
    exponents.copy_(torch.where(top >= 0x7F800000, NAN_BLOCK, measured))


def quantize_to_exponents(
    codec: Exact,
    ranks: int,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    exponents: torch.Tensor,
    codes: torch.Tensor,
) -> None:
    """:func:`dtcomm.kernels.local_tasks.quantize_to_exponents`."""
    digits = codec.digits(ranks)
    largest = 2.0**digits - 1
    total, unit = _sum_of(x, residual).double(), _units(codec, digits, exponents, x.numel())
    bad = _in_nan_block(codec, exponents, x.numel())
    integers = torch.where(bad, 0.0, (total / unit).clamp(-largest, largest).round())
    codes.copy_(integers)
    if residual is not None:
        residual.copy_(torch.where(bad, residual, (total - integers * unit).float()))


def dequantize(
    codec: Exact,
    ranks: int,
    codes: torch.Tensor,
    exponents: torch.Tensor,
    divisor: int,
    out: torch.Tensor,
    verdict: torch.Tensor | None,
) -> None:
    """:func:`dtcomm.kernels.local_tasks.dequantize`."""
    unit = _units(codec, codec.digits(ranks), exponents, out.numel())
    values = (codes.double() * unit / divisor).float()
    values = torch.where(_in_nan_block(codec, exponents, out.numel()), float("nan"), values).to(out.dtype)
    out.copy_(values if verdict is None else torch.where(verdict == _C.AUDIT_OK, values, out))


def audit_checksums(codes: torch.Tensor, sums: torch.Tensor) -> None:
    """:func:`dtcomm.kernels.local_tasks.audit_checksums`."""
    weights = mix32(torch.arange(codes.numel(), device=codes.device)) * 2 + 1
    terms = weights * codes.long()
    sums.copy_(_rows(terms, _C.AUDIT_RUN).sum(1))


def audit_verdict(
    codec: Exact,
    expected_sums: torch.Tensor,
    actual_sums: torch.Tensor,
    exponents: torch.Tensor,
    exponents_again: torch.Tensor,
    verdict: torch.Tensor,
) -> None:
    """:func:`dtcomm.kernels.local_tasks.audit_verdict`."""
    differ = _rows((exponents != exponents_again).int(), max(1, _C.AUDIT_RUN // codec.block)).any(1)
    runs = 2 * torch.arange(expected_sums.numel(), device=expected_sums.device)
    # A block that is larger than a run counts for the run in which it begins, as in the C++ kernel.
    missing = max(0, expected_sums.numel() - differ.numel())
    differ = torch.nn.functional.pad(differ, (0, missing))[: expected_sums.numel()]
    checksums = torch.where(expected_sums != actual_sums, runs, _C.AUDIT_OK)
    wrong = torch.where(differ, runs + 1, checksums)
    verdict.copy_(torch.cat([wrong, wrong.new_full((1,), _C.AUDIT_OK)]).amin().reshape(1))


def gather_values(
    codec: RandK,
    key: int,
    offset: int,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    values: torch.Tensor,
    value_residual: torch.Tensor | None,
) -> None:
    """:func:`dtcomm.kernels.local_tasks.gather_values`."""
    indices = _value_indices(codec, key, offset, x)
    floats = x.float()
    total = _sum_of(x, residual)
    finite = torch.isfinite(_rows(total, codec.layout().granule)).all(1)
    taken = floats.index_select(0, indices)
    values.copy_(torch.where(_per_value(codec, finite, x.numel()), taken, float("nan")))
    if residual is not None and value_residual is not None:
        value_residual.copy_(residual.index_select(0, indices))
        residual.copy_(torch.where(_per_element(codec, finite, x.numel()), total, residual))


def scatter_values(
    codec: RandK, key: int, offset: int, scaled: bool, values: torch.Tensor, out: torch.Tensor
) -> None:
    """:func:`dtcomm.kernels.local_tasks.scatter_values`."""
    numel, layout = out.numel(), codec.layout()
    whole = numel // layout.granule
    firsts = values[: whole * layout.kept].view(whole, layout.kept)[:, 0]
    scaled_values = values
    if scaled:
        factor = torch.full_like(values, layout.granule / layout.kept)
        if rest := numel % layout.granule:
            factor[whole * layout.kept :] = rest / layout.kept_of(rest)
        scaled_values = values * factor
    if numel % layout.granule:
        firsts = torch.cat([firsts, values[whole * layout.kept :][:1]])
    result = torch.zeros(numel, dtype=torch.float32, device=out.device)
    result.index_copy_(0, _value_indices(codec, key, offset, out), scaled_values)
    bad = _per_element(codec, torch.isnan(firsts), numel)
    out.copy_(torch.where(bad, float("nan"), result))


def restore_residual(
    codec: RandK, key: int, offset: int, value_residual: torch.Tensor, residual: torch.Tensor
) -> None:
    """:func:`dtcomm.kernels.local_tasks.restore_residual`."""
    residual.index_copy_(0, _value_indices(codec, key, offset, residual), value_residual)


def _sum_of(x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    return x.float() if residual is None else x.float() + residual


def _rows(x: torch.Tensor, length: int) -> torch.Tensor:
    """`x` in rows of `length` elements, padded with zeros."""
    return torch.nn.functional.pad(x, (0, -x.numel() % length)).view(-(-x.numel() // length), length)


def _units(codec: Exact, digits: int, exponents: torch.Tensor, numel: int) -> torch.Tensor:
    """The unit of each element, a power of two made from its bits."""
    units = (exponents.long() - 126 - digits + 1023 << 52).view(torch.float64)
    return _repeat_rows(units, codec.block, numel)


def _in_nan_block(codec: Exact, exponents: torch.Tensor, numel: int) -> torch.Tensor:
    return _repeat_rows(exponents == NAN_BLOCK, codec.block, numel)


def _per_element(codec: RandK, granules: torch.Tensor, numel: int) -> torch.Tensor:
    """A property of each granule, for each of its elements."""
    return _repeat_rows(granules, codec.layout().granule, numel)


def _per_value(codec: RandK, granules: torch.Tensor, numel: int) -> torch.Tensor:
    """A property of each granule, for each of its kept values."""
    return _repeat_rows(granules, codec.layout().kept, codec.kept_in(numel))


def _repeat_rows(rows: torch.Tensor, length: int, numel: int) -> torch.Tensor:
    """Each element repeated `length` times, cut to `numel` elements."""
    return rows[:, None].expand(-1, length).reshape(-1)[:numel]


def _value_indices(codec: RandK, key: int, offset: int, like: torch.Tensor) -> torch.Tensor:
    """The indices of the kept values of a tensor like `like`, in order: `positions` of all granules at once."""
    layout, numel = codec.layout(), like.numel()
    whole, rest = divmod(numel, layout.granule)
    bits = layout.granule.bit_length() - 1  # whole granules have 2**bits elements, so no position is outside
    first = counter_rng.absorb(key, counter_rng.GOLDEN_RATIO)
    starts = torch.arange(whole, device=like.device) * layout.granule
    keys = _absorb(_signed(first) + starts + offset)
    low, high = keys & _M32, keys >> 32 & _M32
    words = [mix32((low + mix32((high + j) & _M32)) & _M32)[:, None] for j in range(ROUNDS + 1)]
    indices = torch.arange(layout.kept, device=like.device).expand(whole, layout.kept)
    for word in words[:ROUNDS]:
        indices = indices * (word & 0xFFFF | 1) + (word >> 16) & (1 << bits) - 1
        indices = indices ^ indices >> (bits + 1) // 2
    indices = (indices + (words[ROUNDS] * layout.granule >> 32)) % layout.granule
    result = (indices + starts[:, None]).flatten()
    if not rest:
        return result
    last_key = counter_rng.absorb(first, offset + whole * layout.granule)
    last = torch.from_numpy(positions(last_key, rest, layout.kept_of(rest))) + whole * layout.granule
    return torch.cat([result, _to_device(last, like)])


def _to_device(host: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`host` on the device of `like`, copied without waiting for it."""
    return host.to(like.device) if like.is_cpu else host.pin_memory().to(like.device, non_blocking=True)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _absorb(h: torch.Tensor) -> torch.Tensor:
    """`counter_rng.absorb` of one word that was added already, in 64 bits that wrap."""
    h = (h ^ (h >> 30 & (1 << 34) - 1)) * _signed(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> 27 & (1 << 37) - 1)) * _signed(0x94D049BB133111EB)
    return h ^ (h >> 31 & (1 << 33) - 1)


def mix32(h: torch.Tensor) -> torch.Tensor:
    """`counter_rng.mix32` of 32-bit words that are stored in int64."""
    h = (h ^ h >> 16) * 0x7FEB352D & _M32
    h = (h ^ h >> 15) * 0x846CA68B & _M32
    return h ^ h >> 16
