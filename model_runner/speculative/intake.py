"""How much of what proposers have to take in they take in when, so that a long text slows no step down.

Whatever a proposer knows costs some microseconds a token, and a prompt or an answer found in the prefix cache comes all
at once. So a proposer has a number of tokens that it takes in at most in a step, whosever they are.
"""

from collections.abc import Sequence


def share_out(missing: Sequence[int], most: int) -> list[int]:
    """How many of the tokens that each choice still misses it takes in now: `most` of all of them together.

    Those that miss the least come first, so that a choice that has caught up goes on drafting while others catch up.
    """
    if sum(missing) <= most:
        return list(missing)
    shares = [0] * len(missing)
    for index in sorted(range(len(missing)), key=missing.__getitem__):
        shares[index] = min(missing[index], most)
        most -= shares[index]
    return shares
