"""Bring a checkpoint into the form that starts fast: safetensors and tokenizer.json.

Run as a program, so that a server that finds its model in the cache never imports any of this:

    python -m model_runner.models.conversion PARENT SOURCE TARGET
"""

import os
import sys
from pathlib import Path

from model_runner.parent import die_with_parent


def convert_gguf(source: Path, target: Path) -> None:
    """Unpack the weights of a GGUF file to float32 and write them, with config and tokenizer, into `target`."""
    import torch  # noqa: PLC0415  (takes seconds, in which the parent may die)
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # noqa: PLC0415

    folder, name = str(source.parent), source.name
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(target)


def convert_tokenizer(source: Path, target: Path) -> None:
    """Make a folder that links to the files of `source` and adds the tokenizer.json that it lacks."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    target.mkdir(parents=True)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    for file in source.iterdir():
        if not (target / file.name).exists():
            (target / file.name).symlink_to(file.resolve())


def main() -> None:
    """Convert argv[2], a GGUF file or a folder, into the folder argv[3], unless process argv[1] is no more waiting."""
    parent, source, target = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    die_with_parent()
    if os.getppid() == parent:
        (convert_tokenizer if source.is_dir() else convert_gguf)(source, target)


if __name__ == "__main__":
    main()
