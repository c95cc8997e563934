"""Several kinds of parallelism on one device mesh.

- `make_mesh` makes a mesh whose axes have the usual names, and checks that a model fits them.
- `flatten_axes` joins axes, such as those over which gradients are averaged.
- `clip_grad_norm_` clips gradients by the norm of the whole model's, wherever its parameters are.

The integrations take axes of the mesh: ``dtcomm.tp.compress(model, mesh["tp"])``, DistributedDataParallel with
``mesh["dp"].get_group()``, ``fully_shard(model, mesh=mesh["fsdp"])``, and so on.
"""

from dtcomm.mesh.axes import AXES, flatten_axes, make_mesh
from dtcomm.mesh.norms import clip_grad_norm_

__all__ = ["AXES", "clip_grad_norm_", "flatten_axes", "make_mesh"]
