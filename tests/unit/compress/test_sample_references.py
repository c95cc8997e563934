"""AQ-SGD's references stay equal at both ends of a link, and follow the activations."""

from __future__ import annotations

import pytest
import torch

from dtcomm.codecs import codec
from dtcomm.compress.sample_references import SampleReferences


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
