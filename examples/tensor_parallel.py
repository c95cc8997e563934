"""Tensor parallelism of a Hugging Face model: activations cross the ranks in int8.

    pip install ".[transformers]"    # in a checkout of dtcomm
    torchrun --nproc-per-node 2 examples/tensor_parallel.py

The model is a small Llama with random weights, so its text is noise. It should be the same noise as without
compression, which the script computes for comparison. Fewer bits: "int4", or a plan of `dtcomm tp calibrate`.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import dtcomm.tp  # +

device = torch.device("cpu")  # on GPUs: torch.device("cuda", int(os.environ["LOCAL_RANK"]))
dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
mesh = init_device_mesh(device.type, (dist.get_world_size(),))


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)  # every rank begins with the same whole model
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    return LlamaForCausalLM(config).eval().to(device)


whole, model = llama(), llama()
state = dtcomm.tp.compress(model, mesh, "int8")  # + cuts the layers; each rank keeps its part
prompt = torch.arange(256, device=device)[None]

with torch.no_grad():
    expected, logits = whole(prompt).logits, model(prompt).logits
    error = float((logits - expected).norm() / expected.norm())
    tokens = [m.generate(prompt, max_new_tokens=8, do_sample=False)[0, 256:].tolist() for m in (whole, model)]

if dist.get_rank() == 0:
    print(f"logits differ by {error:.2%}; tokens {tokens[1]}, uncompressed {tokens[0]}", flush=True)
state.print_report()  # +
dist.destroy_process_group()
