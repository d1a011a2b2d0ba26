"""Numbers as people read them, in few characters. No I/O in here."""


def count(value: float) -> str:
    """A whole number; thousands where it is a large one."""
    return f"{value:.0f}" if value < 1e5 else f"{value / 1000:.0f}k"


def rate(value: float) -> str:
    """By the second; with a decimal where it is small."""
    return f"{value:.1f}" if 0 < value < 10 else count(value)


def share(value: float) -> str:
    """0 to 1, in percent."""
    return f"{value:.0%}"


def duration(seconds: float) -> str:
    """In milliseconds or seconds."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.{1 if seconds < 0.00995 else 0}f} ms"
    return f"{seconds:.{1 if seconds < 99.95 else 0}f} s"
