"""Tokens a second of plain transformers' own `generate` for one batch of random prompts, on the CPU, as JSON."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@torch.inference_mode()
def generate_seconds(model: Any, prompts: torch.Tensor, num_tokens: int) -> float:
    """Greedily, `num_tokens` for each of the prompts [rows, tokens], whatever they are."""
    start = time.perf_counter()
    answers = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        min_new_tokens=num_tokens,
        max_new_tokens=num_tokens,
        do_sample=False,
    )
    seconds = time.perf_counter() - start
    if answers.shape[1] != prompts.shape[1] + num_tokens:
        raise RuntimeError(f"{answers.shape[1] - prompts.shape[1]} tokens instead of {num_tokens}")
    return seconds


def main() -> None:
    """Measure and print; what the prompts take is measured alone and does not count."""
    parser = argparse.ArgumentParser(description="Measure plain transformers' generate on the CPU.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=16)
    arguments = parser.parse_args()
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.folder, dtype=DTYPES[arguments.dtype])
    torch.manual_seed(0)
    prompts = torch.randint(0, model.config.vocab_size, (arguments.rows, arguments.input_len))
    model.eval()
    counts = 1, 1, 1 + arguments.output_len  # once to warm up
    _, first, all_tokens = (generate_seconds(model, prompts, count) for count in counts)
    print(json.dumps({"tokens_per_s": arguments.rows * arguments.output_len / (all_tokens - first)}))


if __name__ == "__main__":
    main()
