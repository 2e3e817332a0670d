"""Which contexts are used for validation, for which settings, and what is said if none are."""

from __future__ import annotations

from cdpg import CDPGConfig
from cdpg.contexts.contexts import Context
from cdpg.training.validation import FEW, split_validation, validation_indices, why_no_validation

CONTEXTS = [Context(prompt=f"p{number}", columns={}, row=number + 1) for number in range(60)]


def test_the_contexts_set_aside_are_always_the_same() -> None:
    """Also in a later version: a run is compared with those of earlier ones on the same contexts."""
    tuning, aside = split_validation(CONTEXTS, CDPGConfig(), decides=True)
    assert aside == [1, 19, 33, 48, 52, 55]
    assert sorted(tuning + aside) == list(range(60))


def test_contexts_are_set_aside_for_keeping_the_best_and_for_replay() -> None:
    def aside(held_out: int, replay: int) -> int:
        return len(validation_indices(CONTEXTS, CDPGConfig(replay=replay), held_out))

    assert [aside(0, 0), aside(0, 1), aside(3, 0), aside(3, 1)] == [0, 6, 6, 6]


def test_why_none_are_set_aside() -> None:
    assert why_no_validation(FEW - 1, CDPGConfig()) == (
        "49 training contexts are too few to use some for validation by default, which needs 50; set "
        "validation_contexts to 5 or more"
    )
    assert why_no_validation(FEW, CDPGConfig()) == (
        "the 50 training contexts cannot be split like this: some must remain for training, and no prompt or group may "
        "be on both sides; lower validation_contexts, or give more contexts"
    )
    assert why_no_validation(FEW, CDPGConfig(gain_draws=0)) == "gain_draws is 0, so no gain is measured; raise it"
