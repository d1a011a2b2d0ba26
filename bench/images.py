"""Measures how the engine computes images, with models of random weights.

python -m bench.images gaps       # steps of 8 streams, in turns with and without an image being encoded
python -m bench.images memory     # a tower's memory for the largest image, and the memory plan
python -m bench.images quality    # features and answers of a tower in int8 and in float32
"""

import argparse
import io
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as Pixels
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForImageTextToText

from bench.engine_environment import use_engine_environment
from bench.random_image_models import FORMS, make
from bench.shared_runner import Engines
from model_runner.config import RunnerConfig
from model_runner.contract import SamplingParams
from model_runner.hub.repository import resolve_model
from model_runner.image import Image, ImageRun
from model_runner.images.layouts import Layout, read_layout
from model_runner.images.tower import Tower
from model_runner.kernels.library import WeightKind
from model_runner.kernels.memory import return_freed_memory
from model_runner.platforms.cpu import CpuPlatform
from model_runner.runner_interface import FeatureHolder
from scheduler.interface import EngineRequest

MIB = 1 << 20
_KINDS: tuple[WeightKind, ...] = ("int8_rotated", "int8")
_STREAMS = 8
_STEPS = 40
"""Steps of a turn."""
LARGEST = 50_000_000
"""Pixels of the largest image that a server accepts by default."""
_SHAPES = (1.0, 1.5, 2.0, 4.0, 8.0)
"""Aspects of images among which the one with the most feature rows is the largest."""


def image_file(width: int, height: int, seed: int | None = None) -> bytes:
    """A PNG file: of random pixels, or of one colour without a seed."""
    if seed is None:
        pixels = Pixels.new("RGB", (width, height), (90, 160, 40))
    else:
        noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        pixels = Pixels.fromarray(noise)
    file = io.BytesIO()
    pixels.save(file, "png", compress_level=1)
    return file.getvalue()


def make_image(layout: Layout, data: bytes, size: tuple[int, int], name: int) -> Image:
    """An image at the start of a prompt."""
    arranged = layout.of(*size)
    return Image(data, name.to_bytes(32, "big"), (ImageRun(0, 0, arranged.num_rows),), grid=arranged.grid)


def gaps(folder: Path, rounds: int, console: Console) -> None:
    """Compare steps with and without an image being encoded, in two turns each of a round."""
    engines = Engines(RunnerConfig(folder, device="cpu", kv_cache_gib=0.5, max_num_seqs=_STREAMS))
    features, layout = engines.runner.images, read_layout(folder)
    assert features is not None
    assert layout is not None
    size = (1024, 768)
    data = image_file(*size, seed=1)
    console.print(
        f"an image of {layout.of(*size).num_rows} feature rows alone: {_encode_s(features, layout, data):.2f} s"
    )
    engine = engines.make()
    sampling = SamplingParams(temperature=0.0, min_tokens=100_000)
    for stream in range(_STREAMS):
        prompt = tuple(range(100 + stream, 164 + stream))
        engine.add(EngineRequest(f"{stream}", prompt, sampling, 4 * rounds * _STEPS + 100))
    for _ in range(20):
        engine.step()
    found: dict[bool, list[list[float]]] = {False: [], True: []}
    for turn in range(4 * rounds):
        with_images = turn % 4 in (1, 2)  # in the middle, because steps take longer as their texts grow
        if with_images:
            images = [make_image(layout, data, size, name) for name in range(1000 * turn + 1, 1000 * turn + 1000)]
            features.hold(FeatureHolder("bench"), images)
            time.sleep(0.2)
        found[with_images].append([_timed(engine.step) for _ in range(_STEPS)])
        encoded = features.stats().encoded
        features.release("bench")
        while with_images and features.stats().encoded == encoded:  # the image that is being computed
            features.wait(1.0)
        time.sleep(0.2)
    engines.runner.close()  # an interpreter that ended while an image is computed would crash
    stats = features.stats()
    console.print(f"{stats.encoded} images encoded, in {stats.encode_s:.1f} s")
    table = Table("steps", "mean ms", "median ms", "99th of 100 ms")
    for with_images, name in ((False, "alone"), (True, "with an image")):
        every = sorted(1000 * step for steps in found[with_images] for step in steps)
        numbers = statistics.mean(every), statistics.median(every), every[int(0.99 * len(every))]
        table.add_row(name, *(f"{number:.1f}" for number in numbers))
    console.print(table)
    ratios = [_mean_of_round(found[True], number) / _mean_of_round(found[False], number) for number in range(rounds)]
    listed = " ".join(f"{ratio:.2f}" for ratio in sorted(ratios))
    console.print(f"mean step with an image / alone, by rounds: median {statistics.median(ratios):.2f} of {listed}")


def _mean_of_round(turns: Sequence[Sequence[float]], number: int) -> float:
    return statistics.mean(step for steps in turns[2 * number : 2 * number + 2] for step in steps)


def _encode_s(features: Any, layout: Layout, data: bytes) -> float:
    """Seconds to encode an image while no steps are computed; the second of two, as the first makes threads."""
    seconds = 0.0
    for name in (1, 2):
        before = features.stats().encode_s
        features.hold(FeatureHolder("first"), [make_image(layout, data, (1024, 768), name)])
        while not features.is_ready("first"):
            features.wait(10.0)
        features.release("first")
        seconds = features.stats().encode_s - before
    return seconds


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def largest_image(layout: Layout, num_pixels: int) -> tuple[int, int]:
    """Width and height of an image of so many pixels with the most feature rows."""
    sizes = [(round((num_pixels * aspect) ** 0.5), round((num_pixels / aspect) ** 0.5)) for aspect in _SHAPES]
    return max(sizes, key=lambda size: layout.of(*size).num_rows)


def memory(folder: Path, console: Console) -> None:
    """Compare a tower's memory with the plan."""
    platform = CpuPlatform(RunnerConfig(folder, device="cpu"))
    layout = read_layout(folder)
    assert layout is not None
    shape, dtype = platform.inspect_tower(folder, layout), platform.types.compute
    return_freed_memory()  # of writing the model
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
    start = _resident("VmRSS")
    tower = platform.load_tower(folder, layout)
    loading, loaded = _resident("VmHWM") - start, _resident("VmRSS") - start
    weights = shape.weight_bytes(dtype)
    console.print(
        f"{folder.name}: loaded {loaded / MIB:.0f} MiB, at most {loading / MIB:.0f} meanwhile; planned "
        f"{weights / MIB:.0f}"
    )
    for num_pixels in (LARGEST // 50, LARGEST):
        size = largest_image(layout, num_pixels)
        data = image_file(*size)
        return_freed_memory()
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        seconds = _timed(partial(tower.encode, make_image(layout, data, size, 1)))
        peak = _resident("VmHWM") - before
        console.print(
            f"{folder.name}: {size[0]} x {size[1]} pixels, {layout.of(*size).num_rows} rows: {peak / MIB:.0f} MiB more "
            f"at most; planned {(shape.num_bytes(dtype, num_pixels) - weights) / MIB:.0f}; {seconds:.1f} s"
        )


def _resident(name: str) -> int:
    """Resident memory of this process now (VmRSS) or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) << 10


@torch.inference_mode()
def quality(folder: Path, console: Console) -> None:
    """Compare a tower in int8 with the same one in float32, by features and by the next token's probabilities."""
    platform = CpuPlatform(RunnerConfig(folder, device="cpu"))
    layout, packer = read_layout(folder), platform.packer
    assert layout is not None
    assert packer is not None
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    pixels = [Pixels.open(io.BytesIO(image_file(300 + 70 * seed, 240, seed))) for seed in range(2)]

    def load() -> Tower:
        return Tower(folder, platform.read_config(folder), layout, torch.device("cpu"), torch.float32)

    exact = [load().features(one) for one in pixels]
    other = _divergence(model, exact[1][0], exact[0][0])
    console.print(f"{folder.name}: KL of the next token with another picture {other:.2e} nats")
    for kind in _KINDS:
        tower = load()
        tower.pack(replace(packer, kind=kind))
        found = [tower.features(one) for one in pixels]
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
        divergences = [_divergence(model, a[0], b[0]) for a, b in zip(found, exact, strict=True)]
        console.print(
            f"{folder.name} {kind}: features {100 * statistics.mean(errors):.2f} % off, KL of the next token mean "
            f"{statistics.mean(divergences):.2e}, at most {max(divergences):.2e} nats"
        )


def _divergence(model: Any, rows: Tensor, exact: Tensor) -> float:
    """KL of the next token's probabilities after these feature rows [n, hidden] from those after the exact ones."""
    text = model.get_input_embeddings()(torch.arange(40, 60))
    logs = []
    for features in (exact, rows):
        hidden = model.base_model.language_model(inputs_embeds=torch.cat([text, features, text])[None])
        logs.append(model.get_output_embeddings()(hidden.last_hidden_state[0, -1]).log_softmax(-1))
    return float((logs[0].exp() * (logs[0] - logs[1])).sum())


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("gaps", "memory", "quality"))
    parser.add_argument("--form", choices=sorted(FORMS), default="smolvlm")
    parser.add_argument("--model", type=Path, help="a model folder, instead of random weights in a form")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    use_engine_environment()
    console = Console(width=160)
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.model or Path(scratch, asked.spec)
        if asked.model is None:
            make(FORMS[asked.spec], folder, resolve_model(None, Console(stderr=True)).path)
        match asked.what:
            case "gaps":
                gaps(folder, asked.rounds, console)
            case "memory":
                memory(folder, console)
            case _:
                quality(folder, console)


if __name__ == "__main__":
    main()
