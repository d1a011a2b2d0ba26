"""Bring a checkpoint into the form that starts fast: safetensors and tokenizer.json.

Run as a program, so that a server that finds its model in the cache never imports any of this:

    python -P -m model_runner.models.conversion PARENT SOURCE TARGET

If it fails, the last line that it prints says why, below the trace.
"""

import os
import sys
import traceback
from pathlib import Path
from typing import Any

from model_runner.models.gguf import (
    GgufFile,
    check_config,
    check_head,
    check_splitting,
    check_tensors,
    read_gguf,
    set_splitting,
)
from model_runner.models.refusal import UnsupportedModelError, refused
from model_runner.processes import die_with_parent


def convert_gguf(source: Path, target: Path) -> None:
    """Unpack the weights of a GGUF file to float32 and write them, with config and tokenizer, into `target`.

    Raises:
        UnsupportedModelError: if transformers cannot read the file, or not all of it as it is meant.
    """
    file = read_gguf(source)
    check_head(file)
    check_splitting(file)
    with refused(f"transformers fails on its {file.architecture} model"):
        config = _read_config(source, file)
        tokenizer = _read_tokenizer(source, file)
        model = _read_model(source, file, config)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def convert_tokenizer(source: Path, target: Path) -> None:
    """Make a folder that links to the files of `source` and adds the tokenizer.json that it lacks."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    target.mkdir(parents=True)
    AutoTokenizer.from_pretrained(source, trust_remote_code=False).save_pretrained(target)
    for file in source.iterdir():
        if not (target / file.name).exists():
            (target / file.name).symlink_to(file.resolve())


def _read_config(source: Path, file: GgufFile) -> Any:
    from transformers import AutoConfig  # noqa: PLC0415  (takes seconds, in which the parent may die)

    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name, trust_remote_code=False)
    check_config(file, config)
    return config


def _read_tokenizer(source: Path, file: GgufFile) -> Any:
    from transformers import AutoTokenizer  # noqa: PLC0415

    tokenizer: Any = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, trust_remote_code=False)
    set_splitting(file, tokenizer.backend_tokenizer)
    return tokenizer


def _read_model(source: Path, file: GgufFile, config: Any) -> Any:
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, GgufConfig  # noqa: PLC0415
    from transformers.modeling_gguf_pytorch_utils import (  # noqa: PLC0415
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    from model_runner.models.loading import check_report  # noqa: PLC0415

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        source.parent,
        config=config,
        gguf_file=source.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused with the others
    )
    model, report = loaded
    check_report(source, model, report)
    processor = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)(config=config.to_dict())  # type: ignore[no-untyped-call]
    check_tensors(file, get_gguf_hf_weights_map(model, processor))
    return model


def main() -> None:
    """Convert argv[2], a GGUF file or a folder, into the folder argv[3], unless process argv[1] is no more waiting."""
    parent, source, target = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    die_with_parent()
    if os.getppid() != parent:
        return
    try:
        with refused("transformers fails", OSError):
            (convert_tokenizer if source.is_dir() else convert_gguf)(source, target)
    except (UnsupportedModelError, OSError) as error:
        traceback.print_exc(file=sys.stdout)
        print(" ".join(str(error).split()))  # noqa: T201
        sys.exit(1)


if __name__ == "__main__":
    main()
