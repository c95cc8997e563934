"""Training with ranks that come and go: the others train on, and no process is restarted.

A `Coordinator`, one process that holds no weights, knows which ranks take part. `ElasticLocalSGD` is
`dtcomm.local_sgd.LocalSGD` whose ranks may die, leave and join: the group changes at an average, the next outer step.
"""

from dtcomm.extensions.elastic.coordinator import Coordinator
from dtcomm.extensions.elastic.local_sgd import ElasticLocalSGD

__all__ = ["Coordinator", "ElasticLocalSGD"]
