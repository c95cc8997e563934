"""Kernels: the code that runs a codec. `ops` has the verbs; `available`, `current` and `use` choose the kernel.

Modules:
    ops: The public verbs encode, decode, reduce, reduce_encode, and quantize.
    eager: What the verbs do outside `torch.compile`: check the arguments, choose a kernel, run it.
    custom_ops: The verbs as `torch.library` operators, for `torch.compile` and `torch.export`.
    calls: The record of one kernel call, and the checks of its arguments.
    dispatch: Which kernel runs a call.
    cpu, cuda, reference: The kernels. All give the same bytes.
    local_tasks: Rank-local work before and after sums in an agreed representation.
    low_rank: The passes of PowerSGD over one matrix.
    epilogue: What is fused behind a reduction: bias, a stream that is added, and RMS norm.
    triton_epilogue: The same for CUDA tensors, in Triton.
    counter_rng: The random numbers of stochastic rounding.
"""

from dtcomm.kernels.dispatch import available, current, use

__all__ = ["available", "current", "use"]
