"""A smooth surface over (batch size, power limit): a physical curve plus what it misses.

What the curve misses is a Gaussian process with three parts: a shape over the batch size that all
power limits share, a shape over the power limit that all batch sizes share, and a local one. How
much of it to believe is chosen by leaving out one batch size at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from zeus_hetero.physics import FittedLaw, Law

# Standard deviation, log units, of a measurement that counts for nothing.
_NOT_BELIEVED = 100.0


@dataclass(frozen=True)
class Smoothness:
    """How far, and over what distance, a surface may leave its curve.

    Attributes:
        amplitude: standard deviations (log units) of the part over batch sizes, the part over
            power limits, and the local part; 0 everywhere is the curve alone.
        reach: length scales in log units: batch size of the shared part, power limit of the
            shared part, batch size and power limit of the local part.
    """

    amplitude: tuple[float, float, float] = (0.03, 0.06, 0.05)
    reach: tuple[float, float, float, float] = (0.6, 0.2, 0.8, 0.25)

    def scaled(self, amplitude: float, reach: float) -> Smoothness:
        """The same with larger or smaller deviations and length scales."""
        a, r = self.amplitude, self.reach
        return Smoothness(
            (a[0] * amplitude, a[1] * amplitude, a[2] * amplitude),
            (r[0] * reach, r[1] * reach, r[2] * reach, r[3] * reach),
        )

    def covariance(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Covariance of the deviations at two sets of points.

        Args:
            left: shape (n, 2), log batch size and log power limit.
            right: shape (m, 2), likewise.

        Returns:
            Shape (n, m).
        """
        batch = (left[:, None, 0] - right[None, :, 0]) ** 2
        limit = (left[:, None, 1] - right[None, :, 1]) ** 2
        a, r = self.amplitude, self.reach
        return np.asarray(
            a[0] ** 2 * np.exp(-0.5 * batch / r[0] ** 2)
            + a[1] ** 2 * np.exp(-0.5 * limit / r[1] ** 2)
            + a[2] ** 2 * np.exp(-0.5 * (batch / r[2] ** 2 + limit / r[3] ** 2))
        )


# Multiples of (amplitude, reach). Prediction errors on the public traces change by less than a
# tenth when any single figure is halved or doubled, so a coarse grid is enough.
_USUAL = (1.0, 1.0)
_CANDIDATES = (_USUAL, (0.0, 1.0), (0.35, 1.0), (2.5, 1.0), (1.0, 0.6), (1.0, 1.6), (2.5, 0.6))
# A candidate must beat the usual one clearly, or chance picks it.
_CLEARLY = 0.85


@dataclass(frozen=True)
class CrossValidation:
    """What leaving points out says about a surface.

    Attributes:
        residual: measured minus predicted (log units), by point, with the point's whole batch
            size left out; nan where that was not done.
        deviation: the standard deviation that was expected for it.
    """

    residual: np.ndarray
    deviation: np.ndarray

    @property
    def score(self) -> float:
        """Mean absolute residual; one bad batch size must not decide alone, as squares let it."""
        left = self.residual[np.isfinite(self.residual)]
        return float(np.mean(np.abs(left))) if left.size else float("inf")


@dataclass(frozen=True)
class Surface:
    """log time or log power over (log batch size, log power limit).

    Attributes:
        points: shape (n, 2), log batch size and log power limit of the measurements.
        law: the physical curve.
        smoothness: how far the surface may leave the curve.
        noise: by point, standard deviation of its measurement; huge for points not believed.
        weights: by point, its weight in the deviation from the curve.
        cholesky: factor of the covariance of the measurements.
        validation: leave-one-batch-size-out residuals, or None where they were not asked for.
    """

    points: np.ndarray
    law: FittedLaw
    smoothness: Smoothness
    noise: np.ndarray
    weights: np.ndarray
    cholesky: tuple[np.ndarray, bool]
    validation: CrossValidation | None = None

    def mean(self, at: np.ndarray) -> np.ndarray:
        """Prediction at points of shape (m, 2), log units."""
        return self.law.mean(at) + _covariance(self.law, self.smoothness, at, self.points) @ (
            self.weights
        )

    def uncertainty(self, at: np.ndarray) -> np.ndarray:
        """Standard deviation of the true value there, before calibration; log units."""
        cross = _covariance(self.law, self.smoothness, at, self.points)
        explained = np.sum(cross.T * cho_solve(self.cholesky, cross.T), axis=0)
        return np.sqrt(np.maximum(_variance(self.law, self.smoothness, at) - explained, 0.0))

    def covariance(self, at: np.ndarray) -> np.ndarray:
        """Covariance of the true values there, before calibration; log units, shape (m, m)."""
        cross = _covariance(self.law, self.smoothness, at, self.points)
        prior = _covariance(self.law, self.smoothness, at, at)
        return np.asarray(prior - cross @ cho_solve(self.cholesky, cross.T))

    def deviation(self, at: np.ndarray) -> np.ndarray:
        """Standard deviation of a new measurement there, before calibration; log units."""
        return np.hypot(self.uncertainty(at), self.law.noise(at))

    def left_out(self) -> tuple[np.ndarray, np.ndarray]:
        """Residual of each point against the surface through all others, and its deviation."""
        inverse = np.diag(cho_solve(self.cholesky, np.eye(len(self.points))))
        # The deviation as if the point itself were believed, so that one that is not stays out.
        others = np.maximum(1 / inverse - self.noise**2, 0.0)
        return self.weights / inverse, np.sqrt(others + self.law.noise(self.points) ** 2)


def fit_surface(
    points: np.ndarray,
    values: np.ndarray,
    law: Law,
    believed: np.ndarray,
    smoothness: Smoothness | None = None,
) -> Surface:
    """Fit one surface.

    Args:
        points: shape (n, 2), log batch size and log power limit.
        values: log of the measured figure, n.
        law: the kind of physical curve.
        believed: n booleans; a point that is not believed has next to no influence.
        smoothness: None chooses it by cross-validation, a value takes it as it is.

    Returns:
        The surface; with `validation` where smoothness was chosen.
    """
    use = np.flatnonzero(believed)
    fitted = law.fit(points[use], values[use])
    usual = smoothness or Smoothness()
    noise = _noise(points, values, fitted, usual, believed)
    if smoothness is not None:
        return _condition(points, values, fitted, smoothness, noise)
    folds = []
    for fold in _folds(points, believed):
        rest = np.setdiff1d(use, fold)
        folds.append((fold, rest, law.fit(points[rest], values[rest], start=fitted.theta)))
    candidates = [usual.scaled(*candidate) for candidate in _CANDIDATES]
    trials = _validate(points, values, folds, candidates, noise)
    best = min(range(len(trials)), key=lambda i: trials[i].score * (_CLEARLY if i == 0 else 1))
    return _condition(points, values, fitted, candidates[best], noise, trials[best])


def _condition(
    points: np.ndarray,
    values: np.ndarray,
    law: FittedLaw,
    smoothness: Smoothness,
    noise: np.ndarray,
    validation: CrossValidation | None = None,
) -> Surface:
    covariance = _covariance(law, smoothness, points, points)
    cholesky = cho_factor(covariance + np.diag(noise**2))
    weights = cho_solve(cholesky, values - law.mean(points))
    return Surface(points, law, smoothness, noise, weights, cholesky, validation)


def _covariance(
    law: FittedLaw, smoothness: Smoothness, left: np.ndarray, right: np.ndarray
) -> np.ndarray:
    """Of deviations from the curve, and of the curve itself, whose parameters are not certain."""
    slopes = law.slopes(left)
    other = slopes if right is left else law.slopes(right)
    return np.asarray(smoothness.covariance(left, right) + slopes @ other.T)


def _variance(law: FittedLaw, smoothness: Smoothness, at: np.ndarray) -> np.ndarray:
    return np.asarray(sum(a**2 for a in smoothness.amplitude) + np.sum(law.slopes(at) ** 2, axis=1))


def _noise(
    points: np.ndarray,
    values: np.ndarray,
    law: FittedLaw,
    smoothness: Smoothness,
    believed: np.ndarray,
) -> np.ndarray:
    """Noise by point: more for points that lie far off (iteratively reweighted, Huber)."""
    expected = law.noise(points)
    residual = values - law.mean(points)
    noise = np.where(believed, expected, _NOT_BELIEVED)
    covariance = _covariance(law, smoothness, points, points)
    for _ in range(3):
        cholesky = cho_factor(covariance + np.diag(noise**2))
        off = np.abs(noise**2 * cho_solve(cholesky, residual))
        weight = np.minimum(1.0, 2.5 * expected / np.maximum(off, 1e-12))
        noise = np.where(believed, expected / np.sqrt(weight), _NOT_BELIEVED)
    return noise


def _folds(points: np.ndarray, believed: np.ndarray) -> Iterator[np.ndarray]:
    """Indices to leave out together: a batch size; with only one or two of those, a point.

    The smallest and the largest batch size are not left out: what is beyond them is another
    question than what is between the measured ones, and it is never asked beyond the largest.
    """
    sizes = np.unique(points[:, 0])
    if len(sizes) >= 4:
        for size in sizes[1:-1]:
            yield np.flatnonzero((points[:, 0] == size) & believed)
    else:
        indices = np.flatnonzero(believed)
        # At most 12, evenly spread, keeps the fit fast.
        for index in indices[:: max(1, len(indices) // 12)]:
            if len(indices) > 1:
                yield np.array([index])


def _validate(
    points: np.ndarray,
    values: np.ndarray,
    folds: list[tuple[np.ndarray, np.ndarray, FittedLaw]],
    candidates: list[Smoothness],
    noise: np.ndarray,
) -> list[CrossValidation]:
    """Leave-out residuals of every candidate; what they share is computed once."""
    empty = np.full(len(points), np.nan)
    trials = [CrossValidation(empty.copy(), empty.copy()) for _ in candidates]
    covariances = [candidate.covariance(points, points) for candidate in candidates]
    for fold, rest, law in folds:
        slopes = law.slopes(points)
        curve = slopes @ slopes.T
        residual = values - law.mean(points)
        expected = law.noise(points[fold])
        for deviations, trial in zip(covariances, trials):
            covariance = deviations + curve
            known = covariance[np.ix_(rest, rest)]
            known[np.diag_indices_from(known)] += noise[rest] ** 2
            cross = covariance[np.ix_(rest, fold)]
            solved = cho_solve(cho_factor(known), np.column_stack([residual[rest], cross]))
            trial.residual[fold] = residual[fold] - cross.T @ solved[:, 0]
            variance = np.diag(covariance)[fold] - np.sum(cross * solved[:, 1:], axis=0)
            trial.deviation[fold] = np.sqrt(np.maximum(variance, 0.0) + expected**2)
    return trials
