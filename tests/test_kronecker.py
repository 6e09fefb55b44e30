"""Triangular factors, against what they must multiply to, and what damping and Kronecker products must do to them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heedful._kronecker import upper_cholesky
from heedful.errors import ConvergenceError, ParameterError
from tests.conformance.typechecks import as_users_have_it


def second_moments(*shape, seed=0, samples=3):
    """Positive definite, [*batch, n, n]; with fewer samples than one an entry, singular."""
    x = torch.randn(
        *shape, int(samples * shape[-1]), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return x @ x.mT / x.shape[-1]


@settings(max_examples=30)
@given(n=st.integers(1, 40), seed=st.integers(0, 99))
def test_it_is_upper_triangular_with_the_damped_matrix_as_its_square(n, seed):
    h = second_moments(2, n, seed=seed)
    r = upper_cholesky(h, damping=0.1)
    damped = h + 0.1 * h.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] * torch.eye(n)
    assert torch.equal(r, r.triu())
    assert (r.diagonal(dim1=-2, dim2=-1) > 0).all()
    torch.testing.assert_close(r @ r.mT, damped, rtol=1e-12, atol=1e-12)


def test_its_inverse_is_the_upper_factor_of_the_inverse(seed):
    h = second_moments(30, seed=seed)
    expected = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
    torch.testing.assert_close(torch.linalg.inv(upper_cholesky(h, damping=0)), expected, rtol=1e-9, atol=1e-9)


def test_the_factor_of_a_kronecker_product_is_the_product_of_the_factors(seed):
    rows, cols = second_moments(6, seed=seed), second_moments(9, seed=seed + 1)
    both = upper_cholesky(torch.kron(rows, cols), damping=0)
    apart = torch.kron(upper_cholesky(rows, damping=0), upper_cholesky(cols, damping=0))
    torch.testing.assert_close(both, apart, rtol=1e-10, atol=1e-10)
    inverse = torch.linalg.cholesky(torch.linalg.inv(torch.kron(rows, cols)), upper=True)
    torch.testing.assert_close(torch.linalg.inv(apart), inverse, rtol=1e-9, atol=1e-9)


def test_scaling_the_matrix_scales_the_factor():
    h = second_moments(5)
    torch.testing.assert_close(upper_cholesky(64 * h), upper_cholesky(h) * 8, rtol=0, atol=0)  # powers of two are exact


def test_a_matrix_that_fails_is_damped_again_and_its_neighbours_are_not():
    sound, indefinite = second_moments(4), torch.diag(torch.tensor([-0.025, 1, 1, 1], dtype=torch.float64))
    r = upper_cholesky(torch.stack([sound, indefinite]), damping=0.01)
    assert torch.equal(r[0], upper_cholesky(sound, damping=0.01))
    step = 0.01 * indefinite.diagonal().mean()
    added = 4 * step  # the least multiple of 0.0074 above 0.025
    torch.testing.assert_close(r[1].diagonal(), (indefinite.diagonal() + added).sqrt(), rtol=1e-12, atol=0)


def test_eleven_times_the_damping_is_the_end():
    indefinite = torch.diag(torch.tensor([-0.5, 1.0, 1.0, 1.0]))
    message = "a 4 x 4 matrix is not positive definite, not even with 11 times the damping of 0.01 of its mean diagonal"
    with pytest.raises(ConvergenceError, match=message):
        upper_cholesky(indefinite, damping=0.01)
    assert upper_cholesky(indefinite, damping=0.01, retries=80).isfinite().all()


@pytest.mark.parametrize("wrong", [{"damping": -0.1}, {"damping": "0.1"}, {"retries": -1}, {"retries": 1.5}])
def test_wrong_settings_are_refused(wrong):
    with as_users_have_it(), pytest.raises(ParameterError, match=f"{next(iter(wrong))} must be"):
        upper_cholesky(torch.eye(2), **wrong)


def test_what_it_is_given_stays_as_it_is():
    h = second_moments(3)
    before = h.clone()
    upper_cholesky(h)
    assert torch.equal(h, before)
