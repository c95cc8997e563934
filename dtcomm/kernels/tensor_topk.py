"""``topk:scope=tensor`` in torch: the largest elements of everything that is encoded together, on any device.

`dtcomm.codecs.TopK` describes the payload: positions, ascending, in 32 bits, then values.
"""

from __future__ import annotations

import torch

from dtcomm.codecs import TopK
from dtcomm.codecs.sparse import POSITION_BYTES

# The type of values, the type of their codes, and the code of NaN.
_TYPES = {
    "bf16": (torch.bfloat16, torch.int16, 0x7FC0),
    "fp16": (torch.float16, torch.int16, 0x7E00),
    "fp32": (torch.float32, torch.int32, 0x7FC00000),
}


def encode(codec: TopK, x: torch.Tensor) -> torch.Tensor:
    """The payload of an fp32 tensor [n], without padding."""
    magnitudes = x.view(torch.int32).bitwise_and(0x7FFFFFFF).long()
    # Numbers that all differ: the larger magnitude first, of equal ones the smaller index.
    ranking = (magnitudes << 32) - torch.arange(x.numel(), device=x.device)
    positions = ranking.topk(codec.kept_of_tensor(x.numel()), sorted=False).indices.sort().values
    values = x[positions]
    dtype, integers, nan = _TYPES[codec.values]
    # Conversions give a NaN other bits in a vector.
    codes = torch.where(values.isnan(), nan, values.to(dtype).view(integers))
    return torch.cat([positions.int().view(torch.uint8), codes.view(torch.uint8)])


def decode(codec: TopK, payload: torch.Tensor, numel: int) -> torch.Tensor:
    """The fp32 tensor of a payload without padding; values at positions outside it are ignored."""
    split = POSITION_BYTES * codec.kept_of_tensor(numel)
    positions = payload[:split].view(torch.int32).long()
    values = payload[split:].clone().view(_TYPES[codec.values][0]).float()
    outside = (positions < 0) | (positions >= numel)
    decoded = torch.zeros(numel + 1, device=payload.device)
    return decoded.scatter_(0, torch.where(outside, numel, positions), values)[:numel]
