"""Pareto merging against closed forms, naive twins, finite differences and its own limits."""

import copy
import functools
import itertools
import logging
import math
import warnings

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss

import heedful
from heedful._random import numpy_generator
from heedful.errors import (
    ConvergenceError,
    HeedfulWarning,
    InputError,
    ParameterError,
    UnsupportedModelError,
)
from heedful.merge import (
    ParetoSet,
    PreferenceLinear,
    fit_pareto_set,
    fit_pareto_set_unlabelled,
    fit_tucker,
    merge_state_dicts,
    smooth_tchebycheff,
)
from heedful.merge._task_vectors import open_models, open_state_dict
from heedful.merge.pareto_merging._data_free import DataFreeFit
from heedful.merge.pareto_merging._matrices import Sources
from heedful.merge.pareto_merging._scalarization import as_preference, simplex_lattice
from heedful.merge.pareto_merging._sweep import ParetoSweep
from heedful.merge.pareto_merging._tucker import dirichlet_second_moment
from heedful.merge.pareto_merging._unlabelled import LearnedMerge, TaskObjectives, adamerging
from tests.conformance.distributed import WORLD, on_two_ranks
from tests.conformance.typechecks import as_users_have_it

matplotlib.use("Agg")
NAMES = ("math", "code", "chat")


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def deltas_of(K, c, d, seed=0, dtype=torch.float64):
    return torch.randn(K, c, d, generator=seeded(seed), dtype=dtype)


def network(seed=0, widths=(6, 10, 8)):
    into, hidden, out = widths
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(into, hidden), nn.LayerNorm(hidden), nn.Tanh(), nn.Linear(hidden, out))


SQUARE = (8, 8, 8)


def state_of(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def task_models(K=3, seed=0, *, size=0.3, base=None):
    """A base and K models that differ from it by random task vectors."""
    base = state_of(network(seed)) if base is None else base
    generator = seeded(seed + 1)
    models = {
        name: {key: t + size * torch.randn(t.shape, generator=generator, dtype=t.dtype) for key, t in base.items()}
        for name in NAMES[:K]
    }
    return base, models


def assert_states_close(left, right, **tolerance):
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], msg=lambda m, name=name: f"{name}: {m}", **tolerance)


def same_state(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


preferences_of_three = st.lists(st.floats(0.01, 1), min_size=3, max_size=3)


# The Tucker approximation.


def error_of(fit, deltas, moment):
    """Σ_kl S_kl ⟨X_k − Δ_k, X_l − Δ_l⟩, written out."""
    gaps = (fit.A @ fit.G @ fit.B.T - deltas).flatten(1)
    return float((moment * (gaps @ gaps.T)).sum())


@pytest.mark.parametrize(("c", "d", "rank"), [(7, 5, 3), (5, 9, 2), (300, 12, 4), (12, 300, 4), (300, 280, 5)])
def test_bases_are_orthonormal_and_no_sweep_raises_the_error(c, d, rank, seed):
    deltas, moment = deltas_of(3, c, d, seed), dirichlet_second_moment(3)
    errors = []
    for sweeps in (1, 2, 3, 5, 10, 20):
        fit = fit_tucker(deltas, rank, max_iter=sweeps, tol=0)
        errors.append(error_of(fit, deltas, moment))
        torch.testing.assert_close(fit.A.T @ fit.A, torch.eye(rank, dtype=torch.float64))
        torch.testing.assert_close(fit.B.T @ fit.B, torch.eye(rank, dtype=torch.float64))
        torch.testing.assert_close(fit.G, fit.A.T @ deltas @ fit.B)
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in itertools.pairwise(errors))


def hosvd_error(deltas, moment, rank):
    """The truncated higher-order SVD, from the unfoldings of the mixed tensor."""
    root = torch.linalg.cholesky(moment)
    mixed = torch.einsum("kcd,kj->jcd", deltas, root)
    A = torch.linalg.svd(mixed.permute(1, 0, 2).flatten(1))[0][:, :rank]
    B = torch.linalg.svd(mixed.permute(2, 0, 1).flatten(1))[0][:, :rank]
    return float((mixed - A @ (A.T @ mixed @ B) @ B.T).square().sum())


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_error_is_at_most_that_of_the_truncated_hosvd(rank, seed):
    deltas, moment = deltas_of(3, 8, 6, seed), dirichlet_second_moment(3)
    assert error_of(fit_tucker(deltas, rank), deltas, moment) <= hosvd_error(deltas, moment, rank) * (1 + 1e-12)


def test_error_falls_with_the_rank_to_zero(seed):
    deltas, moment = deltas_of(2, 5, 5, seed), dirichlet_second_moment(2)
    errors = [error_of(fit_tucker(deltas, rank), deltas, moment) for rank in range(1, 6)]
    assert all(later < earlier for earlier, later in itertools.pairwise(errors))
    assert errors[-1] < 1e-20
    fits = [fit_tucker(deltas, rank).relative_error for rank in range(1, 6)]
    total = float((moment * (deltas.flatten(1) @ deltas.flatten(1).T)).sum())
    np.testing.assert_allclose(fits, np.sqrt(np.array(errors) / total), rtol=1e-9, atol=1e-12)


def test_one_matrix_gives_its_best_approximation_of_the_rank(seed):
    (matrix,) = deltas_of(1, 9, 6, seed)
    fit = fit_tucker(matrix[None], 3)
    U, s, Vh = torch.linalg.svd(matrix, full_matrices=False)
    torch.testing.assert_close(fit.A @ fit.G[0] @ fit.B.T, U[:, :3] * s[:3] @ Vh[:3])
    assert fit.relative_error == pytest.approx(float((s[3:].square().sum() / s.square().sum()).sqrt()))


def test_large_matrices_of_the_rank_are_found_exactly(seed):
    """Beyond 256 rows the start is by subspace iteration."""
    generator = seeded(seed)
    left, right = torch.randn(400, 6, generator=generator), torch.randn(350, 6, generator=generator)
    deltas = left @ torch.randn(3, 6, 6, generator=generator) @ right.T
    fit = fit_tucker(deltas, 6)
    assert fit.relative_error < 1e-5  # float32
    torch.testing.assert_close(fit.A @ fit.G @ fit.B.T, deltas, rtol=1e-4, atol=1e-3)
    state = torch.get_rng_state()
    again = fit_tucker(deltas, 6)
    assert torch.equal(fit.A, again.A)
    assert torch.equal(state, torch.get_rng_state())


def test_the_second_moment_is_that_of_dirichlet_draws_and_the_identity_of_expectations_holds():
    """E_γ ‖Σ γ_k (X_k − Δ_k)‖² = Σ_kl S_kl ⟨·, ·⟩, and what it leaves out of Σ γ_k ‖W − target_k‖² is constant."""
    for concentration in (1.0, 0.3):
        deltas, other = deltas_of(3, 4, 3, 0), deltas_of(3, 4, 3, 1)
        draws = torch.from_numpy(np.random.default_rng(0).dirichlet([concentration] * 3, size=200_000))
        moment = dirichlet_second_moment(3, concentration)
        products = draws[:, :, None] * draws[:, None, :]
        assert ((products.mean(0) - moment).abs() < 4 * products.std(0) / math.sqrt(200_000)).all()
        losses = []
        for candidate in (torch.zeros_like(deltas), other):
            merged = torch.einsum("nk,kcd->ncd", draws, candidate).flatten(1)
            distances = (merged[:, None] - deltas.flatten(1)).square().sum(2)
            losses.append((draws * distances).sum(1))
        gap = losses[1] - losses[0]
        quadratic = [
            float((moment * ((x - deltas).flatten(1) @ (x - deltas).flatten(1).T)).sum())
            for x in (torch.zeros_like(deltas), other)
        ]
        assert abs(gap.mean() - (quadratic[1] - quadratic[0])) < 4 * gap.std() / math.sqrt(200_000)


@given(st.permutations(range(3)))
def test_permuting_matrices_permutes_cores(order):
    deltas = deltas_of(3, 6, 5)
    fit, permuted = fit_tucker(deltas, 2), fit_tucker(deltas[order], 2)
    torch.testing.assert_close(permuted.A @ permuted.G @ permuted.B.T, (fit.A @ fit.G @ fit.B.T)[order])


def test_a_singular_second_moment_fits_the_mean_alone():
    deltas = deltas_of(3, 6, 5)
    fit = fit_tucker(deltas, 2, second_moment=torch.ones(3, 3, dtype=torch.float64) / 9)
    U, s, Vh = torch.linalg.svd(deltas.mean(0), full_matrices=False)
    torch.testing.assert_close((fit.A @ fit.G @ fit.B.T).mean(0), U[:, :2] * s[:2] @ Vh[:2])


def test_zeros_and_half_precision_are_fitted():
    fit = fit_tucker(torch.zeros(2, 4, 3), 2)
    assert fit.relative_error == 0
    assert not fit.G.any()
    half = fit_tucker(deltas_of(2, 4, 3).bfloat16(), 2)
    assert half.A.dtype == torch.float32


def test_bad_matrices_are_explained():
    with pytest.raises(InputError, match=r"^deltas has entries that are NaN or infinite\."):
        fit_tucker(torch.full((2, 3, 3), math.nan), 1)
    with pytest.raises(
        InputError, match=r"^deltas has shape \(0, 3, 3\)\. Give one of shape \(K, c, d\): at least one matrix"
    ):
        fit_tucker(torch.zeros(0, 3, 3), 1)
    with as_users_have_it():
        with pytest.raises(InputError, match=r"^deltas has shape \(3, 4\)\. Give one of shape \(K, c, d\)"):
            fit_tucker(torch.ones(3, 4), 1)
        for moment in (torch.eye(3), torch.tensor([[1.0, 0.5], [0.0, 1.0]]), torch.full((2, 2), math.nan)):
            with pytest.raises(
                InputError, match=r"^second_moment must be symmetric and of shape \(2, 2\), one row for each"
            ):
                fit_tucker(deltas_of(2, 4, 3), 1, second_moment=moment)
    with pytest.raises(ParameterError, match=r"^rank must be an int >= 1; got 0\.$"):
        fit_tucker(torch.zeros(2, 3, 3), 0)
    with pytest.warns(HeedfulWarning, match=r"^rank 9 is more than matrices of 4 × 3 have; took 3\.$"):
        assert fit_tucker(deltas_of(2, 4, 3), 9).G.shape == (2, 3, 3)


# Scalarisation and preferences.


@given(st.lists(st.floats(0, 5), min_size=3, max_size=3), preferences_of_three, st.floats(0.01, 2), st.floats(-1, 1))
def test_smooth_tchebycheff_lies_between_max_and_max_plus_smoothing_log_k(values, preference, smoothing, ideal):
    values, preference = (torch.tensor(x, dtype=torch.float64) for x in (values, preference))
    weighted = preference * (values - ideal)
    result = smooth_tchebycheff(values, preference, smoothing=smoothing, ideal=ideal)
    slack = 1e-12 * (1 + weighted.abs().max())
    assert weighted.max() - slack <= result <= weighted.max() + smoothing * math.log(3) + slack


@given(st.lists(st.floats(0, 5), min_size=3, max_size=3), preferences_of_three, st.integers(0, 2), st.floats(0, 1))
def test_smooth_tchebycheff_rises_with_every_value(values, preference, which, more):
    values, preference = (torch.tensor(x, dtype=torch.float64) for x in (values, preference))
    raised = values.clone()
    raised[which] += more
    assert smooth_tchebycheff(raised, preference) >= smooth_tchebycheff(values, preference) - 1e-15


def test_its_gradient_is_preference_times_softmax_and_its_limits_are_max_and_mean(seed):
    values = torch.rand(4, generator=seeded(seed), dtype=torch.float64, requires_grad=True)
    preference = torch.rand(4, generator=seeded(seed + 1), dtype=torch.float64)
    weighted = preference * (values - 0.1)
    result = smooth_tchebycheff(values, preference, smoothing=0.2, ideal=0.1)
    (gradient,) = torch.autograd.grad(result, values)
    torch.testing.assert_close(gradient, preference * torch.softmax(weighted / 0.2, 0))
    # Of the expansion in 1/smoothing, what follows the mean is at most 1/(8 smoothing).
    large = smooth_tchebycheff(values, preference, smoothing=1e6, ideal=0.1) - 1e6 * math.log(4)
    torch.testing.assert_close(large, weighted.mean(), rtol=0, atol=1e-6)
    small = smooth_tchebycheff(values, preference, smoothing=1e-6, ideal=0.1)
    torch.testing.assert_close(small, weighted.max(), rtol=0, atol=2e-6)


def test_batches_of_values_and_half_precision_are_scalarised():
    values = torch.rand(5, 3, generator=seeded())
    preference = torch.tensor([0.2, 0.3, 0.5])
    rows = torch.stack([smooth_tchebycheff(row, preference) for row in values])
    torch.testing.assert_close(smooth_tchebycheff(values, preference), rows)
    assert smooth_tchebycheff(values.half(), preference).dtype == torch.float32
    whole = torch.tensor([1, 2, 4])  # integers must not make integers of the preference
    with as_users_have_it():
        assert smooth_tchebycheff(whole, preference) == smooth_tchebycheff(whole.float(), preference)
    with pytest.raises(ParameterError, match=r"^smoothing must be a number > 0; got 0\.$"):
        smooth_tchebycheff(values, preference, smoothing=0)
    with (
        as_users_have_it(),
        pytest.raises(InputError, match=r"^values has 3 objectives and preference 2 weights\. Give one for each\.$"),
    ):
        smooth_tchebycheff(values, preference[:2])


@pytest.mark.parametrize(
    "given",
    [
        [2, 1, 1],
        np.array([0.5, 0.25, 0.25]),
        torch.tensor([4.0, 2.0, 2.0]),
        {"math": 2, "chat": 1, "code": 1},
        (2, 1, 1),
    ],
)
def test_a_preference_is_a_list_an_array_a_tensor_or_a_mapping_in_any_scale(given):
    assert as_preference(given, NAMES).tolist() == [0.5, 0.25, 0.25]


def test_names_left_out_of_a_preference_weigh_nothing():
    assert as_preference({"code": 3}, NAMES).tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            [1, -1, 1],
            ParameterError,
            r"^A preference needs finite weights >= 0 that are not all zero; got \[1\.0, -1\.0, 1\.0\]",
        ),
        (
            [0, 0, 0],
            ParameterError,
            r"not all zero; got \[0\.0, 0\.0, 0\.0\]\. Equal preference is \[1\.0, 1\.0, 1\.0\]\.$",
        ),
        ([1, math.nan, 1], ParameterError, r"^A preference needs finite weights"),
        ([1e308, 1e308, 0], ParameterError, r"^A preference needs finite weights"),
        (
            "math",
            ParameterError,
            r"^A preference is numbers, one for each of math, code, chat, or a mapping.*got 'math'\.$",
        ),
        ({"math": "0.7"}, ParameterError, r"^A preference is numbers, .*; got \['0\.7', 0\.0, 0\.0\]\.$"),
        (
            [1, 1],
            InputError,
            r"^A preference needs one weight for each of the 3 models math, code, chat; got shape \(2,\)\.$",
        ),
        ({"maths": 1}, InputError, r"^The preference speaks of maths; the models are math, code, chat\.$"),
    ],
)
def test_bad_preferences_are_explained(given, error, message):
    with as_users_have_it(), pytest.raises(error, match=message):
        as_preference(given, NAMES)


def test_the_lattice_has_the_corners_and_regular_steps():
    assert simplex_lattice(2, 5).tolist() == [[1, 0], [0.75, 0.25], [0.5, 0.5], [0.25, 0.75], [0, 1]]
    for n_models, n_points, n in ((2, 21, 21), (3, 66, 66), (3, 65, 55), (3, 21, 21), (8, 21, 8)):
        lattice = simplex_lattice(n_models, n_points)
        assert lattice.shape == (n, n_models)
        np.testing.assert_allclose(lattice.sum(axis=1), 1)
        assert all(corner in lattice.tolist() for corner in np.eye(n_models).tolist())
        assert len(np.unique(lattice, axis=0)) == n
    with pytest.raises(
        ParameterError, match=r"^n_points must be at least the number of models, 3, one corner each; got 2\.$"
    ):
        simplex_lattice(3, 2)
    with as_users_have_it(), pytest.raises(ParameterError, match=r"^n_points must be an int; got '21'\.$"):
        simplex_lattice(3, "21")


# The set fitted without data.


@pytest.mark.parametrize("start", ["task_arithmetic", "ties", "given"])
@pytest.mark.parametrize("target_scale", [1.0, 0.9])
def test_at_full_rank_the_linear_form_interpolates_the_targets_whatever_the_start(start, target_scale, seed):
    base, models = task_models(base=state_of(network(seed, SQUARE)), seed=seed)
    given = state_of(network(seed + 5, SQUARE)) if start == "given" else start
    pareto = fit_pareto_set(base, models, rank=8, start=given, scalarization="linear", target_scale=target_scale)
    for preference in ([1, 0, 0], [0.2, 0.3, 0.5]):
        state = pareto.state_dict(preference)
        for name in pareto.factors:
            targets = [base[name] + target_scale * (model[name] - base[name]) for model in models.values()]
            expected = sum(share * target for share, target in zip(preference, targets, strict=True))
            torch.testing.assert_close(state[name], expected, rtol=1e-5, atol=1e-5)  # float32


def test_a_rank_that_holds_all_differences_interpolates_as_well(seed):
    """Rectangular matrices, with task vectors in common spaces of dimension 3 on both sides."""
    base, models = task_models(seed=seed)
    generator = seeded(seed)
    for name in ("0.weight", "3.weight"):
        left, right = (torch.randn(side, 3, generator=generator) for side in base[name].shape)
        for model in models.values():
            model[name] = base[name] + left @ torch.randn(3, 3, generator=generator) @ right.T
    pareto = fit_pareto_set(base, models, rank=3, scalarization="linear")
    state = pareto.state_dict([0.2, 0.3, 0.5])
    for name in pareto.factors:
        expected = sum(share * model[name] for share, model in zip((0.2, 0.3, 0.5), models.values(), strict=True))
        torch.testing.assert_close(state[name], expected, rtol=1e-4, atol=1e-4)  # entries of size 5 in float32


def test_equal_preference_at_target_scale_k_lambda_is_task_arithmetic(seed):
    base, models = task_models(base=state_of(network(seed, SQUARE)), seed=seed)
    pareto = fit_pareto_set(base, models, rank=8, start_scale=0.3, scalarization="linear", target_scale=0.9)
    expected = merge_state_dicts(base, models, method="task_arithmetic", scale=0.3)
    assert_states_close(pareto.state_dict([1, 1, 1]), expected, rtol=1e-5, atol=1e-5)


def test_starts_are_task_arithmetic_and_ties_of_the_registry(seed):
    base, models = task_models(seed=seed)
    for start, settings in {"task_arithmetic": {}, "ties": {"density": 0.2, "normalize": False}}.items():
        pareto = fit_pareto_set(base, models, rank=2, start=start, start_scale=0.4)
        merged = merge_state_dicts(base, models, method=start, scale=0.4, **settings)
        assert_states_close(dict(pareto.base), merged, rtol=1e-6, atol=1e-6)


def test_a_set_is_affine_in_the_preference(seed):
    pareto = fit_pareto_set(*task_models(seed=seed), rank=3)
    one, other = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.1, 0.1, 0.8])
    left, right = pareto.state_dict(one), pareto.state_dict(other)
    middle = pareto.state_dict(0.3 * one + 0.7 * other)
    assert_states_close(middle, {k: 0.3 * left[k] + 0.7 * right[k] for k in left}, rtol=1e-6, atol=1e-6)


def test_cores_of_zeros_give_the_base_for_every_preference_bit_for_bit():
    pareto = fit_pareto_set(*task_models(), rank=3)
    still = ParetoSet(
        pareto.names, pareto.base, {k: f._replace(G=torch.zeros_like(f.G)) for k, f in pareto.factors.items()}
    )
    for preference in ([1, 0, 0], [1, 2, 3]):
        assert same_state(still.state_dict(preference), dict(pareto.base))


def test_extra_parameters_are_counted_exactly():
    pareto = fit_pareto_set(*task_models(), rank=3)
    sizes = {name: tuple(pareto.base[name].shape) for name in pareto.factors}
    assert sizes == {"0.weight": (10, 6), "3.weight": (8, 10)}
    assert pareto.n_extra_parameters == sum(3 * (c + d) + 3 * 3**2 for c, d in sizes.values())
    stored = sum(part.numel() for factors in pareto.factors.values() for part in factors)
    assert pareto.n_extra_parameters == stored


@pytest.mark.parametrize("scalarization", ["linear", "smooth_tchebycheff"])
def test_permuting_models_permutes_preferences(scalarization, seed):
    base, models = task_models(seed=seed)
    turned = {name: models[name] for name in ("chat", "math", "code")}
    preference = {"math": 0.6, "code": 0.3, "chat": 0.1}
    # The refinement draws preferences; three models in another order see other ones.
    settings = {"rank": 3, "scalarization": scalarization, "refine_steps": 0}
    left, right = fit_pareto_set(base, models, **settings), fit_pareto_set(base, turned, **settings)
    assert_states_close(left.state_dict(preference), right.state_dict(preference), rtol=1e-4, atol=1e-4)


def test_models_in_a_sequence_are_called_by_their_place():
    base, models = task_models(2)
    pareto = fit_pareto_set(base, list(models.values()), rank=2)
    assert pareto.names == ("models[0]", "models[1]")


def fit_of(base, models, **settings):
    sources = Sources(
        open_state_dict(base, "the base"),
        open_models(models),
        start="task_arithmetic",
        start_scale=0.3,
        include=None,
        exclude=(),
    )
    fit = DataFreeFit(sources, **settings)
    for name in sources.base.names:
        fit.add(name)
    return fit


def expected_loss(pareto, base, models, draws, *, smoothing=0.1):
    """E g(S(W(γ)) | γ), from the merged matrices themselves."""
    S, scale = 0, 0
    for name, (A, B, G) in pareto.factors.items():
        merged = pareto.base[name] + A @ torch.einsum("nk,krs->nrs", draws.to(G), G) @ B.T
        targets = torch.stack([model[name] for model in models.values()])
        S = S + (merged[:, None] - targets).double().square().sum((2, 3))
        scale = scale + (pareto.base[name] - targets).double().square().sum((1, 2))
    return float(smooth_tchebycheff(S / scale, draws, smoothing=smoothing).mean())


def test_distances_by_the_gram_matrix_are_those_of_the_merged_matrices(seed):
    base, models = task_models(seed=seed)
    fit = fit_of(base, models, rank=3, refine_steps=0)
    pareto = fit_pareto_set(base, models, rank=3, refine_steps=0)
    weights = torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]], dtype=torch.float64)
    for row, distances in zip(weights, fit.distances(weights), strict=True):
        state = pareto.state_dict(row)
        direct = [
            sum((state[n] - model[n]).double().square().sum().item() for n in pareto.factors)
            for model in models.values()
        ]
        np.testing.assert_allclose(distances, direct, rtol=1e-4)  # weights are float32


def test_refining_lowers_the_smooth_tchebycheff_objective_and_no_core_outside_the_mixing_does_better():
    """Adam on all entries of all cores finds no lower objective than the K × K mixing: nothing was lost."""
    base, models = task_models(3, seed=3)
    draws = torch.from_numpy(np.random.default_rng(0).dirichlet([1.0] * 3, size=512))  # as random_state=0 draws
    plain = fit_pareto_set(base, models, rank=3, refine_steps=0)
    mixed = fit_pareto_set(base, models, rank=3, random_state=0)
    before, after = (expected_loss(p, base, models, draws) for p in (plain, mixed))
    assert after < before - 1e-3

    names = list(plain.factors)
    cores = {n: plain.factors[n].G.double().clone().requires_grad_() for n in names}
    parts = {n: [x.double() for x in plain.factors[n]] for n in names}
    targets = {n: torch.stack([m[n] - plain.base[n] for m in models.values()]).double() for n in names}
    scale = sum(targets[n].square().sum((1, 2)) for n in names)
    optimizer = torch.optim.Adam(list(cores.values()), lr=0.02)
    for _ in range(200):
        S = 0
        for n in names:
            A, B, _ = parts[n]
            merged = A @ torch.einsum("nk,krs->nrs", draws, cores[n]) @ B.T
            S = S + (merged[:, None] - targets[n]).square().sum((2, 3))
        loss = smooth_tchebycheff(S / scale, draws).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() == pytest.approx(after, abs=1e-4)  # both have converged that far


def test_refining_never_makes_it_worse_and_repeats(seed):
    base, models = task_models(seed=seed)
    draws = torch.from_numpy(np.random.default_rng(seed).dirichlet([1.0] * 3, size=512))  # as the fit draws them
    losses = [
        expected_loss(fit_pareto_set(base, models, rank=2, refine_steps=steps, random_state=seed), base, models, draws)
        for steps in (0, 1, 30)
    ]
    assert all(later <= earlier + 1e-7 for earlier, later in itertools.pairwise(losses))
    one, other = (fit_pareto_set(base, models, rank=2, random_state=seed) for _ in range(2))
    assert same_state(one.state_dict([1, 2, 3]), other.state_dict([1, 2, 3]))


def test_the_unstructured_optimum_for_two_targets_lies_between_them():
    """For one preference: Adam over all of θ ends on the segment, where a one-dimensional search finds it."""
    targets = torch.randn(2, 12, generator=seeded(), dtype=torch.float64)
    preference = torch.tensor([0.7, 0.3], dtype=torch.float64)

    def loss(theta):
        return smooth_tchebycheff((theta - targets).square().sum(-1), preference, smoothing=0.1)

    theta = torch.zeros(12, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([theta], max_iter=500, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        (value := loss(theta)).backward()
        return value

    optimizer.step(closure)
    shares = torch.linspace(0, 1, 100_001, dtype=torch.float64)
    candidates = torch.stack([loss(targets[0] + s * (targets[1] - targets[0])) for s in shares[::1000]])
    best = shares[::1000][candidates.argmin()]
    fine = torch.linspace(float(best) - 0.01, float(best) + 0.01, 2001, dtype=torch.float64)
    share = fine[torch.stack([loss(targets[0] + s * (targets[1] - targets[0])) for s in fine]).argmin()]
    torch.testing.assert_close(theta.detach(), targets[0] + share * (targets[1] - targets[0]), rtol=0, atol=1e-3)


def test_the_dtype_of_the_base_is_kept_and_its_rounding_compensated():
    base, models = task_models(base=state_of(network(0, SQUARE)))
    halves = {name: tensor.bfloat16() for name, tensor in base.items()}
    others = {name: {key: tensor.bfloat16() for key, tensor in model.items()} for name, model in models.items()}
    pareto = fit_pareto_set(halves, others, rank=8, scalarization="linear")
    state = pareto.state_dict({"code": 1})
    for name in pareto.factors:
        assert state[name].dtype == torch.bfloat16
        torch.testing.assert_close(state[name], others["code"][name], rtol=2**-8, atol=1e-3)  # one rounding of bfloat16


def test_integers_tied_tensors_and_excluded_ones_go_their_way():
    base, models = task_models(2)
    for state in (base, *models.values()):
        state["tied.weight"] = state["3.weight"]
        state["steps"] = torch.tensor(3)
        state["vocabulary"] = torch.zeros(2, 3)
    models["math"]["vocabulary"] = torch.zeros(4, 3)
    pareto = fit_pareto_set(base, models, rank=2, exclude=["vocabulary"])
    state = pareto.state_dict([1, 1])
    assert state["steps"] == 3
    assert state["vocabulary"].shape == (2, 3)
    assert torch.equal(state["tied.weight"], state["3.weight"])
    assert "vocabulary" not in pareto.factors


def test_embeddings_and_kernels_have_factors_only_if_named():
    base = {
        "model.embed_tokens.weight": torch.randn(9, 4),
        "transformer.wte.weight": torch.randn(9, 4),
        "layers.0.weight": torch.randn(4, 4),
        "conv.weight": torch.randn(4, 1, 2, 2),
        "norm.weight": torch.randn(4),
    }
    base, models = task_models(2, base=base)
    assert list(fit_pareto_set(base, models, rank=2).factors) == ["layers.0.weight"]
    pareto = fit_pareto_set(base, models, rank=4, include=["conv.*", "*wte*"], scalarization="linear")
    assert set(pareto.factors) == {"conv.weight", "transformer.wte.weight"}
    assert tuple(pareto.factors["conv.weight"].B.shape) == (4, 4)
    merged = pareto.state_dict([1, 0])["conv.weight"]  # full rank: the kernel is a square matrix
    torch.testing.assert_close(merged, models["math"]["conv.weight"], rtol=1e-4, atol=1e-4)


def test_bad_models_and_settings_are_explained():
    base, models = task_models()
    fit_pareto_set = functools.partial(heedful.merge.fit_pareto_set, rank=6)
    one = {"math": models["math"]}
    with pytest.raises(
        InputError, match=r"^A Pareto set needs two models or more, got 1: with one there is nothing to trade"
    ):
        fit_pareto_set(base, one)
    lacking = {**models, "code": {k: v for k, v in models["code"].items() if k != "0.bias"}}
    with pytest.raises(InputError, match=r"0\.bias"):
        fit_pareto_set(base, lacking)
    wrong = {**models, "code": {**models["code"], "0.weight": torch.zeros(3, 3)}}
    with pytest.raises(InputError, match=r"^0\.weight has shape \(3, 3\) in code"):
        fit_pareto_set(base, wrong)
    broken = {**models, "code": {**models["code"], "0.weight": torch.full((10, 6), math.nan)}}
    with pytest.raises(InputError, match=r"^0\.weight of code has 60 entries that are NaN or infinite"):
        fit_pareto_set(base, broken)
    with pytest.raises(InputError, match=r"^The models have no matrix that include=\['nothing'\] names\."):
        fit_pareto_set(base, models, include=["nothing"])
    with pytest.warns(
        HeedfulWarning, match=r"^rank 7 is more than 1 of the 2 matrices have, the first 0\.weight of 10 × 6;"
    ):
        assert fit_pareto_set(base, models, rank=7).factors["0.weight"].G.shape == (3, 6, 6)
    with (
        as_users_have_it(),
        pytest.raises(ParameterError, match=r"^start must be one of 'task_arithmetic', 'ties'; got 'slerp'\.$"),
    ):
        fit_pareto_set(base, models, start="slerp")
    with as_users_have_it(), pytest.raises(ParameterError, match=r"^scalarization must be one of"):
        fit_pareto_set(base, models, scalarization="mean")
    with pytest.raises(InputError, match=r"^The start is already the target of code, and normalize=True divides"):
        fit_pareto_set(base, models, start=models["code"], rank=2)
    fit_pareto_set(base, models, start=models["code"], rank=2, normalize=False)


# Using a set.


def test_apply_writes_the_model_of_the_preference_whatever_was_there():
    pareto = fit_pareto_set(*task_models(), rank=3)
    module = network(9)
    for preference in ([1, 0, 0], [0, 1, 1]):
        assert pareto.apply(module, preference) is module
        assert same_state(module.state_dict(), pareto.state_dict(preference))
    head = nn.ModuleDict({"body": network(3), "head": nn.Linear(8, 2)})
    prefixed = ParetoSet(
        pareto.names,
        {f"body.{k}": v for k, v in pareto.base.items()},
        {f"body.{k}": v for k, v in pareto.factors.items()},
    )
    before = head["head"].weight.clone()
    prefixed.apply(head, [1, 1, 1])
    assert torch.equal(head["head"].weight, before)
    assert torch.equal(head["body"][0].weight, pareto.state_dict([1, 1, 1])["0.weight"])


def test_apply_copies_to_another_device():
    """Which the meta device stands for: a product cannot be written there from here, and a copy can."""
    pareto = fit_pareto_set(*task_models(), rank=3)
    assert pareto.apply(network().to("meta"), [1, 0, 0])[0].weight.is_meta


def test_a_wrapped_module_is_not_given_a_second_preference():
    pareto = fit_pareto_set(*task_models(), rank=3)
    module = network()
    wrapped = pareto.wrap(module)
    for follower in (module, wrapped):
        for use in (pareto.wrap, lambda m: pareto.apply(m, [1, 1, 1])):
            with pytest.raises(InputError, match=r"^The module follows a preference already, since wrap changed it"):
                use(follower)


def test_state_dicts_own_their_tensors():
    pareto = fit_pareto_set(*task_models(), rank=3)
    before = pareto.state_dict([1, 0, 0])
    for tensor in pareto.state_dict([1, 0, 0]).values():
        tensor.zero_()
    assert same_state(pareto.state_dict([1, 0, 0]), before)


def test_a_module_of_another_architecture_is_refused():
    pareto = fit_pareto_set(*task_models(), rank=3)
    with pytest.raises(
        InputError, match=r"^The module lacks 4 tensors of the set, the first 1\.weight, 1\.bias, 3\.weight, 3\.b"
    ):
        pareto.apply(nn.Sequential(nn.Linear(6, 10)), [1, 1, 1])
    other = network()
    other[0] = nn.Linear(7, 10)
    with pytest.raises(InputError, match=r"^0\.weight has shape \(10, 7\) in the module and \(10, 6\) in the set\."):
        pareto.apply(other, [1, 1, 1])


def test_a_wrapped_module_follows_its_preference_also_row_by_row(seed):
    pareto = fit_pareto_set(*task_models(seed=seed), rank=3)
    wrapped = pareto.wrap(network(7))
    x = torch.randn(4, 6, generator=seeded(seed))
    rows = torch.rand(4, 3, generator=seeded(seed + 1)) + 0.01
    expected = []
    for row, preference in zip(x, rows, strict=True):
        expected.append(pareto.apply(network(), preference)(row))
        wrapped.set_preference(preference)
        torch.testing.assert_close(wrapped(x[:1] * 0 + row)[0], expected[-1], rtol=1e-5, atol=1e-5)
    wrapped.set_preference(rows)
    torch.testing.assert_close(wrapped(x), torch.stack(expected), rtol=1e-5, atol=1e-5)
    other = fit_pareto_set(*task_models(seed=seed + 3), rank=3)
    before, twin = other.state_dict([1, 2, 3]), other.wrap(network(2))
    twin.load_state_dict(wrapped.state_dict())  # its preference was one, and is one for each row now
    assert torch.equal(twin(x), wrapped(x))
    assert same_state(other.state_dict([1, 2, 3]), before)  # what is loaded into a module changes no set
    with pytest.raises(
        InputError, match=r"^There are 4 preferences for a batch of 3\. Give one for each row, or one for all\.$"
    ):
        wrapped(x[:3])


def test_wrapping_serves_modules_that_read_weights_themselves(seed):
    """Attention and encoder layers read the weights in them, some on a fast path: those are formed, not replaced."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    base, models = task_models(2, base=state_of(layer))
    pareto = fit_pareto_set(base, models, rank=3)
    assert set(pareto.factors) == {
        "self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"
    }  # fmt: skip
    x = torch.randn(2, 5, 8, generator=seeded(seed))
    plain = pareto.apply(copy.deepcopy(layer), [0.9, 0.1])
    wrapped = pareto.wrap(copy.deepcopy(layer)).eval()
    wrapped.set_preference([0.9, 0.1])
    with torch.no_grad():
        torch.testing.assert_close(wrapped(x), plain(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(wrapped(x), plain(x), rtol=1e-4, atol=1e-5)  # with gradients: the other path
    with pytest.raises(
        UnsupportedModelError, match=r"^Rows cannot have preferences of their own in module\.self_attn|self_attn"
    ):
        wrapped.set_preference(torch.ones(2, 2))


def test_preference_linear_equals_the_merged_linear_of_every_row(seed):
    generator = seeded(seed)
    linear = nn.Linear(6, 5)
    layer = PreferenceLinear.from_linear(
        linear,
        torch.randn(5, 2, generator=generator),
        torch.randn(6, 2, generator=generator),
        torch.randn(3, 2, 2, generator=generator),
    )
    rows = torch.rand(4, 3, generator=generator) + 0.01
    for shape in ((4, 6), (4, 7, 6), (4, 2, 3, 6)):
        x = torch.randn(shape, generator=generator)
        expected = torch.stack([layer.merge(row)(one) for row, one in zip(rows, x, strict=True)])
        torch.testing.assert_close(layer(x, rows), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(layer(x, rows[0]), layer.merge(rows[0])(x), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(layer(x), layer.merge([1, 1, 1])(x), rtol=1e-5, atol=1e-5)
    one = torch.randn(6, generator=generator)
    torch.testing.assert_close(layer(one, rows[0]), layer.merge(rows[0])(one), rtol=1e-5, atol=1e-5)
    assert layer.weight is linear.weight
    assert "rank=2, n_models=3" in repr(layer)


def test_zero_cores_have_a_gradient_and_the_bases_then_have_none():
    layer = PreferenceLinear(torch.randn(4, 6), None, torch.randn(4, 2), torch.randn(6, 2), torch.zeros(3, 2, 2))
    layer(torch.randn(5, 6)).square().sum().backward()
    assert layer.G.grad.abs().sum() > 0
    assert not layer.A.grad.any()
    assert not layer.B.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_set_survives_saving_bit_for_bit(dtype, tmp_path):
    base, models = task_models()
    base = {name: tensor.to(dtype) for name, tensor in base.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HeedfulWarning)  # types differ
        pareto = fit_pareto_set(base, models, rank=3)
    pareto.save(tmp_path / "set.safetensors")
    for loaded in (ParetoSet.load(tmp_path / "set.safetensors"), heedful.load(tmp_path / "set.safetensors")):
        assert loaded.names == pareto.names
        assert list(loaded.base) == list(pareto.base)
        assert same_state(loaded.state_dict([3, 1, 1]), pareto.state_dict([3, 1, 1]))
    with pytest.raises(
        FileExistsError, match=r"set\.safetensors exists\. Choose another name, or say overwrite=True\.$"
    ):
        pareto.save(tmp_path / "set.safetensors")
    pareto.save(tmp_path / "set.safetensors", overwrite=True)
    with pytest.raises(FileNotFoundError, match=r"has no pareto\.safetensors, so it is no Pareto set"):
        ParetoSet.load(tmp_path)


# Sweeps.


def quadratic_evaluate(state):
    weight = float(state["0.weight"].mean())
    return {"math": weight, "code": -weight, "unknown to the set": 0.0}


def test_a_sweep_evaluates_each_preference_of_the_lattice():
    pareto = fit_pareto_set(*task_models(2), rank=3)
    sweep = pareto.sweep(quadratic_evaluate, 5)
    assert sweep.preferences.tolist() == simplex_lattice(2, 5).tolist()
    for preference, values in zip(sweep.preferences, sweep.values, strict=True):
        performance = quadratic_evaluate(pareto.state_dict(preference))
        assert values.tolist() == [performance["math"], performance["code"]]
    assert sweep.front.all()  # every step towards one name is a step away from the other
    assert sweep.reference.tolist() == sweep.values.min(axis=0).tolist()
    assert list(sweep.records) == ["preference_math", "preference_code", "math", "code", "front"]
    assert len(sweep.records) == 5
    assert sweep.to_dict()["hypervolume"] == sweep.hypervolume > 0
    assert pareto.sweep(quadratic_evaluate, 5, reference={"math": 1e9, "code": 1e9}).hypervolume == 0
    with pytest.raises(
        InputError, match=r"^evaluate returned values for math; code is missing\. Give one value a model\.$"
    ):
        pareto.sweep(lambda state: {"math": 1.0})
    with (
        as_users_have_it(),
        pytest.raises(InputError, match=r"^evaluate returned values of type float\. Give a mapping from math"),
    ):
        pareto.sweep(lambda state: 0.5)
    with pytest.raises(
        InputError, match=r"^evaluate returned .*nan.* for the preference \[1\.0, 0\.0\]\. Give finite numbers\.$"
    ):
        pareto.sweep(lambda state: {"math": math.nan, "code": 1.0})


def test_slips_are_told_before_anything_is_evaluated():
    pareto = fit_pareto_set(*task_models(2), rank=3)
    with pytest.raises(InputError, match=r"^The constraint speaks of maths"):
        pareto.select(pytest.fail, {"maths": ">=1"})
    with pytest.raises(InputError, match=r"^reference has values for math; code is missing"):
        pareto.sweep(pytest.fail, reference={"math": 1.0})


def test_selection_takes_the_best_mean_that_meets_the_constraint():
    preferences = simplex_lattice(2, 5)
    values = np.array([[9.0, 1.0], [8.0, 4.0], [6.0, 6.0], [4.0, 7.0], [1.0, 8.0]])
    sweep = ParetoSweep.of(("math", "code"), preferences, values, np.zeros(2))
    assert sweep.select({}) == {"math": 0.75, "code": 0.25}
    assert sweep.select({"code": ">=5"}) == {"math": 0.5, "code": 0.5}
    assert sweep.select({"code": ">= 5", "math": "<=4"}) == {"math": 0.25, "code": 0.75}
    with pytest.raises(
        InputError, match=r"^None of the 5 preferences gives math >=9\.5; the closest is 9\. Loosen the bound"
    ):
        sweep.select({"math": ">=9.5"})
    with pytest.raises(InputError, match=r"^None of the 5 preferences meets all of"):
        sweep.select({"math": ">=8", "code": ">=8"})
    with pytest.raises(InputError, match=r"^The constraint speaks of maths; the models are math, code\.$"):
        sweep.select({"maths": ">=1"})
    for bound in ("9", ">=nine", "=>9", 9):
        with as_users_have_it(), pytest.raises(ParameterError, match=r"^A constraint"):
            sweep.select({"math": bound})
    pareto = fit_pareto_set(*task_models(2), rank=3)
    assert pareto.select(quadratic_evaluate, {"math": ">=-9"}, 5) == pareto.sweep(quadratic_evaluate, 5).select(
        {"math": ">=-9"}
    )


def test_uniformity_is_one_if_performance_follows_preference_and_less_if_it_does_not():
    preferences = simplex_lattice(2, 11)
    assert ParetoSweep.of(("a", "b"), preferences, preferences * 7 + 2, np.zeros(2)).uniformity == pytest.approx(1)
    turned = ParetoSweep.of(("a", "b"), preferences, preferences[::-1].copy(), np.zeros(2))
    assert turned.uniformity == pytest.approx(1 - np.abs(1 - 2 * preferences[:, 0]).mean())
    assert ParetoSweep.of(("a", "b"), preferences, np.ones((11, 2)), np.zeros(2)).uniformity < 1


@pytest.mark.parametrize("k", [2, 3])
def test_a_sweep_can_be_drawn(k):
    preferences = simplex_lattice(k, 21)
    axes = ParetoSweep.of(NAMES[:k], preferences, preferences**0.5, np.zeros(k)).plot()
    assert axes.get_xlabel() == ("math" if k == 2 else "preference")
    matplotlib.pyplot.close(axes.figure)


# Learning from unlabelled inputs.


def problem(K=2, seed=0, *, size=0.3, n_batches=3):
    base, models = task_models(K, seed, size=size)
    generator = seeded(seed + 2)
    batches = {name: [torch.randn(8, 6, generator=generator) for _ in range(n_batches)] for name in models}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + 3)
        heads = {name: nn.Linear(8, 4) for name in models}
    return {"model": network(seed), "base": base, "models": models}, {"batches": batches, "heads": heads}


def learn(K=2, seed=0, **settings):
    data, tasks = problem(K, seed)
    return fit_pareto_set_unlabelled(
        **data, **{**tasks, "rank": 3, "steps": 5, "lr": 1e-2, "random_state": seed, **settings}
    )


def entropies(problem, state):
    """Mean entropy of each task over all of its batches."""
    data, tasks = problem
    module = network()
    module.load_state_dict(state)
    values = []
    for name in data["models"]:
        logits = tasks["heads"][name](module(torch.cat(tasks["batches"][name])))
        p = torch.softmax(logits, 1)
        values.append(-(p * p.log()).sum(1).mean())
    return torch.stack(values).detach()


def test_learning_lowers_the_entropy_of_the_preferred_task():
    parts = problem(2)
    history = []
    pareto = learn(steps=150, callback=lambda event: history.append(event.values) or False)
    start = entropies(
        parts, merge_state_dicts(parts[0]["base"], parts[0]["models"], method="task_arithmetic", scale=0.3)
    )
    equal = entropies(parts, pareto.state_dict([1, 1]))
    assert (equal < start).all()
    first, second = entropies(parts, pareto.state_dict([1, 0])), entropies(parts, pareto.state_dict([0, 1]))
    assert first[0] < second[0]
    assert second[1] < first[1]
    assert len(history) == 150
    assert history[0].keys() == {"loss", "math", "code"}


def test_the_first_step_starts_from_the_merged_start_and_moves_cores_alone():
    data, tasks = problem(2)
    seen = []
    learn(steps=1, normalize=False, callback=lambda event: seen.append(event.values))
    merged = merge_state_dicts(data["base"], data["models"], method="task_arithmetic", scale=0.3)
    first = {name: [batches[0]] for name, batches in tasks["batches"].items()}
    expected = entropies((data, {**tasks, "batches": first}), merged)
    assert [seen[0]["math"], seen[0]["code"]] == pytest.approx(expected.tolist(), rel=1e-5)
    # Adam moves by lr whatever has a gradient, here in units of the task vectors; at G = 0 the bases have none.
    pareto, still = learn(steps=1, lr=1e-2), learn(steps=1, lr=1e-12)
    for name, parts in pareto.factors.items():
        vectors = [model[name] - data["base"][name] for model in data["models"].values()]
        unit = sum(torch.linalg.svdvals(vector)[0].item() for vector in vectors) / len(vectors) / 3
        assert parts.G.abs().max().item() == pytest.approx(1e-2 * unit, rel=1e-3)
        assert torch.equal(parts.A, still.factors[name].A)
        torch.testing.assert_close(parts.A.T @ parts.A, torch.eye(3), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("learn_base", [True, False])
def test_the_base_is_learned_layer_by_layer_or_stays(learn_base):
    data, _ = problem(2)
    pareto = learn(steps=3, learn_base=learn_base)
    start = merge_state_dicts(data["base"], data["models"], method="task_arithmetic", scale=0.3)
    if not learn_base:
        assert_states_close(dict(pareto.base), start, rtol=1e-6, atol=1e-6)
        return
    for name, tensor in pareto.base.items():  # θ_0 + Σ λ_k V_k with coefficients near 0.3, of each tensor its own
        vectors = torch.stack([(m[name] - data["base"][name]).flatten() for m in data["models"].values()])
        shares = torch.linalg.lstsq(vectors.T, (tensor - data["base"][name]).flatten()).solution
        assert ((shares - 0.3).abs() < 0.04).all()
        assert ((shares - 0.3).abs() > 1e-4).all()


def test_a_given_start_is_kept_until_coefficients_move(tmp_path):
    given = state_of(network(4))
    assert_states_close(dict(learn(start=given, steps=1, lr=1e-12).base), given, rtol=1e-5, atol=1e-6)
    moved = learn(start=given, steps=3)
    assert not torch.equal(moved.base["0.weight"], given["0.weight"])
    fixed = learn(start=given, steps=3, learn_base=False)
    assert same_state(dict(fixed.base), given)


def test_ties_as_start_trims_the_vectors_that_are_learned_with():
    data, _ = problem(2)
    pareto = learn(start="ties", steps=1, lr=1e-12)
    merged = merge_state_dicts(data["base"], data["models"], method="ties", scale=0.3, density=0.2, normalize=False)
    assert_states_close(dict(pareto.base), merged, rtol=1e-5, atol=1e-6)


def test_it_repeats_and_leaves_model_heads_and_random_numbers_as_they_were():
    data, tasks = problem(2)
    data["model"].train()
    tasks["heads"]["math"].train()
    before, state = state_of(data["model"]), torch.get_rng_state()
    pareto = fit_pareto_set_unlabelled(**data, **tasks, rank=3, steps=3, random_state=0)
    assert same_state(state_of(data["model"]), before)
    assert all(p.grad is None for module in (data["model"], *tasks["heads"].values()) for p in module.parameters())
    assert data["model"].training
    assert tasks["heads"]["math"].training
    assert torch.equal(torch.get_rng_state(), state)
    again = fit_pareto_set_unlabelled(**data, **tasks, rank=3, steps=3, random_state=0)
    assert same_state(pareto.state_dict([2, 1]), again.state_dict([2, 1]))


def test_dropout_is_off_while_learning():
    data, tasks = problem(2)
    data["model"] = nn.Sequential(*network(), nn.Dropout(0.9)).train()
    one, other = (fit_pareto_set_unlabelled(**data, **tasks, rank=2, steps=2, random_state=0) for _ in range(2))
    assert same_state(one.state_dict([2, 1]), other.state_dict([2, 1]))


def test_a_callback_stops_and_progress_is_told():
    events = []
    with heedful.progress(events.append):
        learn(steps=50, callback=lambda event: event.done == 3)
    assert [event.done for event in events] == [1, 2, 3]
    assert events[0].phase == "fit"
    assert events[0].total == 50


def test_batches_may_be_mappings_or_single_tensor_lists_and_heads_a_function():
    data, tasks = problem(2)
    wrapped = {name: [[batch] for batch in batches] for name, batches in tasks["batches"].items()}
    named = {name: [{"input": batch} for batch in batches] for name, batches in tasks["batches"].items()}
    settings = {"rank": 2, "steps": 3, "random_state": 0}
    plain = fit_pareto_set_unlabelled(**data, **tasks, **settings)
    for batches in (wrapped, named):
        other = fit_pareto_set_unlabelled(**data, **{**tasks, "batches": batches}, **settings)
        assert same_state(plain.state_dict([1, 2]), other.state_dict([1, 2]))
    heads = tasks["heads"]
    for form in (lambda name, output: heads[name](output), nn.ModuleDict(heads)):
        other = fit_pareto_set_unlabelled(**data, batches=tasks["batches"], heads=form, **settings)
        assert same_state(plain.state_dict([1, 2]), other.state_dict([1, 2]))


def test_an_objective_of_ones_own_and_estimated_ideals_are_used():
    seen = []

    def spread(logits):
        return logits.square().mean()

    learn(objective=spread, steps=1, normalize=False, callback=lambda event: seen.append(event.values))
    data, tasks = problem(2)
    merged = network()
    merged.load_state_dict(merge_state_dicts(data["base"], data["models"], method="task_arithmetic", scale=0.3))
    for name in data["models"]:
        expected = spread(tasks["heads"][name](merged(tasks["batches"][name][0])))
        assert seen[0][name] == pytest.approx(expected.item(), rel=1e-4)
    plain, estimated = learn(steps=10), learn(steps=10, ideal="estimate")
    assert not same_state(plain.state_dict([1, 1]), estimated.state_dict([1, 1]))


def test_coefficients_may_have_a_learning_rate_of_their_own():
    data, _ = problem(2)
    still = learn(steps=3, base_lr=1e-12)
    start = merge_state_dicts(data["base"], data["models"], method="task_arithmetic", scale=0.3)
    assert_states_close(dict(still.base), start, rtol=1e-5, atol=1e-6)
    assert all(parts.G.any() for parts in still.factors.values())
    moved = learn(steps=3, lr=1e-12, base_lr=1e-2)
    assert not torch.allclose(moved.base["0.weight"], start["0.weight"], atol=1e-3)
    assert all(parts.G.abs().max() < 1e-9 for parts in moved.factors.values())
    with pytest.raises(ParameterError, match=r"^base_lr must be a number > 0; got 0\.$"):
        learn(base_lr=0)


@pytest.mark.parametrize("scalarization", ["smooth_tchebycheff", "linear"])
def test_what_is_learned_is_what_a_plain_loop_learns(scalarization):
    """The method's equations written out once more, with every setting off its default."""
    data, tasks = problem(2)
    base, models = data["base"], list(data["models"].values())
    lr, base_lr, rank, steps, mu, ideal, n_preferences = 3e-3, 1e-2, 3, 4, 0.3, 0.2, 2
    pareto = learn(
        steps=steps, lr=lr, base_lr=base_lr, smoothing=mu, ideal=ideal, n_preferences=n_preferences, concentration=2.0,
        scalarization=scalarization, random_state=5,
    )  # fmt: skip
    rng = numpy_generator(5)
    coefficients = {name: torch.full((2,), 0.3, requires_grad=True) for name in base}
    factors, units = {}, {}
    for name in ("0.weight", "3.weight"):
        A, B = (np.linalg.qr(rng.standard_normal((side, rank)))[0] for side in base[name].shape)
        parts = torch.tensor(A).float(), torch.tensor(B).float(), torch.zeros(2, rank, rank)
        factors[name] = [part.requires_grad_() for part in parts]
        units[name] = sum(torch.linalg.svdvals(model[name] - base[name])[0] for model in models) / 2 / rank

    def state(preference):
        merged = {}
        for name, start in base.items():
            merged[name] = start + sum(c * (m[name] - start) for c, m in zip(coefficients[name], models, strict=True))
            if name in factors:
                A, B, G = factors[name]
                core = sum(float(share) * core for share, core in zip(preference, G, strict=True))
                merged[name] = merged[name] + units[name] * A @ core @ B.T
        return merged

    def entropy(name, merged, batch):
        p = tasks["heads"][name](torch.func.functional_call(data["model"], merged, (batch,))).softmax(1)
        return -(p * p.log()).sum(1).mean()

    batches = {name: itertools.cycle(tasks["batches"][name]) for name in data["models"]}
    scale = [sum(entropy(n, state([1, 0]), b) for b in tasks["batches"][n]).item() / 3 for n in batches]
    optimizer = torch.optim.Adam(
        [
            {"params": list(coefficients.values()), "lr": base_lr},
            {"params": [part for parts in factors.values() for part in parts], "lr": lr},
        ]
    )
    for _ in range(steps):
        loss = 0.0
        for preference in rng.dirichlet([2.0, 2.0], size=n_preferences):
            merged = state(preference)
            values = [entropy(name, merged, next(batches[name])) / s for name, s in zip(batches, scale, strict=True)]
            weighted = [share * (value - ideal) for share, value in zip(preference.tolist(), values, strict=True)]
            if scalarization == "linear":
                loss = loss + sum(weighted) / n_preferences
            else:
                loss = loss + mu * sum((w / mu).exp() for w in weighted).log() / n_preferences
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for preference in ([1, 0], [0.3, 0.7]):
        expected = {name: tensor.detach() for name, tensor in state(preference).items()}
        assert_states_close(pareto.state_dict(preference), expected, rtol=1e-4, atol=1e-5)


def test_fits_ignore_that_gradients_are_off():
    plain, data_free = learn(), fit_pareto_set(*task_models(), rank=3, random_state=0)
    with torch.no_grad():
        assert same_state(learn().state_dict([1, 2]), plain.state_dict([1, 2]))
        again = fit_pareto_set(*task_models(), rank=3, random_state=0)
    assert same_state(again.state_dict([1, 2, 3]), data_free.state_dict([1, 2, 3]))


def test_preferences_per_step_are_averaged():
    """One step's gradient with n preferences is the mean of theirs: Adam's first moment shows it."""
    losses = []
    learn(steps=1, n_preferences=64, scalarization="linear", callback=lambda event: losses.append(event.values["loss"]))
    assert losses[0] == pytest.approx(1.0, abs=0.15)  # Σ γ_k S_k(start)/S_k(start) = 1, up to the batch of the step


def test_batches_start_over_and_it_is_said_once(caplog):
    with caplog.at_level(logging.INFO, logger="heedful"):
        learn(steps=8)
    said = [record.message for record in caplog.records if "start over" in record.message]
    assert said == [
        f"The batches of {name} have ended after 3, and start over whenever they do." for name in ("math", "code")
    ]


def test_bad_tasks_are_explained():
    data, tasks = problem(2)
    settings = {"rank": 2, "steps": 2}

    def fit(**changes):
        return fit_pareto_set_unlabelled(**data, **{**tasks, **settings, **changes})

    only = {"math": tasks["batches"]["math"]}
    with pytest.raises(InputError, match=r"^batches has nothing for code\. Give one for each of math, code\.$"):
        fit(batches=only)
    with pytest.raises(InputError, match=r"^heads has nothing for code\. Give one for each of math, code\.$"):
        fit(heads={"math": tasks["heads"]["math"]})
    labelled = {name: [(batch, torch.zeros(8)) for batch in batches] for name, batches in tasks["batches"].items()}
    with pytest.raises(
        InputError, match=r"^A batch of math is a tuple of 2; are there labels in it\? Give inputs alone"
    ):
        fit(batches=labelled)
    mapped = {name: [{"input": batch, "labels": 0} for batch in batches] for name, batches in tasks["batches"].items()}
    with pytest.raises(
        InputError, match=r"^A batch of math has labels, which are not used\. Give the model's inputs alone\.$"
    ):
        fit(batches=mapped)
    with pytest.raises(InputError, match=r"^A batch of math is a str\. Give a tensor, or a mapping"):
        fit(batches={name: ["text"] for name in tasks["batches"]})
    with pytest.raises(InputError, match=r"^batches\['math'\] is empty\. Give a list of batches or a DataLoader\.$"):
        fit(batches={**tasks["batches"], "math": []}, normalize=False)
    with pytest.raises(InputError, match=r"^batches\['math'\] has ended and cannot be started over\."):
        fit(batches={**tasks["batches"], "math": iter(tasks["batches"]["math"])}, steps=9, normalize=False)
    with pytest.raises(
        InputError, match=r"^The head of math has one class, and the entropy of its predictions is 0 for ever"
    ):
        fit(heads={name: nn.Linear(8, 1) for name in NAMES})
    with pytest.raises(InputError, match=r"^The head of math returned a tuple, not the logits\."):
        fit(heads=lambda name, output: (output,))
    with (
        as_users_have_it(),
        pytest.raises(
            ParameterError, match=r'^objective must be "entropy" or a function of the logits; got \'margin\'\.$'
        ),
    ):
        fit(objective="margin")
    with pytest.raises(
        InputError, match=r"^normalize=True divides each objective by its value at the start.*got math -1, code -1"
    ):
        fit(objective=lambda logits: logits.sum() * 0 - 1)
    with pytest.raises(
        ConvergenceError, match=r"^The loss is nan at step 1 with the preference \[0\.\d+, 0\.\d+\]; the objectives"
    ):
        fit(objective=lambda logits: logits.sum() * math.nan, normalize=False)
    with pytest.raises(InputError, match=r"^The model lacks 2 tensors of the base, the first 3\.weight, 3\.bias\."):
        fit_pareto_set_unlabelled(nn.Sequential(*network()[:3]), data["base"], data["models"], **tasks, rank=2)
    with pytest.raises(InputError, match=r"^A Pareto set needs two models or more, got 1"):
        fit_pareto_set_unlabelled(data["model"], data["base"], {"math": data["models"]["math"]}, **tasks)


def learn_on_rank(rank, n_ranks):
    """Each rank has half of every batch and another seed; together they are one process with whole batches."""
    torch.manual_seed(rank)
    data, tasks = problem(2)
    tasks["batches"] = {
        name: [batch.chunk(n_ranks)[rank] for batch in batches] for name, batches in tasks["batches"].items()
    }
    pareto = fit_pareto_set_unlabelled(**data, **tasks, rank=3, steps=6, lr=1e-2, random_state=7 + rank)
    return {name: tensor.tolist() for name, tensor in pareto.state_dict([2, 1]).items()}


@pytest.mark.slow
def test_two_ranks_with_half_the_batches_each_learn_what_one_process_learns_with_all():
    first, second = on_two_ranks(learn_on_rank, WORLD)
    assert first == second
    data, tasks = problem(2)
    seed = int(numpy_generator(7).integers(2**63))  # what rank 0 tells the others
    alone = fit_pareto_set_unlabelled(**data, **tasks, rank=3, steps=6, lr=1e-2, random_state=seed)
    for name, tensor in alone.state_dict([2, 1]).items():
        torch.testing.assert_close(torch.tensor(first[name]), tensor, rtol=1e-3, atol=1e-4)  # Adam enlarges roundings


# AdaMerging.


def test_adamerging_of_one_model_minimises_entropy_over_one_coefficient_per_layer():
    data, tasks = problem(1)
    merged = adamerging(**data, **tasks, steps=4, lr=0.05)

    coefficients = {name: torch.tensor(0.3, requires_grad=True) for name in data["base"]}
    optimizer = torch.optim.Adam(list(coefficients.values()), lr=0.05)
    (model,) = data["models"].values()

    def state():
        return {name: t + coefficients[name] * (model[name] - t) for name, t in data["base"].items()}

    for batch in itertools.islice(itertools.cycle(tasks["batches"]["math"]), 4):
        logits = tasks["heads"]["math"](torch.func.functional_call(data["model"], state(), (batch,)))
        p = torch.softmax(logits, 1)
        loss = -(p * p.log()).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert_states_close(merged, {name: tensor.detach() for name, tensor in state().items()}, rtol=1e-4, atol=1e-5)


def test_gradients_of_layer_wise_coefficients_are_the_finite_differences(seed):
    data, tasks = problem(2, seed)
    data["model"].double()
    for state in (data["base"], *data["models"].values()):
        state.update({name: tensor.double() for name, tensor in state.items()})
    batches = {name: [batches[0].double()] for name, batches in tasks["batches"].items()}
    heads = {name: head.double() for name, head in tasks["heads"].items()}
    sources = Sources(
        open_state_dict(data["base"], "the base"), open_models(data["models"]), start="task_arithmetic",
        start_scale=0.3, include=None, exclude=(),
    )  # fmt: skip
    merged = LearnedMerge(sources, data["model"], each_tensor=True, learned=True)
    merged.coefficients = merged.coefficients.detach().double().requires_grad_()
    assert merged.coefficients.shape == (2, 6)

    def loss(coefficients):
        merged.coefficients = coefficients
        logits = [
            heads[n](torch.func.functional_call(data["model"], merged.state(), (batches[n][0],))) for n in batches
        ]
        return sum(-(x.softmax(1) * x.log_softmax(1)).sum(1).mean() for x in logits)

    assert torch.autograd.gradcheck(loss, (merged.coefficients,))
    merged.coefficients = torch.full((2, 6), 0.3, dtype=torch.float64)
    with TaskObjectives(data["model"], tuple(batches), batches, heads, "entropy") as objectives:
        value = objectives(merged.state()).sum().item()
    assert value == pytest.approx(loss(merged.coefficients).item(), rel=1e-5)  # entropies are computed in float32


def test_task_wise_adamerging_has_one_coefficient_per_model_and_preferences_weigh_tasks():
    data, tasks = problem(2)
    merged = adamerging(**data, **tasks, coefficients="task", steps=5, lr=0.05)
    found = []
    for name, tensor in merged.items():
        vectors = torch.stack([(m[name] - data["base"][name]).flatten() for m in data["models"].values()])
        found.append(torch.linalg.lstsq(vectors.T, (tensor - data["base"][name]).flatten()).solution)
    for shares in found[1:]:
        torch.testing.assert_close(shares, found[0], rtol=1e-3, atol=1e-4)
    one = adamerging(**data, **tasks, preference={"math": 1}, steps=40, lr=0.05)
    other = adamerging(**data, **tasks, preference={"code": 1}, steps=40, lr=0.05)
    parts = (data, tasks)
    assert entropies(parts, one)[0] < entropies(parts, other)[0]
    assert entropies(parts, other)[1] < entropies(parts, one)[1]


def test_learning_by_regression_works_with_an_objective_of_ones_own():
    data, tasks = problem(2)
    merged = adamerging(**data, **tasks, objective=lambda y: mse_loss(y, torch.zeros_like(y)), steps=3)
    assert merged.keys() == data["base"].keys()
