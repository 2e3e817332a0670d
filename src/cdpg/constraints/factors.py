"""Moments and rewards: factors of the target beside the constraints.

The target is P_c(x) = a(x|c) · b(x,c) · exp(Σ_i λ_i φ_i(x,c) + Σ_j r_j(x,c)/β_j). Each function returns a number for
each sample, any finite one. λ of a moment is chosen so that the mean of φ under p, over all contexts, has the given
value.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from cdpg.constraints.named import load_constraint
from cdpg.errors import UserError
from cdpg.sandbox.worker import short_repr

Function = Callable[..., Any] | str


@dataclass(frozen=True)
class Moment:
    """The factor exp(λ·φ), with the λ for which the mean of φ under the target is ``mean``."""

    function: Function
    """φ(prompts, completions, **columns), which returns a number for each completion; or its name."""
    mean: float
    """The mean over contexts of the mean of φ under p_c."""
    multiplier: float | None = None
    """λ, if it is known, as ``moments.json`` of a run has it; a trainer fits it otherwise."""

    kind: ClassVar[str] = "moment"

    def __post_init__(self) -> None:
        _check_function(self)
        object.__setattr__(self, "mean", _finite(self.mean, f"the mean of the moment {function_name(self.function)}"))
        if self.multiplier is not None:
            what = f"the multiplier of the moment {function_name(self.function)}"
            object.__setattr__(self, "multiplier", _finite(self.multiplier, what))

    @property
    def value(self) -> float:
        """The number that it is given with."""
        return self.mean

    @property
    def coefficient(self) -> float:
        """λ; 0 before it is known."""
        return self.multiplier or 0.0


@dataclass(frozen=True)
class Reward:
    """The factor exp(r/β): the optimum of E_π[r] − β KL(π, a)."""

    function: Function
    """r(prompts, completions, **columns), which returns a number for each completion; or its name."""
    beta: float
    """β, the weight of the penalty KL(π, a), in nats, against the reward."""

    kind: ClassVar[str] = "reward"

    def __post_init__(self) -> None:
        _check_function(self)
        beta = _finite(self.beta, f"beta of the reward {function_name(self.function)}")
        if beta <= 0:
            raise UserError(
                f"beta of the reward {function_name(self.function)} must be above 0, not {beta:g}: it is the weight "
                "of the penalty KL(π, a) against the reward; to lower a score, return its negative"
            )
        object.__setattr__(self, "beta", beta)

    @property
    def value(self) -> float:
        """The number that it is given with."""
        return self.beta

    @property
    def coefficient(self) -> float:
        """1/β."""
        return 1.0 / self.beta


Factor = Moment | Reward


class Tilt:
    """The moments and rewards of a target, in the order given, with their coefficients in log P.

    The multipliers of moments are known once they are fitted, and may be fitted again.
    """

    def __init__(self, factors: Sequence[Factor]) -> None:
        self.factors = tuple(
            replace(f, function=load_constraint(f.function, f.kind)) if isinstance(f.function, str) else f
            for f in factors
        )
        known = [moment.multiplier is not None for moment in self.moments]
        if any(known) and not all(known):
            names = ", ".join(function_name(one.function) for one in self.moments if one.multiplier is None)
            raise UserError(
                f"λ is given for some moments, and not for {names}: all λ are fitted together, so give that of each "
                "moment, or of none"
            )

    @property
    def functions(self) -> list[Callable[..., Any]]:
        """The function of each."""
        return [factor.function for factor in self.factors if not isinstance(factor.function, str)]

    @property
    def coefficients(self) -> tuple[float, ...]:
        """λ or 1/β of each; 0 for a moment that is not fitted yet."""
        return tuple(factor.coefficient for factor in self.factors)

    @property
    def moments(self) -> list[Moment]:
        """The moments alone."""
        return [factor for factor in self.factors if isinstance(factor, Moment)]

    @property
    def moment_places(self) -> list[int]:
        """Where the moments are among the factors."""
        return [place for place, factor in enumerate(self.factors) if isinstance(factor, Moment)]

    @property
    def is_fitted(self) -> bool:
        """Whether λ of every moment is known."""
        return all(moment.multiplier is not None for moment in self.moments)

    @property
    def names(self) -> list[str]:
        """A name for each in files, such as ``moment_short``; of functions with one name, the later have numbers."""
        stems = [
            f"{factor.kind}_{function_name(factor.function).rpartition(':')[2].rpartition('.')[2].strip('<>')}"
            for factor in self.factors
        ]
        names: list[str] = []
        for stem in stems:
            numbered = (f"{stem}_{number}" if number > 1 else stem for number in itertools.count(1))
            names.append(next(name for name in numbered if name not in names))
        return names

    def set_multipliers(self, multipliers: Sequence[float]) -> None:
        """Use these λ, one for each moment, from now on."""
        given = iter(multipliers)
        self.factors = tuple(
            replace(factor, multiplier=next(given)) if isinstance(factor, Moment) else factor for factor in self.factors
        )

    def require_fitted(self) -> None:
        """Refuse a moment whose λ is not known."""
        for moment in self.moments:
            if moment.multiplier is None:
                name = function_name(moment.function)
                raise UserError(
                    f"λ of the moment {name} is not known, and it is not fitted here: give it, "
                    f"Moment({name.rpartition(':')[2]}, {moment.mean:g}, multiplier=…), as moments.json of the run "
                    "has it"
                )


def describe(factor: Factor) -> str:
    """A factor as text, as the origin of a run has it: ``moment rules:short=0.5``."""
    return f"{factor.kind} {function_name(factor.function)}={factor.value:g}"


def function_name(function: Any) -> str:
    """The name of a function in messages; of one in a script without its module."""
    if isinstance(function, str):
        return function
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', '')}:{name}".removeprefix("__main__:")


def as_number(value: Any) -> float | None:
    """A function's value for a sample as a finite number; None if it is none."""
    try:
        number = math.nan if isinstance(value, str) or value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def parse_factor(kind: type[Moment] | type[Reward], text: str) -> Factor:
    """``module:function=0.5`` as a moment or a reward; the function is not imported yet."""
    name, equals, number = text.rpartition("=")
    value = as_number(_number_in(number)) if equals else None
    if value is None or not name.strip():
        meaning = "its mean" if kind is Moment else "β"
        raise UserError(f"a {kind.kind} is given as module:function=0.5, with {meaning} after =, not {text!r}")
    return kind(name.strip(), value)


def _number_in(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return None


def _check_function(factor: Factor) -> None:
    if not callable(factor.function) and not isinstance(factor.function, str):
        raise UserError(
            f"the function of a {factor.kind} is {short_repr(factor.function)}: pass a function of (prompts, "
            "completions, **columns), or its name as 'module:function'"
        )


def _finite(value: Any, what: str) -> float:
    number = None if isinstance(value, bool) else as_number(value)
    if number is None:
        raise UserError(f"{what} is {short_repr(value)}: expected a finite number")
    return number
