"""Kernels: the code that runs a codec. `ops` has the verbs; `available`, `current` and `use` choose the kernel.

Modules:
    ops: The public verbs encode, decode, reduce, reduce_encode, and quantize.
    eager: What the verbs do outside `torch.compile`: check the arguments, choose a kernel, run it.
    custom_ops: The verbs as `torch.library` operators, for `torch.compile` and `torch.export`.
    dispatch: Which kernel runs a call.
    cpu, cuda, triton, reference: The kernels. All give the same bytes.
    python_codec: Runs codecs that are written in Python.
    local_tasks, local_tasks_torch: Rank-local work before and after sums in an agreed representation.
    low_rank, low_rank_torch: The passes of PowerSGD over one matrix.
    epilogue: What is fused behind a reduction: bias, residual stream and RMS norm.
    counter_rng: The random numbers of stochastic rounding.
    checks, types: Argument checks, and the record of one kernel call.
"""

from dtcomm.kernels.dispatch import available, current, use

__all__ = ["available", "current", "use"]
