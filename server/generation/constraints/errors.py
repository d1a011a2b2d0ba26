"""Why a constraint is refused."""

from server.errors import shorten


class ConstraintError(Exception):
    """A constraint that cannot be met exactly, or not within bounds."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        """Of what is at fault, in the client's field."""
        self.reason = reason


def under(path: str, key: str | int) -> str:
    """The path of something inside what is at `path`."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    key = shorten(key).encode(errors="replace").decode()
    return f"{path}.{key}" if path else key


def check_text(text: str, path: str) -> None:
    """Raises ConstraintError for a text that no tokens can spell."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConstraintError(path, "The text has half of a surrogate pair, which is no character.") from None
