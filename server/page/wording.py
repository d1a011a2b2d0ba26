"""What several views say in the same words. No I/O in here."""

STOPPED = "stopped"
"""The finish reason of an answer that somebody stopped, which no server tells."""
ENDINGS = {
    "stop": "ended by itself",
    "length": "cut off at the most tokens",
    "content_filter": "cut off by the server's filter",
    STOPPED: "stopped",
}
"""Why an answer ended, by its finish reason."""


def timing(num_tokens: int, first_token_s: float | None, last_token_s: float | None) -> list[str]:
    """How long an answer is and how fast it came, as far as that is known; both times are from the request on."""
    facts = [count(num_tokens, "token")] if num_tokens else []
    if first_token_s is not None and last_token_s is not None:
        writing_s = last_token_s - first_token_s
        if num_tokens > 1 and writing_s > 0:
            facts.append(f"{(num_tokens - 1) / writing_s:.0f} tokens/s")
        facts.append(f"first after {1000 * first_token_s:.0f} ms")
    return facts


def count(number: int, name: str) -> str:
    """In words, as in "1 token"."""
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def number(value: float) -> str:
    """With a proper minus, and three digits after the point."""
    return f"{value:.3f}".replace("-", "−")
