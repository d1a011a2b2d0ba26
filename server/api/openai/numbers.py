"""What answers with numbers have in common."""

import struct
from collections.abc import Sequence

from pydantic import Field

from server.api.openai.objects import ResponseModel
from server.generation.run import PromptRun


class PromptUsage(ResponseModel):
    """Tokens that a request took."""

    prompt_tokens: int = Field(description="Of all texts, with what the model puts around them.")
    total_tokens: int = Field(description="The same.")


def floats_of(prompt: PromptRun) -> Sequence[float]:
    """The numbers of a prompt that has them."""
    return struct.unpack(f"<{len(prompt.pooled) // 4}f", prompt.pooled)


def prompt_usage(num_tokens: int) -> dict[str, int]:
    """A PromptUsage."""
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
