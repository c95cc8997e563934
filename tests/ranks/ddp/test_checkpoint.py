"""Checkpoints of the hook: a resumed run has the same bits, and residuals keep their sum on other numbers of ranks."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
import torch

from dtcomm import ddp
from dtcomm.compress.checkpoint import seal
from dtcomm.launch.ranks import run_ranks
from tests.unit.ddp.models import SMALL_BUCKETS, train, wrapped


def to_bytes(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def from_bytes(data: bytes) -> Any:
    return torch.load(io.BytesIO(data))  # weights_only, the default


def compare_resumed(rank: int, world_size: int, spec: str) -> bool:
    """Return whether eight steps equal four steps, a checkpoint, a new DDP model, and four more steps."""
    uninterrupted, first = wrapped(**SMALL_BUCKETS), wrapped(**SMALL_BUCKETS)
    ddp.compress(uninterrupted, spec, feedback=True, seed=7)
    state = ddp.compress(first, spec, feedback=True, seed=7)
    train(uninterrupted, rank, range(8))
    train(first, rank, range(4))
    checkpoint = to_bytes({"model": first.module.state_dict(), "compression": state.state_dict()})

    # Another seed for the weights and the default buckets: only the checkpoint makes them equal.
    second = wrapped(seed=1)
    state = ddp.compress(second, spec, feedback=True)
    values = from_bytes(checkpoint)
    second.module.load_state_dict(values["model"])
    state.load_state_dict(values["compression"])
    assert state.steps == 4
    train(second, rank, range(4, 8))
    return all(
        torch.equal(a, b) for a, b in zip(uninterrupted.parameters(), second.parameters(), strict=True)
    )


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("spec", ["int8", "fp16", "int8:round=stochastic"])
def test_a_resumed_run_continues_bit_for_bit(ranks: int, spec: str) -> None:
    assert run_ranks(compare_resumed, ranks, spec) == [True] * ranks


def save(rank: int, world_size: int) -> bytes:
    model = wrapped(**SMALL_BUCKETS)
    state = ddp.compress(model, "int8", feedback=True)
    train(model, rank, range(3))
    return to_bytes(state.state_dict())


def load(rank: int, world_size: int, checkpoints: list[bytes]) -> tuple[bytes, str]:
    states = [from_bytes(checkpoint) for checkpoint in checkpoints]
    model = wrapped()
    state = ddp.compress(model, "int8", feedback=True)
    message = ""
    try:
        state.load_state_dict(states[0])
    except ValueError as error:
        message = str(error)
    state.load_state_dict(states)
    resaved = to_bytes(state.state_dict())
    train(model, rank, range(3, 5))
    assert state.steps == 5 and state.error is None and not state.events
    return resaved, message


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3)])
def test_residuals_keep_their_sum_when_the_world_size_changes(before: int, after: int) -> None:
    states = run_ranks(save, before)
    results = run_ranks(load, after, states)
    assert all(f"saved by one of {before} ranks, the group has {after}" in message for _, message in results)
    old = [from_bytes(data)["residuals"] for data in states]
    new = [from_bytes(data)["residuals"] for data, _ in results]
    for name in old[0]:
        into = sum(residuals[name].double() for residuals in old)
        out_of = sum(residuals[name].double() for residuals in new if name in residuals)
        assert isinstance(into, torch.Tensor)
        assert isinstance(out_of, torch.Tensor)
        assert into.any()
        torch.testing.assert_close(into, out_of, rtol=0, atol=1e-6 * float(into.abs().max()))


def check_refusals(rank: int, world_size: int) -> list[str]:
    state = ddp.compress(wrapped(), "int8", feedback=True)
    good = state.state_dict()
    bad: list[Any] = [
        {**good, "version": 99},
        seal({**good, "residuals": {"gone.weight": torch.zeros(4)}}),
        seal({**good, "residuals": {"first.weight": torch.zeros(4)}}),
        [seal({**good, "rank": 1}), seal({**good, "rank": 0})],
    ]
    messages = []
    for invalid_state in bad:
        with pytest.raises(ValueError) as error:
            state.load_state_dict(invalid_state)
        messages.append(str(error.value))
    return messages


def test_a_state_of_another_model_or_version_is_refused_with_the_reason() -> None:
    for version, name, size, order in run_ranks(check_refusals, 2):
        assert "version 99" in version
        assert "gone.weight" in name
        assert "first.weight" in size
        assert "2304" in size
        assert "ranks [1, 0]" in order


def load_into_other_options(rank: int, world_size: int) -> tuple[list[str], list[bool], list[str]]:
    """Return the refusals, whether strict=False loaded the residuals, and what is saved afterwards beside them."""
    saved = {}
    for spec, feedback in (("powersgd:rank=2", True), ("int8", "ef21"), ("int8", True)):
        model = wrapped(**SMALL_BUCKETS)
        state = ddp.compress(model, spec, feedback=feedback)
        train(model, rank, range(3))
        saved[spec, feedback] = from_bytes(to_bytes(state.state_dict()))
    messages, loaded, kinds = [], [], []
    for key, spec, feedback in (
        (("powersgd:rank=2", True), "int8", True),
        (("int8", "ef21"), "int8", True),
        (("int8", True), "int4", False),
    ):
        model = wrapped(**SMALL_BUCKETS)
        state = ddp.compress(model, spec, feedback=feedback)
        with pytest.raises(ValueError) as error:
            state.load_state_dict(saved[key])
        assert state.steps == 0 and not state.state_dict()["residuals"]
        messages.append(str(error.value))
        state.load_state_dict(saved[key], strict=False)
        again = state.state_dict()
        loaded.append(
            state.steps == 3
            and again["residuals"].keys() == saved[key]["residuals"].keys()
            and all(
                torch.equal(again["residuals"][name], saved[key]["residuals"][name])
                for name in again["residuals"]
            )
        )
        train(model, rank, range(3, 5))
        assert state.error is None
        kinds += [kind for kind in ("velocities", "references") if state.state_dict()[kind]]
        kinds += [kind for kind, tensors in state.state_dict()["factors"].items() if tensors]
    return messages, loaded, kinds


def test_a_state_of_other_options_is_refused_and_its_residuals_can_be_loaded() -> None:
    for (scheme, feedback, both), loaded, kinds in run_ranks(load_into_other_options, 2):
        assert re.search(
            r"saved with codec='.*\* -> powersgd:rank=2' \(here '.*\* -> int8'\); strict=False", scheme
        )
        assert "saved with feedback='ef21' (here 'True'); strict=False" in feedback
        assert re.search(r"-> int8' \(here '.*-> int4'\), feedback='True' \(here 'False'\); strict", both)
        assert loaded == [True] * 3 and kinds == []
