"""How to sample a tuned model with plain Transformers as its run did: the facts, and a program.

A run writes the facts to its ``config.yaml``; the model card shows the program made from them.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_url
from huggingface_hub.errors import HFValidationError

from cdpg.config import CDPGConfig
from cdpg.contexts.contexts import Context
from cdpg.models.base import LanguageModel
from cdpg.models.sampling import StopRule
from cdpg.models.saving import PLAIN, left_out
from cdpg.models.transformer import TransformerModel

_TRIED_ON = ("", "a", " a", "a\nb", " a\n\n b\nc", "\n", "a. B", "{}\n{}")
"""Texts on which the extracted code of a stop rule must agree with the rule."""
_CONSTANTS = (str, int, float, bool, bytes, type(None))


def facts(policy: LanguageModel, config: CDPGConfig, contexts: Sequence[Context], stop: StopRule | None) -> Any:
    """The facts a program needs to sample as the run does, beside the run's settings; plain values."""
    if not isinstance(policy, TransformerModel):
        return {}
    return {
        "seq2seq": policy.codec.seq2seq,
        "prompts": sorted({_form(context) for context in contexts}),
        "system": _own_system(contexts, config),
        "closes_texts": policy.codec.closes_texts,
        "prompt_tokens": policy.codec.room(config.max_completion_length) if config.long_contexts == "cut" else None,
        "stop": None if stop is None else stop_code(stop),
        "hub_id": hub_id(policy.inner.config),
        "weights": {"original": _name(policy.original_dtype), "saved": _name(policy.saved_dtype(config))},
        "generation_settings": left_out(policy.inner),
        "adapters": _tuned_adapters(policy.module),
    }


def notices(sampling: Mapping[str, Any]) -> Iterator[str]:
    """Notices on the saved model, a sentence each, from the facts."""
    own = sampling.get("generation_settings")
    if own:
        yield (
            "the tuned model is saved with the generation settings of plain sampling, by which it is tuned and "
            f"measured; the model's own are not kept: {settings_in_words(own)}"
        )
    weights = sampling.get("weights") or {}
    before, after = weights.get("original"), weights.get("saved")
    if before and after and before != after:
        yield (
            f"the model's weights are {before}, and the tuned ones are saved as {after}, in which they are trained; "
            f"save_dtype: original rounds them to {before}"
        )


def settings_in_words(settings: Mapping[str, Any]) -> str:
    """``temperature = 0.6, top_p = 0.9``; long values are shortened."""
    texts = {name: str(value) for name, value in settings.items()}
    return ", ".join(f"{name} = {text if len(text) <= 60 else f'{text[:57]}...'}" for name, text in texts.items())


def hub_id(config: Any) -> str | None:
    """The hub's name of a loaded model; None if it is from a folder or made in Python."""
    name = str(getattr(config, "_name_or_path", "") or "")
    return name if is_hub_id(name) else None


def is_hub_id(name: str) -> bool:
    """Whether a name can be on the hub and is not a local folder."""
    try:
        hf_hub_url(name, "config.json")  # refuses what cannot be a name there
    except HFValidationError:
        return False
    return name.isascii() and not Path(name).is_dir()  # older versions of the hub's library take any letter


def _form(context: Context) -> str:
    if isinstance(context.prompt, str):
        return "text"
    return "begun" if context.prompt[-1]["role"] == "assistant" else "chat"


def _own_system(contexts: Sequence[Context], config: CDPGConfig) -> str | bool:
    """The system message of all prompts; True if they differ, False if there is none except the setting."""
    found = {_system_of(context) for context in contexts}
    if found <= {"", config.system}:
        return False
    return found.pop() if len(found) == 1 else True


def _system_of(context: Context) -> str:
    messages = () if isinstance(context.prompt, str) else context.prompt
    return next((str(message["content"]) for message in messages if message["role"] == "system"), "")


def _tuned_adapters(module: Any) -> dict[str, Any] | None:
    """Kind, rank and scale of the adapters that are tuned; None where all weights are, adapters or not."""
    asked = getattr(module, "peft_config", None)
    if not asked or all(parameter.requires_grad for parameter in module.parameters()):
        return None
    config = list(asked.values())[-1]
    alpha = getattr(config, "lora_alpha", getattr(config, "alpha", None))
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    return {"kind": kind, "rank": getattr(config, "r", None), "alpha": alpha}


def _name(dtype: Any) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


# The stop rule as a standalone function.


def stop_code(stop: StopRule) -> dict[str, str | None]:
    """The rule's name, and the code of its ``cut`` as a standalone function, or None if that is not possible."""
    code = None
    with suppress(Exception):  # its source may be missing, and may raise anything
        code = _standalone(type(stop).cut)
        alone: dict[str, Any] = {}
        exec(code, alone)
        if any(alone["cut"](text) != stop.cut(text) for text in _TRIED_ON):
            code = None
    return {"name": f"{type(stop).__module__}:{type(stop).__qualname__}", "code": code}


def _standalone(method: Any) -> str:
    """A method that does not use its object as a function, with the modules and constants it needs; or ValueError."""
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(method))).body
    if not isinstance(function, ast.FunctionDef) or len(function.args.args) != 2:
        raise ValueError("not a method of one argument")
    owner = function.args.args.pop(0).arg
    function.name, function.decorator_list, function.returns = "cut", [], None
    for argument in function.args.args:
        argument.annotation = None
    if ast.get_docstring(function) is not None:
        function.body[0] = ast.Expr(ast.Constant("The text up to where the run's stop rule ends it, or None."))
    names = sorted({node.id for node in ast.walk(function) if isinstance(node, ast.Name)})
    if owner in names:
        raise ValueError("it uses its object")
    lines = [_definition(name, method.__globals__[name]) for name in names if name in method.__globals__]
    imports = sorted({line for text in lines for line in text if line.startswith("import ")})
    constants = [line for text in lines for line in text if not line.startswith("import ")]
    code = ast.unparse(ast.fix_missing_locations(function))
    return "\n".join([*imports, *([""] if imports else []), *constants, *(["", ""] if constants else []), code])


def _definition(name: str, value: Any) -> list[str]:
    """Lines that define a module, a constant or a regular expression under its name."""
    if isinstance(value, types.ModuleType) and value.__name__ == name:
        return [f"import {name}"]
    if isinstance(value, re.Pattern):
        return ["import re", f"{name} = re.compile({value.pattern!r}, {value.flags})"]
    if isinstance(value, _CONSTANTS):
        return [f"{name} = {value!r}"]
    if getattr(builtins, name, None) is value:
        return []
    raise ValueError(f"{name} is neither a module nor a constant")


# The program.


def program(sampling: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """A Python program that loads a folder's model and samples; ``settings`` are those of the run's ``config.yaml``.

    Values from outside are literals in it, except the code of the run's stop rule.
    """
    seq2seq, forms = bool(sampling.get("seq2seq")), list(sampling.get("prompts") or ["text"])
    auto = "AutoModelForSeq2SeqLM" if seq2seq else "AutoModelForCausalLM"
    code = (sampling.get("stop") or {}).get("code")
    dtype = "float64" if settings.get("dtype") == "float64" else "float32"
    example = '"..."' if "text" in forms or settings.get("chat") else '[{"role": "user", "content": "..."}]'
    lines = [
        "import torch",
        f"from transformers import {auto}, AutoTokenizer",
        "",
        'name = "..."  # of this folder, or of its repository on the hub',
        "tokenizer = AutoTokenizer.from_pretrained(name)",
        f"model = {auto}.from_pretrained(name, dtype=torch.{dtype})",
        *(["", "", *str(code).splitlines()] if code else []),
        "",
        "",
        "def read(ids):",
        "    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)",
        "",
        "",
        "def sample(prompt, count=1):",
        *(f"    {line}" for line in _body(sampling, settings, forms, seq2seq, bool(code))),
        "",
        "",
        f"print(sample({example}))",
    ]
    return "\n".join(lines)


def _body(
    sampling: Mapping[str, Any], settings: Mapping[str, Any], forms: Sequence[str], seq2seq: bool, cut: bool
) -> Iterator[str]:
    """The lines of the function that samples."""
    own = sampling.get("system")
    yield from _as_chat(settings, own if isinstance(own, str) else str(settings.get("system") or ""))
    yield from _prompt_ids(forms, _prefix(settings), bool(sampling.get("closes_texts")))
    yield from _cut_prompt(sampling.get("prompt_tokens"), seq2seq)
    yield "inputs = torch.tensor([ids], device=model.device)"
    first = ascii(str(settings.get("decoder_prefix") or ""))
    if seq2seq:
        yield "start = [model.generation_config.decoder_start_token_id]"
        if first != "''":
            yield f"start += tokenizer({first}, add_special_tokens=False).input_ids"
    length = settings.get("max_completion_length")
    yield "outputs = model.generate("
    yield "    inputs,"
    yield "    attention_mask=torch.ones_like(inputs),"
    if seq2seq:
        yield "    decoder_input_ids=torch.tensor([start], device=model.device),"
    yield f"    {', '.join(f'{name}={value}' for name, value in PLAIN.items())},"
    yield f"    max_new_tokens={length if isinstance(length, int) else 128},"
    yield "    num_return_sequences=count,"
    yield ")"
    if seq2seq:
        yield "texts = [read(output[len(start) :]) for output in outputs]"
    else:
        yield "texts = [read(output)[len(read(ids)) :] for output in outputs]"
    if cut:
        yield "ends = [cut(text) for text in texts]"
        yield "texts = [text if end is None else end for text, end in zip(texts, ends)]"
    yield "return texts"


def _prefix(settings: Mapping[str, Any]) -> str:
    """The expression for the prompt prefix, with a plus sign; empty without one."""
    given = str(settings.get("prompt_prefix") or "")
    return f"{given!a} + " if given else ""


def _as_chat(settings: Mapping[str, Any], system: str) -> Iterator[str]:
    """Lines that turn a text into a chat and add the system message, if the run did."""
    if settings.get("chat"):
        yield "if isinstance(prompt, str):"
        yield f'    prompt = [{{"role": "user", "content": {_prefix(settings)}prompt}}]'
    if system:
        yield 'if all(message["role"] != "system" for message in prompt):'
        yield f'    prompt = [{{"role": "system", "content": {system!a}}}, *prompt]'


def _prompt_ids(forms: Sequence[str], prefix: str, closes_texts: bool) -> Iterator[str]:
    """Lines that encode a prompt: a text, a chat, or either."""
    options, begun = "add_generation_prompt=True", 'begun = prompt[-1]["role"] == "assistant"'
    if "begun" in forms:  # some chats end with the beginning of the answer
        options = "add_generation_prompt=not begun, continue_final_message=begun"
    chat = [
        *([begun] if "begun" in forms else []),
        f"text = tokenizer.apply_chat_template(prompt, tokenize=False, {options})",
        "ids = tokenizer(text, add_special_tokens=False).input_ids",
    ]
    text = [
        f"ids = tokenizer({prefix}prompt).input_ids",
        *(
            ["while ids[-1] in ends:  # the tokenizer closes every text, and a completion goes on", "    ids.pop()"]
            if closes_texts
            else []
        ),
    ]
    if closes_texts:
        yield "ends = torch.tensor(model.generation_config.eos_token_id).reshape(-1).tolist()"
    if "text" not in forms:
        yield from chat
    elif len(forms) == 1:
        yield from text
    else:
        yield "if isinstance(prompt, str):"
        yield from (f"    {line}" for line in text)
        yield "else:"
        yield from (f"    {line}" for line in chat)


def _cut_prompt(room: Any, seq2seq: bool) -> Iterator[str]:
    """Lines that cut a prompt, if the run did."""
    if not isinstance(room, int):
        return
    if seq2seq:  # the special tokens at the end stay
        yield "plain = [place for place, token in enumerate(ids) if token not in tokenizer.all_special_ids]"
        yield "closing = ids[plain[-1] + 1 :] if plain else []"
        yield f"ids = ids[: {room} - len(closing)] + closing if len(ids) > {room} else ids"
    else:  # the end of the prompt and its start token stay
        yield "start = ids[:1] if ids[0] == tokenizer.bos_token_id else []"
        yield f"ids = start + ids[len(start) - {room} :] if len(ids) > {room} else ids"
