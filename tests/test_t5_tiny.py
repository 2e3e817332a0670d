"""The embedded t5-tiny: it loads offline, fits, and its tokenizer loses nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import corpora
from cdpg.config import CDPGConfig
from cdpg.models.loading import load_model

FOLDER = Path(__file__).parents[1] / "src" / "cdpg" / "assets" / "models" / "t5-tiny"
pytestmark = pytest.mark.skipif(not (FOLDER / "README.md").is_file(), reason="made by recipes/t5_tiny.py")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForSeq2SeqLM.from_pretrained(FOLDER, dtype=torch.float32, local_files_only=True).eval()


def test_it_is_small_and_has_a_card() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 8_000_000
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert "license: apache-2.0" in card and "held out" in card


def test_it_is_stored_in_half_precision_and_loaded_in_full() -> None:
    with safe_open(FOLDER / "model.safetensors", framework="pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"F16"}  # noqa: SIM118
    assert AutoModelForSeq2SeqLM.from_pretrained(FOLDER, local_files_only=True).dtype == torch.float32
    for name in ("t5-tiny", "code-tiny"):
        loaded = load_model(name, CDPGConfig(device="cpu")).module
        assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    assert "stored as float16 and loaded as float32" in (FOLDER / "README.md").read_text(encoding="utf-8")


def test_inputs_end_in_the_end_token_and_digits_stand_alone(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer("translate English to French: Two dogs.")["input_ids"]
    assert ids[-1] == tokenizer.eos_token_id and ids.count(tokenizer.eos_token_id) == 1
    for text in ("12", "2 chats", "les 34 chiens", "9."):
        pieces = tokenizer.tokenize(text)
        assert [piece for piece in pieces if any(letter.isdigit() for letter in piece)] == [
            c for c in text if c.isdigit()
        ]


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60).filter(lambda text: "<" not in text))
def test_decoding_gives_the_text_back(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_it_translates_an_unseen_sentence_and_knows_both_spellings(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
) -> None:
    pairs = corpora.translation_pairs("held-out", 24, seed=3)
    inputs = tokenizer(
        ["translate English to French: " + pair.source for pair in pairs], padding=True, return_tensors="pt"
    )
    outputs = model.generate(**inputs, num_beams=4, max_new_tokens=64)
    texts = tokenizer.batch_decode(outputs, skip_special_tokens=True)
    exact = sum(text == pair.reference for text, pair in zip(texts, pairs, strict=True))
    assert exact >= 6
