"""The figures of ``t5_tiny.py`` on the held-out split, and the model card."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, T5ForConditionalGeneration

from cdpg.tasks.summarization.constraint import entities_from_source, entity_sets
from cdpg.tasks.translation.constraint import digits_of, mask_numbers, numerals_as_digits
from corpora import MEASURE_FACTOR, Pair, news_pairs, translation_pairs

TRANSLATE, SUMMARISE = "translate English to French: ", "summarize: "


@torch.no_grad()
def generate(
    model: T5ForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    pairs: list[Pair],
    prefix: str,
    beams: int = 1,
    samples: int = 1,
) -> list[str]:
    """Outputs for each source: by beam search, or drawn ancestrally (temperature 1, nothing cut off)."""
    options: dict[str, object] = {"num_beams": beams, "do_sample": beams == 1, "num_return_sequences": samples}
    if beams == 1:
        options.update(top_k=0, top_p=1.0, temperature=1.0)
    order = sorted(range(len(pairs)), key=lambda place: len(pairs[place].source))
    texts: list[list[str]] = [[] for _ in pairs]
    for start in range(0, len(order), 32):
        places = order[start : start + 32]
        batch = tokenizer([prefix + pairs[place].source for place in places], padding=True, return_tensors="pt")
        output = model.generate(**batch, max_new_tokens=96, **options)
        decoded = tokenizer.batch_decode(output, skip_special_tokens=True)
        for row, place in enumerate(places):
            texts[place] = decoded[row * samples : (row + 1) * samples]
    return [text for each in texts for text in each]


def measure_translation(model: T5ForConditionalGeneration, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
    """BLEU by beam search, and how often ancestral samples write numerals as digits."""
    import sacrebleu

    pairs = translation_pairs("held-out", 500)
    beams = generate(model, tokenizer, pairs, TRANSLATE, beams=4)
    references = [pair.reference for pair in pairs]
    masked = [mask_numbers(text) for text in beams], [[mask_numbers(text) for text in references]]
    drawn = generate(model, tokenizer, pairs, TRANSLATE, samples=8)
    sources = [pair.source for pair in pairs for _ in range(8)]
    return {
        "bleu": sacrebleu.corpus_bleu(beams, [references]).score,
        "bleu_masked": sacrebleu.corpus_bleu(*masked).score,
        "bleu_ancestral": sacrebleu.corpus_bleu(drawn[::8], [references]).score,
        "satisfaction": _mean(numerals_as_digits(sources, drawn)),
        "satisfaction_beam": _mean(numerals_as_digits([pair.source for pair in pairs], beams)),
        "any_digit": _mean([bool(digits_of(text)) for text in drawn]),
    }


def measure_summaries(model: T5ForConditionalGeneration, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
    """ROUGE-L by beam search, and how often ancestral samples satisfy the entities constraint."""
    from rouge_score.rouge_scorer import RougeScorer

    pairs = news_pairs("held-out", 300)
    articles = [pair.source for pair in pairs]
    beams = generate(model, tokenizer, pairs, SUMMARISE, beams=4)
    drawn = generate(model, tokenizer, pairs, SUMMARISE, samples=4)
    sources = [article for article in articles for _ in range(4)]
    known = dict(zip(articles, entity_sets(articles), strict=True))
    found = entity_sets(drawn)
    scorer = RougeScorer(["rougeL"])
    rouge = [scorer.score(pair.reference, text)["rougeL"].fmeasure for pair, text in zip(pairs, beams, strict=True)]
    return {
        "rouge_l": _mean(rouge),
        "satisfaction": _mean(entities_from_source(sources, drawn)),
        "satisfaction_beam": _mean(entities_from_source(articles, beams)),
        "entities": _mean([len(each) for each in found]),
        "only_from_source": _mean([each <= known[source] for each, source in zip(found, sources, strict=True)]),
        "references_satisfying": _mean(entities_from_source(articles, [pair.reference for pair in pairs])),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


CARD = """---
license: apache-2.0
language: [en, fr]
library_name: transformers
pipeline_tag: translation
---

# t5-tiny

A T5 of {parameters:,} parameters, the base model of the offline presets of `translation-numbers` and
`summarization-entities`. It translates English into French after the prefix `translate English to French: ` and
summarises short news articles after `summarize: `. It knows only the grammars that it was trained on
(`recipes/corpora`). It is made for experiments with constraints, not for other translations.

## Training

`python recipes/t5_tiny.py`, seed {seed}: {steps:,} steps, each on {translations_per_batch} sentence pairs, and every
{articles_every} steps on {articles_per_batch} articles, or on as many tokens of shorter ones; about 65 minutes on one
processor core. Training starts with phrases and with articles of two or three sentences, then uses longer ones. The
grammars compose all texts during training; no other data are used. Apart from phrases and the shortest sentences,
hardly any text occurs twice. In {digit_share:.1%} of the sentence pairs ({measure_share:.1%} where a
price, a time or a score is given) the French numbers are digits. Of the training summaries {brief_share:.0%} name
few entities and {wrong_share:.0%} name a wrong person: outputs that are rare in the base are what tuning makes
frequent. Weights are
stored as float16 and loaded as float32 (`"dtype": "float32"` in `config.json`).

## Figures

Loss per token (nats), on fresh sentences of the training split and on those of the held-out split, which share no
sentence and no story:

| task | training | held out |
| --- | --- | --- |
| translation | {losses[translation_base]:.4f} | {losses[translation_held-out]:.4f} |
| summarisation | {losses[summarisation_base]:.4f} | {losses[summarisation_held-out]:.4f} |

On the held-out split, 500 sentences (4,000 ancestral samples) and 300 articles (1,200 ancestral samples):

| task | figure | value |
| --- | --- | --- |
| translation | BLEU, 4 beams | {translation[bleu]:.1f} |
| translation | BLEU, 4 beams, numbers masked | {translation[bleu_masked]:.1f} |
| translation | BLEU of one ancestral sample | {translation[bleu_ancestral]:.1f} |
| translation | numerals as digits, ancestral | {translation[satisfaction]:.2%} |
| translation | numerals as digits, 4 beams | {translation[satisfaction_beam]:.2%} |
| summarisation | ROUGE-L, 4 beams | {summaries[rouge_l]:.3f} |
| summarisation | four entities or more, all from the article, ancestral | {summaries[satisfaction]:.1%} |
| summarisation | the same, 4 beams | {summaries[satisfaction_beam]:.1%} |
| summarisation | entities in a summary, ancestral | {summaries[entities]:.2f} |
| summarisation | summaries whose entities are all from the article, ancestral | {summaries[only_from_source]:.1%} |
"""


def card(settings: dict[str, Any], parameters: int, figures: dict[str, dict[str, float]]) -> str:
    """The model card; ``settings`` are the recipe's, ``figures`` the losses and what was measured above."""
    share = settings["digit_share"] * MEASURE_FACTOR
    return CARD.format(parameters=parameters, measure_share=share, **settings, **figures)
