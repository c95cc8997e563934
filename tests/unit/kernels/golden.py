"""Golden payloads: the bytes of the wire format since its first version.

``python -m tests.unit.kernels.golden`` writes the files. For a new codec that adds its file; a changed file means a
change of docs/reference/wire-format.md, after which peers of two versions cannot communicate.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from dtcomm.codecs import names
from dtcomm.kernels import use
from dtcomm.kernels.ops import encode

FOLDER = Path(__file__).parent / "golden"
# File name -> spec: every registered codec with its defaults, and options.
SPECS = {name: name for name in names()} | {
    "bf16-stochastic": "bf16:round=stochastic",
    "int8-stochastic": "int8:round=stochastic",
    "int8-asymmetric": "int8:symmetric=false",
    "int8-fp32-scales": "int8:block=64,scale=fp32",
    "int8-all-options": "int8:block=16,scale=fp32,symmetric=false,round=stochastic",
    "int8-long-blocks": "int8:block=2048",
    "int6-stochastic": "int6:round=stochastic",
    "int5-asymmetric": "int5:symmetric=false",
    "int4-stochastic": "int4:round=stochastic",
    "int4-asymmetric": "int4:symmetric=false",
    "int3-fp32-scales": "int3:block=64,scale=fp32",
    "int3-all-options": "int3:block=16,scale=fp32,symmetric=false,round=stochastic",
    "int2-long-blocks": "int2:block=2048,symmetric=false",
    "fp8_e4m3-stochastic": "fp8_e4m3:round=stochastic",
    "fp8_e4m3-fp32-scales": "fp8_e4m3:block=16,scale=fp32",
    "mxfp8-e5m2": "mxfp8:element=e5m2",
    "fp8_e3m4-stochastic": "fp8_e3m4:round=stochastic",
    "fp8_e3m4-fp32-scales": "fp8_e3m4:block=16,scale=fp32",
    "sign-fp32-scales": "sign:block=16,scale=fp32",
    "sign-long-blocks": "sign:block=2048",
    "fp8_e5m2-all-options": "fp8_e5m2:block=2048,scale=fp32,round=stochastic",
    "int4-every-option": "int4:block=32,rotate=hadamard,round=stochastic,spikes=1",
    "int3-asymmetric-rotated-spikes": "int3:symmetric=false,rotate=hadamard,spikes=1",
    "mxfp4-rotated": "mxfp4:rotate=hadamard",
    "sign-rotated": "sign:rotate=hadamard",
    "int8-rotated": "int8:rotate=hadamard",
    "int8-spikes": "int8:spikes=1",
    "int8-spikes-of-long-blocks": "int8:block=512,scale=fp32,symmetric=false,spikes=1",
    "int8-rotated-spikes-stochastic": "int8:block=128,round=stochastic,rotate=hadamard,spikes=1",
    "topk-stochastic": "topk:ratio=0.05,values=int4,round=stochastic",
    "topk-bitmap": "topk:ratio=0.5,values=fp32",
    "topk-fp16": "topk:ratio=0.08,values=fp16",
    "randk-int8": "randk:ratio=0.3,values=int8",
    "randk-fp32": "randk:ratio=1.0,values=fp32",
    "exact-16": "exact:bits=16",
    "exact-long-blocks": "exact:block=2048",
}
NUMEL, KEY, OFFSET = 1107, 0x0123456789ABCDEF, 2**32 - 500


def golden_input() -> torch.Tensor:
    """1107 floats made by integer arithmetic: ordinary ones of many magnitudes, then all special ones."""
    i = np.arange(NUMEL, dtype=np.uint64)
    mixed = (i * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)
    exponent = np.uint64(110) + i // np.uint64(48)
    words = ((mixed & np.uint64(0x807FFFFF)) | exponent << np.uint64(23)).astype(np.uint32)
    special = [0, 0x80000000, 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000]
    special += [
        0x7FC00000,
        0xFFC00001,
        0x7F800001,
        0x477FEFFF,
        0x477FF000,
        0x33000000,
        0x33000001,
        0x3F808000,
    ]
    words[-17 * 5 : -17 * 5 + 17] = special[:17]
    words[-40:] = 0
    return torch.from_numpy(words.view(np.float32))


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with use("reference"):
        for name, spec in SPECS.items():
            payload = encode(spec, golden_input(), KEY, OFFSET)
            (FOLDER / f"{name}.bin").write_bytes(payload.numpy().tobytes())


if __name__ == "__main__":
    main()
