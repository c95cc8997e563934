"""References of AQ-SGD: what both ends of a link know about the activations of each training sample.

Wang et al. 2022, "Fine-tuning Language Models over Slow Networks using Activation Compression with Guarantees"
(arXiv:2206.01299): the sender encodes the difference between a sample's activation and its reference, which is what the
receiver had of the same sample the last time. Both add the decoded difference to their reference, so that the
references stay equal, bit for bit. The first time a sample is sent, it travels uncompressed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dtcomm.codecs import Codec
from dtcomm.compress.residuals import flat_copies
from dtcomm.kernels import ops


class SampleReferences:
    """References of one tensor between two stages: sample → fp32 tensor [elements of a sample].

    Attributes:
        codec: Codec of the differences.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._references: dict[int, torch.Tensor] = {}

    def known(self, samples: Sequence[int]) -> torch.Tensor:
        """Return which of ``samples`` have a reference, bool [samples]; the same at both ends of the link."""
        return torch.tensor([sample in self._references for sample in samples], dtype=torch.bool)

    def store(self, samples: Sequence[int], rows: torch.Tensor) -> None:
        """Make the references of samples that have travelled uncompressed, from ``rows`` [samples, ...]."""
        for sample, row in zip(samples, rows, strict=True):
            self._references[sample] = row.detach().flatten().to(torch.float32, copy=True)

    def encode(self, samples: Sequence[int], rows: torch.Tensor, key: int) -> torch.Tensor:
        """Return the payload of the differences of ``rows`` [samples, ...], and advance the references.

        Args:
            samples: The samples of the rows; all have a reference.
            rows: Their activations.
            key: Key of stochastic rounding.
        """
        references = self._stack(samples)
        payload = ops.encode(self.codec, rows.detach().flatten(1).float() - references, key=key)
        self._advance(samples, references, payload)
        return payload

    def payload_bytes(self, samples: Sequence[int]) -> int:
        """Return the size of the payload of some samples."""
        numel = sum(self._references[sample].numel() for sample in samples)
        return self.codec.wire_bytes(numel, torch.float32)

    def decode(self, samples: Sequence[int], payload: torch.Tensor) -> torch.Tensor:
        """Advance the references by a payload; return them, fp32 [samples, elements of a sample]."""
        return self._advance(samples, self._stack(samples), payload)

    def nbytes(self) -> int:
        """Return the bytes of the references."""
        return sum(reference.nbytes for reference in self._references.values())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return copies on the CPU, keyed by the sample."""
        return {
            str(sample): reference.detach().to("cpu", copy=True)
            for sample, reference in self._references.items()
        }

    def load_state_dict(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace all references."""
        self._references = {int(name): value for name, value in flat_copies(tensors, "reference").items()}

    def _stack(self, samples: Sequence[int]) -> torch.Tensor:
        return torch.stack([self._references[sample] for sample in samples])

    def _advance(
        self, samples: Sequence[int], references: torch.Tensor, payload: torch.Tensor
    ) -> torch.Tensor:
        difference = ops.decode(self.codec, payload, references.numel()).view_as(references)
        advanced = references.to(difference.device) + difference
        for sample, reference in zip(samples, advanced, strict=True):
            self._references[sample] = reference.clone()
        return advanced
