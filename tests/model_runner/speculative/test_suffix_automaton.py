"""The automaton, compared with counting all substrings."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from model_runner.speculative.suffix import SuffixAutomaton, Writer, as_tokens
from tests.model_runner.speculative.automata import Match, Reader, suffix_library

Pieces = list[tuple[int, bool, list[int]]]
"""The sequence to extend, whether its tokens count, and the tokens."""
pieces = st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.lists(st.integers(0, 2), max_size=6)), max_size=12)
depths = st.integers(2, 6)


def build(parts: Pieces, depth: int) -> tuple[SuffixAutomaton, Reader, list[list[int]], Counter[tuple[int, ...]]]:
    """An automaton, its sequences, and how often each string of at most `depth` tokens ends at a counted one."""
    automaton = SuffixAutomaton(suffix_library(), depth)
    writers = [Writer(automaton) for _ in range(3)]
    sequences: list[list[int]] = [[] for _ in writers]
    counts: Counter[tuple[int, ...]] = Counter()
    for owner, counted, tokens in parts:
        writers[owner].extend(as_tokens(tokens), counted=counted)
        for token in tokens:
            sequence = sequences[owner]
            sequence.append(token)
            for size in range(1, min(depth, len(sequence)) + 1):
                counts[tuple(sequence[-size:])] += counted
    return automaton, Reader(automaton), sequences, counts


@given(pieces, depths)
def test_counts_are_those_of_brute_force(parts, depth):
    _, reader, sequences, counts = build(parts, depth)
    for string, count in counts.items():
        match = reader.find(string)
        assert match.length == len(string)
        assert reader.count(match) == count
        followers = {longer[-1]: n for longer, n in counts.items() if longer[:-1] == string and n}
        if len(string) < depth:
            assert {token: n for token, n, _ in reader.following(match)} == followers
    num_tokens = sum(map(len, sequences))
    assert len(reader) <= max(2 * num_tokens, 1)


@given(pieces, depths, st.lists(st.integers(0, 3), max_size=20))
def test_a_match_is_the_longest_suffix_that_occurs(parts, depth, text):
    _, reader, _, counts = build(parts, depth)
    match = Match()
    for end, token in enumerate(text, 1):
        match = reader.advance(match, token)
        lengths = [size for size in range(1, min(depth, end) + 1) if tuple(text[end - size : end]) in counts]
        assert match.length == max(lengths, default=0)


@given(pieces, depths)
def test_shorter_matches_are_the_suffixes_that_occur_at_more_places(parts, depth):
    _, reader, sequences, counts = build(parts, depth)

    def ends(string: tuple[int, ...]) -> set[tuple[int, int]]:
        return {
            (owner, end)
            for owner, sequence in enumerate(sequences)
            for end in range(len(string), len(sequence) + 1)
            if tuple(sequence[end - len(string) : end]) == string
        }

    for string in list(counts)[:20]:
        shorter = reader.shorter(reader.find(string))
        sizes = [size for size in range(len(string)) if size == 0 or ends(string[-size:]) != ends(string)]
        assert shorter.length == max(sizes)


@given(pieces, pieces, depths)
def test_matches_stay_right_while_the_automaton_grows(before, after, depth):
    automaton, reader, _, counts = build(before, depth)
    matches = {string: reader.find(string) for string in counts}
    writer = Writer(automaton)
    for _, counted, tokens in after:
        writer.extend(as_tokens(tokens), counted=counted)
    for string, match in matches.items():
        now = reader.find(string)
        assert reader.count(match) == reader.count(now)
        assert reader.following(match) == reader.following(now)
        assert reader.num_following(match) == reader.num_following(now)
        assert reader.shorter(match) == reader.shorter(now)


def test_one_token_over_and_over_costs_no_more_than_others():
    automaton = SuffixAutomaton(suffix_library(), 8)
    Writer(automaton).extend(as_tokens([5] * 100_000))
    reader = Reader(automaton)
    assert len(reader) == 100_001
    assert reader.count(reader.find((5,) * 7)) == 100_000 - 6
