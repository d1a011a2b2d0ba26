"""Reading a request's body: its media type and its size."""

from fastapi import Request

from server.errors import BodyTooLargeError, MediaTypeError


async def read_body(request: Request, max_mib: float) -> bytes:
    """The body of a request with JSON. Raises MediaTypeError, and what `read_bytes` does."""
    types = request.headers.getlist("content-type")
    if len(types) != 1 or types[0].partition(";")[0].strip().lower() != "application/json":
        raise MediaTypeError("The request needs the header 'Content-Type: application/json', once.")
    return await read_bytes(request, max_mib)


async def read_bytes(request: Request, max_mib: float) -> bytes:
    """The body, whatever it is. Raises BodyTooLargeError, before more than that is read."""
    max_bytes = int(max_mib * (1 << 20))
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isdecimal() and len(declared) < 20 else 0
    chunks: list[bytes] = []
    if size <= max_bytes:
        size = 0
        async for chunk in request.stream():
            chunks.append(chunk)
            size += len(chunk)
            if size > max_bytes:
                break
    if size > max_bytes:
        raise BodyTooLargeError(f"The request body is too large. This server reads at most {max_bytes} bytes.")
    return b"".join(chunks)
