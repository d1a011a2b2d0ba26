"""Embeddings and scores of the embedded model, which was trained for neither: what they are, and that they stay so."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tests.conftest import load_dense
from tests.served.conftest import Server

pytestmark = pytest.mark.embedded

MODEL = "SmolLM2-135M-Instruct"
TEXTS = ["The cat sat on the mat.", "A cat is sitting on a rug.", "Stock prices fell sharply on Monday.", "x" * 900]


def vectors(server: Server, texts: Sequence[str], **fields: object) -> list[list[float]]:
    answer = server.client.embeddings.create(model=MODEL, input=list(texts), **fields)
    return [one.embedding for one in answer.data]


def test_they_are_those_of_transformers(server: Server, embedded_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(embedded_folder / "tokenizer.json"))
    model = load_dense(embedded_folder).model
    for text, ours in zip(TEXTS, vectors(server, TEXTS), strict=True):
        with torch.inference_mode():
            state = model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0, -1]
        assert np.linalg.norm(ours) == pytest.approx(1, abs=1e-5)
        assert np.dot(ours, (state / state.norm()).numpy()) > 0.998  # with weights in int8


def test_both_formats_alone_together_and_among_answers_give_the_same(server: Server) -> None:
    alone = [vectors(server, [text])[0] for text in TEXTS]

    async def crowd() -> list[list[float]]:
        async with server.async_client() as client:
            answers = [
                client.completions.create(model=MODEL, prompt=text, max_tokens=20, seed=number)
                for number, text in enumerate(TEXTS * 2)
            ]
            asked = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
            embedded, *_ = await asyncio.gather(asked, *answers)
        return [one.embedding for one in embedded.data]

    assert asyncio.run(crowd()) == vectors(server, TEXTS) == alone
    assert alone[0] != alone[1]


def test_it_does_not_score(server: Server) -> None:
    answer = httpx.post(f"{server.address}/v1/rerank", json={"query": "a", "documents": ["b"]})
    assert answer.json()["error"]["code"] == "unsupported_model"
