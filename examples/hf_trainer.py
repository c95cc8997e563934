"""Hugging Face's Trainer with gradients in int8: a small Llama with random weights learns a Python file.

    pip install ".[transformers]"    # in a checkout of dtcomm
    torchrun --nproc-per-node 2 examples/hf_trainer.py

The Trainer wraps the model in DDP; attach compresses it then, and the Trainer's checkpoints contain the state of
compression. Lines marked with + are dtcomm's.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import dtcomm.ddp  # +

device = "cpu"  # on GPUs: "cuda"; the Trainer then starts "nccl"
text = torch.tensor(list(Path(argparse.__file__).read_bytes())).clamp(max=127)
windows = text[: len(text) // 64 * 64].view(-1, 64)
dataset = [{"input_ids": window, "labels": window} for window in windows]

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )
)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        use_cpu=device == "cpu",
        max_steps=60,
        learning_rate=3e-3,
        logging_steps=10,
        per_device_train_batch_size=8,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
    attached = dtcomm.ddp.attach(trainer, "int8", verify=10)  # +
    trainer.train()

attached.state.print_report()  # +
