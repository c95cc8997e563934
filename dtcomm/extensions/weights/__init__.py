"""New weights for inference engines: a trainer publishes what changed in its weights, without loss.

`diff` and `apply` make and use a patch. A `Publisher` publishes versions from the ranks of a trainer, a `Subscriber`
keeps an engine at the newest one, through a folder, an object store or a `Server`: ``dtcomm weights``.
"""

from dtcomm.extensions.weights.courier import Publisher, Subscriber
from dtcomm.extensions.weights.patch import Patch, PatchRefused, Prepared, Slice, Weights, apply, diff
from dtcomm.extensions.weights.reshard import Part, Resharded, published_tensors
from dtcomm.extensions.weights.store import Server

__all__ = [
    "Part",
    "Patch",
    "PatchRefused",
    "Prepared",
    "Publisher",
    "Resharded",
    "Server",
    "Slice",
    "Subscriber",
    "Weights",
    "apply",
    "diff",
    "published_tensors",
]
