"""Converts a GGUF file to a folder of Transformers: weights in float32, and the tokenizer with its chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

_CONTROL = 3
"""The type of a token that stands for no text."""
_SINGLE_DIGITS = ("smollm", "refact", "starcoder", "command-r")
"""Pre-tokenizers of GGUF that make each digit a token, and otherwise split as GPT-2 does."""
_AS_GPT_2 = ("gpt-2", "default", *_SINGLE_DIGITS)


def convert(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file to a folder.

    The weights are copied into a new model: the one that Transformers has read counts as quantised, and its saved
    configuration would say so.
    """
    read: Any = AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=torch.float32, **_unpacked()
    )
    settings = read.config
    settings.name_or_path = ""  # the folder of the package, which the model's users have not
    if hasattr(settings, "quantization_config"):
        del settings.quantization_config
    model: Any = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(str(folder))
    tokenizer_of(file).save_pretrained(str(folder))


def _unpacked() -> dict[str, Any]:
    """The configuration with which Transformers unpacks the weights. Earlier versions always do, and do not have the
    class."""
    kind = getattr(transformers, "GgufConfig", None)
    return {} if kind is None else {"quantization_config": kind(dequantize=True)}


def tokenizer_of(file: Path) -> PreTrainedTokenizerFast:
    """The byte-level BPE tokenizer of a GGUF file.

    It is made here, and not by Transformers, so that it is the same with every version of it.
    """
    from gguf import GGUFReader

    fields = GGUFReader(str(file)).fields

    def value(key: str, otherwise: Any = None) -> Any:
        return fields[key].contents() if key in fields else otherwise

    kind, split = value("tokenizer.ggml.model"), value("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or split not in _AS_GPT_2:
        raise ValueError(f"its tokenizer is {kind!r} with {split!r}, and a byte-level BPE was expected")
    tokens = value("tokenizer.ggml.tokens")
    pairs = [tuple(merge.split(" ", 1)) for merge in value("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, pairs))
    parts: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split in _SINGLE_DIGITS else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = value("tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    numbers = {name: value(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=value(f"{value('general.architecture')}.context_length"),
        clean_up_tokenization_spaces=False,
        **{name: tokens[number] for name, number in numbers.items() if number is not None},
    )
    fast.chat_template = value("tokenizer.chat_template")
    return fast
