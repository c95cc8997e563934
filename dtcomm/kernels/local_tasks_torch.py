"""The steps of `common` on tensors of a device, as torch's own operators: the CPU's bits, and nobody waits for them."""

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
    size = _rows(_term(x, residual), codec.block).view(torch.int32) & 0x7FFFFFFF
    top = size.amax(1)
    found = torch.where((top > 0) & (top >> 23 == 0), 1, top >> 23)
    exponents.copy_(torch.where(top >= 0x7F800000, NAN_BLOCK, found))


def quantize_to_exponents(
    codec: Exact,
    ranks: int,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    exponents: torch.Tensor,
    codes: torch.Tensor,
) -> None:
    digits = codec.digits(ranks)
    most = 2.0**digits - 1
    term, unit = _term(x, residual).double(), _units(codec, digits, exponents, x.numel())
    bad = _bad(codec, exponents, x.numel())
    integers = torch.where(bad, 0.0, (term / unit).clamp(-most, most).round())
    codes.copy_(integers)
    if residual is not None:
        residual.copy_(torch.where(bad, residual, (term - integers * unit).float()))


def dequantize(
    codec: Exact,
    ranks: int,
    codes: torch.Tensor,
    exponents: torch.Tensor,
    divisor: int,
    out: torch.Tensor,
    verdict: torch.Tensor | None,
) -> None:
    unit = _units(codec, codec.digits(ranks), exponents, out.numel())
    found = (codes.double() * unit / divisor).float()
    found = torch.where(_bad(codec, exponents, out.numel()), float("nan"), found).to(out.dtype)
    out.copy_(found if verdict is None else torch.where(verdict == _C.AUDIT_OK, found, out))


def audit_checksums(codes: torch.Tensor, sums: torch.Tensor) -> None:
    weights = mix32(torch.arange(codes.numel(), device=codes.device)) * 2 + 1
    terms = weights * codes.long()
    sums.copy_(_rows(terms, _C.AUDIT_RUN).sum(1))


def audit_verdict(
    codec: Exact,
    sums: torch.Tensor,
    found: torch.Tensor,
    exponents: torch.Tensor,
    again: torch.Tensor,
    verdict: torch.Tensor,
) -> None:
    differ = _rows((exponents != again).int(), max(1, _C.AUDIT_RUN // codec.block)).any(1)
    runs = 2 * torch.arange(sums.numel(), device=sums.device)
    # Blocks larger than a run: each counts for the run that it begins with, as on the CPU.
    differ = torch.nn.functional.pad(differ, (0, max(0, sums.numel() - differ.numel())))[: sums.numel()]
    wrong = torch.where(differ, runs + 1, torch.where(sums != found, runs, _C.AUDIT_OK))
    verdict.copy_(torch.cat([wrong, wrong.new_full((1,), _C.AUDIT_OK)]).amin().reshape(1))


def gather_values(
    codec: RandK,
    key: int,
    offset: int,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    values: torch.Tensor,
    owed: torch.Tensor | None,
) -> None:
    places = _places(codec, key, offset, x)
    floats = x.float()
    total = _term(x, residual)
    finite = torch.isfinite(_rows(total, codec.layout().granule)).all(1)
    taken = floats.index_select(0, places)
    values.copy_(torch.where(_of_values(codec, finite, x.numel()), taken, float("nan")))
    if residual is not None and owed is not None:
        owed.copy_(residual.index_select(0, places))
        residual.copy_(torch.where(_of_elements(codec, finite, x.numel()), total, residual))


def scatter_values(
    codec: RandK, key: int, offset: int, scaled: bool, values: torch.Tensor, out: torch.Tensor
) -> None:
    numel, layout = out.numel(), codec.layout()
    whole = numel // layout.granule
    firsts = values[: whole * layout.kept].view(whole, layout.kept)[:, 0]
    given = values
    if scaled:
        factor = torch.full_like(values, layout.granule / layout.kept)
        if rest := numel % layout.granule:
            factor[whole * layout.kept :] = rest / layout.kept_of(rest)
        given = values * factor
    if numel % layout.granule:
        firsts = torch.cat([firsts, values[whole * layout.kept :][:1]])
    found = torch.zeros(numel, dtype=torch.float32, device=out.device)
    found.index_copy_(0, _places(codec, key, offset, out), given)
    bad = _of_elements(codec, torch.isnan(firsts), numel)
    out.copy_(torch.where(bad, float("nan"), found))


def restore_residual(codec: RandK, key: int, offset: int, owed: torch.Tensor, residual: torch.Tensor) -> None:
    residual.index_copy_(0, _places(codec, key, offset, residual), owed)


def _term(x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    return x.float() if residual is None else x.float() + residual


def _rows(x: torch.Tensor, length: int) -> torch.Tensor:
    """Filled up with zeros."""
    return torch.nn.functional.pad(x, (0, -x.numel() % length)).view(-(-x.numel() // length), length)


def _units(codec: Exact, digits: int, exponents: torch.Tensor, numel: int) -> torch.Tensor:
    """Powers of two, by their bits."""
    found = (exponents.long() - 126 - digits + 1023 << 52).view(torch.float64)
    return _each(found, codec.block, numel)


def _bad(codec: Exact, exponents: torch.Tensor, numel: int) -> torch.Tensor:
    return _each(exponents == NAN_BLOCK, codec.block, numel)


def _of_elements(codec: RandK, granules: torch.Tensor, numel: int) -> torch.Tensor:
    return _each(granules, codec.layout().granule, numel)


def _of_values(codec: RandK, granules: torch.Tensor, numel: int) -> torch.Tensor:
    return _each(granules, codec.layout().kept, codec.kept_in(numel))


def _each(of_rows: torch.Tensor, length: int, numel: int) -> torch.Tensor:
    """What is known of every row, of every one of its elements."""
    return of_rows[:, None].expand(-1, length).reshape(-1)[:numel]


def _places(codec: RandK, key: int, offset: int, like: torch.Tensor) -> torch.Tensor:
    """Where the values of a tensor like this one are, in order: `positions` of all granules at once."""
    layout, numel = codec.layout(), like.numel()
    whole, rest = divmod(numel, layout.granule)
    bits = layout.granule.bit_length() - 1  # so a place is never outside, but in the last granule
    first = counter_rng.absorb(key, counter_rng.GOLDEN_RATIO)
    starts = torch.arange(whole, device=like.device) * layout.granule
    keys = _absorb(_signed(first) + starts + offset)
    low, high = keys & _M32, keys >> 32 & _M32
    words = [mix32((low + mix32((high + j) & _M32)) & _M32)[:, None] for j in range(ROUNDS + 1)]
    places = torch.arange(layout.kept, device=like.device).expand(whole, layout.kept)
    for word in words[:ROUNDS]:
        places = places * (word & 0xFFFF | 1) + (word >> 16) & (1 << bits) - 1
        places = places ^ places >> (bits + 1) // 2
    places = (places + (words[ROUNDS] * layout.granule >> 32)) % layout.granule
    found = (places + starts[:, None]).flatten()
    if not rest:
        return found
    last_key = counter_rng.absorb(first, offset + whole * layout.granule)
    last = torch.from_numpy(positions(last_key, rest, layout.kept_of(rest))) + whole * layout.granule
    return torch.cat([found, _sent(last, like)])


def _sent(host: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """On the device of ``like``, without a wait."""
    return host.to(like.device) if like.is_cpu else host.pin_memory().to(like.device, non_blocking=True)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _absorb(h: torch.Tensor) -> torch.Tensor:
    """`mixer.absorb` of one word that has been added already, in 64 bits that wrap."""
    h = (h ^ (h >> 30 & (1 << 34) - 1)) * _signed(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> 27 & (1 << 37) - 1)) * _signed(0x94D049BB133111EB)
    return h ^ (h >> 31 & (1 << 33) - 1)


def mix32(h: torch.Tensor) -> torch.Tensor:
    """`mixer.mix32` of words in 64 bits."""
    h = (h ^ h >> 16) * 0x7FEB352D & _M32
    h = (h ^ h >> 15) * 0x846CA68B & _M32
    return h ^ h >> 16
