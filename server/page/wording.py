"""Numbers as they stand in sentences. No I/O in here."""


def count(number: int, name: str) -> str:
    """In words, as in "1 token"."""
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def number(value: float) -> str:
    """With a proper minus, and three digits after the point."""
    return f"{value:.3f}".replace("-", "−")
