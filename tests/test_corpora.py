"""The grammar corpora: French agreement, variety, disjoint splits, names that stand in the article."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path

import pytest

import corpora
import task_texts
from cdpg.errors import UserError
from cdpg.tasks.translation.constraint import digits_of, mask_numbers, numerals_of
from corpora import clauses, french, lexicon, news, phrases, translation


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("le arbre de le jardin", "l'arbre du jardin"),
        ("de les trois hôtels à les gares", "des trois hôtels aux gares"),
        ("je ai dit que il ne a pas vu la île", "j'ai dit qu'il n'a pas vu l'île"),
        ("si ils partent, si elle part", "s'ils partent, si elle part"),
        ("plus de ⟦1f⟧ heure, plus de ⟦8m⟧ jours", "plus d'une heure, plus de huit jours"),
        ("beaucoup de hommes et de œufs", "beaucoup d'hommes et d'œufs"),
    ],
)
def test_elision_and_contraction(raw: str, expected: str) -> None:
    assert french.finish(raw) == expected


def test_numbers_are_spelt_as_words_or_digits() -> None:
    assert french.finish("⟦1f⟧ pomme et ⟦1m⟧ œuf") == "une pomme et un œuf"
    assert french.finish("plus de ⟦1f⟧ pomme et ⟦9m⟧ œufs", digits=True) == "plus de 1 pomme et 9 œufs"


@pytest.mark.parametrize(
    ("adjective", "noun", "plural", "expected"),
    [
        ("beautiful", "tree", False, "bel arbre"),
        ("old", "hotel", False, "vieil hôtel"),
        ("new", "agreement", True, "nouveaux accords"),
        ("old", "church", False, "vieille église"),
        ("white", "horse", True, "chevaux blancs"),
        ("foreign", "nurse", True, "infirmières étrangères"),
        ("European", "secretary", False, "secrétaire européenne"),
        ("serious", "woman", False, "femme sérieuse"),
        ("national", "meeting", True, "réunions nationales"),
        ("national", "debate", True, "débats nationaux"),
    ],
)
def test_adjectives_agree_and_stand_on_their_side(adjective: str, noun: str, plural: bool, expected: str) -> None:
    word = lexicon.nouns()[noun]
    suited = {each.english: each for each in lexicon.adjectives(word.kind)}
    if adjective not in suited:  # agreement is independent of what a class allows
        suited = {each.english: each for kind in "padetbvfc" for each in lexicon.adjectives(kind)}
    assert phrases.core(word, suited[adjective], plural)[1] == expected


def test_verbs_agree() -> None:
    women = phrases.Phrase(("three women", "trois femmes"), french.FEMININE, 4)
    verbs = lexicon.verbs()
    assert phrases.conjugate(verbs["arrive"], "past", women) == ("arrived", "sont arrivées")
    assert phrases.conjugate(verbs["take"], "not past", women) == ("did not take", "ne ont pas pris")
    assert phrases.conjugate(verbs["buy"], "future", women) == ("will buy", "achèteront")
    assert phrases.passive(verbs["send"], "past", women) == ("were sent", "ont été envoyées")
    assert phrases.conjugate(verbs["go"], "present", phrases.PRONOUNS[1]) == ("goes", "va")
    assert phrases.conjugate(verbs["see"], "going", phrases.PRONOUNS[0]) == ("am going to see", "vais voir")


def test_participle_agrees_with_an_object_before_it() -> None:
    rng = random.Random(5)
    seen = 0
    for _ in range(2_000):
        speaker = clauses.Speaker(rng, rng.choice(lexicon.topics()), 0.5)
        found = re.search(r"^les .* que .* (?:ai|a|avons|avez|ont) (\w+) sont", clauses.relating(speaker)[1])
        if found:
            seen += 1
            assert found[1].endswith("s"), found[0]
    assert seen > 100
    letters = phrases.Phrase(("the two letters", "les deux lettres"), french.FEMININE, 4)
    assert french.agree("reçu", letters.gender, letters.is_plural) == "reçues"


@pytest.mark.exhaustive
def test_sentences_are_well_formed_in_both_languages() -> None:
    rng = random.Random(3)
    for counted in (True, False):
        for _ in range(4_000):
            draft = translation.compose(rng, counted)
            words, digits = draft.reference(), draft.reference(digits=True)
            assert bool(numerals_of(draft.source)) is counted
            assert draft.source[0].isupper() and draft.source[-1] in ".?" and "⟦" not in words + digits
            assert not re.search(r"\b(?:de les?|à les?|de des|si ils?|je ai)\b|  ", words), words
            assert not re.search(r"\b(?:[LlDdJj]e|[Ll]a|[Qq]ue|[Nn]e) [aeiouéèêœ]", words), words
            assert not re.search(r"\b(?:an [^aeiouE]|a [aeio])", draft.source), draft.source
            # Digits satisfy the constraint, words do not, and both translate the same.
            assert digits_of(digits) >= set(numerals_of(draft.source)) and not digits_of(words)
            assert (
                mask_numbers(words).replace("'NUM", "e NUM") == mask_numbers(digits).replace("'NUM", "e NUM")
                or not counted
            )


def test_translation_pairs_are_many_and_distinct() -> None:
    lines = (
        (task_texts.DATA / "translation" / "data" / "sentences_tuning.jsonl").read_text(encoding="utf-8").splitlines()
    )
    pairs = [corpora.Pair(**json.loads(line)) for line in lines]
    assert len({pair.source for pair in pairs}) == len(pairs) == 3_000
    assert len({corpora.sentence_key(pair.source) for pair in pairs}) > 2_500
    assert {value for pair in pairs for value in numerals_of(pair.source)} == set(range(1, 10))
    assert pairs[:50] == corpora.translation_pairs("tune", 50) != corpora.translation_pairs("tune", 50, seed=1)


@pytest.mark.exhaustive
def test_splits_are_disjoint_whatever_the_seed() -> None:
    held = {corpora.sentence_key(pair.source) for pair in corpora.translation_pairs("held-out", 700)}
    tune = {corpora.sentence_key(pair.source) for pair in corpora.translation_pairs("tune", 700, seed=4)}
    base = {corpora.sentence_key(pair.source) for pair in itertools.islice(corpora.base_translations(9), 3_500)}
    assert not held & tune and not held & base and not tune & base
    assert corpora.sentence_key("Two dogs saw three cats.") == corpora.sentence_key("Nine dogs saw one cats.")


def test_the_hash_fills_the_splits_in_proportion() -> None:
    counts = dict.fromkeys(corpora.SPLITS, 0)
    for value in range(5_000):
        counts[corpora.split_of(str(value))] += 1
    assert counts["base"] == pytest.approx(4_000, abs=150)
    assert counts["tune"] == pytest.approx(500, abs=100) and counts["held-out"] == pytest.approx(500, abs=100)


def test_digits_are_as_rare_as_asked() -> None:
    stream = itertools.islice(corpora.base_translations(0, digit_share=0.02, plain_share=0.15), 6_000)
    pairs = list(stream)
    share = sum(bool(digits_of(pair.reference)) for pair in pairs) / len(pairs)
    assert 0.012 < share < 0.03
    plain = sum(not numerals_of(pair.source) for pair in pairs) / len(pairs)
    assert 0.12 < plain < 0.18


def test_articles_and_references() -> None:
    pairs = corpora.news_pairs("held-out", 300)
    assert len({pair.source for pair in pairs}) == 300
    assert pairs == corpora.news_pairs("held-out", 300)
    for pair in pairs:
        assert 60 <= len(pair.source.split()) <= 120
        assert 1 <= len(re.findall(r"[.](?: |$)", pair.reference)) <= 2
        assert "{" not in pair.source + pair.reference


def test_a_reference_names_only_what_the_article_names() -> None:
    rng = random.Random(0)
    for _ in range(300):
        story = news.imagine(rng)
        article, summary = news.write(story, rng)
        names = [story.facts[letter] for letter in "pqoucdnmae" if story.facts[letter].removeprefix("the ") in summary]
        assert 3 <= len(names) <= 8
        assert all(name.removeprefix("the ") in article for name in names)


def test_hasty_summaries_name_little_and_sometimes_wrongly() -> None:
    rng = random.Random(1)
    wrong = brief = 0
    for _ in range(400):
        story = news.imagine(rng)
        summary = news.summarise_loosely(story, rng, brief_share=0.5, wrong_share=0.25)
        exact = news.summarise_loosely(story, rng, brief_share=0.0, wrong_share=0.0)
        known = " ".join(story.facts.values())
        wrong += any(word not in known for word in re.findall(r"[A-Z]\w+ [A-Z]\w+", summary.replace("The ", "the ")))
        brief += len(summary.split()) < len(exact.split())
    assert wrong > 20 and brief > 100


def test_lessons_for_beginners_are_short_and_exact() -> None:
    for pair in itertools.islice(corpora.base_phrases(0), 500):
        assert len(pair.source.split()) <= 14 and not digits_of(pair.reference)
    for pair in itertools.islice(corpora.base_translations(0, longest=8), 500):
        assert len(pair.source.split()) <= 8
    for pair in itertools.islice(corpora.base_glimpses(0), 200):
        assert len(pair.source.split()) < 80
        names = set(re.findall(r"(?<= )[A-Z]\w+", pair.reference))
        assert names <= set(re.findall(r"[A-Z]\w+", pair.source))


@pytest.mark.parametrize("name", task_texts.TEXTS)
def test_the_package_holds_what_the_grammars_compose(name: str) -> None:
    shipped = (task_texts.DATA / name).read_bytes()
    assert shipped.splitlines(keepends=True)[:40] == task_texts.content(name, 40).splitlines(keepends=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", task_texts.TEXTS)
def test_the_recipe_writes_the_very_files_of_the_package(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["task_texts.py", "--output", str(tmp_path)])
    monkeypatch.setattr(task_texts, "TEXTS", {name: task_texts.TEXTS[name]})
    task_texts.main()
    assert (tmp_path / name).read_bytes() == (task_texts.DATA / name).read_bytes()


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(UserError, match="unknown split 'test'; choose one of base, tune, held-out"):
        corpora.translation_pairs("test", 1)


def test_spacy_recognises_most_names() -> None:
    pytest.importorskip("spacy")
    from cdpg.tasks.summarization.constraint import entity_sets

    rng = random.Random(2)
    stories = [(story := news.imagine(rng), news.write(story, rng)[0]) for _ in range(60)]
    found = entity_sets([article for _, article in stories])
    hits = total = 0
    for (story, article), names in zip(stories, found, strict=True):
        for letter in "pqoucdnmae":
            fact = story.facts[letter]
            if fact in article:
                total += 1
                hits += bool({fact.lower(), fact.lower().removeprefix("the ")} & names)
    assert hits / total > 0.95
