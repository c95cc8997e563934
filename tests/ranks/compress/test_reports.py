"""One report format for every integration, from runs of two ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dtcomm import ddp, fsdp, tp
from dtcomm.compress.report import COLUMNS, MESSAGE_COLUMNS
from dtcomm.compress.reporting import Reporting
from dtcomm.launch.ranks import run_ranks
from dtcomm.local_sgd import LocalSGD

WIDTH, STEPS = 64, 3


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    for _ in range(STEPS):
        model(torch.ones(512, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def run_integrations(ranks: int) -> Iterator[tuple[Reporting, nn.Module, torch.optim.Optimizer]]:
    """Yield the state of each integration with what is to be trained."""
    model = DistributedDataParallel(make_model())
    yield ddp.compress(model, "int8", timeline=10), model, torch.optim.SGD(model.parameters(), lr=0.01)
    sharded = make_model()
    for layer in sharded:
        fully_shard(layer, mesh=init_device_mesh("cpu", (ranks,)))
    fully_shard(sharded, mesh=init_device_mesh("cpu", (ranks,)))
    yield fsdp.compress(sharded, "int8", "int8"), sharded, torch.optim.SGD(sharded.parameters(), lr=0.01)
    plain = make_model()
    optimizer = fsdp.ShardedOptimizer(
        plain.named_parameters(), torch.optim.SGD, lr=0.01, gradients="int8", parameters="int8"
    )
    yield optimizer, plain, optimizer
    parallel = make_model()
    state = tp.compress(
        parallel, None, "int8", {"0": "column", "1": "row"}, backward_codec="int8", latency=False
    )
    yield state, parallel, torch.optim.SGD(parallel.parameters(), lr=0.01)
    local = make_model()
    yield LocalSGD(local, every=1), local, torch.optim.SGD(local.parameters(), lr=0.01)


def collect_reports(rank: int, ranks: int) -> list[tuple[str, dict[str, Any]]]:
    reports = []
    for state, model, optimizer in run_integrations(ranks):
        for _ in train(model, optimizer):
            if isinstance(state, LocalSGD):
                state.step()
        report = state.report()
        reports.append((str(report), json.loads(report.to_json())))
    return reports


def test_all_integrations_report_in_one_format() -> None:
    for reports in run_ranks(collect_reports, 2):
        integrations = [values["integration"] for _, values in reports]
        assert integrations == ["DDP", "FSDP", "ShardedOptimizer", "TP", "LocalSGD"]
        for text, values in reports:
            lines = text.splitlines()
            assert lines[0].startswith(f"dtcomm {values['integration']}: ")
            for columns, line in ((COLUMNS, lines[1]), (MESSAGE_COLUMNS, lines[len(values["rows"]) + 4])):
                assert line.split() == " ".join(columns).split(), values["integration"]
            assert any(line.startswith("total ") for line in lines)
            assert values["steps"] == (None if values["integration"] == "TP" else STEPS)
            assert values["messages"] > 0 and 0 < values["wire_bytes"] < values["plain_bytes"]
            # Every message is counted: what the rows sent is what was sent.
            sent = sum(row["wire_bytes"] for row in values["rows"])
            assert abs(sent - values["wire_bytes"]) <= len(values["rows"])
            assert set(values) == set(reports[0][1])
            # Nothing is claimed that was not measured, and every message has a row.
            assert values["payoff"] is None and "verdict     not measured: " in text
            assert sum(row["calls"] for row in values["by_message"]) == values["messages"]
        errors = {row["what"]: row["relative_error"] for row in reports[2][1]["rows"]}
        assert 1e-4 < errors["gradients"] < 0.05 and 1e-4 < errors["parameters"] < 0.05


def count_steps_after_resuming(rank: int, ranks: int) -> list[tuple[str, int | None, int]]:
    saved: list[dict[str, Any]] = []
    counts = []
    for resumed in (False, True):
        for number, (state, model, optimizer) in enumerate(run_integrations(ranks)):
            if isinstance(state, tp.TPState):
                saved.append({})
                continue
            if resumed:
                state.load_state_dict(saved[number])
            for step, _ in enumerate(train(model, optimizer)):
                if isinstance(state, LocalSGD):
                    state.step()
                if resumed and step == 0:
                    break
            saved.append(state.state_dict())
            report = state.report()
            counts.append((report.integration, report.steps, report.earlier_steps))
    return counts


def test_steps_and_messages_are_those_of_this_run() -> None:
    names = ("DDP", "FSDP", "ShardedOptimizer", "LocalSGD")
    expected = [*((name, STEPS, 0) for name in names), *((name, 1, STEPS) for name in names)]
    for counts in run_ranks(count_steps_after_resuming, 2):
        assert counts == expected
