"""Images on other hosts: which URLs are accepted, and the request for those that have not been fetched yet.

A URL is parsed once, here. The host that is compared with the setting is the one that is connected to, and the rest of
the URL is sent to it as it is. So no second parser can see another host in the same URL.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from urllib.parse import quote

from server.errors import InvalidRequestError, shorten
from server.generation.sent_images import SentImage

_URL = re.compile(r"https://(?P<host>[a-z0-9.-]{1,253})(?::443)?(?P<target>[/?][^#]*)?(?:#.*)?", re.I | re.DOTALL)
_VISIBLE = "".join(map(chr, range(0x21, 0x7F)))
FETCH_S = 10.0
"""Seconds in which all images of one request must have been fetched."""


@dataclass(frozen=True, slots=True)
class RemoteImage:
    """The URL of an image on a host that the server fetches from, with port 443 and without user and password."""

    host: str
    """In lower case, as in the setting."""
    target: str
    """Path and query in visible ASCII."""


class UnfetchedError(Exception):
    """A prompt has images that were not fetched yet. Work is done again with them."""

    def __init__(self, images: Mapping[str, RemoteImage], failures: Mapping[str, InvalidRequestError]) -> None:
        """`images` are the images by their URLs, and `failures` what to raise for one that cannot be fetched."""
        super().__init__(images, failures)
        self.images = images
        self.failures = failures


def remote_image(sent: SentImage, hosts: Collection[str]) -> RemoteImage:
    """The image that a part names by a URL. Raises InvalidRequestError if it is not on one of these hosts."""
    assert sent.url is not None, "callers pass images in URLs"
    if not hosts:
        raise _refused(sent, "This server fetches no images: its operator may name hosts by --image-hosts.")
    found = _URL.fullmatch(sent.url)
    if found is None:
        raise _refused(sent, "It must be of the form https://HOST/PATH, without user, password and port.")
    host = found["host"].lower()
    if host not in hosts:
        why = f"This server does not fetch from '{shorten(host, 128)}', which is not among its --image-hosts."
        raise _refused(sent, why)
    target = quote(found["target"] or "/", safe=_VISIBLE)
    return RemoteImage(host, target if target.startswith("/") else f"/{target}")


def fetch_failure(sent: SentImage, max_bytes: int) -> InvalidRequestError:
    """The error for an image that cannot be fetched, whatever the reason: the reason could tell about a network."""
    if sent.kind == "image":
        message = f"{sent.field}: Unable to download the file. Please verify the URL and try again."
        return InvalidRequestError(message, param=f"{sent.path}.source.url", code="invalid_image_url")
    message = (
        f"Error while downloading {shorten(sent.url or '', 256)}. The host must have a public address, and answer "
        f"within {FETCH_S:g} seconds with status 200, without a redirect, and with at most {max_bytes} bytes."
    )
    return InvalidRequestError(message, param=sent.path, code="invalid_image_url")


def _refused(sent: SentImage, why: str) -> InvalidRequestError:
    """The error for a URL that is not fetched, with the reason."""
    if sent.kind == "image":
        message = f"{sent.field}: {why} Send the image in base64."
        return InvalidRequestError(message, param=f"{sent.path}.source.url", code="unsupported_value")
    message = (
        f"Invalid image URL: '{sent.field}'. Expected a base64-encoded data URL with an image MIME type "
        "(e.g. 'data:image/png;base64,aW1nIGJ5dGVzIGhlcmU='), but got a value without the 'data:' prefix."
    )
    return InvalidRequestError(f"{message} {why}", param=sent.path, code="invalid_value")
