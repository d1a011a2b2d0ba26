"""Tokens that grammars allow, compared with other means of checking each token's text; and matchers' life cycle.

The judge is the module regex, which can decide whether a text is a prefix of a match. Languages that no expression
describes are small and checked with a list of their texts.
"""

import json
import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import regex
from torch import Tensor

from model_runner.batch import SampleRows
from model_runner.contract import SamplingParams
from model_runner.draft_tree import NO_DRAFT, ROOT, DraftTree
from model_runner.sampling import grammar as module
from model_runner.sampling.grammar import GrammarError, Grammars, GuessedTokens, Matcher
from model_runner.sampling.rows import NO_EARLY_TOKENS, MaskedRows, SamplingState
from model_runner.sampling.sampler import Sampler
from model_runner.speculative.grammar import prune
from model_runner.speculative.verify import Verifier
from tests import tiny_vocabulary
from tests.model_runner.oracles.draw import TorchDraw
from tests.model_runner.sampling import oracle
from tests.model_runner.sampling.harness import CPU, picks_of, random_logits

SIZE, WIDTH = 300, 310
"""Tokens of the tokenizer; columns of the logits, of which the last stand for nothing."""
TEXTS = tiny_vocabulary.spelled(SIZE)
EOS = tiny_vocabulary.EOS
CODEC = tiny_vocabulary.tokenizer(SIZE)
HEAD = '%llguidance {"no_forcing": true}\n'

Judge = Callable[[bytes], tuple[bool, bool]]
"""Whether a text begins one of the language, and whether it is one."""


def by_expression(pattern: bytes) -> Judge:
    compiled = regex.compile(pattern)
    return lambda text: (
        compiled.fullmatch(text, partial=True) is not None,
        compiled.fullmatch(text) is not None,
    )


def by_list(texts: Iterable[str]) -> Judge:
    complete = {text.encode() for text in texts}
    begun = {text[:end] for text in complete for end in range(len(text) + 1)}
    return lambda text: (text in begun, text in complete)


def json_grammar(schema: object, **written: object) -> str:
    return f"{HEAD}start: %json {json.dumps({**schema, 'x-guidance': {'whitespace_flexible': False, **written}})}"


CHARACTER = (
    rb"(?:[\x00-\x7f]|[\xc2-\xdf][\x80-\xbf]|\xe0[\xa0-\xbf][\x80-\xbf]|[\xe1-\xec\xee\xef][\x80-\xbf]{2}"
    rb"|\xed[\x80-\x9f][\x80-\xbf]|\xf0[\x90-\xbf][\x80-\xbf]{2}|[\xf1-\xf3][\x80-\xbf]{3}|\xf4[\x80-\x8f][\x80-\xbf]{2})"
)
ITEM = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "ab": {"enum": ["b", "ab", True, None]}},
    "required": ["ab"],
    "additionalProperties": False,
}
INTEGER = rb"-?(?:0|[1-9][0-9]*)"
SPACE = rb"[ \n]{0,2}"
LANGUAGES: dict[str, tuple[str, Judge]] = {
    "alternatives": (HEAD + "start: /(ab|ba|abc){1,6}0*/", by_expression(rb"(ab|ba|abc){1,6}0*")),
    "shared beginnings": (HEAD + "start: /a(aa|ab)*b?|(ab)+12/", by_expression(rb"a(aa|ab)*b?|(ab)+12")),
    "empty text": (HEAD + "start: /(true|12)?/", by_expression(rb"(true|12)?")),
    "any character": (
        HEAD + 'start: /[^a"]{1,4}b/',
        by_expression(rb'(?:(?![a"])' + CHARACTER + rb"){1,4}b"),
    ),
    "closed by a mark": (HEAD + r"start: /(.|\n)*<\/a>/", by_expression(rb"(?:" + CHARACTER + rb")*</a>")),
    "object": (
        json_grammar(ITEM),
        by_expression(rb'\{(?:"a":' + INTEGER + rb',)?"ab":(?:"b"|"ab"|true|null)\}'),
    ),
    "array with spaces": (
        json_grammar(
            {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
            whitespace_flexible=True, whitespace_pattern="[ \n]{0,2}",
        ),
        by_expression(
            rb"\[" + SPACE + INTEGER + rb"(?:" + SPACE + rb"," + SPACE + INTEGER + rb"){0,2}" + SPACE + rb"\]"
        ),
    ),
    "rules": (
        HEAD + 'start: "[" (one ("," one)*)? "]" tail?\none: start | /[ab]{1,2}/\ntail: "}}" | "12"',
        by_expression(rb"(?P<start>\[(?:(?:(?&start)|[ab]{1,2})(?:,(?:(?&start)|[ab]{1,2}))*)?\](?:\}\}|12)?)"),
    ),
    "choice": (
        HEAD + 'start: "ab" | "abc" | "12 00" | "null" | "nulL" | "é\\"}"',
        by_list(["ab", "abc", "12 00", "null", "nulL", 'é"}']),
    ),
}  # fmt: skip


@cache
def shared() -> Grammars:
    return make()


def make(width: int = WIDTH) -> Grammars:
    return Grammars(CODEC.to_str, width)


def matcher(grammar: str, output: Iterable[int] = (), stop: tuple[int, ...] = (EOS,)) -> Matcher:
    return shared().matcher(grammar, stop, tuple(output))


def allowed(state: Matcher) -> set[int]:
    assert state.failure is None
    return set(np.flatnonzero(np.unpackbits(state.mask().view(np.uint8), bitorder="little")).tolist())


def judged(judge: Judge, before: bytes, stop: tuple[int, ...] = (EOS,)) -> set[int]:
    """All tokens that may follow."""
    ids = (token for token in range(SIZE) if TEXTS[token] and token not in stop)
    following = {token for token in ids if judge(before + TEXTS[token])[0]}
    return following | (set(stop) if judge(before)[1] else set())


def walk(grammar: str, seed: int, most: int = 40, stop: tuple[int, ...] = (EOS,)) -> list[int]:
    """Random tokens that the grammar allows; long ones and those that end it are rarer than the others."""
    rng, state, tokens = random.Random(seed), matcher(grammar, (), stop), []
    while len(tokens) < most and (going_on := sorted(allowed(state) - set(stop))):
        common = [token for token in going_on if TEXTS[token].isascii() and len(TEXTS[token]) < 4]
        tokens.append(rng.choice(common if common and rng.random() < 0.9 else going_on))
        state.advance(tokens[-1])
    return tokens


def is_confirmed(grammar: str, judge: Judge, tokens: list[int], stop: tuple[int, ...] = (EOS,)) -> bool:
    """Whether the judge says the same of every token at every place."""
    state, text = matcher(grammar, (), stop), b""
    for token in (*tokens, None):
        one_by_one = {token for token in range(SIZE) if state.allows(token)}  # asked while no mask is known
        if one_by_one != judged(judge, text, stop) or allowed(state) != one_by_one:
            return False
        if token is not None:
            state.advance(token)
            text += TEXTS[token]
    return True


def encode(text: str) -> list[int]:
    return CODEC.encode(text).ids


# -- masks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LANGUAGES)
def test_exactly_the_tokens_whose_text_can_come_next(name: str) -> None:
    grammar, judge = LANGUAGES[name]
    for seed in range(6):
        assert is_confirmed(grammar, judge, walk(grammar, seed))


@pytest.mark.parametrize("stop", [(), (EOS, 1), (EOS, encode("0")[0]), (encode("b")[0],)])
def test_tokens_that_stop_stand_where_the_text_is_complete_and_nowhere_else(stop: tuple[int, ...]) -> None:
    for name in ("alternatives", "empty text", "rules"):
        grammar, judge = LANGUAGES[name]
        for seed in range(3):
            assert is_confirmed(grammar, judge, walk(grammar, seed, stop=stop), stop)


def test_a_judge_of_another_language_disagrees() -> None:
    grammar, _ = LANGUAGES["alternatives"]
    for other in (rb"(ab|ba|abc){1,5}0*", rb"(ab|ba|abc){1,6}0*b?", rb"(ab|ba){1,6}0*"):
        assert not all(is_confirmed(grammar, by_expression(other), walk(grammar, seed)) for seed in range(6))


# -- states ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LANGUAGES)
def test_the_state_is_what_the_tokens_make_of_it(name: str) -> None:
    """Whatever is asked on the way, and by whom the mask is computed."""
    grammar, _ = LANGUAGES[name]
    tokens = walk(grammar, 7)
    plain, asked, filled = matcher(grammar), matcher(grammar), matcher(grammar)
    for place in range(len(tokens) + 1):
        asked.guess(tokens[:place], 5)
        asked.fitting([*tokens[place : place + 3], 7, 8])
        shared().fill_masks([filled], in_background=True)
        if place % 2:
            shared().fill_masks([filled, asked], in_background=True)  # one of them is being filled already
        anew = matcher(grammar, tokens[:place])
        masks = [allowed(state) for state in (plain, asked, filled, anew)]
        assert masks[1:] == masks[:1] * 3
        assert len({state.is_stopped for state in (plain, asked, filled, anew)}) == 1
        if place < len(tokens):
            for state in (plain, asked, filled):
                state.advance(tokens[place])


def test_many_masks_in_threads_are_those_of_each_alone() -> None:
    grammars = [grammar for grammar, _ in LANGUAGES.values()] * 3
    outputs = [walk(grammar, seed, 6) for seed, grammar in enumerate(grammars)]
    states = [matcher(grammar, output) for grammar, output in zip(grammars, outputs, strict=True)]
    shared().fill_masks(states, in_background=True)
    expected = [allowed(matcher(grammar, output)) for grammar, output in zip(grammars, outputs, strict=True)]
    assert [allowed(state) for state in states] == expected


def test_nothing_moves_it_after_its_end() -> None:
    state = matcher(LANGUAGES["choice"][0], [*encode("ab"), EOS])
    state.advance(5)
    assert state.failure is None
    assert state.guess(encode("ab"), 4) == GuessedTokens()


# -- drafts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LANGUAGES)
def test_how_many_of_some_tokens_fit(name: str) -> None:
    grammar, judge = LANGUAGES[name]
    rng = random.Random(name)
    for seed in range(4):
        tokens = walk(grammar, seed, 8)
        begun = rng.randrange(len(tokens) + 1)
        text = b"".join(TEXTS[token] for token in tokens[:begun])
        rest = [*tokens[begun : begun + 3], rng.randrange(3, SIZE), rng.randrange(3, SIZE)]
        expected = 0
        while expected < len(rest) and judge(text := text + TEXTS[rest[expected]])[0]:
            expected += 1
        assert matcher(grammar, tokens[:begun]).fitting(rest) == expected


@pytest.mark.parametrize("name", LANGUAGES)
def test_guesses_are_allowed(name: str) -> None:
    grammar, _ = LANGUAGES[name]
    num_guessed = 0
    for seed in range(4):
        tokens = walk(grammar, seed)
        for place in range(len(tokens) + 1):
            state = matcher(grammar, tokens[:place])
            guess = state.guess(tokens[:place], 5).tokens
            assert len(guess) <= 5
            for token in guess:
                assert token in allowed(state)
                state.advance(token)
            num_guessed += len(guess)
    assert num_guessed > 0 or name not in ("object", "choice")


def test_what_is_forced_is_guessed_to_its_end() -> None:
    state = matcher(json_grammar(ITEM), encode('{"ab":t'))
    assert state.guess((), 8) == GuessedTokens(encode("rue}"), [True] * len(encode("rue}")))
    assert state.guess((), 2).tokens == encode("ru")


def test_a_space_is_guessed_where_there_was_one_before() -> None:
    schema = {"type": "object", "properties": {"ab": {"const": 1}, "ba": {"const": 2}}, "required": ["ab", "ba"]}
    spaced = json_grammar({**schema, "additionalProperties": False}, whitespace_flexible=True, whitespace_pattern=" ?")
    # Certain is what stands where there can be no space, or not another one.
    for text, rest, forced in (('{"ab": 1', ', "ba": 2', b'"ba"2'), ('{"ab":1', ',"ba":2', b'ba"')):
        output = encode(text + rest[:1])
        guess = matcher(spaced, output).guess(output, 20)
        assert CODEC.decode(guess.tokens).startswith(rest[1:])
        certain = [TEXTS[token] for token, is_forced in zip(guess.tokens, guess.is_forced, strict=True) if is_forced]
        assert b"".join(certain) == forced


def test_trees_are_left_with_what_the_grammar_allows() -> None:
    a, b, c = encode("abc")
    state = matcher(HEAD + "start: /a(b|ba)c/")
    tree = DraftTree(tokens=(a, b, b, c, a, c), parents=(ROOT, ROOT, 0, 2, 2, 4), confidence=(0.5,) * 6)
    left = prune(tree, state)
    assert [[left.tokens[node] for node in left.path(last)] for last in range(len(left))] == [
        [a], [a, b], [a, b, c], [a, b, a], [a, b, a, c],
    ]  # fmt: skip
    fitting = prune(tree.take([0, 2, 3]), state)
    assert fitting.tokens == (a, b, c)
    assert prune(DraftTree((b,), (ROOT,), (0.5,)), state) == NO_DRAFT
    assert allowed(state) == {a, TEXTS.index(b"ab"), TEXTS.index(b"abc")}


# -- compiling ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The grammars that are compiled."""
    made: list[str] = []
    compile_one = Grammars._compile

    def counting(self: Grammars, grammar: str, num_tokens: int) -> object:
        made.append(grammar)
        return compile_one(self, grammar, num_tokens)

    monkeypatch.setattr(Grammars, "_compile", counting)
    return made


ONE, OTHER = HEAD + 'start: "a"', HEAD + 'start: "b"'


def test_what_is_prepared_is_not_compiled_again(compiled: list[str]) -> None:
    grammars = make()
    grammars.prepare(ONE, 3)
    assert compiled == [ONE] * 3
    states = [grammars.matcher(ONE, (EOS,), ()) for _ in range(3)]
    assert compiled == [ONE] * 3
    assert len({id(state.inner) for state in states}) == 3
    grammars.matcher(ONE, (EOS,), ())
    assert compiled == [ONE] * 4


def test_requests_with_the_same_grammar_are_all_prepared(compiled: list[str]) -> None:
    grammars = make()
    for _ in range(5):
        grammars.prepare(ONE, 2)
    for _ in range(10):
        grammars.matcher(ONE, (EOS,), ())
    assert compiled == [ONE] * 10


def test_what_nobody_fetches_is_dropped_the_oldest_first(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_KEPT", 4)
    grammars = make()
    grammars.prepare(ONE, 3)
    grammars.prepare(OTHER, 2)
    del compiled[:]
    for grammar in (OTHER, OTHER, ONE, ONE):
        grammars.matcher(grammar, (EOS,), ())
    assert compiled == []
    grammars.prepare(ONE, 100)
    assert compiled == [ONE] * 4
    for _ in range(4):
        grammars.matcher(ONE, (EOS,), ())
    assert compiled == [ONE] * 4
    grammars.matcher(ONE, (EOS,), ())
    assert compiled == [ONE] * 5


@pytest.fixture
def all_costly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_COSTLY_S", 0.0)


@pytest.mark.usefixtures("all_costly")
def test_a_costly_grammar_is_compiled_once_for_all_requests(compiled: list[str]) -> None:
    grammars = make()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: grammars.prepare(ONE, 3), range(8)))
    states = [grammars.matcher(ONE, (EOS,), ()) for _ in range(24)]
    assert compiled == [ONE]
    assert len({id(state.inner) for state in states}) == 24


@pytest.mark.usefixtures("all_costly")
def test_of_costly_grammars_those_used_last_are_kept(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_COSTLY", 2)
    grammars = make()
    third = HEAD + 'start: "c"'
    grammars.prepare(ONE, 1)
    grammars.prepare(OTHER, 1)
    grammars.matcher(ONE, (EOS,), ())
    for grammar in (third, ONE, OTHER):
        grammars.prepare(grammar, 1)
    assert compiled == [ONE, OTHER, third, OTHER]


@pytest.mark.usefixtures("all_costly")
def test_a_grammar_that_fails_to_compile_lets_the_next_thread_try(compiled: list[str]) -> None:
    grammars = make()
    for _ in range(2):
        with pytest.raises(GrammarError):
            grammars.prepare("start: (", 1)
    assert compiled == ["start: ("] * 2


@pytest.mark.usefixtures("all_costly")
@pytest.mark.parametrize("name", LANGUAGES)
def test_copies_allow_what_one_of_its_own_allows(name: str) -> None:
    """Whatever other copies have come through in between."""
    grammar, _ = LANGUAGES[name]
    grammars = make()
    grammars.prepare(grammar, 1)
    walks = [walk(grammar, seed, 20) for seed in range(4)]
    copies = [grammars.matcher(grammar, (EOS,), ()) for _ in walks]
    for place in range(max(map(len, walks))):
        for copy, tokens in zip(copies, walks, strict=True):
            if place < len(tokens):
                assert allowed(copy) == allowed(matcher(grammar, tokens[:place]))
                copy.advance(tokens[place])


@pytest.mark.usefixtures("all_costly")
def test_a_copy_that_meets_a_limit_ends_the_sharing(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins anew by itself, and the next requests get a lexer that has no past."""
    grammar, _ = LANGUAGES["object"]
    tokens = walk(grammar, 7, 30)
    monkeypatch.setattr(module, "_STATES", 28)
    grammars = make()
    grammars.prepare(grammar, 1)
    state = grammars.matcher(grammar, (EOS,), ())
    for token in tokens:
        allowed(state)
        state.advance(token)
    assert len(compiled) > 1
    del compiled[:]
    grammars.prepare(grammar, 1)
    assert compiled == [grammar]


def test_threads_do_not_disturb_each_other() -> None:
    grammars = make()
    names = [name for name in LANGUAGES for _ in range(4)]

    def masks(name: str) -> list[set[int]]:
        grammar, _ = LANGUAGES[name]
        grammars.prepare(grammar, 1)
        tokens = walk(grammar, 2, 10)
        state = grammars.matcher(grammar, (EOS,), ())
        found = [allowed(state)]
        for token in tokens:
            state.advance(token)
            found.append(allowed(state))
        return found

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(masks, names))
    assert together == [masks(name) for name in names]


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("start: nope", 'unknown name: "nope"'),
        ("start: /(/", "unclosed group"),
        ("nothing", "Expected token"),
        ('start: %json {"not": {}}', "not"),
        ("start: <no such token>", "no such token"),
    ],
)
def test_a_grammar_that_does_not_compile(grammar: str, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        make().prepare(grammar, 2)
    with pytest.raises(GrammarError, match=reason):
        make().matcher(grammar, (EOS,), ())
    state = SamplingState(2, WIDTH, CPU, shared())
    with pytest.raises(ValueError, match=reason):
        state.admit(0, SamplingParams(grammar=grammar, stop_token_ids=(EOS,)), ())
    state.admit(0, SamplingParams(), ())  # the slot is free


def test_a_text_that_is_there_already_counts() -> None:
    grammar, judge = LANGUAGES["choice"]
    for prefix in ("", "ab", "n", "nul", 'é"}'):
        matcher = shared().matcher(grammar, (EOS,), (), prefix)
        for token, text in enumerate(TEXTS):
            may_begin, _ = judge(prefix.encode() + text)
            assert matcher.allows(token) == (judge(prefix.encode())[1] if token == EOS else bool(text) and may_begin)


def test_a_model_that_has_no_tokenizer_or_not_a_fitting_one() -> None:
    def missing() -> str:
        raise FileNotFoundError("no tokenizer.json")

    for grammars in (Grammars(missing, WIDTH), Grammars(lambda: "{}", WIDTH), make(width=SIZE - 10)):
        for _ in range(2):
            with pytest.raises(GrammarError, match="this model's tokenizer supports neither"):
                grammars.prepare(ONE, 1)
    state = SamplingState(1, WIDTH, CPU)
    with pytest.raises(ValueError, match="no tokenizer"):
        state.admit(0, SamplingParams(grammar=ONE), ())


def test_what_nobody_fetches_is_dropped_by_its_size_too(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_CHARACTERS", 3 * len(ONE))
    grammars = make()
    grammars.prepare(ONE, 2)
    grammars.prepare(OTHER, 2)
    del compiled[:]
    for grammar in (OTHER, OTHER, ONE, ONE):
        grammars.matcher(grammar, (EOS,), ())
    assert compiled == [ONE]
    large = f"{ONE}  // {ONE * 9!r}"
    grammars.prepare(large, 9)
    grammars.matcher(large, (EOS,), ())
    assert compiled == [ONE, large]


# -- tokens that were found beforehand ---------------------------------------------------------------------------------


@pytest.mark.parametrize("picks_allowed", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_was_found_without_the_grammar_stands_where_it_is_allowed(temperature: float, picks_allowed: bool) -> None:
    asked: list[Sequence[int]] = []

    def sample_allowed(logits: Tensor, masked: MaskedRows) -> list[int]:
        asked.append(masked.rows)
        bits = np.unpackbits(masked.masks.view(np.uint8), axis=1, count=WIDTH, bitorder="little").astype(np.bool_)
        hidden = np.where(bits, logits.numpy()[list(masked.rows)], -np.inf)
        return [oracle.pick(*row) for row in zip(hidden, masked.keys.tolist(), masked.temperatures, strict=True)]

    grammars = [LANGUAGES["object"][0], LANGUAGES["any character"][0], None, LANGUAGES["rules"][0]]
    outputs: list[list[tuple[int, ...]]] = []
    for known in (False, True):
        state = SamplingState(4, WIDTH, CPU, make())
        for slot, grammar in enumerate(grammars):
            stop = (EOS,) if grammar else ()
            state.admit(
                slot, SamplingParams(temperature=temperature, seed=slot, grammar=grammar, stop_token_ids=stop), ()
            )
        verify = Verifier(state, Sampler(TorchDraw(WIDTH, CPU)), sample_allowed if picks_allowed else None)
        samples = [SampleRows(slot, slot, NO_DRAFT, "match") for slot in range(4)]
        outputs.append([])
        for step in range(12):
            logits = random_logits(4, WIDTH, step)
            plan = state.plan_early_sampling(samples, range(4), np.full(4, step))
            assert (plan.choices, plan.with_grammar) == ({0, 1, 2, 3}, {0, 1, 3})
            verdicts = verify(logits, samples, range(4), early=picks_of(logits, plan) if known else NO_EARLY_TOKENS)
            outputs[-1].append(tuple(token for verdict in verdicts for token in verdict.tokens))
    assert outputs[0] == outputs[1]
    assert any(asked) == picks_allowed
    assert 2 not in {row for rows in asked for row in rows}


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("begins_early", [False, True])
def test_a_failure_in_mid_output_ends_that_one_with_the_reason(
    begins_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other rows in the batch are as they are alone."""
    sampling = SamplingParams(temperature=0.0, grammar=LANGUAGES["any character"][0], stop_token_ids=(EOS,))
    monkeypatch.setattr(module, "_STEP_FUEL", 20)
    state = SamplingState(4, WIDTH, CPU, make())
    state.admit(1, sampling, ())  # this one needs more
    state.admit(0, replace(sampling, grammar=OTHER), ())
    state.admit(2, SamplingParams(temperature=0.0), ())
    state.admit(3, SamplingParams(temperature=0.0, grammar=ONE, stop_token_ids=(EOS,)), ())
    if begins_early:
        state.fill_masks([0, 1, 2, 3], in_background=True)
    logits = random_logits(4, WIDTH, 1)
    picks = Sampler(TorchDraw(WIDTH, CPU))(logits, state.rows([0, 1, 2, 3]))
    assert picks.errors[1] is not None
    assert picks.errors[1].by_request
    assert "exceeded the limits of its grammar" in picks.errors[1].message
    assert "\n" not in picks.errors[1].message
    for row in (0, 2, 3):
        alone = Sampler(TorchDraw(WIDTH, CPU))(logits[row : row + 1], state.rows([row]))
        assert (picks.tokens[row], picks.errors[row]) == (alone.tokens[0], None)


def test_an_ambiguous_grammar_of_a_client_ends_before_it_costs_seconds() -> None:
    ambiguous = "start: part\npart: part part | /[a-z ]/ | part part part\n"
    output = encode("a" * 110)
    by_client = matcher(f"start: answer\nanswer: %lark {{\n{ambiguous}}}\n", output)
    assert by_client.failure is not None
    assert "max is 500" in by_client.failure.message
    assert matcher(ambiguous, output).failure is None


@pytest.mark.parametrize("begins_early", [False, True])
@pytest.mark.parametrize("name", ["alternatives", "any character", "object"])
def test_what_is_kept_for_other_outputs_never_ends_one(
    name: str, begins_early: bool, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit that an output meets only for what was asked on the way, and not by itself."""
    grammar, _ = LANGUAGES[name]
    tokens = walk(grammar, 7, 30)
    expected = [allowed(matcher(grammar, tokens[:place])) for place in range(len(tokens))]
    monkeypatch.setattr(module, "_STATES", 28)
    del compiled[:]
    grammars = make()
    state = grammars.matcher(grammar, (EOS,), ())
    for place, token in enumerate(tokens):
        if begins_early:
            grammars.fill_masks([state], in_background=True)
        assert allowed(state) == expected[place]
        state.guess(tokens[:place], 5)
        state.advance(token)
    assert len(compiled) > 1
