"""SuffixDecoding, compared with counting in plain lists, and the storage of past outputs."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_runner.draft_tree import NO_DRAFT, DraftTree
from model_runner.speculative.growing import grow_best_first
from model_runner.speculative.suffix import DEPTH, PastOutputs, SuffixAutomaton, SuffixProposer
from tests.model_runner.speculative.automata import Reader, suffix_library, suffix_proposer
from tests.model_runner.speculative.driving import Run, draft, markov, new_choice

Text = Sequence[int]


def followers(texts: Sequence[Text], string: Text) -> Counter[int]:
    """Counts of the tokens that follow a string."""
    found: Counter[int] = Counter()
    for text in texts:
        for end in range(len(string), len(text)):
            if tuple(text[end - len(string) : end]) == tuple(string):
                found[text[end]] += 1
    return found


def probabilities(texts: Sequence[Text], string: Text) -> dict[int, float]:
    """Probabilities of the tokens that follow a string."""
    found = followers(texts, string)
    weight = sum(found.values()) + 2.6 / len(string)
    rivals = len(found) > 1
    return {token: n / weight * n / (n + rivals) for token, n in found.items()}


def drafts(
    corpora: Sequence[Sequence[Text]], context: Text, max_nodes: int
) -> list[tuple[Sequence[Text], Text, DraftTree]]:
    """The possible drafts: in each corpus, from the two longest matches at different places."""
    found = []
    for texts in corpora:
        sizes = [size for size in range(min(len(context), DEPTH - 1), 0, -1) if followers(texts, context[-size:])]
        ends = {size: followers([[*text, -1] for text in texts], context[-size:]).total() for size in sizes}
        longest = [size for place, size in enumerate(sizes) if place == 0 or ends[size] > ends[sizes[place - 1]]]
        for size in longest[:2]:

            def children(string: Text, texts: Sequence[Text] = texts) -> list[tuple[int, float, Text]]:
                return [(token, value, (*string, token)) for token, value in probabilities(texts, string).items()]

            string = tuple(context[-size:])
            found.append((texts, string, grow_best_first(string, children, min(max_nodes, 2 * size + 1), 0.1)))
    return found


def is_draft_of(tree: DraftTree, texts: Sequence[Text], string: Text) -> bool:
    """Whether every node has the probability that it has after the string."""
    for node, (token, confidence) in enumerate(zip(tree.tokens, tree.confidence, strict=True)):
        before = [tree.tokens[place] for place in tree.path(node)[:-1]]
        if probabilities(texts, [*string, *before]).get(token) != confidence:
            return False
    return True


def check_best(tree: DraftTree, corpora: Sequence[Sequence[Text]], context: Text, max_nodes: int) -> None:
    """Check a tree's probabilities, bit for bit and in order. Its nodes may differ, because nodes can have equals."""
    found = drafts(corpora, context, max_nodes)
    best = max((sum(draft.survival()) for _, _, draft in found), default=0.0)
    assert sum(tree.survival()) == best
    assert tree == NO_DRAFT or any(
        tree.survival() == draft.survival() and is_draft_of(tree, texts, string) for texts, string, draft in found
    )


texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@given(texts, st.integers(0, 12))
def test_the_draft_is_the_best_of_brute_force_on_the_choices_own_tokens(text, max_nodes):
    proposer, choice = suffix_proposer(), new_choice(text)
    proposer.begin(choice)
    check_best(draft(proposer, choice, max_nodes), [[text]], text, max_nodes)


@given(st.lists(texts, min_size=1, max_size=4), texts, st.integers(1, 12))
def test_past_outputs_are_a_second_corpus(past, text, max_nodes):
    proposer = suffix_proposer()
    for output in past:
        tokens = [7]
        proposer.begin(new_choice(tokens))
        tokens += output
        proposer.end(0)
    proposer._past.take_in(1000)
    choice = new_choice(text)
    proposer.begin(choice)
    corpora = [[text], [[7, *output] for output in past]]
    check_best(draft(proposer, choice, max_nodes), corpora, text, max_nodes)


def finish(proposer: SuffixProposer, prompt: Text, output: Text, *, salt: str = "", stops: Text = ()) -> None:
    """Run a choice to its end, one token at a time."""
    tokens = list(prompt)
    choice = new_choice(tokens, salt=salt, stops=stops)
    proposer.begin(choice)
    for token in output:
        tokens.append(token)
        draft(proposer, choice, 4)
    proposer.end(0)


def first_draft(proposer: SuffixProposer, prompt: Text, salt: str = "") -> tuple[int, ...]:
    choice = new_choice(prompt, salt=salt)
    proposer.begin(choice)
    tokens = draft(proposer, choice, 8).tokens
    proposer.end(0)
    return tokens


def test_an_answer_is_known_when_the_question_comes_again():
    proposer = suffix_proposer()
    finish(proposer, range(100, 120), range(200, 230))
    assert first_draft(proposer, range(100, 120)) == tuple(range(200, 208))


def test_salts_are_kept_apart():
    proposer = suffix_proposer()
    finish(proposer, range(100, 120), range(200, 230), salt="a")
    assert first_draft(proposer, range(100, 120), salt="b") == ()
    assert first_draft(proposer, range(100, 120), salt="") == ()
    assert first_draft(proposer, range(100, 120), salt="a") != ()


def test_what_was_drawn_after_a_stop_token_is_not_kept():
    proposer = suffix_proposer()
    finish(proposer, range(100, 120), [200, 201, 2, 202, 203], stops=[2])
    assert first_draft(proposer, range(100, 120)) == (200, 201, 2)


def test_prompts_of_others_are_context_and_not_drafted():
    proposer = suffix_proposer()
    finish(proposer, range(100, 120), range(200, 230))
    assert first_draft(proposer, range(100, 110)) == ()


@pytest.mark.parametrize("lives", [[30], [10, 20], [1, 1, 28], [0, 30], [15, 0, 15]])
def test_output_is_kept_once_however_often_the_choice_was_preempted(lives):
    prompt, output = [9, 8, 9, 8], [place * place % 5 for place in range(30)]
    proposer, tokens = suffix_proposer(), list(prompt)
    for life in lives:
        tokens = list(tokens)
        choice = new_choice(tokens, num_prompt=len(prompt))
        proposer.begin(choice)
        for _ in range(life):
            tokens.append(output[len(tokens) - len(prompt)])
            draft(proposer, choice, 3)
        proposer.end(0)
    reader = Reader(*proposer._past.of_salt(""))
    proposer._past.take_in(1000)
    text = [*prompt, *output]
    for start in range(len(text)):
        for end in range(start + 1, len(text) + 1):
            string = text[start:end]
            ends = [e for e in range(len(prompt) + 1, len(text) + 1) if text[max(e - len(string), 0) : e] == string]
            assert reader.count(reader.find(string)) == len(ends)


def test_a_token_that_anything_may_follow_says_nothing():
    proposer = suffix_proposer()
    choice = new_choice([token for other in range(1, 60) for token in (0, other)] + [0])
    proposer.begin(choice)
    assert draft(proposer, choice, 8) == NO_DRAFT


# -- memory ------------------------------------------------------------------------------------------------------------


def occurs(automata: Sequence[SuffixAutomaton], string: Text) -> bool:
    return any(Reader(automaton).find(string).length == len(string) for automaton in automata)


def test_the_oldest_outputs_of_a_salt_go_first():
    past = PastOutputs(suffix_library(), generation=100, limit=10_000)
    for number in range(50):
        past.add("", (), [number, 1000 + number] * 5)
        past.take_in(1000)
        assert past.num_tokens <= 200
        assert len(past.of_salt("")) <= 2
        for recent in range(max(number - 9, 0), number + 1):
            assert occurs(past.of_salt(""), [recent, 1000 + recent])
    assert not occurs(past.of_salt(""), [0, 1000])


def test_over_the_limit_the_salt_without_new_outputs_loses_its_own():
    past = PastOutputs(suffix_library(), generation=100, limit=300)
    for number in range(40):
        past.add(f"{number}", (5, 6), [number] * 18)
        past.add("busy", (), [number, 7])
        assert past.num_tokens <= 300
        assert past.of_salt("busy")
    assert past.of_salt("39")
    assert not past.of_salt("0")
    assert past.num_tokens == sum(past._salts[salt][-1].num_tokens for salt in past._salts)


def test_a_single_output_beyond_the_limit_is_not_kept():
    past = PastOutputs(suffix_library(), generation=100, limit=300)
    past.add("", (), range(301))
    assert past.of_salt("") == []
    assert past.num_tokens == 0


def test_nothing_generated_opens_no_automaton():
    past = PastOutputs(suffix_library())
    past.add("", (1, 2), ())
    assert past.of_salt("") == []


def test_a_choice_goes_on_when_its_salts_automata_are_replaced():
    target, answer = markov(3, 40, order=400), [1, 2, 3]
    while len(answer) < 200:
        answer.append(target(answer))
    proposer = suffix_proposer()
    proposer._past = PastOutputs(suffix_library(), generation=50)
    run = Run(proposer, target, 40, [1, 2, 3], 6).begin(slot=1)
    replaced = set()
    for _ in range(20):
        finish(proposer, [1, 2, 3], answer[3:])  # another choice with the same answer
        run.take_step()
        replaced.update(proposer._past.of_salt(""))
    assert len(replaced) > 10
    assert run.num_accepted > 80
