"""The entities constraint and its metrics, on the real spaCy model."""

from __future__ import annotations

import builtins
import time
import types
from typing import Any

import pytest

pytest.importorskip("spacy")

from cdpg.errors import UserError
from cdpg.evaluation.measures import distinct_2
from cdpg.tasks.summarization import constraint as entities
from cdpg.tasks.summarization.constraint import (
    entities_from_source,
    entity_sets,
    labelled_entities,
    precision_source,
    recall_target,
)

ARTICLE = (
    "Laura Bennett met Daniel Carter in Paris on Monday. They talked about Germany and France. "
    "The Red Cross sent a team from Berlin, and Amnesty International wrote a report."
)
FOUR = "Laura Bennett met Daniel Carter in Paris and talked about Germany."
THREE = "Laura Bennett met Daniel Carter in Paris."
WRONG = "Laura Bennett met Daniel Carter in Paris and talked about Japan."


def test_the_examples_are_recognised() -> None:
    found = entity_sets([ARTICLE, FOUR])
    assert found[1] == {"laura bennett", "daniel carter", "paris", "germany"}
    assert found[1] | {"france", "berlin", "amnesty international"} <= found[0]
    assert "monday" not in found[0]


def test_four_entities_of_the_source_satisfy() -> None:
    verdicts = entities_from_source([ARTICLE] * 4, [FOUR, THREE, WRONG, ""])
    assert verdicts == [True, False, False, False]


def test_distinct_entities_are_counted_once_and_in_any_case() -> None:
    repeated = "Laura Bennett met Daniel Carter in Paris. Later Laura Bennett left Paris."
    assert entities_from_source([ARTICLE], [repeated]) == [False]
    assert entities_from_source([ARTICLE.replace("Germany", "GERMANY")], [FOUR]) == [True]


def test_entities_are_compared_in_lower_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: every capitalised word is an entity."""
    named = {"Germany Paris Anna Bob": "PARIS bob Bob ANNA GERMANY", "GERMANY Germany PARIS Paris": "Germany Paris"}
    monkeypatch.setattr(
        entities,
        "labelled_entities",
        lambda texts: [[(word, "GPE") for word in text.split() if word[0].isupper()] for text in texts],
    )
    entities.source_entities.cache_clear()
    assert entity_sets(named) == [frozenset({"germany", "paris", "anna", "bob"}), frozenset({"germany", "paris"})]
    assert entity_sets(named.values()) == entity_sets(named)
    # The second names two entities, each in two ways: too few.
    assert entities_from_source(list(named.values()), list(named)) == [True, False]
    entities.source_entities.cache_clear()


def test_the_source_column_holds_the_full_article() -> None:
    assert entities_from_source(["summarize: cut"], [FOUR], source=[ARTICLE], other=["x"]) == [True]
    assert entities_from_source(["summarize: " + ARTICLE], [FOUR]) == [True]
    assert entities_from_source([ARTICLE], [FOUR], source=["Nothing happened."]) == [False]


def test_verdicts_keep_their_order_with_duplicates_and_unreadable_texts() -> None:
    completions = [THREE, FOUR, "(" * 20_000, FOUR, WRONG, FOUR + " ok" * 4_000]
    assert entities_from_source([ARTICLE] * 6, completions) == [False, True, False, True, False, False]


def test_odd_texts_cost_little() -> None:
    entities_from_source([ARTICLE], [FOUR])
    start = time.process_time()  # others may keep the machine busy
    assert entities_from_source(["(" * 20_000] * 2, ["(" * 20_000, FOUR]) == [False, False]
    assert entity_sets(["(" * 20_000 + " Paris"])[0] <= {"paris"}
    assert time.process_time() - start < 5


def test_a_source_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    entities.source_entities.cache_clear()
    entities_from_source([ARTICLE] * 3, [FOUR, FOUR + " ", THREE])
    assert entities.source_entities.cache_info().misses == 1


def test_labels_are_those_of_the_specification() -> None:
    found = labelled_entities(["Laura Bennett paid 300 dollars in Paris on Monday."])[0]
    assert found == [("Laura Bennett", "PERSON"), ("Paris", "GPE")]


def test_seven_labels_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all that the model tells apart; one entity of each label, in the order of the model's list."""
    every = "CARDINAL DATE EVENT FAC GPE LANGUAGE LAW LOC MONEY NORP ORDINAL ORG PERCENT PERSON PRODUCT QUANTITY TIME"
    found = [types.SimpleNamespace(text=f"a {label}", label_=label) for label in [*every.split(), "WORK_OF_ART"]]
    reader = types.SimpleNamespace(pipe=lambda texts, batch_size: [types.SimpleNamespace(ents=found) for _ in texts])
    monkeypatch.setattr(entities, "pipeline", lambda: reader)
    counted = ["EVENT", "FAC", "GPE", "LOC", "NORP", "ORG", "PERSON"]
    assert labelled_entities(["x"]) == [[(f"a {label}", label) for label in counted]]


def test_precision_and_recall_with_their_empty_sets() -> None:
    some, other, none = frozenset("abcd"), frozenset("abx"), frozenset[str]()
    assert precision_source(some, other) == 0.5
    assert recall_target(some, other) == pytest.approx(2 / 3)
    assert (precision_source(none, some), precision_source(some, none)) == (0.0, 0.0)
    assert (recall_target(none, some), recall_target(some, none), recall_target(none, none)) == (0.0, 1.0, 1.0)


def test_distinct_2() -> None:
    assert distinct_2("a b a b a") == 0.5
    assert distinct_2("a b c") == 1.0
    assert (distinct_2("a"), distinct_2("")) == (0.0, 0.0)


def test_a_missing_model_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entities, "MODELS", ("no_such_model",))
    with pytest.raises(UserError, match="spacy download en_core_web_sm"):
        entities.pipeline.__wrapped__()


def test_missing_spacy_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "spacy":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UserError, match=r"cdpg\[tasks\]"):
        entities.pipeline.__wrapped__()
