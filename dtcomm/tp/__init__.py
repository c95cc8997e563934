"""Tensor parallelism with compressed communication: layers, and styles for `parallelize_module`."""

from dtcomm.tp.blocks import ParallelAttention, ParallelMLP
from dtcomm.tp.calibrate import Calibration, calibrate
from dtcomm.tp.comm_config import Wire, wire
from dtcomm.tp.convert_model import Swapped, compress
from dtcomm.tp.embedding import VocabParallelEmbedding
from dtcomm.tp.layer_plan import KINDS, PLANS
from dtcomm.tp.linear import ColumnParallelLinear, RowParallelLinear
from dtcomm.tp.prepare import PrepareModuleInput, PrepareModuleOutput, SequenceParallel
from dtcomm.tp.sharded_module import full_state_dict
from dtcomm.tp.styles import ColwiseParallel, RowwiseParallel

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
