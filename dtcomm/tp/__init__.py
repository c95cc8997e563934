"""Tensor parallelism with compressed communication: layers, and styles for `parallelize_module`."""

from dtcomm.tp.blocks import ParallelAttention, ParallelMLP
from dtcomm.tp.calibrate import Calibration, calibrate
from dtcomm.tp.embedding import VocabParallelEmbedding
from dtcomm.tp.linear import ColumnParallelLinear, RowParallelLinear
from dtcomm.tp.plan import KINDS, PLANS
from dtcomm.tp.prepare import PrepareModuleInput, PrepareModuleOutput, SequenceParallel
from dtcomm.tp.sharded import full_state_dict
from dtcomm.tp.styles import ColwiseParallel, RowwiseParallel
from dtcomm.tp.swap import Swapped, compress
from dtcomm.tp.wire import Wire, wire

__all__ = [
    "KINDS",
    "PLANS",
    "Calibration",
    "ColumnParallelLinear",
    "ColwiseParallel",
    "ParallelAttention",
    "ParallelMLP",
    "PrepareModuleInput",
    "PrepareModuleOutput",
    "RowParallelLinear",
    "RowwiseParallel",
    "SequenceParallel",
    "Swapped",
    "VocabParallelEmbedding",
    "Wire",
    "calibrate",
    "compress",
    "full_state_dict",
    "wire",
]
