"""The samplers' fields: what reaches the engine, and what is refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from model_runner.contract import SAMPLER_ORDER, Breaker, Dry, Mirostat, SamplingParams, Xtc
from server.text.dry_breakers import BreakerSpellings
from server.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import CHAT, COMPLETIONS, chat, client_of, completion
from tests.server.test_params import sampling
from tests.server.tiny_model import END, EOS, write_folder

LLAMA_CPP = ("top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"top_n_sigma": 1.5}, {"top_n_sigma": 1.5}),
        ({"top_n_sigma": -1}, {}),
        ({"top_n_sigma": 0}, {}),
        ({"epsilon_cutoff": 0.01}, {"epsilon_cutoff": 0.01}),
        ({"eta_cutoff": 0.01}, {"eta_cutoff": 0.01}),
        ({"xtc_probability": 0.5}, {"xtc": Xtc(0.5, 0.1)}),
        ({"xtc_probability": 0.5, "xtc_threshold": 0.2}, {"xtc": Xtc(0.5, 0.2)}),
        ({"xtc_probability": 0, "xtc_threshold": 0.1}, {}),
        ({"mirostat": 2}, {"mirostat": Mirostat(5.0, 0.1)}),
        ({"mirostat": 2, "mirostat_tau": 3, "mirostat_eta": 0.2, "top_p": 1}, {"mirostat": Mirostat(3.0, 0.2)}),
        ({"mirostat": 0, "mirostat_tau": 5, "mirostat_eta": 0.1, "top_k": 4}, {"top_k": 4}),
        ({"dry_multiplier": 0.0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1}, {}),
        ({"dry_multiplier": 0.8, "dry_penalty_last_n": 0}, {}),
        ({"dry_multiplier": 0.8, "dry_sequence_breakers": []}, {"dry": Dry(0.8)}),
        (
            {"dry_multiplier": 0.8, "dry_base": 2, "dry_allowed_length": 3, "dry_penalty_last_n": 64,
             "dry_sequence_breakers": ["h"]},
            {"dry": Dry(0.8, 2.0, 3, 64, (Breaker((104, 256, 257, 258)),))},
        ),
        ({"exponential_decay_length_penalty": [10, 1.5]}, {"exponential_decay_length_penalty": (10, 1.5)}),
        ({"sampler_order": "samewise"}, {}),
        ({"sampler_order": "llama.cpp", "top_k": 3}, {"sampler_order": LLAMA_CPP, "top_k": 3}),
        ({"sampler_order": ["min_p", "xtc"], "min_p": 0.5}, {"sampler_order": ("min_p", "xtc"), "min_p": 0.5}),
    ],
)  # fmt: skip
async def test_field_reaches_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any], expected: dict[str, Any]
):
    got = await sampling(client, engine, **fields)
    assert got == SamplingParams(**{"seed": 3, "stop_token_ids": (EOS, END), **expected})


async def test_breakers_that_nobody_names(client: httpx.AsyncClient, engine: FakeEngine):
    dry = (await sampling(client, engine, dry_multiplier=0.8)).dry
    assert dry == Dry(0.8, 1.75, 2, -1, (Breaker(tuple(sorted(map(ord, '\n:"*')))),))


async def test_breakers_are_looked_for_in_another_process(
    make_app: Callable[..., FastAPI], folder: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    found: set[str] = set()
    find = BreakerSpellings._find

    def note(self: BreakerSpellings, breaker: str) -> tuple[Breaker, ...]:
        found.add(breaker)
        return find(self, breaker)

    monkeypatch.setattr(BreakerSpellings, "_find", note)
    async with client_of(make_app(folder)) as client:
        assert found == set('\n:"*')  # the breakers of requests that name none
        found.clear()
        assert (await sampling(client, engine, dry_multiplier=0.8)).dry.breakers
        for path, body in ((CHAT, chat), (COMPLETIONS, completion)):
            fields = {"dry_multiplier": 0.8, "dry_sequence_breakers": [path]}
            assert (await client.post(path, json=body(**fields))).status_code == 200
        assert not found  # in this process


async def test_defaults_of_the_model(make_app: Callable[..., FastAPI], engine: FakeEngine, tmp_path: Path):
    generation = {"epsilon_cutoff": 0.1, "eta_cutoff": 0.2, "exponential_decay_length_penalty": [7, 1.25], "top_p": 0.5}
    folder = write_folder(tmp_path / "m", generation=generation)
    async with client_of(make_app(folder)) as client:
        got = await sampling(client, engine)
        assert (got.epsilon_cutoff, got.eta_cutoff, got.exponential_decay_length_penalty) == (0.1, 0.2, (7, 1.25))
        got = await sampling(client, engine, mirostat=2)
        assert (got.epsilon_cutoff, got.eta_cutoff, got.top_p, got.mirostat) == (0, 0, 1, Mirostat())
        fields = (await client.get("/v1/capabilities")).json()["endpoints"][CHAT]
        assert (fields["eta_cutoff"]["default"], fields["mirostat_tau"]["default"]) == (0.2, 5)
        assert "top_k" in fields["mirostat"]["excludes"]
        assert fields["dry_base"]["requires"] == ["dry_multiplier"]
        response = await client.post(COMPLETIONS, json=completion(sampler_order=["epsilon_cutoff", "eta_cutoff"]))
        assert (response.status_code, response.json()["error"]["param"]) == (400, "sampler_order")
        assert "'top_p', which is in use" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"top_n_sigma": -1.5}, "top_n_sigma", "decimal_below_min_value"),
        ({"top_n_sigma": "1"}, "top_n_sigma", "invalid_type"),
        ({"epsilon_cutoff": 1}, "epsilon_cutoff", "decimal_above_max_value"),
        ({"eta_cutoff": -0.1}, "eta_cutoff", "decimal_below_min_value"),
        ({"xtc_probability": 1.5}, "xtc_probability", "decimal_above_max_value"),
        ({"xtc_probability": 0.5, "xtc_threshold": 2}, "xtc_threshold", "decimal_above_max_value"),
        ({"xtc_threshold": 0.3}, "xtc_threshold", "invalid_value"),
        ({"mirostat": 1}, "mirostat", "unsupported_value"),
        ({"mirostat": True}, "mirostat", "unsupported_value"),
        ({"mirostat": 3}, "mirostat", "unsupported_value"),
        ({"mirostat_tau": 3}, "mirostat_tau", "invalid_value"),
        ({"mirostat": 0, "mirostat_eta": 0.3}, "mirostat_eta", "invalid_value"),
        ({"mirostat": 2, "mirostat_eta": 1.1}, "mirostat_eta", "decimal_above_max_value"),
        ({"mirostat": 2, "top_k": 5}, "mirostat", "invalid_parameter_combination"),
        ({"mirostat": 2, "top_p": 0.9}, "mirostat", "invalid_parameter_combination"),
        ({"mirostat": 2, "min_p": 0.1}, "mirostat", "invalid_parameter_combination"),
        ({"mirostat": 2, "typical_p": 0.1}, "mirostat", "invalid_parameter_combination"),
        ({"mirostat": 2, "eta_cutoff": 0.1}, "mirostat", "invalid_parameter_combination"),
        ({"mirostat": 2, "epsilon_cutoff": 0.1}, "mirostat", "invalid_parameter_combination"),
        ({"mirostat": 2, "top_n_sigma": 1}, "mirostat", "invalid_parameter_combination"),
        ({"mirostat": 2, "xtc_probability": 0.1}, "mirostat", "invalid_parameter_combination"),
        ({"mirostat": 2, "sampler_order": "llama.cpp"}, "mirostat", "invalid_parameter_combination"),
        ({"dry_multiplier": -1}, "dry_multiplier", "decimal_below_min_value"),
        ({"dry_base": 2}, "dry_base", "invalid_value"),
        ({"dry_multiplier": 1, "dry_base": 0.5}, "dry_base", "decimal_below_min_value"),
        ({"dry_multiplier": 1, "dry_allowed_length": 0}, "dry_allowed_length", "integer_below_min_value"),
        ({"dry_multiplier": 1, "dry_penalty_last_n": -2}, "dry_penalty_last_n", "integer_below_min_value"),
        ({"dry_multiplier": 1, "dry_sequence_breakers": [""]}, "dry_sequence_breakers[0]", "string_below_min_length"),
        ({"dry_multiplier": 1, "dry_sequence_breakers": ["x" * 41]}, "dry_sequence_breakers[0]",
         "string_above_max_length"),
        ({"dry_multiplier": 1, "dry_sequence_breakers": ["x"] * 17}, "dry_sequence_breakers", "array_above_max_length"),
        ({"dry_sequence_breakers": ["x"]}, "dry_sequence_breakers", "invalid_value"),
        ({"exponential_decay_length_penalty": [1]}, "exponential_decay_length_penalty", "array_below_min_length"),
        ({"exponential_decay_length_penalty": [1.5, 2]}, "exponential_decay_length_penalty[0]", "invalid_value"),
        ({"exponential_decay_length_penalty": [-1, 2]}, "exponential_decay_length_penalty[0]", "invalid_value"),
        ({"exponential_decay_length_penalty": [1, 0]}, "exponential_decay_length_penalty[1]", "invalid_value"),
        ({"exponential_decay_length_penalty": [1, 2], "ignore_eos": True}, "exponential_decay_length_penalty",
         "invalid_value"),
        ({"sampler_order": "vllm"}, "sampler_order", "invalid_value"),
        ({"sampler_order": 3}, "sampler_order", "invalid_type"),
        ({"sampler_order": ["top_k", "mirostat"]}, "sampler_order[1]", "invalid_value"),
        ({"sampler_order": ["top_k", "top_p", "top_k"]}, "sampler_order[2]", "invalid_value"),
        ({"sampler_order": ["top_k"] * 10}, "sampler_order", "array_above_max_length"),
        ({"sampler_order": ["top_k"], "top_p": 0.5}, "sampler_order", "invalid_value"),
        ({"sampler_order": ["top_p"], "top_p": 0.5, "temperature": 0.5}, "sampler_order", "invalid_value"),
        ({"sampler_order": "llama.cpp", "eta_cutoff": 0.5}, "sampler_order", "invalid_value"),
        ({"sampler_order": ["top_k"], "xtc_probability": 0.5}, "sampler_order", "invalid_value"),
    ],
)  # fmt: skip
async def test_refused_by_name(client: httpx.AsyncClient, fields: dict[str, Any], param: str, code: str):
    response = await client.post(COMPLETIONS, json=completion(**fields))
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code), error


def test_the_orders_have_no_step_twice():
    assert len(set(SAMPLER_ORDER)) == len(SAMPLER_ORDER)
    assert set(LLAMA_CPP) < set(SAMPLER_ORDER)


TEXTS = [b"a", b"b", b"ab", b"xa", b"bax", b"", b"cabc", b"b\n"]


def speller() -> BreakerSpellings:
    return BreakerSpellings(TEXTS, lambda text: [TEXTS.index(character.encode()) for character in text])


def test_spellings_of_breakers():
    spell = speller()
    assert spell(["a"], 8) == (Breaker((0, 2, 3, 4, 6)),)
    assert spell(["ab"], 8) == (Breaker((2, 6)), Breaker((0, 3), (1,)))
    assert spell(["aab"], 8) == (Breaker((0, 3), (0, 1)),)  # and nothing that ends with `aa`
    assert spell(["a", "a"], 8) == spell(["a"], 8)
    assert spell([], 8) == ()


def test_breakers_with_the_same_rest_are_one():
    assert speller()(["ab", "bb", "x"], 8) == (Breaker((2, 3, 4, 6)), Breaker((0, 1, 2, 3), (1,)))


def test_breakers_that_the_model_cannot_write():
    assert speller()(["a"], 4) == (Breaker((0, 2, 3)),)
    assert speller()(["ab"], 1) == ()
    assert speller()(["ab"], 2) == (Breaker((0,), (1,)),)


def test_a_breaker_of_several_tokens(tokenizer: Tokenizer):
    assert tokenizer.spell_breakers(["\n\n"], tokenizer.vocab_size) == (Breaker((10,), (10,)),)


def test_a_long_breaker_has_at_most_one_form_for_each_of_its_beginnings():
    """Though thousands of tokens end with the first one."""
    long = "".join(map(chr, range(97, 97 + 20)))
    texts = [letter.encode() for letter in long] + [f"{number}{long[0]}".encode() for number in range(5000)]
    (breaker, *others) = BreakerSpellings(texts, lambda text: [long.index(letter) for letter in text])([long], 10**6)
    assert breaker == Breaker((0, *range(20, 5020)), tuple(range(1, 20)))
    assert others == []
