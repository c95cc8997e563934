"""Payloads that no encoder makes: kernels read them without leaving their memory, the verbs refuse them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dtcomm import _C, errors
from dtcomm.codecs import Codec, TopK


def refuse(codec: Codec, payloads: Sequence[torch.Tensor], numel: int) -> None:
    """Raises PayloadCorrupt, with the granule and the reason, where one of the `payloads` has positions that no
    encoder of `codec` writes. A few nanoseconds a kept element; codecs without positions cost nothing. Payloads are
    on the CPU and of the right size; those of other devices are not looked at.
    """
    if not isinstance(codec, TopK):
        return
    for i, payload in enumerate(payloads):
        if payload.device.type == "cpu":
            why = _C.why_corrupt(codec.native(), payload.data_ptr(), numel)
            if why:
                raise errors.PayloadCorrupt(f"payload {i} in codec {str(codec)!r}, {why}")
