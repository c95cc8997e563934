"""Patches: exact, and refused before a byte changes where they do not fit or are damaged."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dtcomm.errors import PayloadCorrupt
from dtcomm.extensions.weights import Patch, PatchRefused, Slice, Weights, apply, diff
from dtcomm.extensions.weights.patch import seal

State = dict[str, Tensor]


def state(seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "rows": normal(64, 33).bfloat16(),
        "norm": normal(48),
        "half": normal(7, 5).half(),
        "scale": normal(100).to(torch.float8_e4m3fn),
        "packed": torch.randint(0, 255, (4, 31), generator=generator).to(torch.uint8),
        "steps": torch.tensor(seed),
        "none": torch.empty(0, 3),
    }


def step(old: State) -> State:
    """What a small step of an optimizer makes of weights."""
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["rows"].view(-1).view(torch.int16)[::29] += 1
    new["norm"][3] *= 1.5
    new["packed"].view(-1)[::17] ^= 5
    new["steps"] += 1
    return new


def copy(tensors: State) -> State:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def equal(one: State, other: State) -> bool:
    return all(
        torch.equal(one[name].reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8))
        for name in other
    )


@pytest.mark.parametrize("make", [step, lambda old: state(9), copy])
def test_weights_become_the_new_ones(make: Callable[[State], State]) -> None:
    old = state(0)
    new, weights = make(old), copy(old)
    assert apply(weights, diff(old, new, base=4, version=6)) == 6
    assert equal(weights, new)
    weights = state(5)
    assert apply(weights, diff(None, new, version=6)) == 6
    assert equal(weights, new)


def refused(weights: Weights | State, patch: bytes | list[bytes], *words: str) -> None:
    """The patch is refused with these words, and changes nothing."""
    receiver = weights if isinstance(weights, Weights) else Weights(weights)
    before = {name: part.tensor.clone() for name, part in receiver.slices.items()}
    with pytest.raises((PatchRefused, PayloadCorrupt)) as caught:
        receiver.commit(receiver.prepare(patch if isinstance(patch, list) else [patch]))
    assert equal({name: part.tensor for name, part in receiver.slices.items()}, before)
    for word in words:
        assert word in str(caught.value)


def test_what_does_not_fit_is_refused() -> None:
    old = state(0)
    new = step(old)
    patch = diff(old, new, base=1, version=2, model="m")
    refused(state(1), patch, "version 2", "'rows'", "bytes of version 1")  # the wrong base
    weights = Weights(copy(old), version=1)
    weights.commit(weights.prepare([patch]))
    refused(weights, patch, "version 2", "already")  # twice
    refused(weights, diff(new, old, base=3, version=4), "have version 2")  # out of order
    refused(new, patch, "'rows'", "new one")  # twice, where no version is known
    refused(Weights(copy(old), model="other"), patch, "'m'", "'other'")
    refused(
        {name: tensor for name, tensor in old.items() if name != "half"}, patch, "'half'", "no such tensor"
    )
    refused({**old, "rows": torch.zeros(33, 64).bfloat16()}, patch, "'rows'", "[64, 33]", "[33, 64]")
    refused({**old, "norm": torch.zeros(48).double()}, patch, "'norm'", "float64")
    refused(copy(old), [patch, patch], "each patch of a version once")
    refused(copy(old), [patch, diff(old, new, base=0, version=2, model="m")], "different versions")
    with pytest.raises(ValueError, match="version=1"):
        diff(old, new, base=1, version=1)
    with pytest.raises(ValueError, match="'half'"):
        diff(old, {**new, "half": torch.zeros(3)})


def shards(old: Tensor, new: Tensor, bounds: list[int], version: int) -> list[bytes]:
    """The patches of ranks that hold rows each."""
    parts = []
    for begin, end in itertools.pairwise(bounds):
        before, after = (Slice(each[begin:end], tuple(new.shape), (begin, 0)) for each in (old, new))
        whole = version == 0
        parts.append(
            diff(None if whole else {"x": before}, {"x": after}, base=max(0, version - 1), version=version)
        )
    return parts


def test_shards_of_a_trainer_fit_other_shards_of_an_engine() -> None:
    first, second = torch.randn(12, 10).bfloat16(), torch.randn(12, 10).bfloat16()
    engines = [
        Weights({"x": torch.zeros(12, 10).bfloat16()}),
        Weights({"x": torch.zeros(10, 12).bfloat16().t()}),
        Weights({"x": Slice(torch.zeros(6, 10).bfloat16(), (12, 10), (3, 0))}, buffers=2),
        Weights({"x": Slice(torch.zeros(12, 5).bfloat16(), (12, 10), (0, 5))}),
    ]
    boxes = [first, first, first[3:9], first[:, 5:]]
    for engine, box in zip(engines, boxes):
        engine.commit(engine.prepare(shards(first, first, [0, 4, 8, 12], 0)))
        assert torch.equal(engine.slices["x"].tensor, box)
        refused(engine, shards(first, second, [0, 6, 12], 1), "'x'", "its shards")  # a changed layout
        refused(engine, shards(first, second, [0, 4, 8, 12], 1)[1:], "'x'")
        engine.commit(engine.prepare(shards(first, second, [0, 4, 8, 12], 1)))
    assert torch.equal(engines[3].slices["x"].tensor, second[:, 5:])
    assert torch.equal(engines[1].slices["x"].tensor, second)


def test_tied_weights_change_once() -> None:
    old = torch.randn(20, 30).bfloat16()
    new = old.clone()
    new.view(torch.int16)[3, 4:9] += 1
    patch = diff({"embed": old, "head": old}, {"embed": new, "head": new})
    weights = old.clone()
    apply({"embed": weights, "head": weights}, patch)
    assert torch.equal(weights, new)


@pytest.mark.parametrize("buffers", [1, 2])
def test_an_interrupted_commit_is_completed(buffers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    old = state(0)
    new = step(old)
    weights = copy(old)
    receiver = Weights(weights, version=0, buffers=buffers)
    prepared = receiver.prepare([diff(old, new)])
    write, calls = receiver._write, iter(range(100))

    def interrupt(*arguments: object) -> None:
        if next(calls) == 2:
            raise KeyboardInterrupt
        write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(receiver, "_write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        receiver.commit(prepared)
    monkeypatch.undo()
    assert receiver.version is None and not equal(weights, old) and not equal(weights, new)
    with pytest.raises(PatchRefused, match="in part"):
        receiver.prepare([diff(old, new)])
    assert receiver.commit(prepared) == 1
    assert equal(weights, new)
    with pytest.raises(PatchRefused, match="already"):
        receiver.commit(prepared)


def mutants(patch: bytes, others: list[bytes], seed: int) -> list[bytes]:
    """Bad patches of a version: damaged, with lengths that others chose, of a wrong base, double, or mixed.

    Some have checksums that are right again, so that checks behind them are reached.
    """
    chance = random.Random(seed)
    data = bytearray(patch)
    kind = chance.randrange(8)
    if kind == 7:
        return chance.choice([[chance.choice(others[1:])], [patch, patch], [patch, chance.choice(others)]])
    if kind == 0:
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    elif kind == 1:
        del data[chance.randrange(len(data)) :]
    elif kind == 2:
        at = chance.randrange(len(data))
        data[at:at] = chance.randbytes(chance.randrange(1, 40))
    elif kind == 3:
        at, other = chance.randrange(len(data)), chance.choice(others)
        data[at:] = other[at:]
    elif kind == 4:
        data[chance.randrange(16) :][:4] = chance.randbytes(4)
    else:
        read = Patch.read(patch)
        entries = list(read.entries)
        payloads = [read.payload(index).clone() for index in range(len(entries))]
        index = chance.randrange(len(entries))
        if kind == 5 and payloads[index].numel():
            for _ in range(chance.randrange(1, 4)):
                payloads[index][chance.randrange(payloads[index].numel())] ^= 1 << chance.randrange(8)
            entries[index] = entries[index]._replace(payload_crc=chance.getrandbits(32))
            if chance.random() < 0.9:
                from dtcomm.extensions.weights.slices import checksum

                entries[index] = entries[index]._replace(payload_crc=checksum(payloads[index]))
        else:
            field = chance.choice(entries[index]._fields)
            value = chance.choice(
                [-1, 0, 1, 2**40, 2**63, 2**70, "x", None, [], (1, 2), (2**40, 1), True, 1.5, "raw"]
            )
            entries[index] = entries[index]._replace(**{field: value})
        data = bytearray(seal(entries, payloads, base=read.base, version=read.version, model=read.model))
    return [bytes(data)]


def fuzz(count: int, seed: int) -> int:
    """Apply ``count`` bad patches; return how many were refused. The others made the published bytes."""
    old = state(0)
    new, weights = step(old), copy(old)
    patch, whole = diff(old, new), diff(None, new)
    others = [whole, diff(new, old), diff(state(1), state(2)), diff(new, step(new), base=1, version=2)]
    number = 0
    for attempt in range(count):
        bad = mutants(patch if attempt % 4 else whole, others, seed + attempt)
        try:
            apply(weights, bad)
        except (PatchRefused, PayloadCorrupt):
            number += 1
            assert equal(weights, old), f"seed {seed + attempt}"
            continue
        assert equal(weights, new), f"seed {seed + attempt}"
        weights = copy(old)
    return number


def test_bad_patches_are_refused() -> None:
    assert fuzz(2000, 0) > 1500


@pytest.mark.slow
def test_many_bad_patches_are_refused() -> None:
    refused = fuzz(100_000, 10_000)
    print(f"100,000 bad patches: {refused:,} refused, the others made the published bytes")
    assert refused > 75_000
