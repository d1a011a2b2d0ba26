r"""Compare what the ledger reserves for a model with what its engine process takes at its peak.

    python -m bench.ledger                                  # the embedded model
    python -m bench.ledger --kv-cache-gib 0.1 folder other
    python -m bench.ledger --images smolvlm                 # random weights in this form, and its largest image

An engine process is started for each model. It plans and loads the model, and then fills the cache: with prompts, with
as many choices as can run, each with penalties and logprobs, with logprobs of every token of a prompt, and with drafts
in full steps; a model that reads images gets the largest one. An encoder instead encodes some of its longest texts, and
steps full of short ones. The memory of a process is what no file backs.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.engine_run import run
from bench.local_server import environment
from model_runner.config import RunnerConfig
from model_runner.contract import Pooling, SamplingParams, Speculation
from model_runner.encoders.folder import find_encoder
from model_runner.hub.repository import resolve_model
from model_runner.image import Image
from model_runner.image_reader import layout_of
from model_runner.kernels.memory import return_freed_memory
from model_runner.processes import private_memory
from scheduler.interface import ChoiceState, EngineRequest
from server.engine import building
from server.engine.environment import engine_environment
from server.engine.loop import LoadedEngine
from server.engine.messages import EngineConfig, Plan

_POLL_S = 0.005
_PROMPTS = 8
"""Prompts that fill the cache."""
_LONG = 2048
"""Most tokens of a prompt; longer ones take more time, and no more memory."""
_BUDGET = 64 << 30
"""Memory that the ledger may give. The size of the cache is configured, so it does not follow from this."""
_SEED = 1


class _Peak:
    """Watches this process from a thread."""

    def __init__(self) -> None:
        self.private = 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ends.wait(_POLL_S):
            self.private = max(self.private, private_memory())

    def end(self) -> int:
        """The peak in bytes."""
        self._ends.set()
        self._thread.join()
        return self.private


def workload(loaded: LoadedEngine, image: Image | None) -> Iterator[list[EngineRequest]]:
    """Requests that together take the most memory, in rounds. The image is the largest one; None if there are none."""
    info, numbers = loaded.info, random.Random(_SEED)

    def prompt(length: int) -> tuple[int, ...]:
        return tuple(numbers.randrange(info.vocab_size) for _ in range(length))

    num_tokens = info.num_blocks * info.block_size
    longest = min(info.max_model_len - 8, _LONG)
    length = min(longest, num_tokens // _PROMPTS)
    yield [
        EngineRequest(f"fill{index}", prompt(length), SamplingParams(seed=index), 4)
        for index in range(-(-num_tokens // length))
    ]
    if image is not None:
        yield [EngineRequest("image", prompt(image.num_rows + 8), SamplingParams(seed=1), 4, images=(image,))]
    crowd = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.1, frequency_penalty=0.1, logprobs=20)
    short = min(32, longest)
    yield [EngineRequest(f"crowd{index}", prompt(short), crowd, 8) for index in range(info.max_num_seqs)]
    every = SamplingParams(temperature=0.0, prompt_logprobs=5)
    yield [EngineRequest("every", prompt(min(longest, info.max_num_batched_tokens + 8)), every, 1)]
    repeated = prompt(8) * 4
    yield [
        EngineRequest(
            f"draft{index}",
            repeated[:short],
            SamplingParams(temperature=0.0),
            16,
            (ChoiceState(0),),
            speculation=Speculation("prediction", 15, prediction=repeated),
        )
        for index in range(info.max_num_seqs)
    ]


def texts(loaded: LoadedEngine, pooling: Pooling) -> Iterator[list[EngineRequest]]:
    """The same for an encoder."""
    info, numbers = loaded.info, random.Random(_SEED)
    for length, count in ((info.max_model_len, _PROMPTS), (16, 4 * info.max_num_seqs)):
        prompts = [tuple(numbers.randrange(4, info.vocab_size) for _ in range(length)) for _ in range(count)]
        sampling = SamplingParams(pooling=pooling)
        yield [EngineRequest(f"{length}-{index}", one, sampling, 0) for index, one in enumerate(prompts)]


def largest(folder: Path) -> Image | None:
    """The largest image that a model reads; None if it reads none."""
    if (layout := layout_of(folder)) is None:
        return None
    from bench.images import LARGEST, image_file, largest_image, make_image  # noqa: PLC0415 - loads transformers

    size = largest_image(layout, LARGEST)
    image = make_image(layout, image_file(*size), size, 1)
    return_freed_memory()
    return image


def measure(folder: Path, kv_cache_gib: float) -> dict[str, Any]:
    """Plan, load and run a model in this process. Returns what was planned, and what was taken, in bytes."""
    encoder = find_encoder(folder)
    image = largest(folder) if encoder is None else None
    runner = RunnerConfig(folder, device="cpu", kv_cache_gib=kv_cache_gib if encoder is None else None)
    config = EngineConfig(runner, log_level="error")
    needs = building.plan(Plan(config, {"cpu": _BUDGET}))
    peak = _Peak()
    loaded = building.load(config)
    loading = peak.private
    pooling = None if encoder is None else Pooling("classes" if encoder.classifies else "modules")
    for requests in workload(loaded, image) if pooling is None else texts(loaded, pooling):
        run(loaded.engine, requests)  # type: ignore[arg-type]
    kinds = {"process": needs.process_bytes, **needs.running}
    return {"reserved": needs.reserved_bytes, "loading": loading, "taken": peak.end(), "kinds": kinds}


def measure_apart(folder: Path, kv_cache_gib: float) -> dict[str, Any]:
    """`measure` in a process with the environment of engines."""
    command = [sys.executable, "-m", "bench.ledger", "--child", "--kv-cache-gib", str(kv_cache_gib), str(folder)]
    variables = engine_environment() | environment()
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.0f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the models that the arguments name, and print a table."""
    parser = argparse.ArgumentParser(description="Compare reserved memory with memory that is taken.")
    parser.add_argument("models", nargs="*", help="folders, GGUF files or hub names; default: embedded")
    parser.add_argument("--kv-cache-gib", type=float, default=0.25)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--images", action="append", default=[], help="a form of bench.images, with random weights")
    asked = parser.parse_args(arguments)
    models = asked.models if asked.models or asked.images else [""]
    folders = [resolve_model(model or None, Console(stderr=True)).path for model in models]
    if asked.child:
        print(json.dumps(measure(folders[0], asked.kv_cache_gib)))
        return
    table = Table("model", "reserved MiB", "taken MiB", "taken of reserved", "after loading MiB", "by kind MiB")
    with tempfile.TemporaryDirectory() as scratch:
        folders += [_written(form, Path(scratch, form)) for form in asked.images]
        _fill(table, folders, asked.kv_cache_gib)
    Console().print(table)


def _written(form: str, folder: Path) -> Path:
    """The folder, with a model of random weights in this form."""
    from bench.random_image_models import FORMS, make  # noqa: PLC0415 - as above

    make(FORMS[form], folder, resolve_model(None, Console(stderr=True)).path)
    return folder


def _fill(table: Table, folders: Sequence[Path], kv_cache_gib: float) -> None:
    """Add a row for each model."""
    for folder in folders:
        found = measure_apart(folder, kv_cache_gib)
        kinds = ", ".join(f"{name} {_mib(size)}" for name, size in found["kinds"].items() if size)
        share = f"{found['taken'] / found['reserved']:.2f}"
        table.add_row(folder.name, _mib(found["reserved"]), _mib(found["taken"]), share, _mib(found["loading"]), kinds)


if __name__ == "__main__":
    main()
