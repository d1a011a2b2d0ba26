"""Beam search over the simulated runner's world, in the simplest way: whole histories, no cache, no scheduler."""

from dataclasses import replace
from itertools import product

from scheduler.beam_search import BeamSearcher, Rules
from tests.scheduler.simulated_runner import VOCAB, extend_hash, offers


def hash_of(tokens):
    history = 0
    for token in tokens:
        history = extend_hash(history, token)
    return history


def expected_sequences(request):
    """The sequences that the request's search returns, best first."""
    rules = Rules(request.beam_search, request.sampling.stop_token_ids, request.max_tokens)
    sampling = replace(request.sampling, beam_candidates=rules.num_candidates)
    searcher = BeamSearcher(rules)
    rows = [request.prompt]
    while rows:
        of_rows = [offers(hash_of(tokens), sampling) for tokens in rows]
        rows = [(*rows[step.row], step.token_id) for step in searcher.advance(of_rows)]
    return searcher.finished()


def best_of_all(prompt, length, length_penalty):
    """The best of all sequences of this length, by trying each: its score and its tokens."""
    scored = []
    for tokens in product(range(VOCAB), repeat=length):
        total, history = 0.0, hash_of(prompt)
        for token in tokens:
            total -= hash((history, token)) % 1000 / 100
            history = extend_hash(history, token)
        scored.append((total / length**length_penalty, tokens))
    return max(scored)
