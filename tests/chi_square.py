"""Pearson's chi-square test, for draws of tokens."""

import numpy as np
from numpy.typing import NDArray


def chi_square_bound(degrees: int) -> float:
    """Exceeded with probability 0.001 by a chi-square variable (Wilson & Hilferty 1931; 1% off from 5 degrees on)."""
    z = 3.0902
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + z * spread**0.5) ** 3


def chi_square(token_ids: NDArray[np.integer], probabilities: NDArray[np.floating]) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; infinite when an impossible token was drawn."""
    observed = np.bincount(token_ids, minlength=len(probabilities)).astype(float)
    if observed[probabilities == 0].any():
        return float("inf"), 1
    order = np.argsort(-probabilities)
    expected = probabilities[order] * len(token_ids)
    observed = observed[order]
    many = expected >= 10
    if expected[~many].sum() >= 10:
        expected = np.append(expected[many], expected[~many].sum())
        observed = np.append(observed[many], observed[~many].sum())
    else:
        expected, observed = expected[many], observed[many]
    return float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1
