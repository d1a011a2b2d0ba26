"""The speculation methods that a runner offers."""

import logging
from collections.abc import Collection

from model_runner.contract import Speculation
from model_runner.hub.repository import cache_folder
from model_runner.kernels.background_build import suffix_library
from model_runner.kernels.build import NoKernelsError
from model_runner.speculative.draft_kv import DraftKV, TargetBlocks
from model_runner.speculative.draft_model import LIMITS, DraftModelProposer
from model_runner.speculative.lookahead import LookaheadProposer
from model_runner.speculative.prediction import PredictionProposer
from model_runner.speculative.proposer import Proposer
from model_runner.speculative.suffix import SuffixLibrary, SuffixProposer
from model_runner.target import TargetModel

logger = logging.getLogger("samewise.runner")

AUTO = "auto"
_QUICK = ("prediction", "grammar", "suffix")
"""Methods that take next to no time, the most certain first."""


def make_proposers(blocks: TargetBlocks, draft: TargetModel | None, step_tokens: int) -> dict[str, Proposer]:
    """A proposer for each available method, by name. `auto` chooses among them.

    Args:
        blocks: the target's cache.
        draft: a smaller model with its own cache, for `draft_model`.
        step_tokens: tokens of the largest step, for which memory is planned.
    """
    proposers: dict[str, Proposer] = {
        "lookahead": LookaheadProposer(),
        "prediction": PredictionProposer(),
    }
    if (library := load_suffix()) is not None:
        proposers["suffix"] = SuffixProposer(library)
    if draft is not None:
        kv = DraftKV(blocks.generations, blocks.block_size, LIMITS.num_extended)
        proposers["draft_model"] = DraftModelProposer(draft, kv, LIMITS, step_tokens)
    return proposers


def load_suffix() -> SuffixLibrary | None:
    """The library of suffix automata; None, with a warning, if it cannot be built."""
    try:
        return SuffixLibrary(suffix_library(cache_folder()))
    except NoKernelsError as error:
        logger.warning("The speculation method suffix is not available: %s", error)
        return None


def members(
    speculation: Speculation, methods: Collection[str], heads: str | None, *, has_grammar: bool = False
) -> tuple[str, ...]:
    """The methods that a choice uses, in the order in which they are asked: of the one that it names, or of auto.

    Args:
        speculation: what the choice requests.
        methods: the available methods.
        heads: the method with a trained network, which is asked where the quick ones find nothing.
        has_grammar: whether the choice has a grammar.
    """
    if speculation.method != AUTO:
        return (speculation.method,)
    useful = {"prediction": bool(speculation.prediction), "grammar": has_grammar}
    quick = (method for method in _QUICK if useful.get(method, True))
    return tuple(method for method in (*quick, *([heads] if heads else [])) if method in methods)


def cost_rank(method: str) -> int:
    """The place of a method in the order in which methods are asked: the quick ones first."""
    return _QUICK.index(method) if method in _QUICK else len(_QUICK)


def is_promising(expected: float, rival: float | None) -> bool:
    """Whether a draft is good enough not to ask the next method.

    Args:
        expected: tokens that the draft will bring.
        rival: tokens that the next method brings on average; None if that is not known.
    """
    return expected >= (1.0 if rival is None else rival) and expected > 0
