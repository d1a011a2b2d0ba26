"""Which model types are served: `python -m bench.model_breadth`.

For every type of transformers' mappings for causal language models and for images with text, a tiny random model is
saved, loaded and run. Its greedy tokens are compared with transformers' `generate`, alone and four at once, in float32.
Each model runs in a process of its own, so that a crash ends no other.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging as hf_logging

from bench.engine_run import run
from bench.shared_runner import Engines
from bench.tiny_models import VOCAB_SIZE, model_types, tiny_config, write_tiny_model
from model_runner.config import RunnerConfig
from model_runner.contract import SamplingParams
from model_runner.models.refusal import UnsupportedModelError
from scheduler.interface import EngineRequest

Verdict = Literal["served", "refused", "differs", "crashed"]

_LENGTHS = (45, 7, 70, 33)
"""Tokens of the prompts: within, at the end of, and beyond a block of the cache and a window."""
_NEW_TOKENS = 12
_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a model type."""

    model_type: str
    verdict: Verdict
    reason: str = ""
    seconds: float = 0.0


def try_type(model_type: str) -> Outcome:
    """Write a tiny model of the type, and compare the engine's answers with transformers'."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            write_tiny_model(model_type, folder)
        except Exception as error:
            return Outcome(
                model_type, "crashed", f"tiny model: {type(error).__name__}: {error}\n{traceback.format_exc()}"
            )
        try:
            engines = Engines(RunnerConfig(folder, device="cpu", kv_cache_gib=0.02, quantization="none", threads=1))
        except UnsupportedModelError as error:
            return Outcome(model_type, "refused", str(error).replace(f"{folder} (", "("))
        return _compare(model_type, folder, engines)


def _compare(model_type: str, folder: Path, engines: Engines) -> Outcome:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in _LENGTHS]
    sampling = SamplingParams(temperature=0.0)
    requests = [EngineRequest(f"{i}", tuple(prompt), sampling, _NEW_TOKENS) for i, prompt in enumerate(prompts)]
    alone = [run(engines.make(), [request]).tokens[0] for request in requests]
    crowd = run(engines.make(chunk=64), requests).tokens
    if list(crowd) != alone:
        return Outcome(model_type, "differs", f"alone {alone} but in a crowd {crowd}")
    model = load_reference(folder)
    expected = [greedy(model, prompt) for prompt in prompts]
    if expected != alone:
        return Outcome(model_type, "differs", f"transformers {expected} but the engine {alone}")
    return Outcome(model_type, "served", f"{len({*sum(map(list, alone), [])})} distinct")


def load_reference(folder: Path) -> Any:
    """The folder's model as transformers runs it."""
    config = tiny = None
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    classes: Any = AutoModelForImageTextToText
    if type(config) not in classes._model_mapping:
        classes = AutoModelForCausalLM
    return classes.from_pretrained(folder, dtype=torch.float32).eval()


def greedy(model: Any, prompt: list[int]) -> tuple[int, ...]:
    tokens = torch.tensor([prompt])
    output = model.generate(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=_NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
    )
    return tuple(output[0, len(prompt) :].tolist())


def _child(model_type: str, pipe: Connection) -> None:
    import sys

    sys.stdout = open(os.devnull, "w")
    try:
        outcome = try_type(model_type)
    except BaseException as error:  # the report says so
        outcome = Outcome(model_type, "crashed", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    pipe.send(outcome)


def try_apart(model_type: str) -> Outcome:
    """`try_type` in a process of its own."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_child, args=(model_type, theirs))
    process.start()
    theirs.close()
    try:
        if ours.poll(_SECONDS):
            return ours.recv()
        process.kill()
        return Outcome(model_type, "crashed", "it took too long")
    except EOFError:
        process.join()
        return Outcome(model_type, "crashed", f"the process ended with {process.exitcode}")
    finally:
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="*")
    parser.add_argument("--json", type=Path)
    parser.add_argument("-v", action="store_true")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    hf_logging.set_verbosity_error()
    torch.set_num_threads(1)
    outcomes = []
    import time

    for model_type in arguments.types or model_types():
        t = time.time()
        outcome = try_apart(model_type)
        outcomes.append(outcome)
        r = outcome.reason if arguments.v else outcome.reason[:300].replace("\n", " | ")
        print(f"{model_type:28}{outcome.verdict:9}{time.time() - t:5.1f}s  {r}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps([asdict(o) for o in outcomes], indent=1))
    print(Counter(o.verdict for o in outcomes))


if __name__ == "__main__":
    main()
