"""Tiny random models of real architectures, with tokenizers, made on the spot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

TEXTS = (
    "def add(a, b):\n    return a + b\n",
    "def name(self):\n    return self._name\n",
    "two dogs and three cats play in the snow",
    "the quick brown fox jumps over one lazy dog",
)
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8}
PAD, BOS, EOS = 0, 1, 2


def make_tokenizer(bos: bool = False, eos: bool = False, pad: str | None = "<pad>") -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 300 tokens that may add a start or an end token to every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{'<s> ' if bos else ''}$A{' </s>' if eos else ''}", special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token=pad)
    fast.chat_template = CHAT_TEMPLATE
    return fast


_IDS = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
_BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 128,
}  # fmt: skip

CAUSAL: dict[str, Callable[[int], PreTrainedModel]] = {
    "gpt2": lambda v: GPT2LMHeadModel(
        GPT2Config(vocab_size=v, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=EOS, eos_token_id=EOS)
    ),
    "gpt_neo": lambda v: GPTNeoForCausalLM(
        GPTNeoConfig(
            vocab_size=v,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            window_size=8,
            max_position_embeddings=128,
            **{k: x for k, x in _IDS.items() if k != "pad_token_id"},
        )
    ),
    "llama": lambda v: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=v,
            num_hidden_layers=2,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            max_position_embeddings=128,
            **SMALL,
            **_IDS,
        )
    ),
    "qwen2": lambda v: Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=v,
            num_hidden_layers=2,
            num_key_value_heads=2,
            max_position_embeddings=128,
            **{k: x for k, x in SMALL.items() if k != "head_dim"},
            **_IDS,
        )
    ),
    "qwen3": lambda v: Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=v, num_hidden_layers=2, num_key_value_heads=2, max_position_embeddings=128, **SMALL, **_IDS
        )
    ),
}
SEQ2SEQ: dict[str, Callable[[int], PreTrainedModel]] = {
    "t5": lambda v: T5ForConditionalGeneration(
        T5Config(
            vocab_size=v,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=PAD,
            pad_token_id=PAD,
            eos_token_id=EOS,
        )
    ),
    "t5_gated_untied": lambda v: T5ForConditionalGeneration(
        T5Config(
            vocab_size=v,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=PAD,
            pad_token_id=PAD,
            eos_token_id=EOS,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=False,
        )
    ),
    "bart": lambda v: BartForConditionalGeneration(
        BartConfig(vocab_size=v, decoder_start_token_id=EOS, forced_eos_token_id=EOS, **_BART, **_IDS)
    ),
    "marian": lambda v: MarianMTModel(MarianConfig(vocab_size=v, decoder_start_token_id=PAD, **_BART, **_IDS)),
}
FAMILIES = {**CAUSAL, **SEQ2SEQ}


def make_model(family: str, vocabulary: int = 300, seed: int = 0) -> PreTrainedModel:
    """A random model whose next-token distributions are far from uniform: a mistake in scoring must show."""
    torch.manual_seed(seed)
    model = FAMILIES[family](vocabulary)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(max(1.0, 0.35 / float(parameter.std())))
        if family == "t5_gated_untied":
            model.lm_head.weight.mul_(0.4)  # it starts so large that rounding shows
        if family == "t5":
            model.shared.weight.mul_(3.0)  # tied: its logits are scaled down by √d_model
    return model.eval()


def tokenizer_for(family: str) -> PreTrainedTokenizerFast:
    """As the family has it: encoders get an end token, Llama a start token, GPT-2 pads with its end token."""
    if family in SEQ2SEQ:
        return make_tokenizer(eos=True)
    return make_tokenizer(bos=family == "llama", pad="</s>" if family == "gpt2" else "<pad>")


def save(folder: Path, family: str, **options: Any) -> Path:
    """A model and its tokenizer as a Hugging Face folder."""
    tokenizer_for(family).save_pretrained(folder)
    make_model(family, **options).save_pretrained(folder)
    return folder
