"""Parts of messages with images in OpenAI's APIs, and the files in their URLs."""

import base64
import binascii
import re
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from server.api.fields.rules import EchoedModel
from server.errors import InvalidRequestError, shorten
from server.generation.sent_images import Kind, SentImage, SentImages

_DATA_URL = re.compile(r"data:(?P<type>[^,]{0,1024}),", re.IGNORECASE)
_HTTP = re.compile(r"http:", re.IGNORECASE)
_HTTPS = re.compile(r"https:", re.IGNORECASE)
_BREAKS = re.compile(r"[\r\n]")
_STARTS = {b"\xff\xd8": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}
"""Media types of files by their first bytes."""
_EXAMPLE = "(e.g. 'data:image/png;base64,aW1nIGJ5dGVzIGhlcmU=')"
Detail = Literal["auto", "low", "high", "original"]
URL = "A data URL with a PNG, JPEG, WebP or GIF file in base64, or an https URL on one of the server's `image_hosts`."
"""Description of fields with an image's URL."""
DETAIL = (
    "How finely the model sees the image: `auto`, `high` and `original` at the model's own resolution, `low` in fewer "
    "tokens. `low` is reported if the model's image processor has no choice."
)
"""Description of fields `detail`."""


class ImageUrl(EchoedModel):
    """An image in a URL."""

    url: str = Field(description=URL)
    detail: Detail | None = Field(None, description=DETAIL)


def _form(value: object) -> str:
    return "<string>" if isinstance(value, str) else "<object>"


class ImagePart(EchoedModel):
    """An image in a message."""

    type: Literal["image_url"]
    image_url: Annotated[
        Annotated[str, Tag("<string>")] | Annotated[ImageUrl, Tag("<object>")], Discriminator(_form)
    ] = Field(description="The image; as a string, its URL.")

    def mark(self, images: SentImages, path: str) -> str:
        """Add the image to the others; returns its mark. Raises InvalidRequestError."""
        if isinstance(self.image_url, ImageUrl):
            url, field, detail = self.image_url.url, f"{path}.image_url.url", self.image_url.detail
        else:
            url, field, detail = self.image_url, f"{path}.image_url", None
        return add_url(url, "image_url", images, path, field, detail or "")


def add_url(url: str, kind: Kind, images: SentImages, path: str, field: str, detail: str) -> str:
    """Add the image in a URL, which stands in `field`, to the others; returns its mark. Raises InvalidRequestError."""
    if _HTTPS.match(url):
        return images.add(SentImage(kind, b"", path, field, url=url, detail=detail))
    return images.add(SentImage(kind, _in_url(url, path, field), path, field, detail=detail))


def _in_url(url: str, path: str, field: str) -> bytes:
    """The file in a data URL, whatever media type it names. Raises InvalidRequestError with OpenAI's words."""
    found = _DATA_URL.match(url)
    if found is None:
        got = "a value without the 'data:' prefix" if not url.lower().startswith("data:") else "one without a ','"
        of_web = " Images are fetched by https only, from hosts of --image-hosts." if _HTTP.match(url) else ""
        message = (
            f"Invalid image URL: '{field}'. Expected a base64-encoded data URL with an image MIME type {_EXAMPLE}, "
            f"but got {got}.{of_web}"
        )
        raise InvalidRequestError(message, param=path, code="invalid_value")
    parameters = [one.strip().lower() for one in found["type"].split(";")]
    if "base64" not in parameters[1:]:
        message = (
            f"Invalid image URL: '{field}'. Expected a base64-encoded data URL with an image MIME type {_EXAMPLE}, "
            f"but got one with '{shorten(found['type'])}'."
        )
        raise InvalidRequestError(message, param=path, code="invalid_value")
    data = from_base64(url[found.end() :])
    if data is None:
        raise InvalidRequestError("Invalid base64 image_url.", param=path, code="invalid_base64")
    return data


def data_url(data: bytes) -> str:
    """The data URL of an image file."""
    kind = next((kind for start, kind in _STARTS.items() if data.startswith(start)), "png")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def from_base64(text: str) -> bytes | None:
    """The bytes of a base64 text, which may have line breaks; None if it is not base64 or empty."""
    try:
        return base64.b64decode(_BREAKS.sub("", text), validate=True) or None
    except (binascii.Error, ValueError):
        return None
