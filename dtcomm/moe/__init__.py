"""Expert parallelism: `dispatch` sends tokens to the ranks that hold their experts, `combine` brings the results back.

Example::

    tokens, route = dtcomm.moe.dispatch(x, experts, num_experts)
    outputs = [expert(part) for expert, part in zip(local_experts, route.split(tokens))]
    y = dtcomm.moe.combine(torch.cat(outputs), route, weights)

Experts are distributed evenly and in order: of n ranks, rank r holds the experts ``r * num_experts / n`` to ``(r + 1) *
num_experts / n - 1``. This is the all-to-all scheme of GShard (Lepikhin et al. 2020, arXiv:2006.16668), with or without
a capacity. examples/moe.py has a layer of these: a router with its losses, experts and their communication.

Tokens are sent in fp8 and results in bf16 by default. Both functions are differentiable; each one's gradient goes the
other's way, in ``backward_codec``. Between ranks on several hosts a token is sent once to each host that has some of
its experts, as the bytes that its rank encoded. The results are summed on each host before they return.

On CUDA tensors all index tensors stay on the device. `dispatch` waits for the device once: to learn how many rows to
send and to receive, which the size of its result depends on. `combine` and the backward passes do not wait.
`dispatch_padded` and `combine_padded` never wait, so they can be captured in graphs: every rank sends ``capacity`` rows
to every expert, and the counts stay on the device.

`MoEState` counts what is sent.
"""

from dtcomm.moe.dispatch import Route, combine, dispatch
from dtcomm.moe.encoded_rows import EncodedRows as EncodedRows
from dtcomm.moe.padded import combine_padded, dispatch_padded
from dtcomm.moe.route import MoEState
from dtcomm.moe.route import expert_capacity as expert_capacity

__all__ = ["MoEState", "Route", "combine", "combine_padded", "dispatch", "dispatch_padded"]
