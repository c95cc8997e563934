"""Context parallelism: attention over sequences that are sharded among ranks, with compressed keys and values.

Every rank holds a part of the sequence, of the tokens, the activations and the loss. Only attention needs the other
ranks' tokens:

- `attention` is `torch.nn.functional.scaled_dot_product_attention` of the whole sequence, from the ranks' parts: by
  ring attention, an all-gather of keys and values, or the all-to-all of Ulysses.
- `context_parallel` is a context in which torch's function is `attention`, for models that need not be changed.
- `shard`, `unshard`, `positions` and `padded_length` divide sequences; `ContextParallelState` counts what is sent.

In the layout ``"zigzag"`` the sequence has two chunks for each of n ranks, and rank r holds chunks r and 2n - 1 - r.
Causal attention is then the same work for all ranks. In the layout ``"contiguous"`` rank r holds the r-th of n chunks.

A rank encodes its keys and values once, and all ranks, itself included, compute with what these bytes decode to: a
result does not depend on which rank holds a token. Compression is straight-through: gradients are those of attention to
the decoded keys and values, and are sent in a codec of their own.
"""

from dtcomm.context_parallel.attention import attention
from dtcomm.context_parallel.layout import padded_length as padded_length
from dtcomm.context_parallel.layout import positions as positions
from dtcomm.context_parallel.layout import shard
from dtcomm.context_parallel.layout import unshard as unshard
from dtcomm.context_parallel.sdpa_patch import context_parallel
from dtcomm.context_parallel.state import ContextParallelState

__all__ = ["ContextParallelState", "attention", "context_parallel", "shard"]
