"""Which contexts are set aside, for which settings, and what is said if none are."""

from __future__ import annotations

from cdpg import CDPGConfig
from cdpg.contexts.contexts import Context
from cdpg.training.validation import FEW, aside_of, set_aside, why_none_aside

CONTEXTS = [Context(prompt=f"p{number}", columns={}, row=number + 1) for number in range(60)]


def test_the_contexts_set_aside_are_always_the_same() -> None:
    """Also in a later version: a run is compared with those of earlier ones on the same contexts."""
    tuning, aside = set_aside(CONTEXTS, CDPGConfig(), decides=True)
    assert aside == [1, 19, 33, 48, 52, 55]
    assert sorted(tuning + aside) == list(range(60))


def test_contexts_are_set_aside_for_keeping_the_best_and_for_replay() -> None:
    def aside(held_out: int, replay: int) -> int:
        return len(aside_of(CONTEXTS, CDPGConfig(replay=replay), held_out))

    assert [aside(0, 0), aside(0, 1), aside(3, 0), aside(3, 1)] == [0, 6, 6, 6]


def test_why_none_are_set_aside() -> None:
    assert why_none_aside(FEW - 1, CDPGConfig()) == (
        "none of 49 contexts to tune on are set aside, which by default takes 50; set validation_contexts, to 5 or more"
    )
    assert why_none_aside(FEW, CDPGConfig()) == (
        "the 50 contexts to tune on cannot be parted as asked: some must remain, and no prompt and no group may be on "
        "both sides; set validation_contexts to fewer, or give more contexts"
    )
    assert why_none_aside(FEW, CDPGConfig(gain_draws=0)) == "gain_draws is 0, so that no gain is measured; raise it"
