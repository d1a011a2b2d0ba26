"""POST /v1/score and /v1/rerank: how well documents answer queries."""

import math
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from model_runner.contract import Pooling
from server.api.pooling.intent import rerank_intent
from server.api.pooling.schema import RerankRequest
from server.generation import pooling
from server.generation.abilities import read_abilities
from server.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine, make_numbers
from tests.server.helpers import chat, client_of, refused, requested
from tests.server.test_embeddings import asked as embedding
from tests.server.test_embeddings import folder_with

SCORE, RERANK = "/v1/score", "/v1/rerank"
YES, NO = ord("y"), ord("n")
PAIRS = "{% for m in messages %}[{{ m.role if m.role in ['query', 'document', 'system'] }}:{{ m.content }}]{% endfor %}"
OF_TOKENS = {"config.json": {"architectures": ["Qwen3ForCausalLM"], "classifier_from_token": ["n", "y"]}}
OF_LOGITS = {
    "modules.json": [{"path": "", "type": "a.Transformer"}, {"path": "1_LogitScore", "type": "b.LogitScore"}],
    "1_LogitScore/config.json": {"true_token_id": YES, "false_token_id": None},
    "config_sentence_transformers.json": {
        "activation_fn": "torch.nn.modules.linear.Identity",
        "prompts": {"web": "Find it."},
        "default_prompt_name": "web",
    },
    "sentence_bert_config.json": {"processing_kwargs": {"chat_template": {"add_generation_prompt": True}}},
}
OF_CLASSES = {"config.json": {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}}


@pytest.fixture
def serving(make_app: Callable[..., FastAPI], tmp_path: Path, engine: FakeEngine) -> Callable[..., httpx.AsyncClient]:
    engine.info_ = replace(engine.info_, max_model_len=512)

    def make(files: dict[str, Any], template: str | None = None, **settings: Any) -> httpx.AsyncClient:
        folder = folder_with(tmp_path / "model", files)
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        return client_of(make_app(folder, **settings))

    return make


@pytest.fixture
async def reranker(serving: Callable[..., httpx.AsyncClient]) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(OF_TOKENS) as client:
        yield client


def prompts(engine: FakeEngine) -> list[str]:
    return [bytes(token for token in request.prompt if token < 256).decode() for request in engine.requests]


def scores(engine: FakeEngine) -> list[float]:
    """The probability of yes, where there are yes and no, by the definition of a softmax."""
    logits = [struct.unpack("<2f", make_numbers(request, 16)) for request in engine.requests]
    return [math.exp(yes) / (math.exp(yes) + math.exp(no)) for yes, no in logits]


async def test_yes_and_no_at_the_end_of_the_question(reranker: httpx.AsyncClient, engine: FakeEngine):
    answer = await reranker.post(SCORE, json={"model": "tiny", "queries": "why", "documents": ["so", "no"]})
    body = answer.json()
    assert {request.sampling.pooling for request in engine.requests} == {Pooling("logits", tokens=(YES, NO))}
    assert all(
        "<Query>: why\n<Document>: " in prompt and "<Instruct>: Given a web" in prompt for prompt in prompts(engine)
    )
    assert all(prompt.endswith("assistant\n") for prompt in prompts(engine))
    assert [one["score"] for one in body["data"]] == pytest.approx(scores(engine))
    assert [one["index"] for one in body["data"]] == [0, 1]
    assert body["usage"]["prompt_tokens"] == sum(len(request.prompt) for request in engine.requests)


async def test_queries_and_documents_pair_up(reranker: httpx.AsyncClient, engine: FakeEngine):
    await reranker.post(SCORE, json={"text_1": ["a", "b"], "text_2": ["c", "d"], "instruction": "Look!"})
    assert "<Instruct>: Look!\n<Query>: a\n<Document>: c" in prompts(engine)[0]
    assert "<Query>: b\n<Document>: d" in prompts(engine)[1]
    assert len(engine.requests) == 2


@pytest.mark.parametrize("path", [RERANK, "/rerank", "/v2/rerank"])
async def test_documents_are_ranked(reranker: httpx.AsyncClient, engine: FakeEngine, path: str):
    documents = ["one", {"text": "two"}, "three", "four"]
    asked = {"model": "tiny", "query": "?", "documents": documents}
    answer = (await reranker.post(path, json=asked)).json()
    found = scores(engine)
    order = sorted(range(4), key=lambda index: -found[index])
    assert [result["index"] for result in answer["results"]] == order
    assert [result["relevance_score"] for result in answer["results"]] == pytest.approx([found[i] for i in order])
    texts = ["one", "two", "three", "four"]
    assert [result["document"] for result in answer["results"]] == [{"text": texts[index]} for index in order]
    best = (await reranker.post(path, json={**asked, "top_n": 2, "return_documents": False})).json()["results"]
    assert best == [{key: result[key] for key in ("index", "relevance_score")} for result in answer["results"][:2]]


@pytest.mark.parametrize("path", [RERANK, "/rerank"])
async def test_texts_are_ranked_in_the_form_of_tei(reranker: httpx.AsyncClient, engine: FakeEngine, path: str):
    texts = ["one", "two", "three"]
    asked = {"query": "?", "texts": texts}
    plain = await reranker.post(path, json=asked)
    found = scores(engine)
    order = sorted(range(3), key=lambda index: -found[index])
    assert [one["index"] for one in plain.json()] == order
    assert [one["score"] for one in plain.json()] == pytest.approx([found[index] for index in order])
    assert {tuple(one) for one in plain.json()} == {("index", "score")}
    shown = await reranker.post(path, json={**asked, "return_text": True, "top_n": 2, "learn": True})
    assert shown.json() == [{**one, "text": texts[one["index"]]} for one in plain.json()[:2]]
    assert shown.headers["x-samewise-ignored"] == "learn"


@pytest.mark.parametrize("files", [OF_TOKENS, OF_CLASSES])
async def test_documents_are_cut_if_the_request_or_the_server_says_so(
    serving: Callable[..., httpx.AsyncClient], engine: FakeEngine, files: dict[str, Any]
):
    asked = {"model": "tiny", "query": "?", "documents": ["a", "x" * 600]}
    async with serving(files) as client:
        told = await refused(client, RERANK, asked, "documents[1]", "context_length_exceeded")
        assert "truncate_prompt_tokens" in told
        assert "--auto-truncate" in told
        for path, fields in (
            (RERANK, {"truncate_prompt_tokens": -1}),
            (SCORE, {"truncate_prompt_tokens": -1, "query": None, "queries": "?"}),
            (RERANK, {"truncate": True, "truncation_direction": "Right", "documents": None, "texts": ["x" * 600]}),
        ):
            request = await requested(client, engine, path, asked | fields)
            assert len(request.prompt) == 512, "as many tokens as fit"
            assert 0 < bytes(token for token in request.prompt if token < 256).count(b"x") < 512
        left = asked | {"truncate": True, "truncation_direction": "left"}
        assert (await client.post(RERANK, json=left)).headers["x-samewise-ignored"] == "truncation_direction"
        await refused(
            client, RERANK, asked | {"query": "x" * 600, "truncate": True}, "query", "context_length_exceeded"
        )
    async with serving(files, auto_truncate=True) as client:
        answer = await client.post(RERANK, json=asked)
        assert (answer.status_code, answer.headers["x-samewise-ignored"]) == (200, "documents[1]")


async def test_documents_may_have_other_fields(reranker: httpx.AsyncClient):
    documents = [{"text": "a", "id": 7, "metadata": {"source": "x"}}, {"text": "b", "id": 8}]
    answer = await reranker.post(RERANK, json={"query": "?", "documents": documents})
    assert {one["document"]["text"] for one in answer.json()["results"]} == {"a", "b"}


async def test_the_scores_of_texts_are_those_of_documents(reranker: httpx.AsyncClient):
    texts = {"query": "?", "texts": ["one", "two"]}
    documents = {"query": "?", "documents": texts["texts"]}
    for of_texts, of_documents in (({}, {}), ({"raw_scores": True}, {"use_activation": False})):
        tei = (await reranker.post(RERANK, json={**texts, **of_texts})).json()
        jina = (await reranker.post(RERANK, json={**documents, **of_documents})).json()["results"]
        assert [(one["index"], one["score"]) for one in tei] == [(one["index"], one["relevance_score"]) for one in jina]


@pytest.mark.parametrize("files", [OF_TOKENS, OF_CLASSES, OF_LOGITS])
async def test_scores_without_activation_are_the_model_s_numbers(
    serving: Callable[..., httpx.AsyncClient], engine: FakeEngine, files: dict[str, Any]
):
    async with serving(files) as client:
        asked = {"queries": "q", "documents": "d"}
        values = [
            (await client.post(SCORE, json={**asked, "use_activation": use})).json()["data"][0]["score"]
            for use in (None, True, False)
        ]
    numbers = struct.unpack(f"<{2 if files is OF_TOKENS else 1}f", make_numbers(engine.requests[0], 16))
    raw = numbers[0] - sum(numbers[1:])
    assert values[2] == pytest.approx(raw)
    assert values[0] == values[1] == pytest.approx(raw if files is OF_LOGITS else 1 / (1 + math.exp(-raw)))


@pytest.mark.parametrize("names", [("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2")])
async def test_pairs_have_several_names(reranker: httpx.AsyncClient, engine: FakeEngine, names: tuple[str, str]):
    values = []
    for first, second in (("queries", "documents"), names):
        answer = await reranker.post(SCORE, json={first: "q", second: ["a", "b"]})
        values.append([one["score"] for one in answer.json()["data"]])
    assert values[0] == values[1]
    await refused(reranker, SCORE, {names[0]: "q", names[1]: []}, names[1], "empty_array")
    await refused(
        reranker, SCORE, {names[0]: "q", names[1]: ["a", "x" * 600]}, f"{names[1]}[1]", "context_length_exceeded"
    )


async def test_equally_good_documents_keep_their_order_and_long_ones_are_cut(
    reranker: httpx.AsyncClient, engine: FakeEngine
):
    asked = {"query": "?", "documents": ["abcd", "abxy", "ab"], "max_tokens_per_doc": 2}
    answer = (await reranker.post(RERANK, json=asked)).json()
    assert [result["index"] for result in answer["results"]] == [0, 1, 2]
    assert len({request.prompt for request in engine.requests}) == 1


@pytest.mark.parametrize(
    ("limit", "kept"), [(2, ""), (3, "日"), (5, "日"), (6, "日本"), (7, "日本x"), (10**30, "日本x語")]
)
async def test_a_document_is_cut_between_characters(
    reranker: httpx.AsyncClient, engine: FakeEngine, limit: int, kept: str
):
    """Each of the three is three tokens."""
    asked = {"query": "?", "documents": ["日本x語"], "max_tokens_per_doc": limit}
    assert (await reranker.post(RERANK, json=asked)).status_code == 200
    shown = prompts(engine)[0].partition("<Document>:")[2].partition("assistant")[0]
    assert shown.strip() == kept


async def test_all_prompts_together_have_a_limit(
    reranker: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    asked = {"query": "why", "documents": ["a", "b"]}
    await reranker.post(RERANK, json=asked)
    num_tokens = sum(len(request.prompt) for request in engine.requests)
    monkeypatch.setattr(pooling, "MAX_TOKENS", num_tokens)
    assert (await reranker.post(RERANK, json=asked)).status_code == 200
    monkeypatch.setattr(pooling, "MAX_TOKENS", num_tokens - 1)
    await refused(reranker, RERANK, asked, "documents", "invalid_value")
    await refused(reranker, SCORE, {"text_1": "why", "text_2": ["a", "b"]}, "text_2", "invalid_value")
    monkeypatch.setattr(pooling, "MAX_TOKENS", 3)
    assert (await reranker.post("/v1/embeddings", json=embedding(input="abc"))).status_code == 200
    await refused(reranker, "/v1/embeddings", embedding(input=["ab", "cd"]), "input", "invalid_value")


def test_a_query_weighs_as_often_as_it_is_read():
    few, many = (rerank_intent(RerankRequest(query="x" * 1000, documents=["a"] * count)).asks for count in (1, 500))
    assert many.num_bytes == 500 * few.num_bytes > 500_000


async def test_a_pair_without_tokens_is_named(serving: Callable[..., httpx.AsyncClient]):
    async with serving(OF_CLASSES) as client:
        await refused(client, RERANK, {"query": "", "documents": ["a", ""]}, "documents[1]", "invalid_value")


@pytest.mark.parametrize(
    ("path", "fields", "param", "code"),
    [
        (SCORE, {}, "queries", "missing_required_parameter"),
        (SCORE, {"queries": "a"}, "documents", "missing_required_parameter"),
        (SCORE, {"text_1": "a"}, "text_2", "missing_required_parameter"),
        (SCORE, {"text_1": "a", "text_2": "b", "queries": "c"}, "text_1", "invalid_parameter_combination"),
        (SCORE, {"queries": ["a", "b"], "documents": ["c"]}, "queries", "invalid_value"),
        (SCORE, {"queries": ["a", "b"], "documents": ["c", "x" * 300]}, "documents[1]", "context_length_exceeded"),
        (SCORE, {"queries": ["a", "x" * 600], "documents": ["c", "d"]}, "queries[1]", "context_length_exceeded"),
        (RERANK, {"query": "x" * 600, "documents": ["b"]}, "query", "context_length_exceeded"),
        (SCORE, {"queries": "a", "documents": []}, "documents", "empty_array"),
        (RERANK, {"query": "a", "documents": ["b"], "top_n": 0}, "top_n", "integer_below_min_value"),
        (RERANK, {"query": "a", "documents": [{"txt": "b"}]}, "documents[0].text", "missing_required_parameter"),
        (RERANK, {"query": "a", "documents": ["b"], "rank_fields": ["c"]}, "rank_fields", "unsupported_parameter"),
        (RERANK, {"documents": ["b"]}, "query", "missing_required_parameter"),
        (RERANK, {"query": "a"}, "documents", "missing_required_parameter"),
        (RERANK, {"query": "a", "documents": None}, "documents", "missing_required_parameter"),
        (RERANK, {"query": "a", "documents": ["b"], "texts": ["b"]}, "documents", "invalid_parameter_combination"),
        (RERANK, {"query": "a", "texts": []}, "texts", "empty_array"),
        (RERANK, {"query": "a", "texts": [{"text": "b"}]}, "texts[0]", "invalid_type"),
        (RERANK, {"query": "a", "texts": ["b", "x" * 600]}, "texts[1]", "context_length_exceeded"),
        (RERANK, {"query": "a", "documents": ["b"], "raw_scores": True}, "raw_scores", "invalid_value"),
        (RERANK, {"query": "a", "documents": ["b"], "return_text": True}, "return_text", "invalid_value"),
        (RERANK, {"query": "a", "texts": ["b"], "return_documents": True}, "return_documents", "invalid_value"),
        (SCORE, {"data_1": "a", "text_2": "b"}, "text_2", "invalid_value"),
        (SCORE, {"queries": "a", "documents": "b", "items": "b"}, "items", "invalid_parameter_combination"),
        (SCORE, {"data_1": "a", "data_2": "b", "queries": "b"}, "data_1", "invalid_parameter_combination"),
        (SCORE, {"data_2": "b"}, "data_2", "invalid_value"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(
    reranker: httpx.AsyncClient, path: str, fields: dict[str, Any], param: str, code: str
):
    await refused(reranker, path, fields, param, code)


async def test_a_template_for_pairs_is_what_the_model_gets(
    serving: Callable[..., httpx.AsyncClient], engine: FakeEngine
):
    async with serving(OF_LOGITS, PAIRS + "{{ '>' if add_generation_prompt }}") as client:
        answer = await client.post(SCORE, json={"queries": "q", "documents": "d"})
        assert prompts(engine) == ["[system:Find it.][query:q][document:d]>"]
        (logit,) = struct.unpack("<f", make_numbers(engine.requests[0], 16))
        assert answer.json()["data"][0]["score"] == logit
        assert engine.requests[0].sampling.pooling == Pooling("logits", tokens=(YES,))
        told = await requested(client, engine, SCORE, {"queries": "q", "documents": "d", "instruction": "x"})
        assert bytes(told.prompt).startswith(b"[system:x]")
        await refused(client, "/v1/embeddings", embedding(), "model", "unsupported_model")


async def test_a_classification_head(serving: Callable[..., httpx.AsyncClient], engine: FakeEngine):
    async with serving(OF_CLASSES) as client:
        answer = await client.post(SCORE, json={"queries": "q", "documents": "d"})
        assert prompts(engine) == ["qd"]
        assert engine.requests[0].sampling.pooling == Pooling("classes")
        (logit,) = struct.unpack("<f", make_numbers(engine.requests[0], 16))
        assert answer.json()["data"][0]["score"] == pytest.approx(1 / (1 + math.exp(-logit)))
        asked = {"queries": "q", "documents": "d", "instruction": "x"}
        await refused(client, SCORE, asked, "instruction", "unsupported_parameter")
        await refused(client, "/v1/chat/completions", chat(), "model", "unsupported_model")
        capabilities = (await client.get("/v1/capabilities")).json()
        assert capabilities["scoring"] == {"by": "classes", "probability": True}
        assert (capabilities["generates"], capabilities["embedding"]) == (False, None)


async def test_a_setting_makes_a_reranker_of_any_model(serving: Callable[..., httpx.AsyncClient], engine: FakeEngine):
    async with serving({}, score_tokens=("n", "y")) as client:
        request = await requested(client, engine, SCORE, {"queries": "q", "documents": "d"})
        assert request.sampling.pooling == Pooling("logits", tokens=(YES, NO))


def test_a_word_that_is_no_token_is_refused(tmp_path: Path, tokenizer: Tokenizer):
    with pytest.raises(ValueError, match="score_tokens: 'yes' has 3 tokens"):
        read_abilities(folder_with(tmp_path / "model", {}), tokenizer, ("no", "yes"))


def test_a_model_that_cannot_be_asked_gives_no_score(tmp_path: Path):
    folder = folder_with(tmp_path / "model", OF_TOKENS)
    (folder / "chat_template.jinja").unlink()
    abilities = read_abilities(folder, Tokenizer.from_folder(folder))
    assert (abilities.scoring, "no chat template" in abilities.no_scoring) == (None, True)


async def test_a_template_may_do_without_the_models_own_instruction(
    serving: Callable[..., httpx.AsyncClient], engine: FakeEngine
):
    silent = "{% for m in messages if m.role in ['query', 'document'] %}[{{ m.content }}]{% endfor %}"
    async with serving(OF_LOGITS, silent) as client:
        pair = {"queries": "q", "documents": "d"}
        assert bytes((await requested(client, engine, SCORE, pair)).prompt) == b"[q][d]"
        await refused(client, SCORE, {**pair, "instruction": "x"}, "instruction", "unsupported_parameter")


def test_a_head_of_many_classes_gives_no_score(tmp_path: Path, tokenizer: Tokenizer):
    files = {"config.json": {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "a", "1": "b"}}}
    abilities = read_abilities(folder_with(tmp_path / "model", files), tokenizer)
    assert abilities.names == ["classify"]
    assert abilities.no_scoring.startswith("Its classification head has 2 classes")
