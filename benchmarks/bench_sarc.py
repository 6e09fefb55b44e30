"""What features of reservoirs cost beside MiniRocket's, and beside the same equations written plainly.

python benchmarks/bench_sarc.py
"""

import os
import tracemalloc

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread a job, for everybody

import numba
import numpy as np
from aeon.datasets import load_classification
from aeon.transformations.collection.convolution_based import MiniRocket

from heedful.timeseries import SpectralReservoir, frequency_reservoir_states
from measure import ratio, record, side_by_side


def collection(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Training cases; and all, training and test."""
    train, test = (load_classification(name, split)[0] for split in ("train", "test"))
    return train, np.concatenate([train, test])


def plain_features(X: np.ndarray, fitted: SpectralReservoir) -> np.ndarray:
    """The equations in einsum, all cases at once: what one writes first."""
    x = X - X.mean(axis=2, keepdims=True)
    x = (x / np.abs(x).max(axis=2, keepdims=True)).transpose(0, 2, 1).astype(fitted.dtype)
    n, length, _ = x.shape
    periods, both = fitted.periods_, []
    for w_seq, w_cyc, along in zip(fitted.w_seq_, fitted.w_cyc_, (1, -1), strict=True):
        drive = np.einsum("ntd,dh->nth", x[:, ::along], fitted.w_in_.astype(fitted.dtype))
        w_seq, w_cyc = w_seq.astype(fitted.dtype), w_cyc.astype(fitted.dtype)
        states = np.zeros((n, len(periods), length, fitted.n_units), fitted.dtype)
        for t in range(length):
            before = states[:, :, t - 1] if t else np.zeros_like(states[:, :, 0])
            cycle_ago = np.stack(
                [states[:, k, t - p] if t >= p else np.zeros_like(before[:, 0]) for k, p in enumerate(periods)], axis=1
            )
            one = np.einsum("nkh,hg->nkg", before, w_seq)
            states[:, :, t] = np.tanh(drive[:, t, None] + one + np.einsum("nkh,khg->nkg", cycle_ago, w_cyc))
        both.append(states[:, :, ::along])
    states = np.concatenate(both, axis=-1)
    weights = []
    for k, p in enumerate(periods):
        G = np.concatenate([states[:, k, p - 1 : length - 1], states[:, k, : length - p]], axis=-1)
        gram = np.einsum("nti,ntj->nij", G, G) + fitted.ridge * np.eye(G.shape[2])
        weights.append(np.linalg.solve(gram, np.einsum("nti,ntd->nid", G, x[:, p:])).reshape(n, -1))
    return np.hstack([*weights, states.max(axis=2).reshape(n, -1)])


def one_network_step_by_step(X: np.ndarray, w_in: np.ndarray, w_seq: np.ndarray) -> np.ndarray:
    """States (n, L, h) of one echo-state network, a case and a step at a time, as packages for single series run it."""
    states = np.zeros((*X.shape, len(w_seq)))
    for series, seen in zip(X, states, strict=True):
        h = np.zeros(len(w_seq))
        for t, value in enumerate(series):
            h = np.tanh(value * w_in + h @ w_seq)
            seen[t] = h
    return states


def assert_equal_results(train: np.ndarray, X: np.ndarray) -> None:
    fitted = SpectralReservoir(dtype="float64", random_state=0).fit(train)
    np.testing.assert_allclose(fitted.transform(X[:64]), plain_features(X[:64], fitted), rtol=0, atol=1e-8)
    w_in, w_seq = fitted.w_in_[0], fitted.w_seq_[0]
    ours = frequency_reservoir_states(X[:64, 0, :, None] * w_in, w_seq, None, [1])[:, 0]
    np.testing.assert_allclose(ours, one_network_step_by_step(X[:64, 0], w_in, w_seq), rtol=0, atol=1e-12)


def measure(name: str, *, rounds: int) -> dict:
    train, X = collection(name)
    fitted = SpectralReservoir(random_state=0).fit(train)
    w_in, w_seq = fitted.w_in_[0], fitted.w_seq_[0]
    contestants = {
        "sarc": lambda: SpectralReservoir(random_state=0).fit(train).transform(X),
        "sarc, two jobs": lambda: SpectralReservoir(n_jobs=2, random_state=0).fit(train).transform(X),
        "minirocket": lambda: MiniRocket(n_jobs=1, random_state=0).fit(train).transform(X),
    }
    seconds = side_by_side(contestants, rounds=rounds, warmup=1)
    figures: dict = {f"{one}, s": float(np.median(taken)) for one, taken in seconds.items()}
    figures["sarc / minirocket"] = ratio(seconds, "sarc", "minirocket")
    figures["sarc, two jobs / sarc"] = ratio(seconds, "sarc, two jobs", "sarc")
    few = X[:64]  # the plain form holds all at once, and takes its time
    seconds = side_by_side(
        {"plain": lambda: plain_features(few, fitted), "sarc": lambda: fitted.transform(few)}, rounds=3, warmup=1
    )
    figures["64 cases: plain einsum / sarc"] = ratio(seconds, "plain", "sarc")
    seconds = side_by_side(
        {
            "loop": lambda: one_network_step_by_step(few[:, 0], w_in, w_seq),
            "ours": lambda: frequency_reservoir_states(few[:, 0, :, None] * w_in, w_seq, None, [1]),
        },
        rounds=5,
        warmup=1,
    )
    figures["64 cases, one echo-state network: step by step / ours"] = ratio(seconds, "loop", "ours")
    tracemalloc.start()  # NumPy's arrays; resident memory would not show what the allocator had kept from before
    features = fitted.transform(X)
    figures["peak memory beside the features, MiB"] = (tracemalloc.get_traced_memory()[1] - features.nbytes) / 2**20
    tracemalloc.stop()
    title = f"{name}, {len(X)} cases of {X.shape[2]} points, {len(fitted.periods_)} periods"
    return {f"{title}: {figure}": value for figure, value in figures.items()}


def main() -> None:
    numba.set_num_threads(1)
    assert_equal_results(*collection("GunPoint"))
    figures = measure("GunPoint", rounds=15) | measure("OSULeaf", rounds=5)
    record("sarc", figures | {"reservoirpy": "not compared; the network step by step stands in for it"})


if __name__ == "__main__":
    main()
