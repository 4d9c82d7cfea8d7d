"""``python -m distkv.engine.convert GGUF FOLDER PARENT``: a GGUF file as a folder that ``from_pretrained`` reads.

For ``distkv.engine.sources``, which keeps the result; weights are float32. Ends with the process PARENT.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from distkv._parent import die_with

__all__ = ["convert"]


def convert(gguf: Path, out: Path) -> None:
    """Model, configuration, chat template and tokenizer of ``gguf`` into the folder ``out``."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model_class: Any = AutoModelForCausalLM  # has no types
    tokenizer_class: Any = AutoTokenizer
    model = model_class.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32,
        # without it the model counts as quantised and refuses to be saved
        quantization_config=GgufConfig(dequantize=True),
    )  # fmt: skip
    model.save_pretrained(out)
    del model
    tokenizer_class.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(out)


if __name__ == "__main__":
    die_with(int(sys.argv[3]))
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
