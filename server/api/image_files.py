"""Uploaded images that requests name by file ids. They are read before a body is checked."""

# Short: shared by all endpoints and by responses, whose bodies are read in another way.

import re
from collections.abc import Iterable, Mapping

from server.api.model_services import ModelServices
from server.api.services import Services
from server.generation.sent_images import UploadedFile

_FILE_ID = re.compile(rb'"file_id"\s*:\s*"(file-[0-9a-f]{32})"')


async def uploaded_files(
    bodies: Iterable[bytes], client: str, services: Services, served: ModelServices
) -> Mapping[str, UploadedFile]:
    """The client's files whose ids are in these JSON texts, by id. Files that do not exist are omitted.

    Only as many are read as one request may have images, and none that is larger than an image may be. Raises
    NotStoredError.
    """
    files = services.files
    ids = dict.fromkeys(found.decode() for body in bodies for found in _FILE_ID.findall(body))
    if files is None or served.model.images is None or not ids:
        return {}
    most = served.settings.max_image_mib * (1 << 20)
    read: dict[str, UploadedFile] = {}
    for file_id in list(ids)[: served.settings.max_images]:
        record = await files.find(client, file_id)
        if record is None:
            continue
        pieces = None if record.num_bytes > most else await files.read(record)
        content = b"" if pieces is None else b"".join([piece async for piece in pieces])
        read[file_id] = UploadedFile(content, record.num_bytes)
    return read
