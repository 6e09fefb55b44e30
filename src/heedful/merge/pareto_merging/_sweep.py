"""How a Pareto set performs over its preferences."""

import dataclasses
import re
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float

from heedful._pareto import hypervolume, pareto_front
from heedful._results import Report
from heedful.errors import InputError, ParameterError


@dataclasses.dataclass(frozen=True, eq=False)
class ParetoSweep(Report):
    """Performance of merged models over a lattice of preferences; larger is better.

    Parameters
    ----------
    names : tuple of str
        The K source models.
    preferences, values : Float[np.ndarray, "n K"]
        Preferences, and the performance for each name.
    reference : Float[np.ndarray, " K"]
        Where the hypervolume is measured from.
    front : Bool[np.ndarray, " n"]
        Whether no other preference is better in everything.
    hypervolume : float
        What the models dominate, in the product of the units.
    uniformity : float
        Mean over preferences of 1 − ½ Σ_k |γ_k − share_k|, where the shares are the performances, each scaled to run from 0
        to 1 over the sweep, divided by their sum: 1 if performance follows preference exactly.
    """

    names: tuple[str, ...]
    preferences: Float[np.ndarray, "n K"]
    values: Float[np.ndarray, "n K"]
    reference: Float[np.ndarray, " K"]
    front: Bool[np.ndarray, " n"]
    hypervolume: float
    uniformity: float

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        preferences: Float[np.ndarray, "n K"],
        values: Float[np.ndarray, "n K"],
        reference: Float[np.ndarray, " K"],
    ) -> "ParetoSweep":
        """The report on ``values``."""
        return cls(
            tuple(names),
            preferences,
            values,
            reference,
            pareto_front(values),
            hypervolume(values, reference, random_state=0),
            _uniformity(preferences, values),
        )

    @property
    def records(self):
        """A data frame, one row a preference: the preferences as ``preference_<name>``, the performances by name, ``front``."""
        import pandas as pd

        weights = {f"preference_{name}": self.preferences[:, k] for k, name in enumerate(self.names)}
        values = {name: self.values[:, k] for k, name in enumerate(self.names)}
        return pd.DataFrame({**weights, **values, "front": self.front})

    def select(self, constraint: Mapping[str, str]) -> dict[str, float]:
        """The preference with the best mean performance among those that meet ``constraint``, say ``{"math": ">=0.9"}``.

        Raises
        ------
        InputError
            If none of them does; the message says how close they come.
        """
        kept = np.ones(len(self.values), dtype=bool)
        for name, (sign, limit) in read_bounds(constraint, self.names).items():
            meets = sign * self.values[:, self.names.index(name)] >= sign * limit
            if not meets.any():
                closest = sign * (sign * self.values[:, self.names.index(name)]).max()
                raise InputError(
                    f"None of the {len(self.values)} preferences gives {name} {constraint[name]}; the closest is "
                    f"{closest:.6g}. Loosen the bound, or try more with n_points."
                )
            kept &= meets
        if not kept.any():
            raise InputError(
                f"None of the {len(self.values)} preferences meets all of {dict(constraint)}, though each is met by some. "
                "Loosen a bound, or try more with n_points."
            )
        best = int(np.argmax(np.where(kept, self.values.mean(axis=1), -np.inf)))
        return dict(zip(self.names, self.preferences[best].tolist(), strict=True))

    def plot(self, ax=None):
        """Draw it and return the matplotlib axes.

        For two models the performances, the front, and the hypervolume as the area under it; for more, each performance
        against its own preference.
        """
        if ax is None:
            import matplotlib.pyplot as plt

            ax = plt.figure().subplots()
        if len(self.names) > 2:
            for k, name in enumerate(self.names):
                ax.scatter(self.preferences[:, k], self.values[:, k], s=12, label=name)
            ax.set_xlabel("preference")
            ax.set_ylabel("performance")
            ax.legend()
            return ax
        corners = self.values[self.front]
        corners = corners[np.argsort(corners[:, 0])]
        x, y = np.r_[self.reference[0], corners[:, 0]], np.r_[corners[0, 1], corners[:, 1]]
        ax.fill_between(x, y, self.reference[1], step="pre", color="C0", alpha=0.15)
        ax.plot(*corners.T, color="C0", linewidth=1, label=f"front, hypervolume {self.hypervolume:.4g}")
        shown = ax.scatter(*self.values.T, c=self.preferences[:, 0], cmap="viridis", s=20, zorder=2)
        ax.figure.colorbar(shown, ax=ax, label=f"preference for {self.names[0]}")
        ax.set_xlabel(self.names[0])
        ax.set_ylabel(self.names[1])
        ax.legend()
        return ax


def _uniformity(preferences: Float[np.ndarray, "n K"], values: Float[np.ndarray, "n K"]) -> float:
    low, high = values.min(axis=0), values.max(axis=0)
    scaled = np.where(high > low, (values - low) / np.where(high > low, high - low, 1.0), 1.0)
    sums = scaled.sum(axis=1, keepdims=True)
    shares = np.where(sums > 0, scaled / np.where(sums > 0, sums, 1.0), 1 / values.shape[1])
    return float(1 - 0.5 * np.abs(preferences - shares).sum(axis=1).mean())


def read_bounds(constraint: Mapping[str, str], names: Sequence[str]) -> dict[str, tuple[int, float]]:
    """For each name of the constraint +1 for at least and −1 for at most, and the limit."""
    bounds = {}
    for name, bound in constraint.items():
        if name not in names:
            raise InputError(f"The constraint speaks of {name}; the models are {', '.join(names)}.")
        if not (match := re.fullmatch(r"\s*(>=|<=)\s*(\S+)\s*", str(bound))):
            raise ParameterError(f'A constraint is written ">=0.9" or "<=0.5"; got {bound!r} for {name}.')
        try:
            bounds[name] = (1 if match[1] == ">=" else -1), float(match[2])
        except ValueError:
            raise ParameterError(f'A constraint ends in a number, as in ">=0.9"; got {bound!r} for {name}.') from None
    return bounds
