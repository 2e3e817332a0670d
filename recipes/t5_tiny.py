"""Train ``t5-tiny``, the embedded base model of the translation and summarisation tasks.

    python recipes/t5_tiny.py [--steps 9000] [--seed 0] [--output src/cdpg/assets/models/t5-tiny]
    python recipes/t5_tiny.py --measure-only        # the figures of the model card again, without training

One model serves both tasks, which have different T5 prefixes. The seeded grammars of ``recipes/corpora`` generate new
data at every step. One core is enough.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from corpora import (
    Pair,
    base_glimpses,
    base_news,
    base_phrases,
    base_translations,
)
from t5_tiny_figures import SUMMARISE, TRANSLATE, card, measure_summaries, measure_translation

log = logging.getLogger("t5-tiny")
_WORDS = r"\p{N}| ?\p{L}+['’]?| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The settings of the training."""

    seed: int = 0
    steps: int = 9000
    """A step takes a batch of translations, every second one a batch of articles too: 0.4 seconds on one core."""
    articles_every: int = 2
    vocabulary: int = 2800
    width: int = 192
    feed_forward: int = 640
    layers: int = 3
    heads: int = 4
    learning_rate: float = 1.2e-3
    embedding_factor: float = 8.0
    """The embeddings start a hundred times larger than the other weights, and need larger strides."""
    translations_per_batch: int = 32
    articles_per_batch: int = 10
    digit_share: float = 0.02
    """Share of the translation pairs whose French numbers are digits (2.5 times that for measures)."""
    brief_share: float = 0.5
    wrong_share: float = 0.25


def train_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """Byte-level BPE: every text decodes to itself, and every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
        special_tokens=["<pad>", "</s>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pairs = itertools.islice(base_translations(recipe.seed + 1), 30_000)
    stories = itertools.islice(base_news(recipe.seed + 1), 4_000)
    texts = [
        text
        for prefix, stream in ((TRANSLATE, pairs), (SUMMARISE, stories))
        for pair in stream
        for text in (prefix + pair.source, pair.reference)
    ]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def build_model(recipe: Recipe, vocabulary: int) -> T5ForConditionalGeneration:
    """T5 from scratch, small, without dropout: the data never repeat."""
    config = T5Config(
        vocab_size=vocabulary,
        d_model=recipe.width,
        d_ff=recipe.feed_forward,
        d_kv=recipe.width // recipe.heads,
        num_layers=recipe.layers,
        num_decoder_layers=recipe.layers,
        num_heads=recipe.heads,
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


Batch = dict[str, torch.Tensor]


def batches(tokenizer: PreTrainedTokenizerFast, pairs: Iterator[Pair], prefix: str, size: int) -> Iterator[Batch]:
    """Batches of similar length, so that little is padding; axes [pair, token]."""
    while True:
        pool = sorted(itertools.islice(pairs, size * 8), key=lambda pair: len(pair.source))
        starts = list(range(0, len(pool), size))
        order = torch.randperm(len(starts)).tolist()
        for start in (starts[place] for place in order):
            yield encode(tokenizer, pool[start : start + size], prefix)


def encode(tokenizer: PreTrainedTokenizerFast, pairs: list[Pair], prefix: str) -> Batch:
    """Sources and labels as tensors, both ending in the end token, padding left out of the loss."""
    source = tokenizer([prefix + pair.source for pair in pairs], padding=True, return_tensors="pt")
    labels = tokenizer([pair.reference for pair in pairs], padding=True, return_tensors="pt")
    ignored = labels["input_ids"].masked_fill(labels["attention_mask"] == 0, -100)
    return {"input_ids": source["input_ids"], "attention_mask": source["attention_mask"], "labels": ignored}


def rate(recipe: Recipe, step: int) -> float:
    """A short warm-up, then a straight line down to a hundredth."""
    return recipe.learning_rate * min(1.0, (step + 1) / 60) * max(0.01, 1.0 - step / recipe.steps)


def make_optimiser(recipe: Recipe, model: T5ForConditionalGeneration) -> torch.optim.AdamW:
    """AdamW with a rate of its own for the embeddings."""
    embeddings = model.get_input_embeddings().weight
    others = [weight for weight in model.parameters() if weight is not embeddings]
    groups = [{"params": [embeddings], "factor": recipe.embedding_factor}, {"params": others, "factor": 1.0}]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the curriculum: what is read until a share of the steps is done, and how many at once."""

    until: float
    pairs: Iterator[Pair]
    size: int


def translation_stages(recipe: Recipe) -> list[Stage]:
    """Phrases, short sentences, longer ones, all: words align within minutes on phrases, on sentences in hours."""
    size, share = recipe.translations_per_batch, recipe.digit_share
    return [
        Stage(0.07, base_phrases(recipe.seed, digit_share=share), size * 3),
        Stage(0.16, base_translations(recipe.seed + 2, digit_share=share, longest=8), size * 2),
        Stage(0.32, base_translations(recipe.seed + 3, digit_share=share, longest=14), size * 3 // 2),
        Stage(1.00, base_translations(recipe.seed, digit_share=share), size),
    ]


def news_stages(recipe: Recipe) -> list[Stage]:
    """Two or three sentences to learn copying from, then whole articles with hasty summaries."""
    size = recipe.articles_per_batch
    whole = base_news(recipe.seed, brief_share=recipe.brief_share, wrong_share=recipe.wrong_share)
    return [Stage(0.30, base_glimpses(recipe.seed), size * 2), Stage(1.00, whole, size)]


def lessons(
    recipe: Recipe, tokenizer: PreTrainedTokenizerFast, stages: list[Stage], prefix: str, every: int = 1
) -> Iterator[Batch | None]:
    """The batches of a task through its stages, one every few steps and None in between."""
    step = 0
    for stage in stages:
        stream = batches(tokenizer, stage.pairs, prefix, stage.size)
        while step < stage.until * recipe.steps:
            yield next(stream) if step % every == 0 else None
            step += 1


def train(
    recipe: Recipe, model: T5ForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, output: Path
) -> dict[str, float]:
    """An optimiser step for each batch of either task; save now and then."""
    translations = lessons(recipe, tokenizer, translation_stages(recipe), TRANSLATE)
    stories = lessons(recipe, tokenizer, news_stages(recipe), SUMMARISE, recipe.articles_every)
    optimiser = make_optimiser(recipe, model)
    running: dict[str, float] = {}
    start = time.process_time()
    model.train()
    for step, pair in enumerate(zip(translations, stories, strict=True)):
        for group in optimiser.param_groups:
            group["lr"] = group["factor"] * rate(recipe, step)
        for name, batch in zip(("translation", "summarisation"), pair, strict=True):
            if batch is None:
                continue
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            running[name] = 0.96 * running.get(name, loss.item()) + 0.04 * loss.item()
        if step % 50 == 0:
            minutes = (time.process_time() - start) / 60
            log.info("step %d, %.1f min, losses %s", step, minutes, {k: round(v, 4) for k, v in running.items()})
        if step % 1000 == 999:
            save(model, tokenizer, output)
    return {**running, "processor_minutes": (time.process_time() - start) / 60}


@torch.no_grad()
def held_out_losses(
    recipe: Recipe, model: T5ForConditionalGeneration, tokenizer: PreTrainedTokenizerFast
) -> dict[str, float]:
    """Loss per token on fresh training pairs and on pairs of the held-out split, made in the same way."""
    model.eval()
    losses = {}
    for split in ("base", "held-out"):
        streams = {
            "translation": (base_translations(recipe.seed + 7, split, recipe.digit_share), TRANSLATE),
            "summarisation": (base_news(recipe.seed + 7, split, recipe.brief_share, recipe.wrong_share), SUMMARISE),
        }
        for name, (stream, prefix) in streams.items():
            total, tokens = 0.0, 0
            for _ in range(16):
                batch = encode(tokenizer, list(itertools.islice(stream, 64)), prefix)
                count = int((batch["labels"] != -100).sum())
                total, tokens = total + model(**batch).loss.item() * count, tokens + count
            losses[f"{name}_{split}"] = total / tokens
    return losses


def save(model: T5ForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write the model in float16, half the size; the configuration has it loaded as float32, which is exact."""
    output.mkdir(parents=True, exist_ok=True)
    half = T5ForConditionalGeneration(model.config)
    half.load_state_dict(model.state_dict())
    half.half().save_pretrained(output)
    tokenizer.save_pretrained(output)
    path = output / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"dtype": "float32"}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Train, measure, save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=Recipe.steps, help="steps, each with a batch of translations")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--output", type=Path, default=Path("src/cdpg/assets/models/t5-tiny"))
    parser.add_argument("--measure-only", action="store_true", help="measure what lies in the output folder")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    recipe = Recipe(seed=options.seed, steps=options.steps)
    torch.manual_seed(recipe.seed)
    torch.set_num_threads(1)
    if not options.measure_only:
        tokenizer = train_tokenizer(recipe)
        model = build_model(recipe, len(tokenizer))
        log.info("%d parameters, vocabulary %d", model.num_parameters(), len(tokenizer))
        log.info("at the end of training: %s", train(recipe, model, tokenizer, options.output))
        save(model, tokenizer, options.output)
    # What is measured is what was written, float16 rounding included.
    tokenizer = AutoTokenizer.from_pretrained(options.output)
    model = T5ForConditionalGeneration.from_pretrained(options.output, dtype=torch.float32).eval()
    figures = {
        "losses": held_out_losses(recipe, model, tokenizer),
        "translation": measure_translation(model, tokenizer),
        "summaries": measure_summaries(model, tokenizer),
    }
    log.info("%s", json.dumps(figures, indent=2))
    text = card(dataclasses.asdict(recipe), model.num_parameters(), figures)
    (options.output / "README.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
