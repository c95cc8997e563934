"""Local SGD and DiLoCo: every rank trains on its own, and every so many steps the ranks average their progress.

- Local SGD: Stich 2019, "Local SGD Converges Fast and Communicates Little" (arXiv:1805.09767).
- Post-local SGD, with synchronous steps at first: Lin, Stich, Patel, Jaggi 2020 (arXiv:1808.07217).
- DiLoCo, with an outer optimizer: Douillard et al. 2023 (arXiv:2311.08105).
- Streaming DiLoCo, in fragments, overlapped and with few bits: Douillard et al. 2025 (arXiv:2501.18512).
- Error feedback of outer gradients of two bits: Thérien et al. 2025, MuLoCo (arXiv:2505.23725).
- Moments averaged on periods of their own: Iacob et al. 2025, DES-LOC (arXiv:2505.22549).

The ranks send the differences to the weights that all of them had after the last average. These are small and compress
well; what compression loses is fed back, as for gradients.
"""

from dtcomm.local_sgd.local_sgd import LocalSGD
from dtcomm.local_sgd.trainer import TrainerState, attach

__all__ = ["LocalSGD", "TrainerState", "attach"]
