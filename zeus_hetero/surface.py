"""A smooth surface over (batch size, power limit): a physical curve plus what it misses.

What the curve misses is a Gaussian process with three parts: a shape over the batch size that all
power limits share, a shape over the power limit that all batch sizes share, and a local one. How
much of it to believe is chosen by leaving out one batch size at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from zeus_hetero.physics import Curve

FitCurve = Callable[..., np.ndarray]


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
        curve: the physical curve.
        noise_curve: standard deviation of one measurement, likewise.
        theta: their parameters.
        smoothness: how far the surface may leave the curve.
        noise: by point, standard deviation of its measurement; huge for points not believed.
        weights: by point, its weight in the deviation from the curve.
        cholesky: factor of the covariance of the measurements.
        validation: leave-one-batch-size-out residuals, or None where they were not asked for.
    """

    points: np.ndarray
    curve: Curve
    noise_curve: Curve
    theta: np.ndarray
    smoothness: Smoothness
    noise: np.ndarray
    weights: np.ndarray
    cholesky: tuple[np.ndarray, bool]
    validation: CrossValidation | None = None

    def mean(self, at: np.ndarray) -> np.ndarray:
        """Prediction at points of shape (m, 2), log units."""
        return self.curve(self.theta, at[:, 0], at[:, 1]) + (
            self.smoothness.covariance(at, self.points) @ self.weights
        )

    def deviation(self, at: np.ndarray) -> np.ndarray:
        """Standard deviation of a new measurement there, before calibration; log units."""
        cross = self.smoothness.covariance(at, self.points)
        explained = np.sum(cross.T * cho_solve(self.cholesky, cross.T), axis=0)
        prior = sum(a**2 for a in self.smoothness.amplitude)
        return np.sqrt(np.maximum(prior - explained, 0.0) + self._noise(at) ** 2)

    def _noise(self, at: np.ndarray) -> np.ndarray:
        return self.noise_curve(self.theta, at[:, 0], at[:, 1])

    def left_out(self) -> tuple[np.ndarray, np.ndarray]:
        """Residual of each point against the surface through all others, and its deviation."""
        inverse = np.diag(cho_solve(self.cholesky, np.eye(len(self.points))))
        # The deviation as if the point itself were believed, so that one that is not stays out.
        others = np.maximum(1 / inverse - self.noise**2, 0.0)
        return self.weights / inverse, np.sqrt(others + self._noise(self.points) ** 2)


def fit_surface(
    points: np.ndarray,
    values: np.ndarray,
    curve: Curve,
    noise_curve: Curve,
    fit_curve: FitCurve,
    believed: np.ndarray,
    smoothness: Smoothness | None = None,
) -> Surface:
    """Fit one surface.

    Args:
        points: shape (n, 2), log batch size and log power limit.
        values: log of the measured figure, n.
        curve: the physical curve.
        noise_curve: standard deviation of one measurement, likewise.
        fit_curve: finds their parameters.
        believed: n booleans; a point that is not believed has next to no influence.
        smoothness: None chooses it by cross-validation, a value takes it as it is.

    Returns:
        The surface; with `validation` where smoothness was chosen.
    """
    use = np.flatnonzero(believed)
    theta = fit_curve(points[use, 0], points[use, 1], values[use])
    residual = values - curve(theta, points[:, 0], points[:, 1])
    expected = noise_curve(theta, points[:, 0], points[:, 1])

    def condition(chosen: Smoothness, validation: CrossValidation | None = None) -> Surface:
        cholesky = cho_factor(chosen.covariance(points, points) + np.diag(noise**2))
        weights = cho_solve(cholesky, residual)
        return Surface(
            points, curve, noise_curve, theta, chosen, noise, weights, cholesky, validation
        )

    usual = smoothness or Smoothness()
    noise = _noise(points, residual, usual, believed, expected)
    if smoothness is not None:
        return condition(smoothness)
    folds = []
    for fold in _folds(points, believed):
        rest = np.setdiff1d(use, fold)
        start = fit_curve(points[rest, 0], points[rest, 1], values[rest], start=theta)
        folds.append((fold, rest, values - curve(start, points[:, 0], points[:, 1])))
    trials = []
    for candidate in _CANDIDATES:
        trial = usual.scaled(*candidate)
        trials.append((trial, _validate(points, folds, trial, noise, expected)))
    best = min(range(len(trials)), key=lambda i: trials[i][1].score * (_CLEARLY if i == 0 else 1))
    chosen, validation = trials[best]
    return condition(chosen, validation)


def _noise(
    points: np.ndarray,
    residual: np.ndarray,
    smoothness: Smoothness,
    believed: np.ndarray,
    expected: np.ndarray,
) -> np.ndarray:
    """Noise by point: more for points that lie far off (iteratively reweighted, Huber)."""
    noise = np.where(believed, expected, 100.0)
    covariance = smoothness.covariance(points, points)
    for _ in range(3):
        cholesky = cho_factor(covariance + np.diag(noise**2))
        off = np.abs(noise**2 * cho_solve(cholesky, residual))
        weight = np.minimum(1.0, 2.5 * expected / np.maximum(off, 1e-12))
        noise = np.where(believed, expected / np.sqrt(weight), 100.0)
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
    folds: list[tuple[np.ndarray, np.ndarray, np.ndarray]],
    smoothness: Smoothness,
    noise: np.ndarray,
    expected: np.ndarray,
) -> CrossValidation:
    covariance = smoothness.covariance(points, points)
    prior = sum(a**2 for a in smoothness.amplitude)
    left = np.full(len(points), np.nan)
    deviation = np.full(len(points), np.nan)
    for fold, rest, residual in folds:
        cholesky = cho_factor(covariance[np.ix_(rest, rest)] + np.diag(noise[rest] ** 2))
        cross = covariance[np.ix_(fold, rest)]
        solved = cho_solve(cholesky, np.column_stack([residual[rest], cross.T]))
        left[fold] = residual[fold] - cross @ solved[:, 0]
        explained = np.sum(cross.T * solved[:, 1:], axis=0)
        deviation[fold] = np.sqrt(np.maximum(prior - explained, 0.0) + expected[fold] ** 2)
    return CrossValidation(left, deviation)
