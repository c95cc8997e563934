"""Ranks of `ElasticLocalSGD` die in the middle of an average, leave and join; the others train on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dtcomm.errors import DtcommError, JoinRefused, PeerLost
from dtcomm.extensions.elastic import Coordinator, ElasticLocalSGD
from dtcomm.launch.ranks import RunningRanks, send_to_parent, spawn_ranks
from dtcomm.local_sgd import LocalSGD
from tests.support.relay import Relay
from tests.support.waiting import wait_for

WIDTH, EVERY, STEPS = 32, 4, 40
SECRET = {"DTCOMM_SECRET": "a secret of these tests", "GLOO_SOCKET_IFNAME": "lo"}


def nesterov(weights: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.7, momentum=0.9, nesterov=True)


def make_model(seed: int, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh(), nn.BatchNorm1d(width), nn.Linear(width, WIDTH))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(seed))
    loss = (model(x) - x.flip(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def all_weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten().float() for tensor in model.state_dict().values()])


def die_in_average(local: ElasticLocalSGD, number: int, how: signal.Signals = signal.SIGKILL) -> None:
    """Make this process end itself instead of sending its part of an average; the others have encoded theirs."""
    start = local._start

    def start_or_die(*arguments: Any) -> Any:
        if local.syncs == number:
            time.sleep(0.2)
            os.kill(os.getpid(), how)
        return start(*arguments)

    local._start = start_or_die  # type: ignore[method-assign]


def run(process: int, world_size: int, address: str, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train until step STEPS; process 2 dies in an average, process 3 joins later; all wait for it at step 20."""
    torch.set_num_threads(1)
    if process == 3:
        wait_for(lambda: (Path(folder) / "join").exists())
    model = make_model(seed=process)
    made = dict(options, outer=nesterov) if options.pop("outer", False) else options
    local = ElasticLocalSGD(
        model, address, EVERY, "int4", feedback=True, timeout_s=20, name=f"process {process}", **made
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if process == 2:
        die_in_average(local, 3)
    began, losses = local.steps, []
    while local.steps < STEPS:
        losses.append(train_step(model, optimizer, 1000 * process + local.steps))
        local.step()
        if local.steps == 20 and process == 0:
            (Path(folder) / "join").touch()
            send_to_parent("waiting")
            wait_for(lambda: (Path(folder) / "joined").exists())
    local.sync()
    names = local.view.names
    weights = all_weights(model)
    local.close()
    return {"began": began, "losses": losses, "weights": weights, "names": names, "report": local.syncs}


def joined(coordinator: Coordinator, count: int) -> bool:
    return len(coordinator._members) == count


@pytest.mark.parametrize(
    "options", [{"outer": True}, {"fragments": 2, "delay": 2, "mixing": 0.5}], ids=["diloco", "streaming"]
)
def test_one_of_three_dies_and_another_joins(
    tmp_path: Path, monkeypatch: Any, options: dict[str, Any]
) -> None:
    monkeypatch.setenv("DTCOMM_SECRET", SECRET["DTCOMM_SECRET"])
    with Coordinator("127.0.0.1", ranks=3) as coordinator:
        arguments = (coordinator.address, str(tmp_path), options)
        with spawn_ranks(run, 4, *arguments, backend=None, env=SECRET) as ranks:
            assert ranks.receive(0) == "waiting"
            wait_for(lambda: joined(coordinator, 3))  # two survivors and the one that waits
            (tmp_path / "joined").touch()
            outcomes = ranks.join(60)
    assert outcomes[2].exitcode == -signal.SIGKILL
    results = [outcomes[process].result for process in (0, 1, 3)]
    assert all(results), [str(outcome) for outcome in outcomes]
    assert [result["began"] for result in results[:2]] == [0, 0] and results[2]["began"] >= 20
    for result in results:
        assert torch.equal(result["weights"], results[0]["weights"])
        assert len(result["names"]) == 3 and not any("process 2" in name for name in result["names"])
        assert len({result["report"] for result in results}) == 1
    first = results[0]["losses"]
    assert sum(first[-4:]) < 0.8 * sum(first[:4])
    assert sum(results[2]["losses"][:4]) < 0.9 * sum(first[:4]), "it began with what the others had learnt"


def conserve(process: int, world_size: int, address: str) -> dict[str, Any]:
    """Make averages, in the third of which process 2 dies; return what it should have conserved and what it left."""
    torch.set_num_threads(1)
    model = make_model(seed=process)
    local = ElasticLocalSGD(
        model, address, EVERY, "int4", feedback=True, name=f"process {process}", timeout_s=20
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    failed, count_failure = [], local._count_failure

    def note_failure(what: str, error: Exception | None) -> None:
        failed.append(what)
        count_failure(what, error)

    local._count_failure = note_failure  # type: ignore[method-assign]
    if process == 2:
        die_in_average(local, 2)
    for step in range(3 * EVERY):
        train_step(model, optimizer, 1000 * process + step)
        if step < 3 * EVERY - 1:
            local.step()
    before = local.state_dict()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    local.step()
    after = local.state_dict()
    local.close()
    return {"weights": weights, "before": before, "after": after, "names": local.view.names, "failed": failed}


def test_survivors_residuals_are_conserved_when_a_rank_dies_in_an_average(monkeypatch: Any) -> None:
    monkeypatch.setenv("DTCOMM_SECRET", SECRET["DTCOMM_SECRET"])
    with (
        Coordinator("127.0.0.1", ranks=3) as coordinator,
        spawn_ranks(conserve, 3, coordinator.address, backend=None, env=SECRET) as ranks,
    ):
        outcomes = ranks.join(60)
    survivors = [outcomes[process].result for process in (0, 1)]
    assert all(survivors), [str(outcome) for outcome in outcomes]
    for result in survivors:
        assert len(result["names"]) == 2 and "average 3" in result["failed"]
    compressed = survivors[0]["after"]["residuals"].keys()
    assert compressed
    for name in compressed:
        common, moved = (survivors[0][when]["common"][name].double() for when in ("before", "after"))
        sent = 2 * (common - moved).flatten()
        offered = kept = torch.zeros(common.numel(), dtype=torch.float64)
        for result in survivors:
            offered = offered + (common - result["weights"][name]).flatten()
            offered = offered + result["before"]["residuals"][name]
            kept = kept + result["after"]["residuals"][name]
        assert torch.allclose(offered, sent + kept, atol=1e-6), (offered - sent - kept).abs().max()
        assert kept.abs().max() > 0


def fall_silent(process: int, world_size: int, address: str, folder: str) -> tuple[int, int, torch.Tensor]:
    """Make averages until all three take part again; process 2 stops in the second one, as a host without network."""
    torch.set_num_threads(1)
    model = make_model(seed=process)
    local = ElasticLocalSGD(
        model, address, EVERY, "int4", feedback=True, name=f"process {process}", timeout_s=2
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sizes = {len(local.view.names)}
    if process == 2:
        die_in_average(local, 1, signal.SIGSTOP)
    while not (Path(folder) / f"over at {local.steps}").exists():
        train_step(model, optimizer, 1000 * process + local.steps)
        if local.view.rank == 0 and len(local.view.names) == 3 and sizes == {2, 3}:
            sizes.add(0)  # the others are less than one average ahead, and all end at an average
            (Path(folder) / f"over at {(local.steps // EVERY + 3) * EVERY}").touch()
        local.step()
        sizes.add(len(local.view.names))
        time.sleep(0.01)
    local.sync()
    local.close()
    return local.view.number, len(local.view.names), all_weights(model)


@pytest.mark.slow
def test_a_rank_that_falls_silent_is_left_out_and_comes_back_when_it_wakes(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("DTCOMM_SECRET", SECRET["DTCOMM_SECRET"])
    with (
        Coordinator("127.0.0.1", ranks=3, timeout_s=6) as coordinator,
        spawn_ranks(fall_silent, 3, coordinator.address, str(tmp_path), backend=None, env=SECRET) as ranks,
    ):
        wait_for(lambda: len(coordinator.members()) == 3)
        wait_for(lambda: len(coordinator.members()) == 2)
        ranks.kill(2, signal.SIGCONT)
        outcomes = ranks.join(60)
    results = [outcome.result for outcome in outcomes]
    assert all(results), [str(outcome) for outcome in outcomes]
    for number, count, weights in results:
        assert number == results[0][0] > 2 and count == 3
        assert torch.equal(weights, results[0][2])


def repeat(
    process: int, world_size: int, address: str, failing: tuple[int, ...], options: dict[str, Any]
) -> dict[str, Any]:
    """Train with three ranks; on rank 1 some attempts fail after all messages have arrived, as on no other rank."""
    torch.set_num_threads(1)
    model = make_model(seed=0)
    made = dict(options, outer=nesterov)
    local = ElasticLocalSGD(
        model, address, EVERY, "int4", feedback=True, timeout_s=20, name=f"process {process}", **made
    )
    rank = local.view.rank  # the order of joining is not that of the processes
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    complete, begin_group = LocalSGD._complete, local._begin_group
    attempts, settled, taken_back = 0, residuals_at_rest(local), []

    def complete_or_fail(self: LocalSGD, average: Any) -> None:
        nonlocal attempts
        attempts += 1
        complete(self, average)
        if attempts in failing:
            dist.barrier()  # all have stored their residuals
            if rank == 1:
                raise DtcommError("a fault of this test")

    def compare_residuals() -> None:
        begin_group()
        now = residuals_at_rest(local)
        taken_back.append(now.keys() == settled.keys() and all(torch.equal(now[n], settled[n]) for n in now))

    local._begin_group = compare_residuals  # type: ignore[method-assign]
    with patch.object(LocalSGD, "_complete", complete_or_fail):
        for step in range(4 * EVERY):
            train_step(model, optimizer, 1000 * rank + step)
            local.step()
            settled.update(residuals_at_rest(local))
        local.sync()
    state = local.state_dict()
    local.close()
    kept = {name: state[name] for name in ("residuals", "common", "outer", "steps", "syncs", "averages")}
    return {
        "rank": rank,
        "state": kept,
        "weights": all_weights(model),
        "attempts": attempts,
        "taken back": taken_back,
    }


def residuals_at_rest(local: ElasticLocalSGD) -> dict[str, torch.Tensor]:
    """Return copies of the residuals of those weights of which no average is in flight."""
    busy = {
        name for average in local._in_flight for fragment in average.fragments for name in fragment.weights
    }
    residuals = local._error_state.state_dict()["residuals"]
    return {name: residual.clone() for name, residual in residuals.items() if name not in busy}


def run_and_repeat(failing: tuple[int, ...], options: dict[str, Any]) -> list[dict[str, Any]]:
    with (
        Coordinator("127.0.0.1", ranks=3) as coordinator,
        spawn_ranks(repeat, 3, coordinator.address, failing, options, backend=None, env=SECRET) as ranks,
    ):
        outcomes = ranks.join(60)
    assert all(outcome.ok for outcome in outcomes), [str(outcome) for outcome in outcomes]
    return sorted((outcome.result for outcome in outcomes), key=lambda result: int(result["rank"]))


def test_an_average_that_failed_on_one_rank_is_repeated_bit_for_bit(monkeypatch: Any) -> None:
    """The others have stored its residuals already, and set them back: nothing tells that it was repeated."""
    monkeypatch.setenv("DTCOMM_SECRET", SECRET["DTCOMM_SECRET"])
    undisturbed, repeated = run_and_repeat((), {}), run_and_repeat((3, 4), {})
    for expected, result in zip(undisturbed, repeated, strict=True):
        assert expected["taken back"] == [] and result["taken back"] == [True, True]
        assert result["attempts"] == expected["attempts"] + 2
        assert torch.equal(result["weights"], expected["weights"])
        assert_equal_states(result["state"], expected["state"])
        assert any(residual.abs().max() > 0 for residual in result["state"]["residuals"].values())


def test_averages_in_flight_are_repeated_too(monkeypatch: Any) -> None:
    """Of two fragments one fails while the messages of the other one are in flight."""
    monkeypatch.setenv("DTCOMM_SECRET", SECRET["DTCOMM_SECRET"])
    results = run_and_repeat((3, 4), {"fragments": 2, "delay": 3, "mixing": 0.5})
    for result in results:
        assert result["taken back"] == [True, True]
        assert torch.equal(result["weights"], results[0]["weights"])
        for name in ("common", "outer", "steps", "syncs", "averages"):
            assert_equal_states(result["state"][name], results[0]["state"][name])
    # Sixteen steps start eight averages; sync() makes one more of both fragments.
    assert results[0]["state"]["syncs"] == 9 and results[0]["attempts"] == 9 + 2


def assert_equal_states(value: Any, expected: Any) -> None:
    torch.testing.assert_close(value, expected, rtol=0, atol=0)


def join_wrongly(process: int, world_size: int, address: str, folder: str) -> Any:
    """Process 0 and 1 train; the others come with something else and are refused."""
    torch.set_num_threads(1)
    if process < 2:
        model = make_model(seed=process)
        local = ElasticLocalSGD(
            model, address, EVERY, "int4", feedback=True, name=f"process {process}", timeout_s=20
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if process == 0:
            (Path(folder) / "begun").touch()
        while not (Path(folder) / f"over at {local.steps}").exists():
            train_step(model, optimizer, local.steps)
            if process == 0 and (Path(folder) / "refused").exists():
                # Process 1 is less than one average ahead, and all ends at an average.
                (Path(folder) / f"over at {(local.steps // EVERY + 3) * EVERY}").touch()
                (Path(folder) / "refused").unlink()
            local.step()
        local.close()
        return local.view.names
    wait_for(lambda: (Path(folder) / "begun").exists())
    model = make_model(seed=0, width=WIDTH + (process == 2))
    if process == 4:
        os.environ["DTCOMM_SECRET"] = "another"
    spec = "int8" if process == 3 else "int4"
    try:
        if process == 5:
            import dtcomm

            dtcomm.__version__ = "0.0.9"
        ElasticLocalSGD(model, address, EVERY, spec, feedback=True, timeout_s=20)
    except JoinRefused as error:
        return str(error)
    finally:
        if process == 5:
            dtcomm.__version__ = "0.1.0"
    return "was not refused"


def test_another_model_codec_secret_or_version_is_refused(
    tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setenv("DTCOMM_SECRET", SECRET["DTCOMM_SECRET"])
    with (
        Coordinator("127.0.0.1", ranks=2) as coordinator,
        spawn_ranks(join_wrongly, 6, coordinator.address, str(tmp_path), backend=None, env=SECRET) as ranks,
    ):
        wait_for(lambda: sum("refused" in record.message for record in caplog.records) == 4)
        assert len(coordinator.members()) == 2
        (tmp_path / "refused").touch()
        results = [outcome.result for outcome in ranks.join(60)]
    assert len(results[0]) == len(results[1]) == 2
    text = dict(zip(("model", "codec", "secret", "version"), results[2:], strict=True))
    assert "digest" in text["model"] and text["model"].count("elements") == 2
    assert "int8" in text["codec"] and "int4" in text["codec"]
    assert "DTCOMM_SECRET" in text["secret"]
    assert "dtcomm: 0.0.9" in text["version"] and "0.1.0" in text["version"]
    assert not any(SECRET["DTCOMM_SECRET"] in record.message for record in caplog.records)


def outlive_coordinator(process: int, world_size: int, address: str) -> tuple[str, bool]:
    torch.set_num_threads(1)
    model = make_model(seed=0)
    local = ElasticLocalSGD(model, address, 1, timeout_s=1)
    send_to_parent("joined")
    try:
        while True:
            local.step()
            time.sleep(0.01)
    except PeerLost as error:
        local.close()
        return str(error), bool(local._common[0].isfinite().all())


def test_members_say_that_the_coordinator_is_gone(monkeypatch: Any) -> None:
    monkeypatch.delenv("DTCOMM_SECRET", raising=False)
    with (
        Coordinator("127.0.0.1", ranks=2) as coordinator,
        spawn_ranks(outlive_coordinator, 2, coordinator.address, backend=None) as ranks,
    ):
        _receive_from_all(ranks, 2)
        coordinator.close()
        results = [outcome.result for outcome in ranks.join(60)]
    assert all(coordinator.address in text and is_finite for text, is_finite in results)


COORDINATOR = """
from dtcomm.extensions.elastic import Coordinator
coordinator = Coordinator("127.0.0.1", ranks=2)
print(coordinator.address, flush=True)
coordinator.wait()
"""


def test_members_do_not_wait_for_a_coordinator_that_is_stopped(monkeypatch: Any) -> None:
    """Its connections stay open, as those of a suspended machine."""
    monkeypatch.delenv("DTCOMM_SECRET", raising=False)
    with subprocess.Popen([sys.executable, "-c", COORDINATOR], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        try:
            with spawn_ranks(outlive_coordinator, 2, address, backend=None) as ranks:
                _receive_from_all(ranks, 2)
                process.send_signal(signal.SIGSTOP)
                results = [outcome.result for outcome in ranks.join(60)]
        finally:
            process.kill()
    assert all(address in text and is_finite for text, is_finite in results)


def _receive_from_all(ranks: RunningRanks, count: int) -> None:
    for rank in range(count):
        assert ranks.receive(rank) == "joined"


def go_on(process: int, world_size: int, address: str, folder: str) -> dict[str, Any]:
    """Train; wait at step 6 for the parent, who restarts the coordinator; then process 2 dies in an average."""
    torch.set_num_threads(1)
    model = make_model(seed=process)
    local = ElasticLocalSGD(
        model, address, EVERY, "int4", feedback=True, timeout_s=20, name=f"process {process}"
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if process == 2:
        die_in_average(local, 3)
    views = []
    while local.steps < 6 * EVERY:
        train_step(model, optimizer, 1000 * process + local.steps)
        if local.steps == 6:
            send_to_parent("waiting")
            wait_for(lambda: (Path(folder) / "go on").exists())
        local.step()
        views.append((local.view.number, len(local.view.names)))
    weights = all_weights(model)
    local.close()
    return {"views": views, "syncs": local.syncs, "weights": weights}


def test_a_cut_connection_and_a_new_coordinator_do_not_disturb_training(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """All ask for a verdict while there is no coordinator, and form a new group with the one that is started again."""
    monkeypatch.setenv("DTCOMM_SECRET", SECRET["DTCOMM_SECRET"])
    earlier = Coordinator("127.0.0.1", ranks=3)
    with (
        earlier,
        Relay(earlier.port) as relay,
        spawn_ranks(go_on, 3, relay.address, str(tmp_path), backend=None, env=SECRET) as ranks,
    ):
        for rank in range(3):
            assert ranks.receive(rank) == "waiting"
        relay.cut()
        earlier.close()
        (tmp_path / "go on").touch()
        time.sleep(0.5)
        with Coordinator("127.0.0.1", earlier.port, ranks=3) as coordinator:
            relay.restore()
            outcomes = ranks.join(60)
            assert coordinator._number == 2
    assert outcomes[2].exitcode == -signal.SIGKILL
    results = [outcomes[process].result for process in (0, 1)]
    assert all(results), [str(outcome) for outcome in outcomes]
    for result in results:
        assert result["views"] == [(1, 3)] * (4 * EVERY - 1) + [(2, 2)] * (2 * EVERY + 1)
        assert result["syncs"] == 6 and torch.equal(result["weights"], results[0]["weights"])


def continue_from_state(process: int, world_size: int, address: str, saved: Any) -> tuple[int, torch.Tensor]:
    torch.set_num_threads(1)
    model = make_model(seed=7 + process)
    state = saved if process == 0 else None
    if state is not None:
        with pytest.raises(ValueError, match="steps"):
            ElasticLocalSGD(
                model, address, EVERY, "int4", feedback=True, state={**saved, "steps": saved["steps"] + 1}
            )
    local = ElasticLocalSGD(model, address, EVERY, "int4", feedback=True, state=state, timeout_s=20)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    local.close()
    return local.steps, weights


def test_the_member_with_a_saved_state_gives_it_to_the_others(monkeypatch: Any) -> None:
    monkeypatch.delenv("DTCOMM_SECRET", raising=False)
    with Coordinator("127.0.0.1", ranks=1) as coordinator:
        with spawn_ranks(saved_state, 1, coordinator.address, backend=None) as ranks:
            (saved,) = [outcome.result for outcome in ranks.join(60)]
    with (
        Coordinator("127.0.0.1", ranks=3) as coordinator,
        spawn_ranks(continue_from_state, 3, coordinator.address, saved, backend=None) as ranks,
    ):
        results = [outcome.result for outcome in ranks.join(60)]
    expected = torch.cat([common.flatten() for common in saved["common"].values()])
    for steps, weights in results:
        assert steps == 6
        assert torch.equal(weights, expected)


def saved_state(process: int, world_size: int, address: str) -> dict[str, Any]:
    model = make_model(seed=3)
    local = ElasticLocalSGD(model, address, EVERY, "int4", feedback=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(6):
        train_step(model, optimizer, step)
        local.step()
    state = local.state_dict()
    local.close()
    return state
