"""Run a language model with tensor parallelism and compressed activations.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py --codec int4
    torchrun --nproc-per-node 2 examples/tensor_parallel.py --plan plan.json     # written by `dtcomm tp calibrate`

The model is a tiny Llama with random weights. Its text is noise, but should be the same noise as without compression.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import dtcomm.tp


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)  # every rank starts with the same full model
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def run(codec: str = "int8", plan: str | None = None, tokens: int = 8) -> tuple[list[int], float]:
    """Return the generated tokens and the relative difference of the logits from the unsharded model's."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    reference, shared = model(), model()
    state = dtcomm.tp.compress(shared, mesh, codec, plan)  # the only line dtcomm needs
    prompt = torch.arange(64)[None] % 512
    expected, output = reference(prompt).logits, shared(prompt).logits
    error = float((output - expected).norm() / expected.norm())
    written = shared.generate(prompt, max_new_tokens=tokens, do_sample=False)[0, 64:].tolist()
    if dist.get_rank() == 0:
        print(state)
        print(f"logits differ by {100 * error:.2f} %; generated tokens: {written}")
    state.print_report()
    return written, error


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--plan", help="a file that `dtcomm tp calibrate` wrote")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    run(options.codec, options.plan)
    dist.destroy_process_group()
