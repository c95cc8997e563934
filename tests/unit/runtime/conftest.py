"""Tensors here are small: one torch thread, or every operation waits for a second one to wake up."""

import torch

torch.set_num_threads(1)
