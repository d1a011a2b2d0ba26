import pytest

from server.client.openai_answers import Choice, Chunk, Delta, Function, Logprobs, TokenLogprob, ToolCall, Usage
from server.page.conversation import Turn
from server.page.inside.replay import Proof, Replayed, proof_of

SEEDED = {"seed": 7}


def turn(content: str = "", **properties) -> Turn:
    return Turn(id=1, role="assistant", content=content, **{"request": SEEDED, "fingerprint": "fp_1"} | properties)


def chunk(*texts: str, fingerprint: str | None = "fp_1", **delta) -> Chunk:
    logprobs = Logprobs(content=[TokenLogprob(token=text, logprob=-1.0) for text in texts])
    choice = Choice(delta=Delta(content="".join(texts), **delta), logprobs=logprobs)
    return Chunk(choices=[choice], system_fingerprint=fingerprint)


def replayed(first: Turn, *chunks: Chunk) -> Replayed:
    again = Replayed(first)
    for at, one in enumerate(chunks):
        again.add(one, float(at))
    return again


def proof(first: Turn, *chunks: Chunk, supports_seeds: bool = True) -> Proof:
    return proof_of(replayed(first, *chunks), supports_seeds=supports_seeds)


def test_the_same_again():
    assert proof(turn("Hello!"), chunk("Hel", "lo"), chunk("!")) == Proof(
        True, "The same again: 3 tokens, equal to the last character.", ["Same fingerprint: fp_1."]
    )


def test_the_usage_counts_where_there_are_no_logprobs():
    first = turn("Hi")
    text = Chunk(choices=[Choice(delta=Delta(content="Hi"))])
    end = Chunk(usage=Usage(completion_tokens=2))
    assert proof(first, text, end) == Proof(True, "The same again: 2 tokens, equal to the last character.", [])


def test_another_fingerprint_with_the_same_text():
    found = proof(turn("Hi"), chunk("Hi", fingerprint="fp_2"))
    assert (found.is_same, found.notes) == (True, ["Fingerprints: fp_1, then fp_2."])


def test_an_answer_that_begins_with_a_given_text():
    assert proof(turn("The cat", prefix="The"), chunk(" cat")).is_same


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["The", " dog", " ran"], "from token 2 on"),
        (["A", " cat"], "from token 1 on"),
        (["The", " cat"], "after 7 characters"),
        (["The", " cat", " sat", "."], "from token 4 on"),
    ],
)
def test_where_they_part(texts, said):
    found = proof(turn("The cat sat"), chunk(*texts))
    assert not found.is_same
    assert found.said == f"Not the same: differs {said}."


def test_tokens_that_are_not_the_text_count_for_no_place():
    different = Chunk(
        choices=[
            Choice(
                delta=Delta(content="b", reasoning="x"),
                logprobs=Logprobs(content=[TokenLogprob(token="<think>", logprob=-1.0)]),
            )
        ]
    )
    assert proof(turn("bc", reasoning="x"), different).said == "Not the same: differs after 1 character."


def test_reasoning_is_compared_too():
    found = proof(turn("b", reasoning="xyz"), chunk("b", reasoning="xz"))
    assert found.said == "Not the same: differs within the reasoning, after 1 character."


def test_calls_are_compared_without_their_ids():
    first = turn(tool_calls=[{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}])
    part = ToolCall(index=0, id="2", type="function", function=Function(name="f", arguments="{"))
    end = ToolCall(index=0, function=Function(arguments="}"))
    assert proof(first, chunk(tool_calls=[part]), chunk(tool_calls=[end])).is_same
    other = ToolCall(index=0, function=Function(arguments="]"))
    assert proof(first, chunk(tool_calls=[part]), chunk(tool_calls=[other])).said.endswith("in its tool calls.")


@pytest.mark.parametrize("first", [turn("Hel", finish_reason="stopped"), turn("Hel", problem="It broke.")])
def test_an_answer_that_broke_off_is_compared_up_to_there(first):
    again = replayed(first, chunk("He"))
    assert not again.is_enough
    again.add(chunk("llo", ", you"), 1.0)
    assert again.is_enough
    assert [token.text for token in again.tokens.all] == ["He", "llo"]
    assert (
        proof_of(again, supports_seeds=True).said == "The same again: 2 tokens, equal up to where the answer broke off."
    )


def test_a_whole_answer_is_never_enough_before_its_end():
    assert not replayed(turn("Hi", finish_reason="length"), chunk("Hi")).is_enough


@pytest.mark.parametrize(
    ("request_", "fingerprint", "supports_seeds", "said"),
    [
        (SEEDED, "fp_2", True, "The fingerprint changed from fp_1 to fp_2"),
        (SEEDED, None, True, "returns no fingerprint"),
        (SEEDED, "fp_1", False, "does not support seeds"),
        (SEEDED | {"speculation": {"verify": "rejection"}}, "fp_1", True, "“rejection”"),
        (SEEDED | {"speculation": "off"}, "fp_1", True, "is the same (fp_1)"),
    ],
)
def test_why_it_may_not_be_the_same(request_, fingerprint, supports_seeds, said):
    found = proof(turn("a", request=request_), chunk("b", fingerprint=fingerprint), supports_seeds=supports_seeds)
    assert any(said in note for note in found.notes), found.notes
