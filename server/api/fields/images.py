"""Parts of messages with images in OpenAI's APIs, and the files in their URLs."""

import base64
import binascii
import re
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from server.api.fields.rules import EchoedModel, hint
from server.errors import InvalidRequestError, shorten
from server.generation.sent_images import Kind, SentImage, SentImages

_DATA_URL = re.compile(r"data:(?P<type>[^,]*),", re.IGNORECASE)
_BREAKS = re.compile(r"[\r\n]")
_EXAMPLE = "(e.g. 'data:image/png;base64,aW1nIGJ5dGVzIGhlcmU=')"
Detail = Literal["auto", "low", "high", "original"]


def detail() -> Detail | None:
    """The default of the field `detail`."""
    default: Detail | None = hint(
        "How finely the model sees the image. All values are accepted and have the model's own resolution.",
        "The image is shown at the model's own resolution.",
        off=["auto", "high", "original"],
    )
    return default


class ImageUrl(EchoedModel):
    """An image in a URL."""

    url: str = Field(description="A data URL with a PNG, JPEG, WebP or GIF file in base64. Other URLs are refused.")
    detail: Detail | None = detail()


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
            url, field = self.image_url.url, f"{path}.image_url.url"
        else:
            url, field = self.image_url, f"{path}.image_url"
        return add_url(url, "image_url", images, path, field)


def add_url(url: str, kind: Kind, images: SentImages, path: str, field: str) -> str:
    """Add the image in a URL, which stands in `field`, to the others; returns its mark. Raises InvalidRequestError."""
    return images.add(SentImage(kind, _in_url(url, path, field), path, field))


def _in_url(url: str, path: str, field: str) -> bytes:
    """The file in a data URL, whatever media type it names. Raises InvalidRequestError with OpenAI's words."""
    found = _DATA_URL.match(url)
    if found is None:
        got = "a value without the 'data:' prefix" if not url.lower().startswith("data:") else "one without a ','"
        message = (
            f"Invalid image URL: '{field}'. Expected a base64-encoded data URL with an image MIME type {_EXAMPLE}, "
            f"but got {got}."
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


def from_base64(text: str) -> bytes | None:
    """The bytes of a base64 text, which may have line breaks; None if it is not base64 or empty."""
    try:
        return base64.b64decode(_BREAKS.sub("", text), validate=True) or None
    except (binascii.Error, ValueError):
        return None
