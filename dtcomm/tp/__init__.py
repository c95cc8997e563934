"""Tensor parallelism with compressed communication.

- Layers: `ColumnParallelLinear`, `RowParallelLinear`, `VocabParallelEmbedding`.
- `compress` replaces the layers of an existing model. It has plans for known models;
  `dtcomm.extensions.calibrate` finds one for another, and chooses a codec for each layer.
- Styles for torch's `parallelize_module`: `ColwiseParallel`, `RowwiseParallel`, `SequenceParallel`,
  `PrepareModuleInput`, `PrepareModuleOutput`. `dtcomm.tp.hf_transformers` has styles for transformers.
- `AllReduce` sums activations for inference engines; `CustomAllReduce` has the methods of vLLM's and SGLang's slot.
- `dtcomm.tp.functional` has the differentiable collectives that all of them use.
"""

from dtcomm.tp.comm_config import CommConfig
from dtcomm.tp.convert_model import TPState, compress
from dtcomm.tp.inference import AllReduce, CustomAllReduce
from dtcomm.tp.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from dtcomm.tp.sharded_module import full_state_dict
from dtcomm.tp.styles import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

__all__ = [
    "AllReduce",
    "ColumnParallelLinear",
    "ColwiseParallel",
    "CommConfig",
    "CustomAllReduce",
    "PrepareModuleInput",
    "PrepareModuleOutput",
    "RowParallelLinear",
    "RowwiseParallel",
    "SequenceParallel",
    "TPState",
    "VocabParallelEmbedding",
    "compress",
    "full_state_dict",
]
