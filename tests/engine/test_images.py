"""Models that take images: their answers are transformers', and do not depend on the rest."""

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pixels

from model_runner.config import RunnerConfig
from model_runner.contract import SamplingParams, Speculation
from model_runner.images.decoding import decode, digest
from model_runner.images.image import Image, ImageRun
from model_runner.images.layouts import read_layout
from model_runner.runner import ModelRunner
from scheduler.interface import BeamSearch, ChoiceState, EngineRequest
from tests import image_models
from tests.engine.conftest import Harness

GREEDY = SamplingParams(temperature=0.0, logprobs=2)
SIZES = [(70, 50), (1, 1), (33, 90), (200, 3), (56, 56)]


def picture(number: int, size: tuple[int, int] = (64, 48)) -> bytes:
    """A PNG file of random pixels."""
    width, height = size
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Pixels.fromarray(pixels).save(file, "png")
    return file.getvalue()


class Model:
    """A tiny model of a family, in a server's runner and in transformers."""

    def __init__(self, family: str, folder: Path, **config: Any) -> None:
        self.family, self.folder = family, folder
        image_models.write_model(folder, family)
        layout = read_layout(folder)
        assert layout is not None
        self.layout = layout
        self.config = RunnerConfig(folder, device="cpu", quantization="none", kv_cache_gib=0.02, max_num_seqs=34)
        self.harness = Harness(ModelRunner.load(replace(self.config, **config)))

    def request(self, name: str, *pieces: str | bytes, **settings: Any) -> EngineRequest:
        """A request with texts and image files."""
        inputs = image_models.oracle_inputs(
            self.folder, self.family, [piece if isinstance(piece, str) else decode(piece) for piece in pieces]
        )
        ids = inputs["input_ids"][0].tolist()
        images, places = [], iter(place for place, token in enumerate(ids) if token == self.layout.image_token)
        for data in (piece for piece in pieces if isinstance(piece, bytes)):
            pixels = decode(data)
            arranged = self.layout.of(*pixels.size)
            own = [next(places) for _ in range(arranged.num_rows)]
            runs: list[ImageRun] = []
            for row, place in enumerate(own):
                if runs and runs[-1].place + runs[-1].length == place:
                    runs[-1] = runs[-1]._replace(length=runs[-1].length + 1)
                else:
                    runs.append(ImageRun(place, row, 1))
            name_of = digest(pixels, {})
            images.append(Image(data, name_of, tuple(runs), grid=arranged.grid))
        assert next(places, None) is None
        request = EngineRequest(name, tuple(ids), GREEDY, 12, images=tuple(images))
        return replace(request, **settings)

    def expected(self, *pieces: str | bytes) -> list[int]:
        """The tokens that transformers generates."""
        inputs = image_models.oracle_inputs(
            self.folder, self.family, [piece if isinstance(piece, str) else decode(piece) for piece in pieces]
        )
        model: Any = image_models.load_oracle(self.folder)
        output = model.generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=None)
        tokens: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
        return tokens


@pytest.fixture(scope="session")
def load_images(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Model]:
    """Returns a function from a family to its tiny model."""
    made: dict[tuple[Any, ...], Model] = {}

    def make(family: str, **config: Any) -> Model:
        key = (family, *config.items())
        if key not in made:
            made[key] = Model(family, tmp_path_factory.mktemp(family), **config)
        return made[key]

    return make


def prompt_of(sizes: Sequence[tuple[int, int]]) -> list[str | bytes]:
    """Texts and as many images of different sizes."""
    pieces: list[str | bytes] = ["What is this? "]
    for number, size in enumerate(sizes):
        pieces += [picture(number, size), f" and {number}"]
    return pieces


@pytest.mark.parametrize("family", image_models.FAMILIES)
def test_answers_are_those_of_transformers(family: str, load_images: Callable[..., Model]) -> None:
    model = load_images(family)
    sizes = SIZES if family != "mistral3" else [(64, 64), *SIZES[2:]]  # transformers fails on a single row
    for count in (1, 2, len(sizes)):
        pieces = prompt_of(sizes[:count])
        expected = model.expected(*pieces)
        for chunk in (512, 7, 1) if count == 2 else (512,):
            engine = model.harness.engine(chunk=chunk)
            request = model.request("a", *pieces)
            assert model.harness.run(engine, [request])["a", 0].tokens == expected, (count, chunk)
