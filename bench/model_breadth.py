"""Which model types are served: `python -m bench.model_breadth` writes the page docs/reference/model-types.md.

For every type of transformers' mappings for causal language models and for images with text, a tiny random model is
saved, loaded and run. Its greedy tokens are compared with transformers' `generate`, alone and four at once, in float32.
Each model runs in a process of its own, so that a crash ends no other. Types as arguments only print their results.
"""

import argparse
import json
import logging
import multiprocessing
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from transformers import AutoConfig, __version__
from transformers.utils import logging as hf_logging

from bench.engine_run import run
from bench.shared_runner import Engines
from bench.tiny_models import VOCAB_SIZE, auto_class, decoder_types, write_tiny_model
from model_runner.config import RunnerConfig
from model_runner.contract import SamplingParams
from model_runner.modules.text_model import without_missing_towers
from model_runner.platforms.cpu import CpuPlatform
from model_runner.refusal import UnsupportedModelError
from scheduler.interface import EngineRequest

Verdict = Literal["served", "refused", "differs", "crashed"]

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "model-types.md"
_LENGTHS = (45, 7, 70, 33)
"""Tokens of the prompts: within a block of the cache and a window, and beyond."""
_NEW_TOKENS = 12
_SECONDS = 180


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a model type."""

    model_type: str
    verdict: Verdict
    reason: str = ""
    model_class: str = ""
    layers: str = ""
    """Kinds of layers, as in `layer_types`."""
    is_native: bool = False
    """Whether a step is one native call on CPU with quantised weights."""


def try_type(model_type: str) -> Outcome:
    """Write a tiny model of the type, and compare the engine's answers with transformers'."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tiny_model(model_type, folder)
        config: Any = AutoConfig.from_pretrained(folder)
        kinds = getattr(config.get_text_config(), "layer_types", None) or ["full_attention"]
        outcome = Outcome(
            model_type,
            "served",
            model_class=next(iter(config.architectures or ()), ""),
            layers=", ".join(sorted({kind.removesuffix("_attention").replace("_", " ") for kind in kinds})),
        )
        try:
            engines = Engines(RunnerConfig(folder, device="cpu", kv_cache_gib=0.1, quantization="none", threads=1))
        except UnsupportedModelError as error:
            return replace(outcome, verdict="refused", reason=str(error).replace(str(folder), "").strip())
        if (difference := _difference(folder, engines)) is not None:
            return replace(outcome, verdict="differs", reason=difference)
        spec = CpuPlatform(RunnerConfig(folder, threads=1)).inspect(folder).spec
        return replace(outcome, is_native=spec is not None)


def _difference(folder: Path, engines: Engines) -> str | None:
    """Where the engine's greedy tokens differ from transformers', or in a crowd from those alone."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in _LENGTHS]
    sampling = SamplingParams(temperature=0.0)
    requests = [EngineRequest(f"{i}", tuple(prompt), sampling, _NEW_TOKENS) for i, prompt in enumerate(prompts)]
    alone = [run(engines.make(), [request]).tokens[0] for request in requests]
    crowd = list(run(engines.make(chunk=64), requests).tokens)
    if crowd != alone:
        return f"alone {alone}, but in a crowd {crowd}"
    with without_missing_towers():
        model = auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=torch.float32).eval()
    expected = [_greedy(model, prompt) for prompt in prompts]
    return None if expected == alone else f"{expected} by transformers, but {alone} by the engine"


def _greedy(model: Any, prompt: list[int]) -> tuple[int, ...]:
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
    try:
        outcome = try_type(model_type)
    except BaseException as error:
        logging.getLogger("bench").debug(model_type, exc_info=True)
        outcome = Outcome(model_type, "crashed", f"{type(error).__name__}: {error}")
    pipe.send(outcome)


def try_apart(model_type: str) -> Outcome:
    """`try_type` in a process of its own, with a limit on its time."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_child, args=(model_type, theirs))
    process.start()
    theirs.close()
    try:
        if ours.poll(_SECONDS):
            outcome: Outcome = ours.recv()
            return outcome
        process.kill()
        return Outcome(model_type, "crashed", f"it took more than {_SECONDS} seconds")
    except EOFError:
        process.join()
        return Outcome(model_type, "crashed", f"its process ended with {process.exitcode}")
    finally:
        process.join()


def render(outcomes: Sequence[Outcome]) -> str:
    """The page of all model types."""
    served = [one for one in outcomes if one.verdict == "served"]
    others = [one for one in outcomes if one.verdict != "served"]
    ways = {True: "one native call", False: "modules"}
    rows = [f"| {one.model_type} | {one.model_class} | {one.layers} | {ways[one.is_native]} |" for one in served]
    refused = [f"| {one.model_type} | {one.layers} | {_short(one)} |" for one in others]
    return _PAGE.format(
        version=__version__,
        num_types=len(outcomes),
        num_served=len(served),
        num_others=len(others),
        lengths=", ".join(map(str, _LENGTHS)),
        num_tokens=_NEW_TOKENS,
        served="\n".join(rows),
        refused="\n".join(refused),
    )


def _short(outcome: Outcome) -> str:
    """A refusal without the model's name and the advice, as one cell of a table."""
    reason = outcome.reason if outcome.verdict == "refused" else f"{outcome.verdict}: {outcome.reason}"
    reason = reason.removeprefix(f"(a {outcome.model_type} model) ").removeprefix(f"a {outcome.model_type} model ")
    first = reason.partition("; docs/")[0]
    return " ".join(first.replace("|", "/").replace("`", "").split())


_PAGE = """\
<!-- python -m bench.model_breadth writes this page -->

# Model types

Look up the `model_type` of a model's `config.json` here. A type with `text_config` is served for its text.

```bash
python -m bench.model_breadth              # writes this page
python -m bench.model_breadth llama bloom  # prints the results of these types
```

transformers {version} can generate text with {num_types} types that have no encoder of their own. **{num_served} are
served**, and {num_others} are refused at startup with a reason. The command made a tiny random model of each type. It
compared greedy tokens with transformers' `generate` in float32: {num_tokens} tokens after prompts of {lengths} tokens,
one at a time and four at once.

## Served

*Modules* are transformers' own, with the server's attention, linear layers and experts. *One native call* is faster
([families](models.md#families-with-native-kernels)). Encoders such as BERT need `is_decoder` in their configuration.

| model type | class | kinds of layers | runs as |
| --- | --- | --- | --- |
{served}

## Refused

| model type | kinds of layers | reason |
| --- | --- | --- |
{refused}
"""


def main() -> None:
    """Try the types that the arguments name, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", help="model types; without any, all of them, and the page is written")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    hf_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(1)
    console = Console()
    outcomes = []
    for model_type in arguments.types or decoder_types():
        start = time.perf_counter()
        outcomes.append(outcome := try_apart(model_type))
        seconds = time.perf_counter() - start
        console.print(f"{model_type:26} {outcome.verdict:8} {seconds:5.1f} s  {_short(outcome)}", markup=False)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps([asdict(one) for one in outcomes], indent=1))
    console.print(", ".join(f"{count} {verdict}" for verdict, count in Counter(o.verdict for o in outcomes).items()))
    if not arguments.types:
        PAGE.write_text(render(outcomes))
    sys.exit(any(outcome.verdict in ("differs", "crashed") for outcome in outcomes))


if __name__ == "__main__":
    main()
