"""Encoders on real engines: transformers' numbers, and the same bits alone and in every crowd."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.random_encoders import ENCODERS, MODULES, OTHER_ENCODERS, TEXTS, add_modules, save_encoder, tokenizer
from model_runner.config import RunnerConfig
from model_runner.contract import Pooling, SamplingParams, StepPlan, StepResult
from model_runner.encoders import model as encoder_model
from model_runner.encoders.folder import MODEL_TYPES, find_encoder
from model_runner.encoders.runner import EncoderRunner, plan_encoder
from model_runner.refusal import UnsupportedModelError
from scheduler.engine import Engine
from scheduler.interface import EngineRequest, SchedulerConfig
from scheduler.scheduler import Scheduler
from tests.encoders.oracle import Oracle, Vector, cosine

PAIRS = [(TEXTS[0], TEXTS[2]), ("a", "b"), (TEXTS[3], TEXTS[1]), (TEXTS[4], "dog")]


def load(folder: Path, **settings: object) -> EncoderRunner:
    encoder = find_encoder(folder)
    assert encoder is not None
    config = RunnerConfig(folder, **{"quantization": "none", "threads": 1} | settings)
    needs = plan_encoder(config, encoder, imported=0)
    runner = EncoderRunner.load(config, encoder)
    assert (needs.max_model_len, needs.kv_cache_gib) == (runner.info.max_model_len, None)
    assert needs.reserved_bytes > needs.loading_bytes > 0
    return runner


def engine(runner: EncoderRunner, chunk: int = 512) -> Engine:
    info = runner.info
    limits = SchedulerConfig(info.block_size, info.max_num_seqs, chunk, info.max_model_len, prefix_caching=False)
    return Engine(Scheduler(limits, info.num_blocks), runner)


def run(running: Engine, requests: Sequence[EngineRequest]) -> dict[str, bytes]:
    """The numbers of each request."""
    for request in requests:
        running.add(request)
    found: dict[str, bytes] = {}
    while running.has_work:
        for output in running.step():
            assert output.error is None
            assert output.tokens == ()
            found[output.request_id] = output.pooled
    running.check_integrity()
    assert len(found) == len(requests)
    return found


def request(name: str, tokens: Sequence[int], pooling: Pooling) -> EngineRequest:
    return EngineRequest(name, tuple(tokens), SamplingParams(pooling=pooling), 0)


def embedding_requests(pooling: Pooling) -> list[EngineRequest]:
    return [request(f"e{index}", tokenizer().encode(text).ids, pooling) for index, text in enumerate(TEXTS)]


def score_requests() -> list[EngineRequest]:
    made = []
    for index, (first, second) in enumerate(PAIRS):
        encoded = tokenizer().encode(first, second)
        made.append(request(f"s{index}", encoded.ids, Pooling("classes", num_first=encoded.type_ids.index(1))))
    return made


def vector(numbers: bytes) -> Vector:
    return np.frombuffer(numbers, "<f4").astype(np.float64)


@pytest.fixture(scope="module")
def embedding_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            folder = save_encoder(tmp_path_factory.mktemp("encoders") / kind, kind)
            made[kind] = add_modules(folder, *MODULES[kind])
        return made[kind]

    return make


@pytest.mark.parametrize("quantization", ["none", "auto"])
@pytest.mark.parametrize("kind", ENCODERS)
def test_embeddings(kind: str, quantization: str, embedding_folder: Callable[[str], Path]) -> None:
    folder = embedding_folder(kind)
    runner = load(folder, quantization=quantization)
    encoder = find_encoder(folder)
    assert encoder is not None
    requests = embedding_requests(Pooling("modules", normalizes=encoder.normalizes))
    alone = {}
    for one in requests:
        alone |= run(engine(runner), [one])
    for chunk in (7, 64, 512):  # texts of up to 126 tokens, so that some are in several steps
        assert run(engine(runner, chunk), requests) == alone
        assert run(engine(runner, chunk), requests[::-1]) == alone
    oracle = Oracle(folder)
    closeness = [cosine(vector(alone[one.request_id]), oracle.embed([*one.prompt])) for one in requests]
    assert min(closeness) > (1 - 1e-9 if quantization == "none" else 0.98)  # a tiny model may turn one of them more
    assert np.median(closeness) > 0.998
    assert cosine(vector(alone["e0"]), vector(alone["e3"])) < 0.999  # else all of this would say nothing
    if encoder.normalizes:
        assert np.linalg.norm(vector(alone["e0"])) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("classes", [1, 3])
@pytest.mark.parametrize("kind", [kind for kind in ENCODERS if kind != "gemma3_text"])
def test_classification_heads(kind: str, classes: int, tmp_path: Path) -> None:
    other_pooling = {"modernbert": "mean", "eurobert": "late"}
    more = {"classifier_pooling": other_pooling[kind]} if kind in other_pooling and classes == 3 else {}
    folder = save_encoder(tmp_path, kind, classes=classes, **more)
    runner = load(folder)
    requests = score_requests()
    crowd = run(engine(runner), requests)
    oracle = Oracle(folder)
    for one, pair in zip(requests, PAIRS, strict=True):
        assert run(engine(runner, 16), [one])[one.request_id] == crowd[one.request_id]
        expected = oracle.classify([*one.prompt], tokenizer().encode(*pair).type_ids)
        np.testing.assert_allclose(vector(crowd[one.request_id]), expected, atol=2e-4)


@pytest.mark.parametrize("kind", OTHER_ENCODERS)
def test_other_kinds(kind: str, tmp_path: Path) -> None:
    embedding = add_modules(save_encoder(tmp_path / "embedding", kind), *MODULES["bert"])
    requests = embedding_requests(Pooling("modules"))
    found = run(engine(load(embedding)), requests)
    for one in requests:
        assert cosine(vector(found[one.request_id]), Oracle(embedding).embed([*one.prompt])) > 1 - 1e-9
    scoring = save_encoder(tmp_path / "scoring", kind, classes=1)
    scores = run(engine(load(scoring)), score_requests())
    for one, pair in zip(score_requests(), PAIRS, strict=True):
        expected = Oracle(scoring).classify([*one.prompt], tokenizer().encode(*pair).type_ids)
        np.testing.assert_allclose(vector(scores[one.request_id]), expected, atol=2e-4)


def test_every_kind_is_tested() -> None:
    assert {*ENCODERS, *OTHER_ENCODERS} == MODEL_TYPES


@pytest.mark.parametrize("kind", ["modernbert", "gemma3_text", "mpnet"])
def test_windows_and_biases_of_long_texts(kind: str, embedding_folder: Callable[[str], Path]) -> None:
    """Queries with a window are computed 128 at a time."""
    folder = embedding_folder(kind)
    runner = load(folder, max_model_len=290)
    requests = [
        request(f"r{length}", [0, *(4 + place * 7 % 50 for place in range(length - 1))], Pooling("modules"))
        for length in (290, 129, 128, 256, 255)
    ]
    found = run(engine(runner), requests)
    for one in requests:
        assert run(engine(runner), [one]) == {one.request_id: found[one.request_id]}
        assert cosine(vector(found[one.request_id]), Oracle(folder).embed([*one.prompt])) > 1 - 1e-9


@pytest.mark.parametrize("quantization", ["none", "auto"])
def test_threads_change_nothing(quantization: str, embedding_folder: Callable[[str], Path]) -> None:
    one, two = (
        run(
            engine(load(embedding_folder("modernbert"), quantization=quantization, threads=threads)),
            embedding_requests(Pooling("modules")),
        )
        for threads in (1, 2)
    )
    assert one == two


def test_token_types_matter(tmp_path: Path) -> None:
    runner = load(save_encoder(tmp_path, "bert", classes=1))
    pair = score_requests()[0]
    plain = replace(pair, sampling=SamplingParams(pooling=Pooling("classes")))
    assert run(engine(runner), [pair]) != run(engine(runner), [plain])


def test_padding_tokens_in_a_text_have_robertas_positions(embedding_folder: Callable[[str], Path]) -> None:
    folder = embedding_folder("xlm-roberta")
    tokens = tokenizer().encode("a <pad> b <pad>").ids
    assert tokens.count(1) == 2
    found = run(engine(load(folder)), [request("r", tokens, Pooling("modules", normalizes=True))])
    assert cosine(vector(found["r"]), Oracle(folder).embed(tokens)) > 1 - 1e-9


def test_vectors_are_shortened_and_then_normalised(embedding_folder: Callable[[str], Path]) -> None:
    runner = load(embedding_folder("bert"))
    tokens = tokenizer().encode(TEXTS[0]).ids
    whole, short, raw = (
        vector(run(engine(runner), [request("r", tokens, pooling)])["r"])
        for pooling in (
            Pooling("modules", normalizes=True),
            Pooling("modules", dimensions=10, normalizes=True),
            Pooling("modules"),
        )
    )
    np.testing.assert_allclose(short, whole[:10] / np.linalg.norm(whole[:10]), rtol=1e-6)
    np.testing.assert_allclose(raw / np.linalg.norm(raw), whole, atol=1e-7)
    assert np.linalg.norm(raw) > 1.1


def test_aborted_texts_leave_the_others_alone(embedding_folder: Callable[[str], Path]) -> None:
    runner = load(embedding_folder("bert"))
    requests = embedding_requests(Pooling("modules"))
    expected = run(engine(runner), requests)
    running = engine(runner, 32)
    for one in requests:
        running.add(one)
    found = {output.request_id: output.pooled for output in running.step()}
    running.abort("e2")
    while running.has_work:
        found |= {output.request_id: output.pooled for output in running.step()}
    assert found == {name: numbers for name, numbers in expected.items() if name != "e2"}
    running.check_integrity()


def test_a_step_without_memory_is_done_again(
    embedding_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(embedding_folder("bert"))
    requests = embedding_requests(Pooling("modules"))
    expected = run(engine(runner), requests)
    encode, calls = runner._model.encode, []

    def short_of_memory(texts: Sequence[encoder_model.EncoderText]) -> list[torch.Tensor]:
        calls.append(len(texts))
        if len(calls) < 3:
            raise MemoryError
        return encode(texts)

    monkeypatch.setattr(runner._model, "encode", short_of_memory)
    assert run(engine(runner), requests) == expected
    assert len(calls) > 2


def test_numbers_that_are_not_finite_are_an_error(embedding_folder: Callable[[str], Path]) -> None:
    runner = load(embedding_folder("bert"))
    runner._model._base.embeddings.word_embeddings.weight[5] = torch.nan
    running = engine(runner)
    running.add(request("bad", [0, 5, 2], Pooling("modules")))
    running.add(request("good", [0, 6, 2], Pooling("modules")))
    outputs = {output.request_id: output.error for output in running.step()}
    assert outputs["good"] is None
    assert outputs["bad"] is not None
    assert "not finite" in outputs["bad"].message


@pytest.mark.parametrize("pooling", [None, Pooling("last"), Pooling("classes")])
def test_other_requests_fail(pooling: Pooling | None, embedding_folder: Callable[[str], Path]) -> None:
    running = engine(load(embedding_folder("bert")))
    running.add(EngineRequest("r", (0, 5, 2), SamplingParams(pooling=pooling), 0 if pooling else 4))
    (output,) = running.step()
    assert output.error is not None
    assert "the model is an encoder, which gives pooling by modules" in output.error.message
    assert output.error.by_request


def test_a_model_that_mixes_texts_is_refused(
    embedding_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = encoder_model.Texts.attend

    def mixing(self: encoder_model.Texts, query: torch.Tensor, *others: object, **more: object) -> torch.Tensor:
        return attend(self, query, *others, **more) + query[0, 0, 0] * 1e-6  # type: ignore[arg-type]

    monkeypatch.setattr(encoder_model.Texts, "attend", mixing)
    with pytest.raises(UnsupportedModelError, match="mixes the texts of a batch"):
        load(embedding_folder("bert"))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"device": "cuda"}, "encoders run on the CPU only"),
        ({"kv_cache_gib": 1.0}, "remove --kv-cache-gib"),
        ({"learn": True, "aux_model": Path("x")}, "remove --aux-model, --learn"),
        ({"max_model_len": 301}, "more than the model's own limit of 300"),
        ({"dtype": "bfloat16"}, "bfloat16 is not supported on CPU"),
    ],
)
def test_settings_of_generating_models(
    settings: dict[str, object], reason: str, embedding_folder: Callable[[str], Path]
) -> None:
    with pytest.raises(ValueError, match=reason):
        load(embedding_folder("bert"), **settings)


def test_lengths(embedding_folder: Callable[[str], Path], tmp_path: Path) -> None:
    assert load(embedding_folder("bert")).info.max_model_len == 200  # of sentence_bert_config.json
    assert load(embedding_folder("bert"), max_model_len=300).info.max_model_len == 300
    plain = save_encoder(tmp_path, "xlm-roberta")
    assert load(plain).info.max_model_len == 256  # of tokenizer_config.json
    assert load(plain, max_model_len=298).info.max_model_len == 298
    with pytest.raises(ValueError, match="own limit of 298"):  # positions begin at 2
        load(plain, max_model_len=299)


def test_nothing_is_computed_before_the_end_of_a_text(embedding_folder: Callable[[str], Path]) -> None:
    runner = load(embedding_folder("bert"))
    steps: list[tuple[StepPlan, StepResult]] = []
    execute = runner.execute

    def watched(plan: StepPlan) -> StepResult:
        steps.append((plan, execute(plan)))
        return steps[-1][1]

    runner.execute = watched  # type: ignore[method-assign]
    run(engine(runner, 16), [request("r", tokenizer().encode(TEXTS[4]).ids, Pooling("modules"))])
    assert [bool(result.choices[0].pooled) for _, result in steps] == [False] * (len(steps) - 1) + [True]
    assert len(steps) > 4
