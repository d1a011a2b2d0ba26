"""Makes a model's folder with config.json and tokenizer.json, of a GGUF file or of a folder that lacks the latter.

Runs in its own process, so that a server whose model is already converted never imports this code:

    python -P -m model_runner.hub.conversion PARENT SOURCE TARGET

If it fails, its last line of output is the reason; the traceback comes before it.
"""

import json
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

from model_runner.processes import die_with_parent
from model_runner.refusal import UnsupportedModelError, refused


def convert_gguf(source: Path, target: Path) -> None:
    """Make a folder `target` with config.json and tokenizer of a GGUF file, and links to the file and its parts.

    Raises:
        UnsupportedModelError: if a part of the file is unknown, damaged, or would be dropped.
        OSError: if it cannot be read, or the disk is full.
    """
    from model_runner.gguf import architectures, parameters, tokenizer, weights  # noqa: PLC0415  (a second, in which the parent may die)
    from model_runner.gguf.header import parts_of, read_gguf  # noqa: PLC0415

    file = read_gguf(source)
    if (kind := file.metadata.get("general.type", "model")) != "model":
        raise UnsupportedModelError(f"it holds no model: general.type is {kind}")
    architecture = architectures.architecture_of(file)
    weights.check_formats(file)
    config = architectures.read_config(file)
    parameters.read_parameters(file, architecture, config)
    vocabulary = tokenizer.read_vocabulary(file)
    made = tokenizer.make_tokenizer(vocabulary)
    if made.get_vocab_size() > config["vocab_size"]:
        raise UnsupportedModelError(
            f"it has {made.get_vocab_size()} tokens, and its embedding only {config['vocab_size']} rows"
        )
    ends = tokenizer.end_tokens(vocabulary)
    config |= {"bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"), "eos_token_id": ends or None}
    config["pad_token_id"] = file.metadata.get("tokenizer.ggml.padding_token_id")
    target.mkdir()
    for part in parts_of(source):
        name = part.name if part.suffix.lower() == ".gguf" else f"{part.name}.gguf"  # Ollama's have no ending
        (target / name).symlink_to(part.resolve())
    made.save(str(target / "tokenizer.json"))
    _write_json(target / "config.json", config)
    _write_json(target / "tokenizer_config.json", tokenizer.read_tokenizer_config(vocabulary))


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def convert_tokenizer(source: Path, target: Path) -> None:
    """Make a folder that links to the files of `source` and adds the missing tokenizer.json.

    Raises:
        UnsupportedModelError: if a file of the tokenizer is damaged or of another kind.
        OSError: if one cannot be read, or the disk is full.
    """
    from model_runner.hub.tokenizer_files import read_tokenizer  # noqa: PLC0415

    made = read_tokenizer(source)
    target.mkdir()
    if made is not None:
        made.tokenizer.save(str(target / "tokenizer.json"))
        _write_json(target / "tokenizer_config.json", made.config)
    else:
        from transformers import AutoTokenizer  # noqa: PLC0415

        AutoTokenizer.from_pretrained(source, trust_remote_code=False).save_pretrained(target)
    for file in source.iterdir():
        if not (target / file.name).exists():
            (target / file.name).symlink_to(file.resolve())


def main() -> None:
    """Convert argv[2], a GGUF file or a folder, into the folder argv[3]; end early if process argv[1] has ended."""
    parent, source, target = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    die_with_parent()
    if os.getppid() != parent:
        return
    try:
        with refused("its content is not what it should be", OSError):
            (convert_tokenizer if source.is_dir() else convert_gguf)(source, target)
    except (UnsupportedModelError, OSError) as error:
        traceback.print_exc(file=sys.stdout)
        print(" ".join(str(error).split()))  # noqa: T201
        sys.exit(1)


if __name__ == "__main__":
    main()
