"""Residuals and AQ-SGD's references: their memory, checkpoints, and redistribution among other ranks."""

from __future__ import annotations

import io

import pytest
import torch

from dtcomm.codecs import codec
from dtcomm.compress import checkpoint
from dtcomm.compress.residuals import Residuals, SampleReferences, expand_saved, redistribute


def test_a_residual_starts_as_zeros_and_keeps_its_memory() -> None:
    residuals = Residuals()
    gradient = torch.randn(7, dtype=torch.bfloat16)
    first = residuals.get("w", gradient)
    assert first.dtype == torch.float32
    assert first.shape == (7,)
    assert not first.any()
    assert residuals.get("w", gradient) is first


def test_a_loaded_residual_of_another_size_is_refused_by_name() -> None:
    residuals = Residuals()
    residuals.load_state_dict({"w": torch.zeros(5)})
    with pytest.raises(ValueError, match="'w' has 5 elements, its gradient 7"):
        residuals.get("w", torch.zeros(7))


def test_a_state_is_a_copy_in_both_directions() -> None:
    residuals, other = Residuals(), Residuals()
    residuals.get("w", torch.zeros(3)).fill_(1.0)
    saved = residuals.state_dict()
    other.load_state_dict(saved)
    residuals.get("w", torch.zeros(3)).fill_(2.0)
    saved["w"].fill_(3.0)
    assert other.get("w", torch.zeros(3)).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(("form", "share"), [("fp32", 1.0), ("bf16", 0.5), ("int8", 0.27)])
def test_states_have_the_form_in_which_residuals_are_kept_and_load_exactly(form: str, share: float) -> None:
    residuals, other = Residuals(form), Residuals(form)
    residuals.add("w", torch.linspace(-1, 1, 1000), key=3)
    saved = residuals.state_dict()
    stream = io.BytesIO()
    torch.save(saved, stream)
    assert stream.tell() < 4000 * share + 2000
    stream.seek(0)
    loaded = torch.load(stream, weights_only=True)
    checkpoint.residuals({"w": 1000})("residuals", loaded)
    other.load_state_dict(expand_saved(loaded))
    assert torch.equal(other.get("w", torch.zeros(1000)), residuals.get("w", torch.zeros(1000)))


def test_a_payload_that_does_not_match_its_elements_is_refused() -> None:
    residuals = Residuals("int8")
    residuals.add("w", torch.ones(100))
    good = residuals.state_dict()["w"]
    for wrong in (
        {"numel": 5000},
        {"numel": -1},
        {"numel": 1.0},
        {"int8": good["int8"][:-1]},
        {"int8": None},
    ):
        with pytest.raises(
            ValueError, match="residual of 'w': its payload and its number of elements do not"
        ):
            checkpoint.residuals()("residuals", {"w": good | wrong})
    with pytest.raises(ValueError, match="has 100 elements, the model 99"):
        checkpoint.residuals({"w": 99})("residuals", {"w": good})


def test_only_fp32_tensors_can_be_loaded() -> None:
    with pytest.raises(ValueError, match="residual of 'w'"):
        Residuals().load_state_dict({"w": torch.zeros(3, dtype=torch.float64)})


def test_scale_follows_a_loss_scale() -> None:
    residuals = Residuals()
    residuals.get("w", torch.zeros(2)).fill_(8.0)
    residuals.scale(0.25)
    assert residuals.get("w", torch.zeros(2)).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("before", [1, 2, 3, 5])
@pytest.mark.parametrize("after", [1, 2, 3, 4, 7])
def test_the_sum_over_ranks_survives_a_change_of_world_size(before: int, after: int) -> None:
    # Integers, so that the sums are exact; "late" exists on the last rank only.
    states = [{"w": torch.randint(-50, 50, (11,)).float()} for _ in range(before)]
    states[-1]["late"] = torch.full((3,), 4.0)
    shared = [redistribute(states, rank, after) for rank in range(after)]
    for name in ("w", "late"):
        old = sum(state[name] for state in states if name in state)
        new = sum(state[name] for state in shared if name in state)
        assert torch.equal(torch.as_tensor(old), torch.as_tensor(new))


def test_redistribution_does_not_change_its_inputs() -> None:
    states = [{"w": torch.ones(2)}, {"w": torch.ones(2)}]
    redistribute(states, 0, 1)
    assert states[0]["w"].tolist() == [1.0, 1.0]


def test_redistribution_refuses_sizes_that_differ_and_ranks_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="residual of 'w'"):
        redistribute([{"w": torch.ones(2)}, {"w": torch.ones(3)}], 0, 1)
    with pytest.raises(ValueError, match="rank 2 of world_size 2"):
        redistribute([], 2, 2)


def test_backups_are_restored_unless_they_were_dropped() -> None:
    residuals = Residuals("int8")
    for name in ("applied", "failed"):
        residuals.add(name, torch.linspace(-1, 1, 64))
    before = expand_saved(residuals.state_dict())
    for name in ("applied", "failed"):
        residuals.back_up(name)
        residuals.get(name, torch.zeros(64)).mul_(2)
        residuals.put(name)
    residuals.drop_backups(["applied", "unknown"])
    residuals.restore()
    after = expand_saved(residuals.state_dict())
    assert torch.equal(after["failed"], before["failed"])
    assert not torch.allclose(after["applied"], before["applied"], atol=0.1)
    residuals.back_up("failed")
    residuals.drop_backups()
    residuals.reset("failed")
    residuals.restore()
    assert "failed" not in residuals


@pytest.mark.parametrize("spec", ["int4", "int3:round=stochastic", "topk:ratio=0.25"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_ends_have_the_same_references(spec: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(4, 3, 40, generator=generator)
    sender, receiver = SampleReferences(codec(spec)), SampleReferences(codec(spec))
    assert not sender.known([0, 1]).any()
    first = (target + torch.randn(target.shape, generator=generator)).to(dtype)
    for end in (sender, receiver):
        end.store([7, 1, 5, 2], first)
    assert sender.known([1, 3, 7]).tolist() == [True, False, True]
    assert sender.nbytes() == 4 * 120 * 4
    errors = []
    for step in range(12):
        samples, rows = ([1, 2], target[[1, 3]]) if step % 2 else ([5, 7, 1], target[[2, 0, 1]])
        payload = sender.encode(samples, rows.to(dtype), key=step)
        assert len(payload) == receiver.payload_bytes(samples)
        received = receiver.decode(samples, payload)
        for end in (sender, receiver):
            saved = end.state_dict()
            end.load_state_dict(saved)
        assert all(torch.equal(a, receiver.state_dict()[name]) for name, a in sender.state_dict().items())
        errors.append(float((received - rows.flatten(1)).norm() / rows.norm()))
    assert errors[-1] < 0.2 * errors[0]


def test_other_tensors_are_refused() -> None:
    references = SampleReferences(codec("int8"))
    with pytest.raises(ValueError, match="reference of '3': expected an fp32 tensor"):
        references.load_state_dict({"3": torch.zeros(2, dtype=torch.float64)})
