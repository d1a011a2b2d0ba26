"""Whether drafts bring the speed that was predicted for them: steps with some, and steps held out without any."""

_MEMORY = 0.998
"""What is left of a step's weight after the next step at this load."""
_PRIOR = 8.0
"""Steps of each kind that came as predicted, before any was seen."""
_TIME_DEVIATION, _GAIN_DEVIATION = 0.05, 0.1
"""Of these: of the time and of the tokens, relative to what was expected."""
_OUTLIER = 2.0
"""A step that took so many times longer than steps of late was disturbed, and counts as this."""
_DRIFT = 0.02
"""How quickly a lasting change of the machine's speed is no longer taken for a difference between the steps."""


class Comparison:
    """The speed of steps with drafts relative to steps without, by what it was and by what it should have been.

    What decides about drafts is a model: of times, of probabilities. A random hold-out shows what such a model gets
    wrong, as in any controlled experiment (Kohavi et al., Controlled experiments on the web, 2009). Both kinds of steps
    fade together, so that both tell of the same time. Their times are relative to what they should be on an undisturbed
    machine, and to how far off this was lately, whatever the kind; so neither growing contexts nor a slow
    machine count for one kind more than for the other.
    """

    def __init__(self) -> None:
        self._scale = 0.0
        """How many times longer than undisturbed ones steps take lately; 0 before the first."""
        self._with = _Times()
        self._without = _Times()
        self._tokens = self._expected = _PRIOR
        """Of steps with drafts, relative to one for each choice."""
        self._squares = _PRIOR * _GAIN_DEVIATION**2
        """Of the differences of these two."""
        self.trust = 0.0
        """The share of a predicted speed that came for sure, within one standard error; at most 1."""
        self._judge()

    def observe_without(self, expected_s: float, seconds: float) -> None:
        """Take in a step without drafts, with what it should have taken on an undisturbed machine."""
        ratio = self._ratio(expected_s, seconds)
        self._fade()
        self._without.add(ratio)
        self._judge()

    def observe_with(self, expected_s: float, seconds: float, expected_tokens: float, tokens: float) -> None:
        """Take in a step with drafts; tokens are relative to one for each choice."""
        ratio = self._ratio(expected_s, seconds)
        self._fade()
        self._with.add(ratio)
        self._expected += expected_tokens
        self._tokens += tokens
        self._squares += (tokens - expected_tokens) ** 2
        self._judge()

    def _ratio(self, expected_s: float, seconds: float) -> float:
        ratio = seconds / expected_s
        if not self._scale:
            self._scale = ratio
        ratio = min(ratio / self._scale, _OUTLIER)
        self._scale *= ratio**_DRIFT
        return ratio

    def _fade(self) -> None:
        self._with.fade()
        self._without.fade()
        self._tokens = _PRIOR + (self._tokens - _PRIOR) * _MEMORY
        self._expected = _PRIOR + (self._expected - _PRIOR) * _MEMORY
        prior = _PRIOR * _GAIN_DEVIATION**2
        self._squares = prior + (self._squares - prior) * _MEMORY

    def _judge(self) -> None:
        came = self._tokens / self._expected * self._without.mean / self._with.mean
        error = self._squares / self._expected**2 + self._with.relative_error + self._without.relative_error
        self.trust = min(came * (1 - error**0.5), 1.0)


class _Times:
    """Mean and variance of relative times, beside those that are taken for granted."""

    def __init__(self) -> None:
        self._weight = self._sum = self._squares = 0.0

    def add(self, ratio: float) -> None:
        self._weight += 1
        self._sum += ratio
        self._squares += ratio * ratio

    def fade(self) -> None:
        self._weight *= _MEMORY
        self._sum *= _MEMORY
        self._squares *= _MEMORY

    @property
    def mean(self) -> float:
        return (_PRIOR + self._sum) / (_PRIOR + self._weight)

    @property
    def relative_error(self) -> float:
        """The square of the mean's standard error, relative to the mean."""
        weight, mean = _PRIOR + self._weight, self.mean
        squares = _PRIOR * (1 + _TIME_DEVIATION**2) + self._squares
        return max(squares / weight - mean * mean, 0.0) / weight / mean**2
