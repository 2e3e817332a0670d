"""Adapters (PEFT): the model with its adapters switched off is the base, where that can be relied on."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn

from cdpg.config import CDPGConfig
from cdpg.errors import UserError, first_line
from cdpg.models.modules import digest, inner_model


def requested_adapters(config: CDPGConfig, peft_config: Any) -> Any:
    """PEFT's configuration of the adapters that the settings or the trainer's argument ask for; None for none."""
    if config.lora_rank is None:
        return peft_config
    if peft_config is not None:
        raise UserError("lora_rank and peft_config both ask for adapters: give one of them")
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise UserError("lora_rank is set, but PEFT is not installed: pip install 'cdpg[peft]'") from error
    names = list(config.lora_target_modules)
    return LoraConfig(
        r=config.lora_rank,
        lora_alpha=2 * config.lora_rank if config.lora_alpha is None else config.lora_alpha,
        target_modules="all-linear" if names == ["all-linear"] else names,
    )


def with_adapters(module: nn.Module, peft_config: Any) -> tuple[nn.Module, nn.Module | None]:
    """The model with new adapters, and a copy from before them unless the model without them is unchanged.

    It is unchanged if its own parameters are equal bit for bit and none of them is trained. Some initialisations
    subtract the adapters from the weights (``init_lora_weights="pissa"``), and some configurations train the model's
    biases too (``bias="all"``).
    """
    try:
        from peft import PeftConfig, get_peft_model
    except ImportError as error:
        raise UserError("peft_config was given, but PEFT is not installed: pip install 'cdpg[peft]'") from error
    if not isinstance(peft_config, PeftConfig):
        raise UserError(
            f"peft_config takes a configuration of PEFT, such as peft.LoraConfig(r=8), not {peft_config!r:.100}; "
            f"or set lora_rank"
        )
    if peft_config.is_prompt_learning:
        raise UserError(
            f"{type(peft_config).__name__} learns prompts, which cannot be scored exactly here: use adapters of the "
            f"weights, such as LoraConfig"
        )
    own = list(module.parameters())
    original: Any = None if leaves_weights_alone(peft_config) else copy.deepcopy(module)
    before = digest(own)
    try:
        adapted: Any = get_peft_model(module, peft_config)
    except ValueError as error:  # such as layers that the model does not have
        raise UserError(f"the model cannot be given these adapters: {first_line(error)}") from error
    _refuse_tied(adapted, own)
    present = {id(parameter) for parameter in adapted.parameters()}
    frozen = all(id(parameter) in present and not parameter.requires_grad for parameter in own)
    if frozen and digest(own) == before:
        return adapted, None
    if original is None:
        raise UserError(
            f"PEFT changed the model's own weights for this {type(peft_config).__name__}, so that the base is lost: "
            f"use another init_lora_weights"
        )
    return adapted, original


def leaves_weights_alone(peft_config: Any) -> bool:
    """Whether the adapters are of a kind that is known to leave the model's own weights unchanged.

    Then no copy is made before they are added, which saves memory.
    """
    begins, biases = (getattr(peft_config, name, None) for name in ("init_lora_weights", "bias"))
    return begins in (True, False, "gaussian", "orthogonal", "eva") and biases == "none"


def refuse_unwrapped(module: nn.Module) -> None:
    """Refuse adapters added by Transformers, which would save them without the model."""
    if hasattr(module, "peft_config") and not hasattr(module, "get_base_model"):
        raise UserError(
            "the model has adapters that Transformers put in (add_adapter, load_adapter, or adapter_config.json beside "
            "its weights), and would be saved without its own weights: give it as PEFT's model, which is made by "
            "PeftModel.from_pretrained(model, adapter, is_trainable=True), or merge them first (merge_and_unload)"
        )


def _refuse_tied(adapted: nn.Module, own: Iterable[nn.Parameter]) -> None:
    """Refuse adapters of tied weights: merged into them, they would change another part of the model too.

    Adapters that replace the weights are allowed in decoder-only models, where Transformers unties the embeddings.
    """
    from peft.tuners.trainable_tokens import TrainableTokensLayer
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    inner = inner_model(adapted)
    touching: Any = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    replacing: Any = () if inner.config.is_encoder_decoder else (AuxiliaryTrainingWrapper, TrainableTokensLayer)
    places: dict[int, list[str]] = {id(parameter): [] for parameter in own}
    for name, parameter in inner.named_parameters(remove_duplicate=False):
        places.get(id(parameter), []).append(name)
    for name, layer in inner.named_modules():
        if not isinstance(layer, touching) or isinstance(layer, replacing):
            continue
        shared = (place for parameter in layer.parameters() for place in places.get(id(parameter), []))
        elsewhere = next((place for place in shared if not place.startswith(f"{name}.")), None)
        if elsewhere is not None:
            raise UserError(
                f"peft_config has adapters for {name}, whose weights are tied to {elsewhere}, and what is tuned could "
                f"not be saved as a model: leave it out of target_modules and modules_to_save, or untie the weights"
            )
