"""Images in scheduler tests: rows are the digest, and nothing is decoded."""

from hashlib import sha256
from threading import Event, Semaphore

from model_runner.image import Image, ImageRun
from model_runner.images.decoding import Fault, ImageError
from model_runner.images.features import FeatureCache
from tests.scheduler.driving import RecordingRunner

IMAGE_ID = 40
BROKEN = b"broken"


def make_image(content, *runs):
    """An image of this content whose rows are at runs of (place, length)."""
    rows, placed = 0, []
    for place, length in runs:
        placed.append(ImageRun(place, rows, length))
        rows += length
    return Image(content, sha256(content).digest(), tuple(placed))


class PicturingRunner(RecordingRunner):
    """Computes features when the test lets it, unless it `is_free`."""

    def __init__(self, num_blocks, block_size, groups=(), limit=1 << 20, is_free=True):
        super().__init__(num_blocks, block_size, groups)
        self.begun = Event()
        self.gate = Semaphore(0)
        self.is_free = is_free
        self.encoded = []
        self.images = FeatureCache(self._encode, 1, limit)

    def _encode(self, image):
        self.begun.set()
        if not self.is_free:
            self.gate.acquire()
        self.encoded.append(image.data)
        if image.data == BROKEN:
            raise ImageError(Fault.DAMAGED, "the image is broken")
        return [1000 + image.digest[row % 32] for row in range(image.num_rows)]
