"""Which methods draft for a choice that leaves the method to the server."""

from collections.abc import Collection

from model_runner.contract import Speculation

AUTO = "auto"
_QUICK = ("prediction", "grammar", "suffix")
"""Methods that take next to no time, the most certain first."""


def members(
    speculation: Speculation, methods: Collection[str], heads: str | None, *, is_held: bool = False
) -> tuple[str, ...]:
    """The methods that a choice uses, in the order in which they are asked: of the one that it names, or of auto.

    Args:
        speculation: what the choice asks for.
        methods: those that there are.
        heads: the one that takes time on the model's side, for what the quick ones do not find.
        is_held: whether the choice has a grammar.
    """
    if speculation.method != AUTO:
        return (speculation.method,)
    useful = {"prediction": bool(speculation.prediction), "grammar": is_held}
    quick = (method for method in _QUICK if useful.get(method, True))
    return tuple(method for method in (*quick, *([heads] if heads else [])) if method in methods)


def turn(method: str) -> int:
    """When a method is asked: the quick ones first."""
    return _QUICK.index(method) if method in _QUICK else len(_QUICK)


def is_promising(expected: float, rival: float | None) -> bool:
    """Whether a draft is good enough not to ask the next method.

    Args:
        expected: tokens that the draft will bring.
        rival: tokens that the next method brings on average; None if that is not known.
    """
    return expected >= (1.0 if rival is None else rival) and expected > 0
