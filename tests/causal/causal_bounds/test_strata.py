import re

import matplotlib
import numpy as np
import pandas as pd
import pytest

from heedful.causal import conditional_bounds, covariate_bounds
from heedful.errors import InputError, ParameterError

ESTIMANDS = ("effect_second_moment", "effect_variance", "correlation", "prob_benefit", "effect_cdf", "product")


def ends(found):
    return np.array([found.lower, found.upper])


def stratified_trial(seed, sizes=(6, 9, 5)):
    """As many controls as treated units in each stratum."""
    rng = np.random.default_rng(seed)
    strata = np.repeat(np.arange(len(sizes)), 2 * np.array(sizes))
    treated = np.concatenate([np.arange(2 * size) % 2 for size in sizes])
    return strata * (1 + treated) + rng.normal(size=len(strata)), treated, strata


@pytest.mark.parametrize("name", [*ESTIMANDS, "neyman_variance", lambda y0, y1: np.abs(y0 - y1)])
def test_strata_are_what_a_large_eta_tends_to(name, seed):
    """Exact penalty: beyond a finite price no mass crosses strata."""
    y, treated, strata = stratified_trial(seed)
    exact = conditional_bounds(y, treated, strata, estimand=name)
    for eta in (1e5, np.inf):
        found = covariate_bounds(y, treated, strata.astype(float), estimand=name, eta=eta)
        np.testing.assert_allclose(ends(found), ends(exact), rtol=1e-9, atol=1e-9)
        assert found.path["mismatch_lower"] == pytest.approx(0, abs=1e-12)
    np.testing.assert_allclose(
        [exact.lower_blind, exact.upper_blind], [found.lower_blind, found.upper_blind], rtol=1e-9
    )
    assert exact.lower_blind - 1e-9 <= exact.lower <= exact.upper <= exact.upper_blind + 1e-9


@pytest.mark.parametrize("name", ESTIMANDS)
def test_one_stratum_is_blind(name, seed):
    y, treated, _ = stratified_trial(seed)
    found = conditional_bounds(y, treated, np.full(len(y), "all"), estimand=name)
    np.testing.assert_allclose(ends(found), ends(covariate_bounds(y, treated, estimand=name)), rtol=1e-9)
    assert found.eta_lower == np.inf
    (note,) = found.notes
    assert note.startswith(
        "Exact within 1 strata, in which treatment is taken to be assigned at random. If it was chosen"
    )


def test_neymans_variance_refuses_strata_that_were_treated_in_unequal_shares():
    y, treated, strata = np.arange(8.0), np.array([0, 0, 0, 1, 0, 1, 1, 1]), [*"aaaabbbb"]
    with pytest.raises(
        ParameterError, match="no estimate of the effect where propensities differ, between units or strata"
    ):
        conditional_bounds(y, treated, strata, estimand="neyman_variance")
    conditional_bounds(y, [0, 0, 1, 1, 0, 0, 1, 1], strata, estimand="neyman_variance")


def test_a_mean_over_strata_of_what_each_says_alone(seed):
    y, treated, strata = stratified_trial(seed)
    parts = [covariate_bounds(y[strata == s], treated[strata == s], estimand="effect_second_moment") for s in range(3)]
    expected = np.average([ends(part) for part in parts], axis=0, weights=[12, 18, 10])
    np.testing.assert_allclose(ends(conditional_bounds(y, treated, strata, estimand="effect_second_moment")), expected)


def test_strata_count_as_often_as_they_occur_whatever_the_share_treated_in_each():
    """A block-randomised trial, of which the arms have different shares of the strata."""
    y = np.array([0.0, 0.0, 0.0, 1.0, 10.0, 15.0, 15.0, 15.0])
    treated = [0, 0, 0, 1, 0, 1, 1, 1]
    found = conditional_bounds(y, treated, [*"aaaabbbb"], estimand="effect_second_moment")
    assert ends(found).tolist() == [(1 + 25) / 2] * 2
    variance = conditional_bounds(y, treated, [*"aaaabbbb"])
    np.testing.assert_allclose(ends(variance), 4)  # effects 1 and 5, in halves of the units


@pytest.mark.parametrize(
    "relabel",
    [
        lambda s: s - 7.5,
        lambda s: np.array([*"xzy"])[s],
        lambda s: np.array([f"stratum {i}" if i else i for i in s], dtype=object),
        lambda s: pd.Series(s).astype("category"),
    ],
)
def test_names_of_strata_are_nothing(relabel):
    y, treated, strata = stratified_trial(0)
    found = conditional_bounds(y, treated, relabel(strata))
    np.testing.assert_allclose(ends(found), ends(conditional_bounds(y, treated, strata)), rtol=1e-12)


def test_a_report_is_a_picture_too():
    matplotlib.use("Agg")
    ax = conditional_bounds(*stratified_trial(0)).plot()
    assert ax.get_xlabel() == "η"
    matplotlib.pyplot.close("all")


# Bad input


@pytest.mark.parametrize(
    ("strata", "message"),
    [
        ([1, 1, 1, 2], "Every stratum needs units of both arms; no control unit is in 2. Merge strata."),
        ([1, 1], "strata must be one label a unit, 4 as in outcome; got shape (2,)."),
        ([1.0, np.nan, 1.0, np.nan], "strata miss 2 of 4 labels. Remove those units or give them one."),
        (np.array(["a", None, "a", "a"], dtype=object), "strata miss 1 of 4 labels."),
        (pd.Series(["a", pd.NA, "a", "a"], dtype="string"), "strata miss 1 of 4 labels."),
        (np.ones((4, 1)), "strata must be one label a unit, 4 as in outcome; got shape (4, 1)."),
    ],
)
def test_wrong_strata_are_refused_in_words(strata, message):
    with pytest.raises(InputError, match=re.escape(message)):
        conditional_bounds([0.0, 1.0, 2.0, 3.0], [0, 1, 0, 1], strata)


def test_the_rest_is_refused_as_elsewhere():
    with pytest.raises(InputError, match="Bounds need units in both arms"):
        conditional_bounds([0.0, 1.0], [1, 1], [0, 0])
    with pytest.raises(ParameterError, match="estimand must be one of"):
        conditional_bounds([0.0, 1.0], [0, 1], [0, 0], estimand="ate")
