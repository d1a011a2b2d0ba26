"""Applications of models that take images, on a fake engine, and images as files and as parts of messages."""

import base64
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from PIL import Image

from tests.image_processors import write_config, write_files
from tests.server.fake_engine import FakeEngine
from tests.server.helpers import client_of
from tests.server.tiny_model import END

LISTS = (
    "{% for m in messages %}<|start|>{{ m.role }}:{% for part in m.content %}{% if part.type == 'text' %}"
    "{{ part.text }}{% elif part.type == 'image' %}PLACE{% endif %}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant:{% endif %}"
)
"""Shows only lists of parts, and drops strings without an error, as some published templates do."""
BOTH = (
    "{% for m in messages %}<|start|>{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% elif 'image' in part.type and "
    "m.role != 'tool' %}PLACE{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant:{% endif %}"
)
"""Shows strings and lists, but no images of tools."""
FIRST = (
    "{% for m in messages %}{{ m.role }}: {% for part in m.content %}{% if part.type == 'image' %}PLACE\n{% endif %}"
    "{% endfor %}{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }} {% endif %}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
"""Shows a message's images before its texts."""
STRINGS = "{% for m in messages %}<|start|>{{ m.role }}:{{ m.content }}<|end|>{% endfor %}<|start|>assistant:"
"""Shows only strings."""
PLACEHOLDERS = {
    **dict.fromkeys(("idefics3", "llava", "llava_onevision"), "<image>"),
    "minicpmv4_6": "<|image_pad|>",
    "qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>",
}


def picture(width: int = 40, height: int = 30, seed: int = 0) -> Image.Image:
    """A picture of random pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def file_of(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """The image as a file."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    """A data URL with the file."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_part(image: Image.Image | None = None, **fields: Any) -> dict[str, Any]:
    """A part of a chat message."""
    return {"type": "image_url", "image_url": {"url": data_url(file_of(image or picture())), **fields}}


def text_part(text: str) -> dict[str, Any]:
    """A part of a chat message."""
    return {"type": "text", "text": text}


def write_image_folder(folder: Path, family: str, template: str) -> None:
    """Write a model folder of a family, with a chat template in which PLACE is the family's placeholder."""
    folder.mkdir(exist_ok=True)
    write_files(folder, family, "<|start|>", "<|end|>", template=template.replace("PLACE", PLACEHOLDERS[family]))
    write_config(folder, family)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine.roomy()
    engine.info_ = replace(engine.info_, takes_images=True, max_image_rows=1 << 20)
    return engine


@pytest.fixture
def image_folder(tmp_path: Path) -> Callable[..., Path]:
    """Makes model folders."""

    def make(family: str = "llava", template: str = BOTH) -> Path:
        write_image_folder(tmp_path / family, family, template)
        return tmp_path / family

    return make


@pytest.fixture
def image_client(
    make_app: Callable[..., FastAPI], image_folder: Callable[..., Path]
) -> Callable[..., httpx.AsyncClient]:
    """A client of an application of such a model."""

    def make(family: str = "llava", template: str = BOTH, **settings: Any) -> httpx.AsyncClient:
        return client_of(make_app(image_folder(family, template), **settings))

    return make
