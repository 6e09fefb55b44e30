"""The stored samples."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
from scipy import sparse

from heedful.unlearn.system_aware_unlearning._data import canonical_ids, canonical_rows, stack_rows
from heedful.unlearn.system_aware_unlearning.selection import len_of


@dataclasses.dataclass(frozen=True)
class Core:
    """The stored samples in order of arrival, without gaps; ``row_of`` is a row of each id."""

    X: Any
    codes: np.ndarray
    ids: np.ndarray | None
    row_of: dict[Any, int]

    @classmethod
    def of(cls, X, codes: np.ndarray, ids: np.ndarray | None) -> "Core":
        """Copies in canonical form: nothing in them depends on what else their sources held."""
        return cls._of_canonical(canonical_rows(X), np.array(codes, dtype=np.int64), ids)

    @classmethod
    def _of_canonical(cls, X, codes: np.ndarray, ids: np.ndarray | None) -> "Core":
        own = None if ids is None else canonical_ids(ids)
        names = [] if own is None else own.tolist()
        return cls(X, codes, own, dict(zip(names, range(len(names)), strict=True)))

    def __len__(self) -> int:
        return len(self.codes)

    def without(self, rows: list[int]) -> "Core":
        """All but these rows."""
        keep = np.delete(np.arange(len(self)), rows)
        X = canonical_rows(self.X[keep]) if sparse.issparse(self.X) else self.X[keep]
        return Core._of_canonical(X, self.codes[keep], None if self.ids is None else self.ids[keep])

    def joined(self, other: "Core") -> "Core":
        """The rows of both."""
        ids = None if self.ids is None or other.ids is None else np.concatenate([self.ids, other.ids])
        return Core.of(stack_rows(self.X, other.X), np.concatenate([self.codes, other.codes]), ids)

    def find(self, names: Iterable[Any]) -> list[int]:
        """Rows of these names, ascending; none for names that are not there. O(number of names) if each has one row."""
        found = {name: self.row_of[name] for name in names if name in self.row_of}
        if found and len(self.row_of) < len(self) and self.ids is not None:
            return np.flatnonzero(np.isin(self.ids, list(found))).tolist()
        return sorted(found.values())

    def arrays(self) -> dict[str, np.ndarray]:
        """What is stored, as arrays with names."""
        if sparse.issparse(self.X):
            rows = {f"core_X_{part}": getattr(self.X, part) for part in ("data", "indices", "indptr")}
        else:
            rows = {"core_X": self.X}
        return {**rows, "core_y": self.codes, **({} if self.ids is None else {"core_ids": self.ids})}

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray], n_features: int) -> "Core":
        """The core that ``arrays`` describes; ValueError if they contradict each other."""
        if "core_X" in arrays:
            X = arrays["core_X"]
        else:
            parts = tuple(arrays[f"core_X_{part}"] for part in ("data", "indices", "indptr"))
            X = sparse.csr_array(parts, shape=(len(parts[2]) - 1, n_features))
        core = cls.of(X, arrays["core_y"], arrays.get("core_ids"))
        lengths = {len_of(core.X), len(core.codes), len(core) if core.ids is None else len(core.ids)}
        if core.X.ndim != 2 or core.X.shape[1] != n_features or len(lengths) > 1:
            raise ValueError(f"core samples of shape {core.X.shape} for {n_features} features, with {len(core)} labels")
        return core
