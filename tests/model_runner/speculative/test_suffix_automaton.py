"""The automaton against counting all substrings one by one."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from model_runner.speculative.suffix_automaton import Match, SuffixAutomaton, Writer

Pieces = list[tuple[int, bool, list[int]]]
"""Whose sequence goes on, whether as counted tokens, and with what."""
pieces = st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.lists(st.integers(0, 2), max_size=6)), max_size=12)
depths = st.integers(2, 6)


def build(parts: Pieces, depth: int) -> tuple[SuffixAutomaton, list[list[int]], Counter[tuple[int, ...]]]:
    """An automaton, its sequences, and how often each string of at most `depth` tokens ends at a counted one."""
    automaton = SuffixAutomaton(depth)
    writers = [Writer(automaton) for _ in range(3)]
    sequences: list[list[int]] = [[] for _ in writers]
    counts: Counter[tuple[int, ...]] = Counter()
    for owner, counted, tokens in parts:
        writers[owner].extend(tokens, counted=counted)
        for token in tokens:
            sequence = sequences[owner]
            sequence.append(token)
            for size in range(1, min(depth, len(sequence)) + 1):
                counts[tuple(sequence[-size:])] += counted
    for writer, sequence in zip(writers, sequences, strict=True):
        assert writer.end.length == min(depth, len(sequence))
    return automaton, sequences, counts


def find(automaton: SuffixAutomaton, string: tuple[int, ...]) -> Match:
    match = Match()
    for token in string:
        match = automaton.advance(match, token)
    return match


@given(pieces, depths)
@settings(max_examples=300)
def test_counts_are_those_of_brute_force(parts, depth):
    automaton, sequences, counts = build(parts, depth)
    for string, count in counts.items():
        match = find(automaton, string)
        assert match.length == len(string)
        assert automaton.count(match) == count
        followers = {longer[-1]: n for longer, n in counts.items() if longer[:-1] == string and n}
        if len(string) < depth:
            assert {token: n for token, n, _ in automaton.following(match)} == followers
    num_tokens = sum(map(len, sequences))
    assert len(automaton) <= max(2 * num_tokens, 1)


@given(pieces, depths, st.lists(st.integers(0, 3), max_size=20))
def test_a_match_is_the_longest_suffix_that_occurs(parts, depth, text):
    automaton, _, counts = build(parts, depth)
    match = Match()
    for end, token in enumerate(text, 1):
        match = automaton.advance(match, token)
        lengths = [size for size in range(1, min(depth, end) + 1) if tuple(text[end - size : end]) in counts]
        assert match.length == max(lengths, default=0)


@given(pieces, depths)
def test_shorter_matches_are_the_suffixes_that_occur_at_more_places(parts, depth):
    automaton, sequences, counts = build(parts, depth)

    def ends(string: tuple[int, ...]) -> set[tuple[int, int]]:
        return {
            (owner, end)
            for owner, sequence in enumerate(sequences)
            for end in range(len(string), len(sequence) + 1)
            if tuple(sequence[end - len(string) : end]) == string
        }

    for string in list(counts)[:20]:
        shorter = automaton.shorter(find(automaton, string))
        sizes = [size for size in range(len(string)) if size == 0 or ends(string[-size:]) != ends(string)]
        assert shorter.length == max(sizes)


@given(pieces, pieces, depths)
def test_matches_stay_right_while_the_automaton_grows(before, after, depth):
    automaton, _, counts = build(before, depth)
    matches = {string: find(automaton, string) for string in counts}
    writer = Writer(automaton)
    for _, counted, tokens in after:
        writer.extend(tokens, counted=counted)
    for string, match in matches.items():
        now = find(automaton, string)
        assert automaton.count(match) == automaton.count(now)
        assert automaton.following(match) == automaton.following(now)
        assert automaton.num_following(match) == automaton.num_following(now)
        assert automaton.shorter(match) == automaton.shorter(now)


def test_one_token_over_and_over_costs_no_more_than_others():
    automaton = SuffixAutomaton(8)
    writer = Writer(automaton)
    writer.extend([5] * 100_000)
    assert len(automaton) == 100_001
    assert automaton.count(find(automaton, (5,) * 7)) == 100_000 - 6
