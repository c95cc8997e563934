"""Sums of `exact`: the same bits by every algorithm, chunking, hierarchy and order of ranks; and their audit."""

from __future__ import annotations

import random

import pytest
import torch

from bench.common.virtual_ranks import Simulation
from dtcomm import algorithms
from dtcomm.codecs import codec
from dtcomm.collectives.checks import require_auditable
from dtcomm.errors import PayloadCorrupt
from dtcomm.kernels import local_tasks
from dtcomm.runtime.types import Buffers
from tests.unit.collectives.local_multi_stage import plan_of, reduce_all

SPECS = ("exact", "exact:bits=16", "exact:block=256")
ALGORITHMS = [
    *(name for name in algorithms.available("all_reduce") if name != "hierarchical"),
    "hierarchical",
    "hierarchical:ring/tree",
]


def contributions(ranks: int, numel: int, seed: int) -> list[torch.Tensor]:
    """Return values of very different sizes, so that fp32 sums depend on the order, and some non-finite blocks."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for rank in range(ranks):
        x = torch.randn(numel, generator=generator) * torch.exp(torch.randn(numel, generator=generator) * 6)
        if numel > 900 and rank == ranks // 2:
            x[200], x[400], x[600:700] = torch.nan, torch.inf, 0.0
        tensors.append(x)
    return tensors


def true_sum(spec: str, inputs: list[torch.Tensor], divisor: int = 1) -> torch.Tensor:
    """Return the sum as docs/how-it-works/exact-sums.md defines it, in plain arithmetic."""
    exact_codec, n = codec(spec), len(inputs)
    digits = exact_codec.bits - 1 - (n - 1).bit_length()  # type: ignore[attr-defined]
    numel, block = inputs[0].numel(), exact_codec.block  # type: ignore[attr-defined]
    padded = torch.zeros(n, -(-numel // block) * block, dtype=torch.float64)
    for row, x in zip(padded, inputs, strict=True):
        row[:numel] = x.double()
    rows = padded.view(n, -1, block)
    _, exponent = torch.frexp(rows.abs().amax(dim=(0, 2)))  # largest < 2^exponent
    bad = ~torch.isfinite(rows).all(dim=2).all(dim=0)
    unit = torch.ldexp(torch.tensor(1.0, dtype=torch.float64), exponent.clamp(min=-125).double() - digits)
    unit = torch.where(bad, 1.0, unit)[:, None]
    codes = torch.round(torch.where(bad[:, None], 0.0, rows) / unit).clamp(1 - 2**digits, 2**digits - 1)
    total = (codes.sum(dim=0) * unit / divisor).float()
    return torch.where(bad[:, None], torch.nan, total).reshape(-1)[:numel]


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to the dtype, with the one NaN pattern that the codec writes."""
    out = x.to(dtype)
    out[out.isnan()] = torch.nan
    return out


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sum_bits_do_not_depend_on_algorithm_or_rank_order(algorithm: str, ranks: int) -> None:
    """Every algorithm, random pieces and delays, contributions in any order of ranks: one result, the true
    sum of the integers."""
    rng = random.Random(f"{algorithm}{ranks}")
    for spec in SPECS:
        numel, op = rng.choice([1, 40, 1000, 5000, 9001]), rng.choice(["sum", "avg"])
        inputs = contributions(ranks, numel, seed=ranks)
        truth = true_sum(spec, inputs, ranks if op == "avg" else 1)
        for seed in range(2):
            order = rng.sample(range(ranks), ranks)
            shuffled = [inputs[i].clone() for i in order]
            first = rng.randint(1, ranks)
            hosts = (first, ranks - first) if first < ranks else (ranks,)
            world = Simulation(
                ranks=ranks,
                seed=seed,
                delay=rng.choice([0.0, 0.5, 0.9]),
                piece_bytes=rng.choice([2048, 4096, 10_000, 64 * 1024]),
                slot_bytes=2**18,
            )
            plans = [
                plan_of(
                    spec,
                    [numel],
                    torch.float32,
                    rank=rank,
                    ranks=ranks,
                    op=op,
                    algorithm=algorithm,
                    hosts=hosts,
                )
                for rank in range(ranks)
            ]
            outcomes, _ = reduce_all(world, plans, [[Buffers(x, x)] for x in shuffled])
            assert {outcome.status for outcome in outcomes} == {"done"}
            for rank, x in enumerate(shuffled):
                assert torch.equal(bits(x), bits(truth)), (spec, op, world, rank)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce", "reduce_scatter"])
def test_other_collectives_and_types_give_the_same_bits(collective: str, dtype: torch.dtype) -> None:
    """reduce gives its root the bits of all_reduce, reduce_scatter those of each shard; two tensors in one message."""
    ranks, numels, spec = 3, (700, 2100), "exact:bits=16"
    rng = random.Random(5)
    scale = ranks if collective == "reduce_scatter" else 1
    values = [[x.to(dtype) for x in contributions(ranks, numel * scale, seed=numel)] for numel in numels]
    for algorithm in algorithms.available(collective):
        buffers, inputs = [], []
        root = rng.randrange(ranks) if collective == "reduce" else 0
        for rank in range(ranks):
            tensors = [values[part][rank].clone() for part in range(2)]
            outputs = [torch.empty(numel, dtype=dtype) for numel in numels] if scale > 1 else tensors
            have = collective != "reduce" or rank == root
            buffers.append(
                [Buffers(x, out if have else None) for x, out in zip(tensors, outputs, strict=True)]
            )
            inputs.append([x.clone() for x in tensors])
        plans = [
            plan_of(
                spec,
                numels,
                dtype,
                rank=rank,
                ranks=ranks,
                collective=collective,
                algorithm=algorithm,
                root=root,
                hosts=(2, 1),
            )
            for rank in range(ranks)
        ]
        outcomes, _ = reduce_all(Simulation(ranks=ranks, seed=1), plans, buffers)
        assert {outcome.status for outcome in outcomes} == {"done"}
        for part, numel in enumerate(numels):
            # The shards of a reduce_scatter have grids of their own.
            columns = [[x[part][i * numel : (i + 1) * numel] for x in inputs] for i in range(scale)]
            truths = [rounded(true_sum(spec, [x.float() for x in column]), dtype) for column in columns]
            for rank in range(ranks):
                out = buffers[rank][part].output
                if out is None:
                    unchanged_input = buffers[rank][part].input
                    assert unchanged_input is not None
                    assert torch.equal(bits(unchanged_input), bits(inputs[rank][part]))
                else:
                    assert torch.equal(bits(out), bits(truths[rank if scale > 1 else 0])), (algorithm, rank)


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("spec", ["exact:bits=16", "exact"])
def test_feedback_conserves_mass(spec: str, op: str) -> None:
    """result (x ranks for avg) + new residuals = inputs + old residuals, and the residuals stay below a unit."""
    generator = torch.Generator().manual_seed(2)
    for ranks in (2, 5):
        residuals = [torch.zeros(3000) for _ in range(ranks)]
        for step in range(4):
            inputs = [torch.randn(3000, generator=generator) for _ in range(ranks)]
            owed = sum(
                (x.double() + r.double() for x, r in zip(inputs, residuals, strict=True)),
                torch.zeros(3000).double(),
            )
            plans = [
                plan_of(spec, [3000], torch.float32, rank=rank, ranks=ranks, op=op, algorithm="ring")
                for rank in range(ranks)
            ]
            buffers = [[Buffers(x, x, r)] for x, r in zip(inputs, residuals, strict=True)]
            reduce_all(Simulation(ranks=ranks, seed=step), plans, buffers)
            paid = inputs[0].double() * (ranks if op == "avg" else 1)
            paid += sum((r.double() for r in residuals), torch.zeros(3000).double())
            assert torch.allclose(paid, owed, rtol=2e-6, atol=1e-6)
            digits = codec(spec).digits(ranks)  # type: ignore[attr-defined]
            assert max(float(r.abs().max()) for r in residuals) <= 16 * 2.0**-digits


def test_sent_bytes_match_schedule() -> None:
    for name in ALGORITHMS:
        for ranks in (2, 5):
            for spec in (*SPECS, "randk:ratio=0.1,positions=shared"):
                plans = [
                    plan_of(
                        spec,
                        [9001],
                        torch.float32,
                        rank=rank,
                        ranks=ranks,
                        algorithm=name,
                        hosts=(1, ranks - 1),
                    )
                    for rank in range(ranks)
                ]
                inputs = [[Buffers(x, x)] for x in contributions(ranks, 9001, seed=1)]
                outcomes, _ = reduce_all(
                    Simulation(ranks=ranks, seed=0, delay=0.0, slot_bytes=2**20), plans, inputs
                )
                levels = (1, ranks - 1) if name.startswith("hierarchical") else None
                schedule = algorithms.build(name, "all_reduce", ranks, hosts=levels)
                promised = schedule.bytes_on_wire(9001, codec(spec))
                assert [outcome.wire_bytes for outcome in outcomes] == list(promised), (name, ranks, spec)


# --- audit --------------------------------------------------------------------------------------------------------


def audited(
    spec: str, algorithm: str, ranks: int, flip: int | None, seed: int
) -> tuple[list[str], list[torch.Tensor]]:
    """Return (the error of each rank or None, its tensor at the end)."""
    inputs = [x.clone() for x in contributions(ranks, 9000, seed=4)]
    world = Simulation(ranks=ranks, seed=seed, delay=0.3, corrupt_payload=flip)
    plans = [
        plan_of(
            spec,
            [9000],
            torch.float32,
            rank=rank,
            ranks=ranks,
            algorithm=algorithm,
            audit=True,
            hosts=(1, ranks - 1),
        )
        for rank in range(ranks)
    ]
    outcomes, checks = reduce_all(world, plans, [[Buffers(x, x)] for x in inputs])
    assert {outcome.status for outcome in outcomes} == {"done"}
    errors = []
    for check in checks:
        assert check is not None
        try:
            check()
            errors.append("")
        except PayloadCorrupt as error:
            errors.append(str(error))
    return errors, inputs


@pytest.mark.parametrize("algorithm", algorithms.available("all_reduce"))
@pytest.mark.parametrize("spec", ["exact", "exact:bits=16"])
def test_flipped_bit_has_no_effect_or_raises_on_all_ranks(spec: str, algorithm: str) -> None:
    """A bit flipped anywhere in transit has no effect, or all ranks raise an error and keep their tensors."""
    ranks, caught = 3, 0
    before = contributions(ranks, 9000, seed=4)
    truth = true_sum(spec, before)
    for flip in range(0, 90, 2):
        errors, after = audited(spec, algorithm, ranks, flip, seed=flip)
        for rank in range(ranks):
            if errors[rank]:
                assert f"rank {rank}: audit of all_reduce with codec {spec}" in errors[rank]
            wanted = before[rank] if errors[rank] else truth
            assert torch.equal(bits(after[rank]), bits(wanted)), (flip, rank, errors)
        caught += any(errors)
        # Only a flip in the verdict itself can let ranks differ.
        assert len(set(map(bool, errors))) == 1 or any("verdict" in text for text in errors), (flip, errors)
    assert caught >= 8


def test_audit_accepts_clean_sums_and_flips_corrupt_unaudited_sums() -> None:
    for algorithm in algorithms.available("all_reduce"):
        errors, after = audited("exact", algorithm, 3, None, seed=1)
        assert errors == [""] * 3
        assert torch.equal(bits(after[0]), bits(true_sum("exact", contributions(3, 9000, seed=4))))
    wrong = 0
    truth = true_sum("exact", contributions(3, 9000, seed=4))
    for flip in range(30):
        inputs = [x.clone() for x in contributions(3, 9000, seed=4)]
        plans = [plan_of("exact", [9000], torch.float32, rank=rank, ranks=3) for rank in range(3)]
        reduce_all(
            Simulation(ranks=3, seed=flip, corrupt_payload=flip), plans, [[Buffers(x, x)] for x in inputs]
        )
        wrong += any(not torch.equal(bits(x), bits(truth)) for x in inputs)
    assert wrong >= 5


def test_audit_failure_names_the_elements() -> None:
    """The error of a failed audit names the range of elements, or the damaged verdict."""
    plan = plan_of("exact", [9000], torch.float32, rank=1, ranks=3, audit=True)
    for verdict, text in (
        (2, "checksums do not add up to the result's of elements 4096 to 8191"),
        (5, "do not agree on the exponents of elements 8192 to 8999"),
        (local_tasks.AUDIT_OK - 4, "a bit of the verdict changed"),
        (-8, "a bit of the verdict changed"),
    ):
        assert text in plan._describe_failure(verdict, 9000)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kernel", ["native", "reference"])
def test_every_single_bit_change_changes_the_checksum(kernel: str) -> None:
    from dtcomm.kernels import current, use

    exact_codec = codec("exact")
    codes = torch.randint(-(2**31), 2**31 - 1, (5000,), dtype=torch.int64).to(torch.int32)
    sums, changed_sums = torch.empty(2, dtype=torch.int64), torch.empty(2, dtype=torch.int64)
    with use("reference" if kernel == "reference" else current()):
        local_tasks.audit_checksums(exact_codec, codes, sums)()  # type: ignore[arg-type]
        for at in (0, 1, 4095, 4096, 4999):
            for bit in range(32):
                changed = codes.clone()
                changed.view(torch.uint8)[4 * at + bit // 8] ^= 1 << bit % 8
                local_tasks.audit_checksums(exact_codec, changed, changed_sums)()  # type: ignore[arg-type]
                assert (changed_sums != sums).tolist() == [at < 4096, at >= 4096], (at, bit)
        swapped = codes.clone()
        swapped[[10, 11]] = codes[[11, 10]]
        local_tasks.audit_checksums(exact_codec, swapped, changed_sums)()  # type: ignore[arg-type]
        assert changed_sums[0] != sums[0]


def test_only_codec_exact_can_be_audited() -> None:
    for spec in ("none", "int8", "randk:positions=shared", "none/exact"):
        with pytest.raises(
            ValueError, match=f"audit: needs a codec whose sums are exact, got {spec}; valid: exact"
        ):
            require_auditable(spec)
    require_auditable("exact:bits=16")


def test_more_ranks_than_integer_bits_allow_are_refused() -> None:
    assert codec("exact:bits=16").digits(2048) == 4  # type: ignore[attr-defined]
    with pytest.raises(
        ValueError, match=r"codec: exact:bits=16 leaves 3 bits .* 2049 ranks.* at most 2048 ranks"
    ):
        plan_of("exact:bits=16", [8], torch.float32, rank=0, ranks=2049)
