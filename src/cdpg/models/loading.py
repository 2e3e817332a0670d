"""Loads a :class:`LanguageModel` from a hub id, a folder or a loaded model, with or without adapters."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.utils.hub import cached_file

from cdpg.config import CDPGConfig
from cdpg.contexts.contexts import Context
from cdpg.errors import UserError, first_line
from cdpg.models.adapters import leaves_weights_alone, refuse_unwrapped, requested_adapters, with_adapters
from cdpg.models.base import LanguageModel
from cdpg.models.causal import CausalModel
from cdpg.models.codec import Codec
from cdpg.models.devices import check_precision, choose_device
from cdpg.models.modules import inner_model
from cdpg.models.names import locate, require_model
from cdpg.models.seq2seq import Seq2SeqModel
from cdpg.models.transformer import TransformerModel
from cdpg.system import memory
from cdpg.system.distributed import Processes

_NO_LIMIT = 10**9
"""Tokenizers without a limit have a larger number."""


def load_for(
    processes: Processes,
    model: str | os.PathLike[str] | nn.Module | LanguageModel,
    config: CDPGConfig,
    tokenizer: Any = None,
    peft_config: Any = None,
) -> tuple[LanguageModel, LanguageModel, Callable[[], None]]:
    """Policy and base for these processes, and a function that divides their weights, if that is asked for."""
    own = processes.accelerator.device if config.device == "auto" else None
    if config.sharding == "none" or processes.count == 1:
        return *load_policy_and_base(model, config, tokenizer, own, peft_config), lambda: None
    device = own or choose_device(config)
    check_precision(config, device)
    if device.type == "cpu":
        memory.return_freed_blocks()
    # Whole models may be too large for the device: only the parts are moved to it.
    policy, base = load_policy_and_base(model, config, tokenizer, torch.device("cpu"), peft_config)
    if not isinstance(policy, TransformerModel) or not isinstance(base, TransformerModel):
        raise UserError(
            f"sharding: full is for models of Transformers, not for a {type(policy).__name__}: set sharding: none"
        )

    def divide() -> None:
        policy.shard(device, processes)
        if base is not policy:
            base.shard(device, processes)

    return policy, base, divide


def load_proposal(
    processes: Processes,
    source: str,
    config: CDPGConfig,
    policy: LanguageModel,
    base: LanguageModel,
    contexts: Sequence[Context],
) -> tuple[LanguageModel, Callable[[], None]]:
    """What draws the samples, and a function that divides its weights, if that is asked for and they are its own.

    It is ``policy``, ``base``, or a third model by its name, which must have the base's tokens.
    """
    if source in ("policy", "base"):
        return policy if source == "policy" else base, lambda: None
    if not isinstance(base, TransformerModel):
        raise UserError(
            f"proposal is {source!r}, but the model is a {type(base).__name__}, and only one of Transformers can be "
            "loaded beside it: set proposal to policy or base"
        )
    divides = config.sharding != "none" and processes.count > 1
    device = processes.accelerator.device if config.device == "auto" else choose_device(config)
    found = load_model(source, config, device=torch.device("cpu") if divides else device)
    differences = "; ".join(found.token_differences(base, contexts, config.max_completion_length, "prompt"))
    if differences:
        raise UserError(
            f"the proposal {source!r} cannot draw samples that the base scores: {differences}; give a model with the "
            "base's tokens"
        )
    found.module.requires_grad_(False)
    return found, partial(found.shard, device, processes) if divides else lambda: None


def load_policy_and_base(
    model: str | os.PathLike[str] | nn.Module | LanguageModel,
    config: CDPGConfig,
    tokenizer: Any = None,
    device: torch.device | None = None,
    peft_config: Any = None,
) -> tuple[LanguageModel, LanguageModel]:
    """The policy starts as a copy of the base; with adapters, the base is the policy with its adapters off.

    Some adapters change the model's own weights (see ``with_adapters``); then the base is an earlier copy.
    """
    peft_config = requested_adapters(config, peft_config)
    if isinstance(model, LanguageModel):
        if peft_config is not None:
            raise UserError(
                f"adapters are for models of Transformers, not for a {type(model).__name__}: leave them out"
            )
        base = copy.deepcopy(model)
        base.module.requires_grad_(False)
        return model, base
    policy, original = _load(model, config, tokenizer, device, peft_config)
    if peft_config is None:
        _refuse_what_cannot_be_saved(policy.module)
    with _memory(peft_config):
        base = policy if policy.has_adapters else policy.frozen_copy(original)
    if config.base_dtype != "float32":
        if base is policy:
            raise UserError(
                f"base_dtype is {config.base_dtype!r}, but with these adapters the base has no weights of its own: "
                "leave it out"
            )
        base.narrow_layers(getattr(torch, config.base_dtype))
    return policy, base


def _refuse_what_cannot_be_saved(module: nn.Module) -> None:
    """Refuse a quantised model that Transformers cannot save, before the run and not at its end."""
    quantizer = getattr(module, "hf_quantizer", None)
    if quantizer is not None and not quantizer.is_serializable():
        raise UserError(
            f"the model is quantised ({quantizer.quantization_config.quant_method}), and what is tuned could not be "
            "saved: load its weights into a model that is not (without quantization_config), or train adapters "
            "(lora_rank)"
        )


def _memory(peft_config: Any) -> AbstractContextManager[None]:
    adapters = "adapters (lora_rank), which need no second copy"
    if peft_config is not None and not leaves_weights_alone(peft_config):
        adapters = "a LoraConfig with init_lora_weights=True and bias='none', which needs no second copy"
    return memory.needed_for("loading the model", f"use a smaller model, or {adapters}")


def load_model(
    model: str | os.PathLike[str] | nn.Module,
    config: CDPGConfig,
    tokenizer: Any = None,
    device: torch.device | None = None,
) -> TransformerModel:
    """Load a model by name, or wrap a loaded model; weights in float32 or float64."""
    return _load(model, config, tokenizer, device, None)[0]


def load_base(
    model: str | os.PathLike[str] | LanguageModel, config: CDPGConfig, device: torch.device | None = None
) -> LanguageModel:
    """A model that nothing trains; one that is a language model already is taken as it is."""
    if isinstance(model, LanguageModel):
        return model
    base = load_model(model, config, device=device)
    base.module.requires_grad_(False)
    return base


def _load(
    model: str | os.PathLike[str] | nn.Module,
    config: CDPGConfig,
    tokenizer: Any,
    device: torch.device | None,
    peft_config: Any,
) -> tuple[TransformerModel, nn.Module | None]:
    """The model, and a copy from before its adapters if the model without them is not the base."""
    if tokenizer is not None and not callable(tokenizer):
        raise UserError(
            f"processing_class is {tokenizer!r:.100}: pass a tokenizer, as AutoTokenizer.from_pretrained gives it"
        )
    device = device or choose_device(config)
    check_precision(config, device)
    dtype = torch.float64 if config.dtype == "float64" else torch.float32
    model = locate(os.fspath(model)) if isinstance(model, (str, os.PathLike)) else model
    if not isinstance(model, (str, nn.Module)):
        raise UserError(f"model is {model!r}: pass a hub id, a folder, code-tiny, t5-tiny, or a loaded model")
    name = model if isinstance(model, str) else str(getattr(model.config, "_name_or_path", ""))
    original = None
    with _memory(peft_config), torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)  # new adapters and missing weights must be the same in every process
        if isinstance(model, str):
            module, came_in = _load_weights(model, config, dtype)
        else:
            came_in = getattr(inner_model(model), "dtype", None)
            module = _cast(model, dtype)
        refuse_unwrapped(module)
        if peft_config is not None:
            module, original = with_adapters(module, peft_config)
        module = module.to(device)
        original = None if original is None else original.to(device)
    if tokenizer is None:
        tokenizer = _load_tokenizer(name, config)
    own_adapters = peft_config is not None and original is None
    wrapped = wrap_model(module, tokenizer, config, own_adapters)
    wrapped.original_dtype, wrapped.recomputes = came_in, config.gradient_checkpointing
    return wrapped, original


def wrap_model(module: nn.Module, tokenizer: Any, config: CDPGConfig, own_adapters: bool = False) -> TransformerModel:
    """A loaded module and its tokenizer as a language model.

    ``own_adapters``: its adapters are new and only they are trained, so that without them it is the base. For a model
    that came with adapters, the base includes them.
    """
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise UserError("no parameter of the model can be trained: all have requires_grad = False")
    inner = inner_model(module)
    seq2seq = bool(inner.config.is_encoder_decoder)
    end_ids = _end_ids(inner, tokenizer)
    codec = Codec(tokenizer, end_ids, _window(inner, tokenizer), seq2seq, config.long_contexts)
    dtype = getattr(torch, config.dtype)
    if not seq2seq:
        return CausalModel(module, codec, dtype, own_adapters)
    return Seq2SeqModel(module, codec, dtype, own_adapters, _decoder_prefix(inner, tokenizer, config))


def _cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    try:
        return module.to(dtype)
    except ValueError as error:
        raise UserError(f"the model cannot be computed in {dtype}: {first_line(error)}; give it unquantised") from error


def _load_weights(name: str, config: CDPGConfig, dtype: torch.dtype) -> tuple[nn.Module, torch.dtype | None]:
    """The model in ``dtype``, and the original type of its weights according to its configuration."""
    require_model(name)
    try:
        if Path(name).is_dir():
            _refuse_pickles(Path(name))
        elif cached_file(
            name, "adapter_config.json", _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_gated_repo=False,
        ):  # fmt: skip
            cached_file(name, "adapter_model.safetensors")  # otherwise Transformers reads the pickle
        settings = AutoConfig.from_pretrained(name, trust_remote_code=config.trust_remote_code)
        kind: Any = AutoModelForSeq2SeqLM if settings.is_encoder_decoder else AutoModelForCausalLM
        module: nn.Module = kind.from_pretrained(
            name, dtype=dtype, trust_remote_code=config.trust_remote_code, use_safetensors=True
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        if memory.is_out_of_memory(error):
            raise
        raise UserError(f"cannot load the model {name!r}: {first_line(error)}{_where_looked(name)}") from error
    return module, getattr(settings, "dtype", None)


def _refuse_pickles(folder: Path) -> None:
    """Refuse weights that are not in safetensors: reading a pickle may run any code."""
    names = sorted(path.name for path in folder.iterdir())
    for kind, safe in (("pytorch_model", "model"), ("adapter_model", "adapter_model")):
        pickles = [name for name in names if name.startswith(kind) and name.endswith(".bin")]
        if pickles and not any(name.startswith(safe) and name.endswith(".safetensors") for name in names):
            raise UserError(
                f"{str(folder / pickles[0])!r} is a pickle, which may run any code when it is read, and there is no "
                f"{safe}.safetensors beside it: convert it where you trust it, by loading the model with Transformers "
                f"and calling save_pretrained"
            )


def _load_tokenizer(name: str, config: CDPGConfig) -> Any:
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise UserError(
            f"cannot load a tokenizer for {name!r}: {first_line(error)}; pass it as processing_class"
        ) from error


def _where_looked(name: str) -> str:
    return "" if Path(name).is_dir() else "; expected a folder with config.json and weights, or a hub id"


def _end_ids(inner: Any, tokenizer: Any) -> frozenset[int]:
    """Every end token named by the model, its generation settings or its tokenizer."""
    ids: set[int] = set()
    for owner in (getattr(inner, "generation_config", None), inner.config, tokenizer):
        value = getattr(owner, "eos_token_id", None)
        ids.update(value if isinstance(value, Iterable) else [] if value is None else [value])
    return frozenset(ids)


def _window(inner: Any, tokenizer: Any) -> int | None:
    config = inner.config.get_text_config(encoder=True) if inner.config.is_encoder_decoder else inner.config
    limits = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions")]
    limits.append(getattr(tokenizer, "model_max_length", None))
    known = [int(limit) for limit in limits if limit is not None and 0 < limit < _NO_LIMIT]
    return min(known, default=None)


def _decoder_prefix(inner: Any, tokenizer: Any, config: CDPGConfig) -> list[int]:
    start = inner.config.decoder_start_token_id
    if start is None:
        start = getattr(inner.generation_config, "decoder_start_token_id", None)
    if start is None:
        start = inner.config.bos_token_id
    if start is None:
        raise UserError("the model has no decoder_start_token_id: set it in the model's config.json")
    return [start, *tokenizer(config.decoder_prefix, add_special_tokens=False)["input_ids"]]
