"""Images as clients send them, collected while the messages of a conversation are converted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from server.errors import InvalidRequestError
from server.text.image_marks import MAX_IMAGES, mark_of

Kind = Literal["image_url", "input_image", "image", "images"]
"""The API's type of parts with images: of chat completions, of responses, and of Anthropic's messages; or Ollama's
field."""


@dataclass(frozen=True, slots=True)
class SentImage:
    """One image of a request."""

    kind: Kind
    """Type of its part. It decides the words of errors."""
    data: bytes
    """The file; empty if it is named by `file_id` or `url`."""
    path: str
    """Path of its part in the request, such as `messages[0].content[1]`."""
    field: str
    """The field with the data, as errors name it."""
    file_id: str | None = None
    """Id of the uploaded file."""
    url: str | None = None
    """An https URL to fetch the file from."""
    detail: str = ""
    """How finely the model should see it, in OpenAI's words; empty if the client does not say."""


@dataclass(frozen=True, slots=True)
class UploadedFile:
    """A file that a request names: an uploaded one by its id, or a fetched one by its URL."""

    content: bytes
    """Empty if the file is larger than an image may be."""
    num_bytes: int
    """Size of the file."""


class SentImages:
    """The images of one conversation."""

    def __init__(self) -> None:
        self._images: list[SentImage] = []

    def add(self, image: SentImage) -> str:
        """Add an image. Returns the mark to put into the message's content at the image's place.

        Raises InvalidRequestError if there are more than MAX_IMAGES.
        """
        if len(self._images) == MAX_IMAGES:
            message = f"Invalid '{image.path}': a conversation can have at most {MAX_IMAGES} images."
            raise InvalidRequestError(message, param=image.path, code="invalid_value")
        self._images.append(image)
        return mark_of(len(self._images) - 1)

    @property
    def all(self) -> Sequence[SentImage]:
        """The images, by the indices of their marks."""
        return tuple(self._images)
