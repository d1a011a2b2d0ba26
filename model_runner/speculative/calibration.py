"""From what a proposer believes to what happens."""

_BINS = 10
_PRIOR = 4.0
"""Observations that the proposer's own guess counts as; they fade as others do."""
_MEMORY = 0.98
"""What is left of an observation's weight after the next in its bin: what runs now counts."""


class Calibration:
    """The share of a method's nodes that were accepted, by the confidence that it gave them."""

    def __init__(self) -> None:
        self._accepted = [0.0] * _BINS
        self._seen = [0.0] * _BINS
        self._prior = [_PRIOR] * _BINS

    def probability(self, confidence: float) -> float:
        """That a node with this confidence follows its parent."""
        place = _bin(confidence)
        prior = self._prior[place]
        return (prior * confidence + self._accepted[place]) / (prior + self._seen[place])

    def observe(self, confidence: float, *, accepted: bool) -> None:
        """A node whose parent was accepted was accepted, or not."""
        place = _bin(confidence)
        self._accepted[place] = _MEMORY * self._accepted[place] + accepted
        self._seen[place] = _MEMORY * self._seen[place] + 1
        self._prior[place] *= _MEMORY


def _bin(confidence: float) -> int:
    return min(int(confidence * _BINS), _BINS - 1)
