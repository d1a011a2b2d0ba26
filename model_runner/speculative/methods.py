"""The methods of speculation that a runner has."""

from model_runner.speculative.ngram import NgramProposer
from model_runner.speculative.proposer import Proposer


def make_proposers() -> dict[str, Proposer]:
    """A proposer for each method that can be had, by its name."""
    return {"ngram": NgramProposer()}
