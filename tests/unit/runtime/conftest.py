"""Uses one torch thread: tensors here are small, and operations on more threads would wait for them to wake up."""

import torch

torch.set_num_threads(1)
