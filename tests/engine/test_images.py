"""Models that take images: their answers are transformers', and do not depend on the rest."""

import io
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pixels

from model_runner.config import RunnerConfig
from model_runner.contract import SamplingParams, Speculation
from model_runner.image import Image, ImageRun
from model_runner.images.cores import TowerCores
from model_runner.images.decoding import decode, digest
from model_runner.images.features import FeatureCache
from model_runner.images.layouts import SEVERAL, read_layout
from model_runner.images.tiles import compute_one_by_one
from model_runner.images.tower import Tower
from model_runner.kernels.library import Kernels
from model_runner.modules.loading import load_config
from model_runner.native.packer import NativePacker
from model_runner.runner import ModelRunner
from scheduler.engine import Engine
from scheduler.interface import BeamSearch, ChoiceState, EngineRequest
from tests import image_models, image_processors
from tests.engine import tiny_heads
from tests.engine.conftest import Harness
from tests.engine.test_mtp import add
from tests.model_runner.heads.mtp_modules import Qwen

GREEDY = SamplingParams(temperature=0.0, logprobs=2)
SIZES = [(70, 50), (1, 1), (33, 90), (200, 3), (56, 56)]
NUM_TOKENS = 20
"""Generated in a crowd."""
TEXT_AFTER = ("llava", "glm4v", "qwen2_vl", "qwen3_5", "qwen3_vl")
"""Families that then answer a text, of which nothing of the images may be left; one with a typed image token."""
FOUR_PICTURES = 4 * 4 * 32 * 4
"""Bytes of four pictures' features: four rows each, of 32 numbers."""


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
        detail = SEVERAL if self.layout.has_several and sum(isinstance(piece, bytes) for piece in pieces) > 1 else ""
        images, places = [], iter(place for place, token in enumerate(ids) if token == self.layout.image_token)
        for data in (piece for piece in pieces if isinstance(piece, bytes)):
            pixels = decode(data)
            arranged = self.layout.at(detail).of(*pixels.size)
            own = [next(places) for _ in range(arranged.num_rows)]
            runs: list[ImageRun] = []
            for row, place in enumerate(own):
                if runs and runs[-1].place + runs[-1].length == place:
                    runs[-1] = runs[-1]._replace(length=runs[-1].length + 1)
                else:
                    runs.append(ImageRun(place, row, 1))
            name_of = digest(pixels, {"detail": detail})
            images.append(Image(data, name_of, tuple(runs), detail, arranged.grid))
        assert not images or next(places, None) is None
        request = EngineRequest(name, tuple(ids), GREEDY, 12, images=tuple(images))
        return replace(request, **settings)

    def expected(self, *pieces: str | bytes) -> tuple[list[int], list[float]]:
        """The tokens that transformers generates, and their log-probabilities."""
        inputs = image_models.oracle_inputs(
            self.folder, self.family, [piece if isinstance(piece, str) else decode(piece) for piece in pieces]
        )
        model: Any = image_models.load_oracle(self.folder)
        settings = {"do_sample": False, "eos_token_id": None, "output_scores": True, "return_dict_in_generate": True}
        output = model.generate(**inputs, max_new_tokens=12, **settings)
        tokens: list[int] = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        scores = (score[0].log_softmax(-1)[token].item() for score, token in zip(output.scores, tokens, strict=True))
        return tokens, list(scores)


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
def test_features_are_those_of_transformers(
    family: str, load_images: Callable[..., Model], kernels_library: Path
) -> None:
    model = load_images(family)
    tower = Tower(model.folder, load_config(model.folder), model.layout, torch.device("cpu"), torch.float32)
    oracle: Any = image_models.load_oracle(model.folder)
    sizes = [*SIZES, (3, 90), (90, 3)] if family != "deepseek_ocr2" else [SIZES[0], (800, 30)]  # its tower is slow
    for number, size in enumerate(sizes):
        pixels = decode(picture(number, size))
        found = tower.features(pixels)
        assert found.shape[1] == model.layout.of(*size).num_rows
        assert tower.features(pixels, "low").shape[1] == model.layout.at("low").of(*size).num_rows
        if family == "mistral3" and found.shape[1] == 1:
            continue  # transformers fails
        inputs = image_models.oracle_inputs(model.folder, family, [pixels])
        of_text = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
        wanted = {name: value for name, value in inputs.items() if name not in of_text}
        with torch.inference_mode():
            output = oracle.base_model.get_image_features(**wanted, return_dict=True)
        levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        expected = [torch.cat([part.flatten(0, -2) for part in level]) for level in map(as_list, levels)]
        assert torch.equal(found, torch.stack(expected)), size
        if model.layout.has_several:
            pair = image_models.oracle_inputs(model.folder, family, [pixels, pixels])
            with torch.inference_mode():
                several = oracle.base_model.get_image_features(
                    **{name: pair[name] for name in wanted}, return_dict=True
                )
            torch.testing.assert_close(tower.features(pixels, SEVERAL)[0], several.pooler_output[0])
    exact = tower.features(decode(picture(0, SIZES[0])))
    check_packed(tower, kernels_library, model.request("", picture(0, SIZES[0])).images[0], exact)


def check_packed(tower: Tower, kernels_library: Path, image: Image, exact: torch.Tensor) -> None:
    """In int8, features are nearly the same, and have the same bits in one thread next to a step and in all threads."""
    tower.pack(NativePacker(Kernels(kernels_library, threads=3), "int8"))
    assert tower.cores is not None
    with ThreadPoolExecutor(1) as own:
        alone = own.submit(tower.encode, image).result()
        with tower.cores.step():
            beside = own.submit(tower.encode, image).result()
    assert torch.equal(alone, beside)
    assert 0 < (alone - exact).norm() / exact.norm() < 0.02


def test_torch_computes_a_tower_in_one_thread_and_all_else_in_several(kernels_library: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        cores = TowerCores(Kernels(kernels_library, threads=1))
        with ThreadPoolExecutor(1) as own, ThreadPoolExecutor(1) as another:
            own.submit(cores.take).result()
            assert own.submit(torch.get_num_threads).result() == 1
            assert another.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("family", ["smolvlm", "llava_next", "granite_docling"])
def test_tiles_are_computed_one_by_one(family: str, load_images: Callable[..., Model]) -> None:
    model = load_images(family)
    tower = Tower(model.folder, load_config(model.folder), model.layout, torch.device("cpu"), torch.float32)
    pixels = decode(picture(0, (200, 90)))
    at_once = tower.features(pixels)
    base: Any = tower._model.base_model
    calls: list[int] = []
    embeddings = base.get_submodule("vision_tower" if hasattr(base, "vision_tower") else "vision_model").embeddings
    embeddings.register_forward_hook(lambda module, arguments, output: calls.append(len(output)))
    compute_one_by_one(base)
    torch.testing.assert_close(tower.features(pixels), at_once)
    assert len(calls) > 1
    assert set(calls) == {1}


def as_list(level: Any) -> Any:
    """A tensor of several images, or a sequence of tensors, as a sequence."""
    return [level] if isinstance(level, torch.Tensor) else level


@pytest.mark.parametrize("family", image_models.FAMILIES)
def test_answers_are_those_of_transformers(family: str, load_images: Callable[..., Model]) -> None:
    model = load_images(family)
    sizes = SIZES if family != "mistral3" else [(64, 64), *SIZES[2:]]  # transformers fails on a single row
    for count in (2, len(sizes)):
        pieces = prompt_of(sizes[:count])
        expected, logprobs = model.expected(*pieces)
        least = max(image.num_rows for image in model.request("", *pieces).images)
        small = (7, 1) if least < 100 else (90, 50)  # steps of many rows take long
        chunks = (512, least + 3, least) if model.harness.runner.info.sees_images else (512, *small)
        for chunk in chunks if count == 2 else (512,):
            engine = model.harness.engine(chunk=chunk)
            request = model.request("a", *pieces)
            answer = model.harness.run(engine, [request])["a", 0]
            assert answer.tokens == expected, (count, chunk)
            assert [report.logprob for report in answer.logprobs] == pytest.approx(logprobs, abs=2e-4)
    if family in TEXT_AFTER:
        text = model.request("text", "What is this? ")
        text = replace(text, prompt=text.prompt + (model.layout.image_token,) * (not model.layout.of(64, 48).grid))
        answer = model.harness.run(model.harness.engine(), [text])["text", 0]
        output: Any = image_models.load_oracle(model.folder).generate(
            torch.tensor([text.prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
        assert answer.tokens == output[0, len(text.prompt) :].tolist()


def variants(model: Model, name: str) -> list[EngineRequest]:
    """The same text with many pictures, and everything else that shares a step with them."""
    sampled = SamplingParams(temperature=0.9, seed=5, logprobs=2)
    one = [model.request(f"{name}-{i}", "What is this? ", picture(i), " Say.") for i in range(4)]
    two = model.request(f"{name}-two", "A ", picture(0), " B ", picture(1, (90, 33)), " C", sampling=sampled)
    swapped = model.request(f"{name}-swapped", "A ", picture(1, (90, 33)), " B ", picture(0), " C", sampling=sampled)
    text = EngineRequest(f"{name}-text", one[0].prompt[:6], GREEDY, 12)  # shares the first tokens
    choices = tuple(ChoiceState(index) for index in range(3))
    guided = replace(sampled, guidance=2.0)
    return [
        *one,
        two,
        swapped,
        text,
        replace(one[0], request_id=f"{name}-typed", images=()),
        replace(two, request_id=f"{name}-salted", cache_salt="x"),
        replace(two, request_id=f"{name}-three", choices=choices),
        replace(one[1], request_id=f"{name}-beams", beam_search=BeamSearch(3)),
        replace(two, request_id=f"{name}-guided", sampling=guided, guide=one[0].prompt[:6]),
        replace(two, request_id=f"{name}-logprobs", sampling=replace(sampled, prompt_logprobs=1)),
        replace(two, request_id=f"{name}-searched", sampling=replace(GREEDY, penalty_alpha=0.6, top_k=3)),
        *(replace(two, request_id=f"{name}-{i}", speculation=one_of) for i, one_of in speculations().items()),
    ]


def speculations() -> dict[str, Speculation]:
    """Some methods, with drafts that are often right and often wrong."""
    guess = tuple(range(20, 60))
    return {
        "suffix": Speculation("suffix", 4),
        "lookahead": Speculation("lookahead", 5),
        "prediction": Speculation("prediction", 6, prediction=guess),
    }


class WithFeatures:
    """An engine that steps once all features that it asked for are computed, so that steps depend on no speed."""

    def __init__(self, engine: Engine, features: FeatureCache[Any]) -> None:
        self.add, self.check_integrity = engine.add, engine.check_integrity
        self._engine, self._features = engine, features

    def step(self) -> Any:
        """Compute a step."""
        outputs = self._engine.step()
        while self._features.stats().waiting:
            self._features.wait(60.0)
        return outputs


def load_with_drafts(folder: Path, draft_model: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    """A model with a draft model and heads, to draft by every method."""
    monkeypatch.setattr(tiny_heads, "HIDDEN", 32)
    monkeypatch.setitem(tiny_heads._LAYER, "hidden_size", 32)
    monkeypatch.setattr(tiny_heads, "_random", lambda *shape: torch.randn(shape))  # sharp, so that they are sure
    writers = (tiny_heads.write_medusa, tiny_heads.write_hydra, tiny_heads.write_eagle3)
    heads = tuple(write(folder / write.__name__, 320) for write in writers)
    own = shutil.copytree(draft_model, folder / "draft")
    image_processors.write_files(own, "llava")  # the tokenizer must be the same
    return Model("llava", folder / "model", draft_model=own, heads=heads)


def test_forty_pictures_under_one_text(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, in a crowd, with a warm cache, and in chunks with preemption, drafts and little memory for features."""
    model = load_with_drafts(tmp_path, tiny_model("qwen3", 320), monkeypatch)
    methods = [
        *speculations().values(),
        *(Speculation(name, 4) for name in ("draft_model", "eagle", "hydra", "medusa")),
    ]
    features = model.harness.runner.images
    assert features is not None
    first = model.request("0", "What is this? ", picture(0), " Say.", max_tokens=14)
    requests = [
        replace(
            first,
            request_id=str(number),
            images=(replace(first.images[0], data=data, digest=digest(decode(data), {})),),
        )
        for number, data in enumerate(picture(number, (28, 28)) for number in range(40))
    ]
    engine = model.harness.engine(prefix_caching=False)
    alone = {key: answer for request in requests for key, answer in model.harness.run(engine, [request]).items()}
    assert len({answer.logprobs[0] for answer in alone.values()}) == 40
    drafted = [replace(request, speculation=methods[number % len(methods)]) for number, request in enumerate(requests)]
    crowd = model.harness.engine(num_blocks=400)
    poor = model.harness.engine(num_blocks=4, chunk=24)
    drafting: set[int] = set()
    for engine, limit in ((crowd, 1 << 29), (crowd, 1 << 29), (poor, FOUR_PICTURES), (poor, FOUR_PICTURES)):
        features._limit = limit
        found = model.harness.run(WithFeatures(engine, features), drafted if engine is poor else requests)
        for key, answer in found.items():
            assert (answer.tokens, answer.logprobs) == (alone[key].tokens, alone[key].logprobs), (key, limit)
            drafting |= {int(key[0]) % len(methods)} if answer.num_accepted + answer.num_rejected else set()
        stats = features.stats()
        assert (stats.held_bytes, stats.cached_bytes <= limit) == (0, True)
        assert engine is poor or stats.encoded == 40
    assert drafting == set(range(len(methods)))
    assert stats.encoded > 120  # some twice, as their requests were preempted
    assert (crowd.stats().preemptions, poor.stats().preemptions >= 24) == (0, True)


def test_drafts_of_a_module_for_several_tokens(tmp_path: Path) -> None:
    """Its rotary positions have three axes, as the model's; its drafts change no answer."""
    heads = tmp_path / "heads"
    image_models.write_model(heads, "qwen3_5")
    module = Qwen(config=image_models.tiny_config("qwen3_5").get_text_config()).tensors()
    add(heads, lambda tensors: tensors | module)
    model = Model("qwen3_5", tmp_path / "model", heads=(heads,))
    pictures = [picture(number, (28 + 28 * (number % 3), 28)) for number in range(6)]
    requests = [
        model.request(f"{number}", "What is this? ", data, " Again.", max_tokens=30)
        for number, data in enumerate(pictures)
    ]
    alone = {}
    for request in requests:
        alone |= model.harness.run(model.harness.engine(prefix_caching=False), [request])
    drafted = [replace(request, speculation=Speculation("mtp", 4)) for request in requests]
    for settings in ({}, {"chunk": 24, "num_blocks": 9}):
        engine = model.harness.engine(**settings)
        assert model.harness.runner.images is not None
        found = model.harness.run(WithFeatures(engine, model.harness.runner.images), drafted)
        assert [(one.tokens, one.logprobs) for one in found.values()] == [
            (alone[key].tokens, alone[key].logprobs) for key in found
        ]
        assert sum(one.num_accepted + one.num_rejected for one in found.values()) > 0
        assert (engine.stats().preemptions > 0) == ("num_blocks" in settings)


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        ("smolvlm", "int8"),
        ("qwen3_vl", "int8"),
        ("gemma3", "int8"),
        ("gemma4", "none"),
        ("qwen3_5", "int8"),
    ],
)
def test_answers_do_not_depend_on_the_rest(family: str, quantization: str, load_images: Callable[..., Model]) -> None:
    model = load_images(family, quantization=quantization)
    requests = [replace(request, max_tokens=NUM_TOKENS) for request in variants(model, "a")]
    alone = {}
    for request in requests:
        alone |= model.harness.run(model.harness.engine(prefix_caching=False), [request])
    assert len({alone[f"a-{i}", 0].logprobs[0] for i in range(4)}) == 4
    features = model.harness.runner.images
    assert features is not None
    longest = max(len(request.prompt) for request in requests) + NUM_TOKENS
    sees_images = model.harness.runner.info.sees_images
    most = max(image.num_rows for one in requests for image in one.images)
    chunk = most + 5 if sees_images else 24
    few = 3 * -(-longest // 32)
    for settings, limit in (({}, 1 << 29), ({"chunk": chunk, "num_blocks": few}, 8 * most * features._row_bytes)):
        features._limit = limit
        engine = model.harness.engine(**settings)
        found = model.harness.run(WithFeatures(engine, features), requests)
        stats = engine.stats()
        assert (stats.preemptions > 0) == ("num_blocks" in settings)
        assert stats.images is not None
        assert (stats.images.held_bytes, stats.images.cached_bytes <= limit) == (0, True)
        if not settings:  # once more, with a warm cache
            again = model.harness.run(engine, [replace(one, request_id=f"again-{one.request_id}") for one in requests])
            found |= again
        for (name, choice), other in found.items():
            answer = alone[name.removeprefix("again-"), choice]
            same = (other.tokens, other.logprobs, other.prompt_logprobs, other.sampler_states[-1:])
            expected = (answer.tokens, answer.logprobs, answer.prompt_logprobs, answer.sampler_states[-1:])
            assert same == expected, (name, settings)
