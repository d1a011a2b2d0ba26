"""Signatures of thinking. Anthropic's are opaque; of thinking that a client does not want to see, ours hold the text.

So it comes back with the history, and the chat template can show it. Nothing is verified: it is the client's own.
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode

_OURS = "samewise:"


def signature_of(hidden: str = "") -> str:
    """The signature of thinking of which this much is not shown. Never empty: some clients drop what has none."""
    return _OURS + urlsafe_b64encode(hidden.encode()).decode()


def hidden_in(signature: str) -> str | None:
    """The text that a signature holds; None where it is another server's."""
    if not signature.startswith(_OURS):
        return None
    try:
        return urlsafe_b64decode(signature.removeprefix(_OURS)).decode()
    except ValueError:
        return None
