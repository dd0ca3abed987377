"""Intervals for ratios of sums over questions, by resampling the questions."""

from collections.abc import Sequence

import numpy as np

_SAMPLES = 2000
_LEVEL = 0.95


def _resamples(count: int, seed: int) -> np.ndarray:
    """How often each of `count` questions is drawn: [samples, count]."""
    drawn = np.random.default_rng(seed).integers(count, size=(_SAMPLES, count))
    return np.apply_along_axis(np.bincount, 1, drawn, minlength=count).astype(np.float64)


def _ratios(weights: np.ndarray, numerators: np.ndarray, denominators: np.ndarray) -> np.ndarray:
    below = weights @ denominators
    return (weights @ numerators)[below > 0] / below[below > 0]


def _interval(values: np.ndarray) -> tuple[float, float]:
    if not values.size:
        return float("nan"), float("nan")
    low, high = np.quantile(values, [(1 - _LEVEL) / 2, (1 + _LEVEL) / 2])
    return float(low), float(high)


def ratio_interval(numerators: Sequence[float], denominators: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """95% percentile interval of sum(numerators) / sum(denominators).

    Args:
      numerators, denominators: of each question, such as committed tokens and steps.
      seed: of the resampling.
    Returns:
      Its ends; not numbers if no denominator is positive.
    """
    top, below = np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)
    return _interval(_ratios(_resamples(len(top), seed), top, below))


def difference_interval(
    one: tuple[Sequence[float], Sequence[float]], other: tuple[Sequence[float], Sequence[float]], seed: int = 0
) -> tuple[float, float]:
    """95% percentile interval of the first ratio minus the second, over the same resampled questions.

    Args:
      one, other: numerators and denominators of each question, the same questions in the same order.
      seed: of the resampling.
    """
    values = [np.asarray(part, np.float64) for part in (*one, *other)]
    weights = _resamples(len(values[0]), seed)
    weights = weights[(weights @ values[1] > 0) & (weights @ values[3] > 0)]
    return _interval(_ratios(weights, *values[:2]) - _ratios(weights, *values[2:]))
