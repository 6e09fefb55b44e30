"""What may be subtracted from what, and the sums that every method stands on."""

import re
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heedful.errors import HeedfulWarning, InputError, ParameterError
from heedful.merge import merge_state_dicts
from heedful.merge._task_vectors import (
    norm_order,
    one_each,
    open_models,
    open_state_dict,
    read,
    require_same_tensors,
    select_names,
    warn_of_copies,
    weighted_sum,
)
from tests.conformance.typechecks import as_users_have_it

BASE = {"a.weight": torch.ones(2, 3), "a.bias": torch.ones(3), "steps": torch.tensor(3)}


def changed(**tensors):
    """The base with other tensors; None takes one away."""
    state = {name: x + 0.5 if x.is_floating_point() else x for name, x in BASE.items()}
    state |= {name.replace("_", "."): x for name, x in tensors.items()}
    return {name: x for name, x in state.items() if x is not None}


def same(base, *models, exclude=()):
    return require_same_tensors(open_state_dict(base, "the base"), open_models(models), exclude)


def test_floating_point_tensors_are_merged_unless_excluded():
    assert same(BASE, changed(), changed()) == ["a.weight", "a.bias"]
    assert same(BASE, changed(), exclude=["*.bias"]) == ["a.weight"]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (changed(a_bias=None), r"lacks a\.bias\."),
        (changed(b=torch.ones(1)), r"has besides b\."),
        (
            changed(a_bias=None, **{f"x{i}": torch.ones(1) for i in range(7)}),
            r"lacks a\.bias and has besides x0, x1, x2, x3, x4 and 2 more\.",
        ),
    ],
)
def test_other_names_are_told_both_ways(model, message):
    message = rf"^models\[1\] and the base must have the same tensors; models\[1\] {message} .* goes into exclude, as "
    with pytest.raises(InputError, match=message):
        same(BASE, changed(), model)


def test_other_shapes_are_told_with_what_can_be_done():
    with pytest.raises(
        InputError,
        match=r"^a\.weight has shape \(4, 3\) in models\[0\], and \(2, 3\) in the base\. Give all models one vocabulary if "
        r"tokens were added, or leave it out: exclude=\['a\.weight'\]\.$",
    ):
        same(BASE, changed(a_weight=torch.ones(4, 3)))
    assert same(BASE, changed(a_weight=torch.ones(4, 3)), exclude=["a.weight"]) == ["a.bias"]


def test_other_types_are_told_and_computed_with_in_float32():
    half = changed(a_weight=torch.ones(2, 3).half() * 2, a_bias=torch.ones(3).bfloat16())
    message = (
        r"^a\.weight is torch\.float16 in models\[0\], and torch\.float32 in the base; 1 more differ\. The merge is computed "
        r"in float32 and takes the type of the base, or dtype\.$"
    )
    with pytest.warns(HeedfulWarning, match=message):
        merged = merge_state_dicts(BASE, [half], method="task_arithmetic")
    assert torch.equal(merged["a.weight"], torch.full((2, 3), 2.0))
    assert merged["a.bias"].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(dtype):
    codes = torch.ones(2, 3).to(dtype)
    with pytest.raises(
        InputError, match=r"^models\[0\] is quantised: a\.weight has dtype .*\. Give the model as it was"
    ):
        same(BASE, changed(a_weight=codes))
    with pytest.raises(InputError, match=r"^the base is quantised: a\.weight has dtype "):
        same(BASE | {"a.weight": codes}, changed())


def test_numbers_of_another_kind_are_refused():
    with pytest.raises(InputError, match=r"^a\.bias is torch\.int64 in models\[0\], and torch\.float32 in the base\.$"):
        same(BASE, changed(a_bias=torch.ones(3, dtype=torch.int64)))
    with pytest.raises(
        InputError, match=r"^a\.bias is torch\.complex64 in models\[0\], and torch\.complex64 in the base\.$"
    ):
        same(BASE | {"a.bias": torch.ones(3) * 1j}, changed(a_bias=torch.ones(3) * 1j))


def test_nothing_to_merge_is_refused():
    for models in ([], {}):
        with pytest.raises(InputError, match=r"^there are no models to merge\. Give at least one\.$"):
            merge_state_dicts(BASE, models)
    with pytest.raises(InputError, match=r"^there are no models to merge\. Give at least one\.$"):
        merge_state_dicts(None, [], method="linear")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_entries_that_are_not_finite_are_told_by_tensor_and_model(value):
    broken = torch.ones(2, 3)
    broken[1, 2] = value
    message = (
        r"has 1 entries that are NaN or infinite\. Train or download that model again, or leave the tensor out: "
        r"exclude=\['a\.weight'\]\.$"
    )
    with pytest.raises(InputError, match=rf"^a\.weight of models\[1\] {message}"):
        merge_state_dicts(BASE, [changed(), changed(a_weight=broken)])
    with pytest.raises(InputError, match=rf"^a\.weight of the base {message}"):
        merge_state_dicts(BASE | {"a.weight": broken}, [changed()])
    assert "a.weight" in merge_state_dicts(BASE, [changed(a_weight=broken)], exclude=["a.weight"])


def test_large_numbers_whose_sum_overflows_are_finite():
    x = torch.full((4,), 3e38)
    assert torch.equal(read(open_state_dict({"x": x}, "it"), "x", "it"), x)


def test_a_model_that_is_the_base_is_told():
    twin = {name: x.clone() for name, x in BASE.items()}
    with pytest.warns(
        HeedfulWarning, match=r"^models\[1\] equals the base: its task vector is zero, and it holds and adds"
    ):
        merge_state_dicts(BASE, [changed(), twin])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        merge_state_dicts(BASE, [changed(a_weight=BASE["a.weight"])])
        merge_state_dicts(BASE, [changed()], exclude=["*"])
        warn_of_copies(open_state_dict(BASE, "the base"), open_models([changed()]), ["a.weight"])


def test_names_are_chosen_by_name_glob_or_expression():
    names = ["layers.0.mlp.weight", "layers.10.mlp.weight", "head.weight", "head"]
    assert select_names(names, ["head"]) == {"head"}
    assert select_names(names, ["layers.?.*"]) == {"layers.0.mlp.weight"}
    assert select_names(names, [r"re:.*\.1\d\.", "head.*"]) == {"layers.10.mlp.weight", "head.weight"}
    assert select_names(names, []) == set()
    assert select_names(["blocks[0].weight", "blocks0.weight"], ["blocks[0].weight"]) == {
        "blocks[0].weight",  # the name itself
        "blocks0.weight",  # and as a glob
    }
    with pytest.raises(ParameterError, match=r"^'\(' is no regular expression: missing \)"):
        select_names(names, ["re:("])
    message = r"^tensors are chosen by a list of names, globs or re:…; got 'head\.\*'\. Give \['head\.\*'\]\.$"
    with pytest.raises(ParameterError, match=message):
        merge_state_dicts(BASE, [changed()], exclude="head.*")


def test_what_is_no_state_dict_is_refused():
    message = r"^the base must be a state dict, from names to tensors, such as model\.state_dict\(\); got Linear\("
    with as_users_have_it(), pytest.raises(InputError, match=message):
        open_state_dict(torch.nn.Linear(2, 2), "the base")
    with as_users_have_it(), pytest.raises(InputError, match=r"^a\.weight must be a state dict, .*; got tensor\("):
        open_models(BASE)  # one in the place of several


def test_an_exclusion_of_nothing_is_told():
    with pytest.warns(HeedfulWarning, match=r"^exclude: 'hed\.\*' is the name of no tensor\.$"):
        merge_state_dicts(BASE, [changed()], exclude=["hed.*"])


def test_order_by_norm_is_over_all_tensors_the_longest_first_and_stable():
    base = {"a": torch.zeros(2), "b": torch.zeros(2)}
    models = [
        {"a": torch.tensor([3.0, 0]), "b": torch.tensor([0.0, 0])},
        {"a": torch.tensor([0.0, 0]), "b": torch.tensor([0.0, 5])},
        {"a": torch.tensor([0.0, 3]), "b": torch.tensor([4.0, 0])},
    ]
    assert norm_order(open_state_dict(base, "the base"), open_models(models), ["a", "b"]) == [1, 2, 0]
    assert norm_order(open_state_dict(base, "the base"), open_models(models), ["a"]) == [0, 2, 1]


def test_one_value_stands_for_all_and_a_list_for_each():
    assert one_each(1.0, 3, "weight") == [1.0] * 3
    assert one_each("given", 2, "order") == ["given"] * 2
    assert (
        one_each((1, 2), 2, "n")
        == one_each(np.array([1, 2]), 2, "n")
        == one_each(torch.tensor([1, 2]), 2, "n")
        == [1, 2]
    )
    with pytest.raises(ParameterError, match=re.escape("n must be one value, or one for each of the 3 models; got 2")):
        one_each([1, 2], 3, "n")


# Sums.

numbers = st.lists(st.floats(-3, 3), min_size=3, max_size=3)


@given(rows=st.lists(numbers, min_size=1, max_size=4), scale=numbers, weight=numbers)
def test_weighted_sum_is_the_sum_written_out(rows, scale, weight):
    vectors = [torch.tensor(row, dtype=torch.float64) for row in rows]
    scale, weight = (scale * 2)[: len(rows)], (weight * 2)[: len(rows)]
    total = sum(s * w * v for s, w, v in zip(scale, weight, vectors, strict=True))
    torch.testing.assert_close(weighted_sum(vectors, scale, weight), total, rtol=1e-12, atol=1e-12)
    if abs(sum(weight)) > 1e-3:
        mean = weighted_sum(vectors, scale, weight, normalize=True)
        torch.testing.assert_close(mean, total / sum(weight), rtol=1e-9, atol=1e-9)


def test_weights_that_sum_to_zero_divide_nothing():
    vectors = [torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.0])]
    assert weighted_sum(vectors, [1.0, 1.0], [1.0, -1.0], normalize=True).tolist() == [0.5, 2.0]


def test_election_drops_what_disagrees_with_the_sign_of_the_sum():
    """Columns: agreement; a majority by size; a tie, which plus wins; a zero, which has no vote in the mean."""
    vectors = [torch.tensor([1.0, 3.0, 2.0, 0.0]), torch.tensor([2.0, -1.0, -2.0, 4.0])]
    assert weighted_sum(vectors, [1.0, 1.0], elect=True).tolist() == [3.0, 3.0, 2.0, 4.0]
    assert weighted_sum(vectors, [1.0, 1.0], elect=True, normalize=True).tolist() == [1.5, 3.0, 2.0, 4.0]
    assert weighted_sum(vectors, [1.0, 1.0], [1.0, 4.0], elect=True).tolist() == [9.0, -4.0, -8.0, 16.0]
    negative = weighted_sum(vectors, [1.0, 1.0], [-1.0, -1.0], elect=True, normalize=True)
    assert negative.tolist() == [1.5, 3.0, -2.0, 4.0]


@given(rows=st.lists(numbers, min_size=1, max_size=4))
def test_an_elected_sum_has_the_elected_sign_and_is_at_least_as_large(rows):
    vectors = [torch.tensor(row, dtype=torch.float64) for row in rows]
    plain, elected = (weighted_sum(vectors, [1.0] * len(rows), elect=elect) for elect in (False, True))
    slack = 1e-12  # roundings of sums in another order
    assert (plain * elected >= -slack).all()
    assert (elected.abs() >= plain.abs() - slack).all()


@given(row=numbers, weight=st.floats(0.01, 3))
def test_opposite_terms_cancel_in_an_election_and_plus_wins(row, weight):
    x = torch.tensor(row)
    for vectors in ([x, -x], [-x, x]):
        assert torch.equal(weighted_sum(vectors, [1.0, 1.0], [weight] * 2, elect=True), (x * weight).abs())


def test_vectors_are_taken_one_at_a_time_and_not_changed():
    seen = []

    def stream():
        for k in range(3):
            seen.append(k)
            yield torch.full((2,), float(k))

    assert weighted_sum(stream(), [1.0, 2.0, 3.0]).tolist() == [8.0, 8.0]
    assert seen == [0, 1, 2]
    x = torch.ones(2)
    weighted_sum([x, x], [2.0, 2.0])
    assert torch.equal(x, torch.ones(2))
