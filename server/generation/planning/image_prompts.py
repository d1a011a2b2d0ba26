"""Prompts with images: reads the images, and encodes the text around them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from model_runner.image import Image, ImageRun
from model_runner.images.decoding import FORMATS, Fault, ImageError, digest, read
from model_runner.images.layouts import SEVERAL, Arrangement, Layout
from model_runner.runner_interface import RunnerInfo
from server.config import Settings
from server.errors import InvalidRequestError, shorten
from server.generation.notices import Notice
from server.generation.prompt import ImageTexts
from server.generation.remote_images import RemoteImage, UnfetchedError, fetch_failure, remote_image
from server.generation.request import Conversation
from server.generation.sent_images import SentImage, UploadedFile
from server.text.image_marks import is_mark, mark_of, split_at_marks, split_at_typed
from server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ImageInPrompt:
    """An image that was read, without its places."""

    data: bytes
    digest: bytes
    arrangement: Arrangement
    detail: str
    """`low`, SEVERAL, or empty for the model's own resolution."""


ReadImages = Mapping[str, ImageInPrompt]
"""Images by their marks."""


class ImagePrompts:
    """Reads and encodes the images of one model's prompts."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        layout: Layout | None,
        info: RunnerInfo,
        settings: Settings,
        weigh: Callable[[], None],
        files: Mapping[str, UploadedFile],
    ) -> None:
        """`weigh` is called before each image is decoded, and raises if this is no place for that. `files` are those
        that the request may name, by their ids and URLs.
        """
        self._files = files
        self._tokenizer = tokenizer
        self._info = info
        self._settings = settings
        self._weigh = weigh
        self.layout = layout if layout is not None and info.takes_images and can_decode() else None
        """None if the model's prompts cannot have images."""
        self._literal = tokenizer.controls if settings.literal_messages else ()
        """Tokens that stay text in messages; the longest first."""
        own = "" if layout is None else tokenizer.token_name(layout.image_token)
        self._anchor = own or next(iter(self._literal), "")
        """A token that is encoded before and after texts that are pieces of one."""

    @property
    def texts(self) -> ImageTexts | None:
        """How the chat template writes images, and tokens that stay text; None if there is neither."""
        if self.layout is None:
            return ImageTexts("", ("", ""), self._literal) if self._literal else None
        tokens = dict.fromkeys(token for token in (*self._literal, self._anchor, self.layout.placeholder) if token)
        return ImageTexts(self.layout.placeholder, self.layout.around, tuple(tokens))

    def read(self, conversation: Conversation, notices: list[Notice]) -> ReadImages:
        """The images of a conversation. Adds notices of frames that are not shown.

        Raises InvalidRequestError for an image that cannot be used, or if the model takes none, and UnfetchedError.
        """
        sent = conversation.images
        if not sent:
            return {}
        if self.layout is None:
            raise _no_images(sent[0])
        if len(sent) > self._settings.max_images:
            most = self._settings.max_images
            message = f"The request has {len(sent)} images, and this server accepts at most {most} in one request."
            raise InvalidRequestError(message, param=sent[most].path, code="invalid_value")
        self._check_fetched(sent)
        known: dict[tuple[bytes, str], ImageInPrompt] = {}
        images: dict[str, ImageInPrompt] = {}
        for index, one in enumerate(sent):
            data, detail = self._data_of(one), self._detail_of(one, self.layout, notices)
            if self.layout.has_several and len(sent) > 1:
                detail = SEVERAL
            if (data, detail) not in known:
                self._weigh()
                known[data, detail] = self._read(one, data, detail, self.layout.at(detail), notices)
            images[mark_of(index)] = known[data, detail]
        return images

    def _check_fetched(self, sent: Sequence[SentImage]) -> None:
        """Raises InvalidRequestError for a URL that is refused, and UnfetchedError for those that must be fetched."""
        images: dict[str, RemoteImage] = {}
        failures: dict[str, InvalidRequestError] = {}
        for one in sent:
            if one.url is None or one.url in images or one.url in self._files:
                continue
            images[one.url] = remote_image(one, self._settings.image_hosts)
            failures[one.url] = fetch_failure(one, self._most_bytes)
        if images:
            raise UnfetchedError(images, failures)

    @property
    def _most_bytes(self) -> int:
        return int(self._settings.max_image_mib * (1 << 20))

    def _data_of(self, sent: SentImage) -> bytes:
        """The file of an image. Raises InvalidRequestError if it was not uploaded, or is too large."""
        name = sent.url or sent.file_id
        if name is None:
            data, num_bytes = sent.data, len(sent.data)
        elif (named := self._files.get(name)) is not None:
            data, num_bytes = named.content, named.num_bytes
        else:
            message = f"No such File object: {shorten(name, 128)}"
            raise InvalidRequestError(message, param=sent.path, code="not_found")
        if num_bytes > self._most_bytes:
            raise _too_many_bytes(sent, num_bytes, self._most_bytes)
        return data

    def _detail_of(self, sent: SentImage, layout: Layout, notices: list[Notice]) -> str:
        if sent.detail != "low":
            return ""
        if not layout.has_low:
            field = sent.field.removesuffix(".url") if sent.kind == "image_url" else sent.path
            notices.append(Notice(f"{field}.detail", "The image is shown at the model's own resolution."))
            return ""
        return sent.detail

    def _read(self, sent: SentImage, data: bytes, detail: str, layout: Layout, notices: list[Notice]) -> ImageInPrompt:
        try:
            image = read(data, int(self._settings.max_image_megapixels * 1_000_000))
            arrangement = layout.of(*image.pixels.size)
        except ImageError as error:
            raise _unusable(sent, error) from None
        if image.is_animated:
            notices.append(Notice(sent.path, "Only the first frame of the image is shown."))
        kind = {"family": layout.family, "detail": detail}
        options = {**kind, "call": dict(layout.call), "settings": dict(layout.settings)}
        return ImageInPrompt(data, digest(image.pixels, options), arrangement, detail)

    def encode(self, text: str, images: ReadImages, beginning: Sequence[int]) -> tuple[list[int], tuple[Image, ...]]:
        """The tokens of a text with marks, after the `beginning`, and the images with their places.

        Text between feature rows is encoded as it would be between image tokens in one text.
        """
        tokens, pending = list(beginning), ""
        placed: list[Image] = []
        between: dict[str, list[int]] = {}
        follows = False
        for piece in split_at_marks(text):
            if not is_mark(piece):
                pending += piece
                continue
            assert self.layout is not None, "only texts of such a model have marks"
            image, runs, row = images[piece], [], 0
            if (number := self.layout.number) is not None:
                pending += f"{number[0]}{len(placed)}{number[1]}"
            for part in image.arrangement.pieces:
                if isinstance(part, str):
                    pending += part
                    continue
                if not follows:
                    tokens += self._ids(pending, follows=False, is_followed=True)
                elif pending not in between:
                    between[pending] = self._ids(pending, follows=True, is_followed=True)
                tokens += between[pending] if follows else ()
                runs.append(ImageRun(len(tokens), row, part))
                tokens += [self.layout.image_token] * part
                pending, follows, row = "", True, row + part
            placed.append(Image(image.data, image.digest, tuple(runs), image.detail, image.arrangement.grid))
        return tokens + self._ids(pending, follows=follows, is_followed=False), tuple(placed)

    def check_memory(self, images: Sequence[Image], path: str) -> None:
        """Raise InvalidRequestError if the engine has no memory for what the model sees in all these images."""
        rows = {image.digest: image.num_rows for image in images}
        needed, most = sum(rows.values()), self._info.max_image_rows
        if len(rows) > 1 and needed > most:
            message = (
                f"The model sees {needed} tokens in the {len(rows)} images of this prompt, and this server has memory "
                f"for {most}. Send fewer images or smaller ones, or raise the server's setting image_cache_gib."
            )
            raise InvalidRequestError(message, param=path, code="image_too_large")

    def _ids(self, text: str, *, follows: bool, is_followed: bool) -> list[int]:
        """The tokens of a text that follows an image token or is followed by one. Tokens that were typed stay text."""
        if not text:
            return []
        ids: list[int] = []
        texts = self.texts
        pieces = split_at_typed(text, () if texts is None else texts.typed)
        for index, piece in enumerate(pieces):
            if index % 2:
                ids += self._tokenizer.encode_literally(piece, continues=True)
            elif piece:
                before = follows or index > 0
                after = is_followed and index == len(pieces) - 1
                ids += self._anchored(piece, before=before, after=after)
        return ids

    def _anchored(self, text: str, *, before: bool, after: bool) -> list[int]:
        anchored = (self._anchor if before else "") + text + (self._anchor if after else "")
        ids = self._tokenizer.encode(anchored, add_special_tokens=False)
        return ids[int(before) : len(ids) - int(after)]


def can_decode() -> bool:
    """Whether the library that decodes images is installed."""
    return find_spec("PIL") is not None


def _no_images(sent: SentImage) -> InvalidRequestError:
    """The error for an image in a request to a model that takes none."""
    if sent.kind == "images":
        message = f"Unsupported parameter: '{sent.path}'. This model reads text only: send the request without images."
        return InvalidRequestError(message, param=sent.path, code="unsupported_parameter")
    message = f"Invalid content type. {sent.kind} is only supported by certain models."
    return InvalidRequestError(message, param=f"{sent.path}.type", code="invalid_value")


def _too_many_bytes(sent: SentImage, size: int, most: int) -> InvalidRequestError:
    if sent.kind == "image":
        message = f"{sent.field}: image exceeds {most / (1 << 20):g} MB maximum: {size} bytes > {most} bytes"
    else:
        message = (
            f"Invalid '{sent.field}': the image has {size} bytes, and this server accepts at most {most} for one "
            "image. Scale it down, or compress it more."
        )
    return InvalidRequestError(message, param=sent.path, code="image_too_large")


def _unusable(sent: SentImage, error: ImageError) -> InvalidRequestError:
    """The error for an image that is damaged, of another format, or of a size that cannot be used."""
    if error.fault in (Fault.AREA, Fault.ASPECT):
        at = f"{sent.field}:" if sent.kind == "image" else f"Invalid '{sent.field}':"
        return InvalidRequestError(f"{at} {error}", param=sent.path, code="image_too_large")
    if error.fault is Fault.COST and sent.kind != "image":
        return InvalidRequestError(f"Invalid '{sent.field}': {error}", param=sent.path, code="invalid_image")
    if sent.kind == "image":
        message = f"{sent.field}: Could not process image. {error}"
        return InvalidRequestError(message, param=sent.path, code="invalid_image")
    begin = "You uploaded an unsupported image. Please make sure your image"
    if error.fault is Fault.FORMAT:
        message = f"{begin} has of one the following formats: {list(FORMATS)}."
        return InvalidRequestError(message, param=sent.path, code="invalid_image_format")
    return InvalidRequestError(f"{begin} is valid.", param=sent.path, code="invalid_image")
