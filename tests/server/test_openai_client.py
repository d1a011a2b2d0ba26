"""The official client, over a real socket, with everything that it can ask for."""

import openai
import pytest
from openai import OpenAI

from model_runner.contract import Failure
from tests.server.fake_engine import FakeEngine, letters, logprob_of, scripted
from tests.server.helpers import chat, completion
from tests.server.tiny_model import END, EOS


def text_of(engine: FakeEngine, choice: int = 0, request: int = -1) -> str:
    return bytes(letters(engine.requests[request], choice)).decode()


def test_chat(openai_client: OpenAI, engine: FakeEngine):
    engine.num_cached = 3
    answer = openai_client.chat.completions.create(**chat(max_tokens=9))
    assert answer.choices[0].message.content == text_of(engine)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert (answer.object, answer.model) == ("chat.completion", "tiny")
    prompt = len(engine.requests[0].prompt)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        prompt,
        9,
        prompt + 9,
    )
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 0
    assert answer._request_id.startswith("req_")


def test_chat_prompt_is_the_template_without_more_special_tokens(openai_client: OpenAI, engine: FakeEngine, tokenizer):
    messages = [{"role": "developer", "content": " be\n brief "}, {"role": "user", "content": "hi"}]
    messages[1]["content"] = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    openai_client.chat.completions.create(**chat(messages=messages))
    text = tokenizer.decode(engine.requests[0].prompt, skip_special_tokens=False)
    assert text == ("<|start|>system\nbe\n brief<|end|>\n<|start|>user\none\ntwo<|end|>\n<|start|>assistant\n")


def test_chat_streamed(openai_client: OpenAI, engine: FakeEngine):
    stream = openai_client.chat.completions.create(**chat(), stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant", None, None, None, None, None, None]
    assert chunks[0].choices[0].delta.content == ""
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text_of(engine)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 6 + ["length"]
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage.completion_tokens == 5
    assert len({(chunk.id, chunk.created, chunk.system_fingerprint) for chunk in [*chunks, last]}) == 1


def test_three_choices(openai_client: OpenAI, engine: FakeEngine):
    whole = openai_client.chat.completions.create(**chat(n=3, seed=5))
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in whole.choices]
    assert texts == [text_of(engine, choice) for choice in range(3)]
    assert len(set(texts)) == 3
    assert whole.usage.completion_tokens == 15
    parts = ["", "", ""]
    order = []
    for chunk in openai_client.chat.completions.create(**chat(n=3, seed=5), stream=True):
        parts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        order.append(chunk.choices[0].index)
    assert parts == texts
    assert order != sorted(order)  # interleaved


def test_chat_logprobs(openai_client: OpenAI, engine: FakeEngine):
    engine.script = scripted([*"né".encode()])
    answer = openai_client.chat.completions.create(**chat(max_tokens=3, logprobs=True, top_logprobs=2))
    entries = answer.choices[0].logprobs.content
    assert [entry.token for entry in entries] == ["n", "bytes:\\xc3", "bytes:\\xa9"]
    assert b"".join(bytes(entry.bytes) for entry in entries) == "né".encode()
    assert entries[0].logprob == logprob_of(ord("n"), 0) - 10
    assert [len(entry.top_logprobs) for entry in entries] == [2, 2, 2]
    assert [top.logprob for top in entries[0].top_logprobs] == [-0.25, -0.5]


def test_stop(openai_client: OpenAI, engine: FakeEngine):
    engine.script = scripted(b"one two three")
    answer = openai_client.chat.completions.create(**chat(max_tokens=50, stop=["wo t", "zzz"]))
    assert answer.choices[0].message.content == "one t"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == "wo t"
    assert answer.usage.completion_tokens == len("one two t")
    assert engine.aborted == [(engine.requests[0].request_id, 0)]


@pytest.mark.parametrize("token", [EOS, END])
def test_end_of_sequence(openai_client: OpenAI, engine: FakeEngine, token: int):
    engine.script = scripted([*b"ab", token])
    answer = openai_client.chat.completions.create(**chat(max_tokens=50))
    assert answer.choices[0].message.content == "ab"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason is None
    assert answer.usage.completion_tokens == 3


def test_seed(openai_client: OpenAI, engine: FakeEngine):
    same = [openai_client.chat.completions.create(**chat(seed=-7)) for _ in range(2)]
    assert same[0].choices[0].message.content == same[1].choices[0].message.content
    assert [answer.seed for answer in same] == [-7, -7]
    assert engine.requests[0].sampling.seed == 2**64 - 7
    drawn = openai_client.chat.completions.create(**chat())
    again = openai_client.chat.completions.create(**chat(seed=drawn.seed))
    assert again.choices[0].message.content == drawn.choices[0].message.content
    other = openai_client.chat.completions.create(**chat())
    assert other.seed != drawn.seed


def test_completions_of_several_prompts(openai_client: OpenAI, engine: FakeEngine):
    answer = openai_client.completions.create(**completion(prompt=["a", "b"], n=2, max_tokens=None))
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    expected = [text_of(engine, choice, request) for request in (0, 1) for choice in (0, 1)]
    assert [choice.text for choice in answer.choices] == expected
    assert engine.requests[0].max_tokens == 16
    assert answer.usage.prompt_tokens == 2
    alone = openai_client.completions.create(**completion(prompt="b", n=2, max_tokens=16, seed=answer.choices[2].seed))
    assert [choice.text for choice in alone.choices] == expected[2:]


def test_completions_streamed(openai_client: OpenAI, engine: FakeEngine):
    stream = openai_client.completions.create(**completion(), stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == text_of(engine)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 4 + ["length"]
    assert last.usage.total_tokens == 7


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_of_token_ids(openai_client: OpenAI, engine: FakeEngine, max_tokens: int, stream: bool):
    """As evaluation harnesses ask for the likelihood of a text."""
    prompt = [*b"the low", 0xC3, 0xA9]
    answer = openai_client.completions.create(
        **completion(prompt=[prompt], max_tokens=max_tokens, logprobs=1, echo=True, temperature=0), stream=stream
    )
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    logprobs = {name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    for choice in choices:
        for name, values in logprobs.items():
            values.extend(getattr(choice.logprobs, name))
    generated = [bytes([token]).decode() for token in letters(engine.requests[0], 0)]
    assert "".join(choice.text for choice in choices) == "the lowé" + "".join(generated)
    assert logprobs["tokens"] == [*"the low", "bytes:\\xc3", "bytes:\\xa9", *generated]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    own = [logprob_of(token, index + 1) - 10 for index, token in enumerate(prompt[1:])]
    assert logprobs["token_logprobs"][1 : len(prompt)] == own
    assert all(token in top for token, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True))
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4, 5, 6, 7, 7, *[8] * max_tokens]
    assert choices[-1].finish_reason == "length"


def test_models(openai_client: OpenAI):
    (model,) = openai_client.models.list()
    assert (model.id, model.object, model.owned_by, model.max_model_len) == ("tiny", "model", "samewise", 256)
    assert openai_client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        openai_client.models.retrieve("org/other")


def test_error_in_the_middle_of_a_stream(openai_client: OpenAI, engine: FakeEngine):
    engine.fail_after, engine.error_output = 2, Failure("logits are not finite")
    stream = iter(openai_client.chat.completions.create(**chat(), stream=True))
    assert len([next(stream) for _ in range(3)]) == 3
    with pytest.raises(openai.APIError, match="logits are not finite"):
        next(stream)


def test_settings_that_leave_no_token_are_the_requests_mistake(openai_client: OpenAI, engine: FakeEngine):
    engine.fail_after = 0
    engine.error_output = Failure("no token can be chosen with these settings: bad_words", by_request=True)
    with pytest.raises(openai.BadRequestError, match="No token can be chosen with these settings") as caught:
        openai_client.chat.completions.create(**chat())
    assert caught.value.code == "no_token_left"
