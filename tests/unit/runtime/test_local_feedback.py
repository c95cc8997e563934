"""The native machines in seeded orders: residuals keep what encoding loses, in every interleaving."""

from __future__ import annotations

import pytest
import torch

from bench.common.virtual_ranks import run_simulated
from dtcomm import algorithms
from tests.unit.runtime.simulated_cases import CODECS, calls_per_rank, make_case, require_finished, worlds


@pytest.mark.parametrize("algorithm", algorithms.available("all_reduce"))
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("spec", CODECS)
def test_feedback_conserves_mass(algorithm: str, op: str, spec: str) -> None:
    """result (x ranks for avg) + new residuals = inputs + old residuals, over several calls with the same
    residual.
    """
    for world, rng in worlds(8, salt=3):
        case = make_case(
            rng, world.ranks, "all_reduce", algorithm, [spec], [3000], op=op, feedback=True, integers=False
        )
        for _ in range(3):
            owed = torch.zeros(3000, dtype=torch.float64)
            for operation in case.operations:
                part = operation.buffers[0]
                part.input.copy_(torch.randn(3000))
                owed += part.input.double() + part.residual.double()
            require_finished(run_simulated(world, calls_per_rank([case])), world)
            result = torch.as_tensor(case.operations[0].buffers[0].input).double()
            paid = result * (world.ranks if op == "avg" else 1)
            for operation in case.operations:
                residual = operation.buffers[0].residual
                paid += residual.double()
            assert torch.allclose(paid, owed, atol=2e-5, rtol=0), (world, (paid - owed).abs().max())


def test_reduce_scatter_feedback_conserves_mass() -> None:
    for algorithm in algorithms.available("reduce_scatter"):
        for world, rng in worlds(20, salt=4):
            case = make_case(
                rng, world.ranks, "reduce_scatter", algorithm, ["int8"], [1500], feedback=True, integers=False
            )
            total = torch.zeros(1500 * world.ranks, dtype=torch.float64)
            for operation in case.operations:
                part = operation.buffers[0]
                total += part.input.double() + part.residual.double()
            require_finished(run_simulated(world, calls_per_rank([case])), world)
            paid = torch.cat([torch.as_tensor(case.outputs[rank][0]) for rank in range(world.ranks)]).double()
            for operation in case.operations:
                residual = operation.buffers[0].residual
                paid += residual.double()
            assert torch.allclose(paid, total, atol=2e-5, rtol=0), (algorithm, world)


@pytest.mark.parametrize("algorithm", algorithms.available("reduce"))
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_reduce_feedback_conserves_mass(algorithm: str, op: str) -> None:
    """result at the root + new residuals of all ranks = inputs + old residuals, wherever values were encoded."""
    for world, rng in worlds(20, salt=11):
        case = make_case(
            rng, world.ranks, "reduce", algorithm, ["int8"], [3000], op=op, feedback=True, integers=False
        )
        owed = torch.zeros(3000, dtype=torch.float64)
        for rank, operation in enumerate(case.operations):
            residual = operation.buffers[0].residual
            owed += case.inputs[rank][0].double() + residual.double()
        require_finished(run_simulated(world, calls_per_rank([case])), world)
        root = case.shape.root
        paid = torch.as_tensor(case.outputs[root][0]).double() * (world.ranks if op == "avg" else 1)
        for operation in case.operations:
            residual = operation.buffers[0].residual
            paid += residual.double()
        assert torch.allclose(paid, owed, atol=2e-5, rtol=0), (world, (paid - owed).abs().max())


@pytest.mark.parametrize("collective", ["gather", "scatter", "all_to_all", "all_gather", "broadcast"])
def test_copies_feedback_conserves_mass(collective: str) -> None:
    """receiver's copy + sender's residual = sender's input + old residual; a rank's own shard is exact."""
    for algorithm in algorithms.available(collective):
        for world, rng in worlds(12, salt=12):
            n, root = world.ranks, 0
            case = make_case(rng, n, collective, algorithm, ["int8"], [1500], feedback=True, integers=False)
            before = [[part.residual for part in operation.buffers] for operation in case.operations]
            kept = [None if part[0] is None else part[0].clone() for part in before]
            require_finished(run_simulated(world, calls_per_rank([case])), world)
            root = case.shape.root
            outputs = [part[0] for part in case.outputs]
            for rank in range(n):
                old, new = kept[rank], case.operations[rank].buffers[0].residual
                if old is None or new is None or (collective == "broadcast" and rank != root):
                    continue
                owed = case.inputs[rank][0] + old
                match collective:
                    case "gather":
                        arrived = torch.as_tensor(outputs[root]).view(n, -1)[rank]
                    case "all_gather":
                        arrived = torch.as_tensor(outputs[(rank + 1) % n]).view(n, -1)[rank]
                    case "broadcast":
                        arrived = torch.as_tensor(outputs[(rank + 1) % n])
                    case "scatter":
                        arrived = torch.cat([torch.as_tensor(output) for output in outputs])
                    case _:
                        rows = [torch.as_tensor(output).view(n, -1)[rank] for output in outputs]
                        arrived = torch.cat(rows)
                assert torch.allclose(arrived + new, owed, atol=1e-5, rtol=0), (algorithm, world, rank)
