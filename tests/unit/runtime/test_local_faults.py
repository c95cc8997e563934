"""The native machines in seeded orders: deaths, flipped bits and ranks that disagree; no rank hangs."""

from __future__ import annotations

import pytest
import torch

from bench.common.virtual_ranks import Simulation, run_simulated
from tests.unit.runtime.simulated_cases import (
    CASES,
    bits,
    calls_per_rank,
    exact,
    make_case,
    require_finished,
    worlds,
)


@pytest.mark.parametrize(("collective", "algorithm"), CASES)
def test_rank_death_is_reported_and_no_rank_hangs(collective: str, algorithm: str) -> None:
    """Whenever a rank dies, the others finish or name the rank they waited for; none fails for another reason."""
    seen = set()
    for world, rng in worlds(60, salt=7):
        victim = rng.randrange(world.ranks)
        world = Simulation(
            ranks=world.ranks,
            seed=world.seed,
            delay=world.delay,
            crash_rank=victim,
            crash_after=rng.randrange(40),
        )
        cases = [make_case(rng, world.ranks, collective, algorithm, ["int8"], [6000]) for _ in range(3)]
        outcomes = run_simulated(world, calls_per_rank(cases))
        for rank, outcome in enumerate(outcomes):
            seen.add(outcome.status)
            if rank != victim:
                assert outcome.status in ("done", "peer_lost"), (world, rank, outcome)
            if outcome.status == "peer_lost":
                assert outcome.failed_rank != rank, (world, rank, outcome)
            else:
                assert outcome.status == "died" or outcome.finished == 3, (world, rank, outcome)
    assert "peer_lost" in seen and "died" in seen


def test_flipped_bit_changes_results_but_not_control_flow() -> None:
    """Without checksums a flipped payload bit changes a result but no control flow, and no rank differs from another
    where they read the same payload."""
    changed = 0
    for world, rng in worlds(200, salt=8):
        world = Simulation(
            ranks=world.ranks, seed=world.seed, delay=world.delay, corrupt_payload=rng.randrange(12)
        )
        case = make_case(rng, world.ranks, "all_reduce", "two_shot", ["int8"], [5000])
        require_finished(run_simulated(world, calls_per_rank([case])), world)
        outputs = [torch.as_tensor(case.outputs[rank][0]) for rank in range(world.ranks)]
        wrong = [not torch.equal(bits(output), bits(outputs[0])) for output in outputs]
        truth = exact(case, 0, 0)
        changed += any(bool((output - truth).abs().max() > 1.0) for output in outputs)
        # A bit flipped in a final box reaches every rank but its owner, who decoded before it was sent.
        assert sum(wrong) in (0, 1, world.ranks - 1), world
    assert changed > 20


DIFFERENT_CALLS: dict[str, tuple[str, str, list[str], list[int], str, torch.dtype]] = {
    "numel": ("all_reduce", "two_shot", ["int8"], [3001], "sum", torch.float32),
    "codec": ("all_reduce", "two_shot", ["fp16"], [3000], "sum", torch.float32),
    "op": ("all_reduce", "two_shot", ["int8"], [3000], "avg", torch.float32),
    "collective": ("reduce_scatter", "one_shot", ["int8"], [3000], "sum", torch.float32),
    "algorithm": ("all_reduce", "ring", ["int8"], [3000], "sum", torch.float32),
    "dtype": ("all_reduce", "two_shot", ["int8"], [3000], "sum", torch.bfloat16),
    "count": ("all_reduce", "two_shot", ["int8", "int8"], [1500, 1500], "sum", torch.float32),
}


@pytest.mark.parametrize("difference", sorted(DIFFERENT_CALLS))
def test_disagreeing_ranks_report_a_mismatch(difference: str) -> None:
    """One rank makes a different call: a rank reports the mismatch, none accepts wrong bytes, and none hangs."""
    noticed = 0
    for world, rng in worlds(100, salt=9):
        usual = [make_case(rng, world.ranks, "all_reduce", "two_shot", ["int8"], [3000]) for _ in range(2)]
        collective, algorithm, specs, numels, op, dtype = DIFFERENT_CALLS[difference]
        other = make_case(rng, world.ranks, collective, algorithm, specs, numels, op=op, dtype=dtype)
        odd_rank = rng.randrange(world.ranks)
        operations = calls_per_rank(usual)
        operations[odd_rank][1] = other.operations[odd_rank]
        outcomes = run_simulated(world, operations)
        statuses = {outcome.status for outcome in outcomes}
        assert statuses <= {"mismatch", "done"} and "mismatch" in statuses, (world, outcomes)
        assert all(outcome.finished >= 1 for outcome in outcomes), (world, outcomes)
        noticed += sum(outcome.status == "mismatch" for outcome in outcomes)
    assert noticed >= 100
