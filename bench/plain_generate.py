"""Measures transformers' own `generate` on the CPU, for one batch of random prompts; prints JSON.

The time per token after the first is measured on a few tokens and extrapolated.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Clock(StoppingCriteria):
    """A stopping criterion that never stops but records the time of each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


@torch.inference_mode()
def seconds(model: Any, prompts: torch.Tensor, num_tokens: int) -> tuple[float, float]:
    """Seconds to the first tokens of all prompts [rows, tokens], and per token for `num_tokens` further tokens."""
    clock = Clock()
    start = time.perf_counter()
    model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        min_new_tokens=1 + num_tokens,
        max_new_tokens=1 + num_tokens,
        do_sample=False,
        stopping_criteria=[clock],
    )
    if len(clock.times) != 1 + num_tokens:
        raise RuntimeError(f"generate returned {len(clock.times)} tokens instead of {1 + num_tokens}")
    return clock.times[0] - start, (clock.times[-1] - clock.times[0]) / num_tokens


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure plain transformers' generate on the CPU.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--timed", type=int, default=8, help="tokens after the first that are timed")
    arguments = parser.parse_args()
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.folder, dtype=DTYPES[arguments.dtype])
    torch.manual_seed(0)
    prompts = torch.randint(0, model.config.vocab_size, (arguments.rows, arguments.input_len))
    model.eval()
    first_s, next_s = seconds(model, prompts, arguments.timed)
    whole_s = first_s + (arguments.output_len - 1) * next_s
    print(json.dumps({"tokens_per_s": arguments.rows * arguments.output_len / whole_s}))


if __name__ == "__main__":
    main()
