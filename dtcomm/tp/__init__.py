"""Tensor parallelism with compressed communication.

- Layers: `ColumnParallelLinear`, `RowParallelLinear`, `VocabParallelEmbedding`, `ParallelMLP`, `ParallelAttention`.
- `compress` replaces the layers of an existing model; `calibrate` chooses a codec for each of them. `PLANS` has plans
  for known models, and `propose_plan` finds one for another.
- Styles for torch's `parallelize_module`: `ColwiseParallel`, `RowwiseParallel`, `SequenceParallel`,
  `PrepareModuleInput`, `PrepareModuleOutput`. `dtcomm.tp.hf_transformers` has styles for transformers.
- `AllReduce` sums activations for inference engines; `CustomAllReduce` has the methods of vLLM's and SGLang's slot.
- `dtcomm.tp.functional` has the differentiable collectives that all of them use.
"""

from dtcomm.tp.blocks import ParallelAttention, ParallelMLP
from dtcomm.tp.calibrate import Calibration, calibrate
from dtcomm.tp.comm_config import CommConfig, LayerTraffic, make_comm_config
from dtcomm.tp.convert_model import compress
from dtcomm.tp.inference import AllReduce, CustomAllReduce, SumChoice
from dtcomm.tp.layer_plan import KINDS, PLANS
from dtcomm.tp.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from dtcomm.tp.propose import Proposal, ProposedLayer, propose_plan
from dtcomm.tp.sharded_module import full_state_dict
from dtcomm.tp.state import State
from dtcomm.tp.styles import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

__all__ = [
    "KINDS",
    "PLANS",
    "AllReduce",
    "Calibration",
    "ColumnParallelLinear",
    "ColwiseParallel",
    "CommConfig",
    "CustomAllReduce",
    "LayerTraffic",
    "ParallelAttention",
    "ParallelMLP",
    "PrepareModuleInput",
    "PrepareModuleOutput",
    "Proposal",
    "ProposedLayer",
    "RowParallelLinear",
    "RowwiseParallel",
    "SequenceParallel",
    "State",
    "SumChoice",
    "VocabParallelEmbedding",
    "calibrate",
    "compress",
    "full_state_dict",
    "make_comm_config",
    "propose_plan",
]
