"""The Kronecker factors: exact where they claim to be, and the same however they are gathered."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as rotate_in_part
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_all

from heedful._decoders import describe_decoder, record_attention
from heedful.compress import AttentionFactors, attention_factors
from heedful.compress.boa.factors import AttentionStatistics, RunningGram, rotate
from heedful.compress.boa.solve import _kron_loss as kron_loss
from heedful.errors import InputError
from tests.conformance.typechecks import as_users_have_it
from tests.decoders import decoder, tokens

EXACT = {"rtol": 1e-12, "atol": 1e-14}  # a few hundred float64 roundings


def draw(*shape, seed, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def angles(length, rotated, *, seed, sequences=1):
    half = draw(sequences, length, rotated // 2, seed=seed)
    return torch.cat([half, half], -1).cos(), torch.cat([half, half], -1).sin()


def layer(seed, *, n=2, heads=4, kv_heads=4, length=7, dim=6, features=10, dtype=torch.float64):
    """query, key, inputs, attention, output weight of one layer."""
    query = draw(n, heads, length, dim, seed=seed, dtype=dtype)
    key = draw(n, kv_heads, length, dim, seed=seed + 1, dtype=dtype)
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    probs = (query @ key.repeat_interleave(heads // kv_heads, 1).mT).masked_fill(~mask, -torch.inf).softmax(-1)
    x = draw(n, length, features, seed=seed + 2, dtype=dtype)
    return query, key, x, probs, draw(features, heads * dim, seed=seed + 3, dtype=dtype)


def test_the_value_factors_are_the_error_of_the_output(seed):
    query, key, x, probs, out = layer(seed)
    factors = attention_factors(query, key, x, probs, out)
    delta = draw(4, 6, 10, seed=seed + 4)
    for head in range(4):
        moved = probs[:, head] @ x @ delta[head].T @ out[:, 6 * head : 6 * head + 6].T
        torch.testing.assert_close(kron_loss(delta, *factors.value)[head], moved.square().sum() / 14, **EXACT)


@pytest.mark.parametrize("family", ["llama", "opt", "gpt_neox"])
def test_the_value_factors_are_the_error_of_a_real_attention(family):
    changes = {"num_key_value_heads": 4} if family == "llama" else {}
    model = decoder(family, dtype=torch.float64, **changes)
    part = describe_decoder(model).layers[0]
    inputs, outputs = [], []
    part.v.linear.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    part.o.linear.register_forward_hook(lambda module, args, out: outputs.append(out))
    with torch.no_grad(), record_attention(model) as calls:
        model.base_model(tokens(2))
        call = calls[0]
        statistics = AttentionStatistics()
        statistics.update(call.query, call.key, inputs[0], call.probs)
        factor = statistics.factors(part.o.weight).value
        delta = draw(*part.v.weight.unflatten(0, (4, -1)).shape, seed=0)
        delta[[0, 1, 3]] = 0  # one head
        rows = torch.arange(len(part.v.weight)) if part.v.rows is None else part.v.rows
        part.v.linear.weight[rows] += delta.flatten(0, 1)
        model.base_model(tokens(2))
    moved = outputs[1] - outputs[0]
    # 1e-7: the model's cosines are in float32, and its kernel sums in another order.
    torch.testing.assert_close(kron_loss(delta, *factor).sum(), moved.square().sum() / 24, rtol=1e-7, atol=0)


def test_query_and_key_factors_are_the_error_over_all_pairs(seed):
    query, key, x, probs, out = layer(seed, n=1)
    factors = attention_factors(query, key, x, probs, out)
    delta = draw(4, 6, 10, seed=seed + 4)
    for found, other in ((factors.query, key), (factors.key, query)):
        for head in range(4):
            pairs = sum((other[0, head, m] @ delta[head] @ x[0, i]).square() for m in range(7) for i in range(7))
            torch.testing.assert_close(kron_loss(delta, *found)[head], pairs / 49, **EXACT)


def test_query_and_key_factors_are_the_error_over_all_pairs_when_rotated_alike(seed):
    query, key, x, probs, out = layer(seed, n=1, length=1)
    rope = angles(1, 6, seed=seed)
    factors = attention_factors(query, key, x, probs, out, rope=rope)
    delta = draw(4, 6, 10, seed=seed + 4)
    for found, other in ((factors.query, key), (factors.key, query)):
        moved = rotate((delta @ x[0].T).mT[None], rope)  # R ΔW x
        expected = (moved * other).sum(-1).square()[0, :, 0]
        torch.testing.assert_close(kron_loss(delta, *found), expected, **EXACT)


@pytest.mark.parametrize("rotated", [0, 2, 6])
@pytest.mark.parametrize("sequences", [1, 2])
def test_the_row_factor_is_the_mean_over_positions_of_what_rotates_back(seed, rotated, sequences):
    query, key, x, probs, out = layer(seed)
    rope = angles(7, rotated, seed=seed, sequences=sequences)
    factors = attention_factors(query, key, x, probs, out, rope=rope)
    for found, other in ((factors.query, key), (factors.key, query)):
        expected = torch.zeros(4, 6, 6, dtype=torch.float64)
        for i in range(2):
            for position in range(7):
                here = tuple(part[[i % sequences], position, None] for part in rope)
                turn = rotate(torch.eye(6, dtype=torch.float64)[None, :, None], tuple(here)).squeeze().T
                expected += turn.T @ (other[i].mT @ other[i]) @ turn / (7 * 14)
        torch.testing.assert_close(found.h_row, expected, **EXACT)


def test_rotation_is_that_of_the_models(seed):
    query, key, *_ = layer(seed)
    full, part = angles(7, 6, seed=seed), angles(7, 4, seed=seed)
    for rope, theirs in ((full, rotate_all), (part, rotate_in_part)):
        for mine, other in zip((rotate(query, rope), rotate(key, rope)), theirs(query, key, *rope), strict=True):
            torch.testing.assert_close(mine, other, **EXACT)


def test_heads_that_share_keys_and_values_take_the_mean_of_their_group(seed):
    query, key, x, probs, out = layer(seed, heads=6, kv_heads=2)
    shared = attention_factors(query, key, x, probs, out)
    alone = attention_factors(query, key.repeat_interleave(3, 1), x, probs, out)
    torch.testing.assert_close(shared.query.h_row, alone.query.h_row, **EXACT)
    for mine, theirs in (
        (shared.key.h_row, alone.key.h_row),
        (shared.value.h_row, alone.value.h_row),
        (shared.value.h_col, alone.value.h_col),
    ):
        assert len(mine) == 2
        torch.testing.assert_close(mine, theirs.unflatten(0, (2, 3)).mean(1), **EXACT)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 2**31))
def test_factors_of_batches_are_those_of_all_at_once(sizes, seed):
    query, key, x, probs, out = layer(seed, n=sum(sizes), kv_heads=2)
    rope = angles(7, 4, seed=seed)
    together = attention_factors(query, key, x, probs, out, rope=rope)
    statistics = AttentionStatistics()
    parts = (t.split(sizes) for t in (query, key, x, probs))
    for q, k, some, attention in zip(*parts, strict=True):
        statistics.update(q, k, some, lambda head, attention=attention: attention[:, head], rope=rope)
    for mine, theirs in zip(statistics.factors(out), together, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, **EXACT)


def test_sequences_of_different_lengths_count_by_their_tokens(seed):
    statistics, gram = AttentionStatistics(), RunningGram()
    longer, shorter = layer(seed, n=1, length=9), layer(seed + 9, n=1, length=3)
    for query, key, x, probs, _ in (longer, shorter):
        statistics.update(query, key, x, lambda head, probs=probs: probs[:, head])
        gram.update(x[0])
    alone = [attention_factors(*part[:4], longer[4]) for part in (longer, shorter)]
    mixed = statistics.factors(longer[4])
    for name in AttentionFactors._fields:
        for a, b, c in zip(getattr(mixed, name), *(getattr(one, name) for one in alone), strict=True):
            torch.testing.assert_close(a, (9 * b + 3 * c) / 12, **EXACT)
    assert gram.count == 12
    torch.testing.assert_close(gram.mean, mixed.query.h_col, **EXACT)


def test_values_can_be_measured_without_attention_or_without_the_output(seed):
    query, key, x, _, out = layer(seed)
    statistics = AttentionStatistics(value_hessian="shared", value_rows="identity")
    statistics.update(query, key, x, lambda head: pytest.fail("attention was computed"))
    factors = statistics.factors(out)
    assert factors.value.h_row is None
    assert factors.value.h_col is factors.query.h_col
    torch.testing.assert_close(factors.query.h_col, x.flatten(0, 1).T @ x.flatten(0, 1) / 14, **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(seed, dtype):
    given_ = [t.to(dtype) for t in layer(seed, length=64)]
    found, exact = attention_factors(*given_), attention_factors(*(t.double() for t in given_))
    for mine, theirs in zip(found, exact, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert a.dtype == torch.float32
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)  # float32 sums of 128 products


def test_query_heads_must_share_keys_evenly():
    query, key, x, probs, out = layer(0)
    with pytest.raises(InputError, match="4 query heads cannot share 3 heads of keys evenly"):
        attention_factors(query, key[:, :3], x, probs, out)


def test_shapes_of_another_layer_are_refused():
    query, key, x, probs, out = layer(0)
    rope = angles(7, 6, seed=0)
    with as_users_have_it():
        for changed, message in (
            ({"query": query[0]}, r"query must have shape \(batch, heads, length, head_dim\), none 0; got \(4, 7, 6\)"),
            ({"query": query[:0]}, r"none 0; got \(0, 4, 7, 6\)"),
            (
                {"key": key[:1]},
                r"key must have shape \(2, 4, 7, 6\) beside a query of shape \(2, 4, 7, 6\); got \(1, 4, 7, 6\)",
            ),
            ({"value_inputs": x[:, :5]}, r"value_inputs must have shape \(2, 7, 10\)"),
            ({"attention_probs": probs[:, :1]}, r"attention_probs must have shape \(2, 4, 7, 7\)"),
            ({"attention_probs": torch.cat([probs, probs], 1)}, r"attention_probs must have .*; got \(2, 8, 7, 7\)"),
            ({"out_weight": out[:, :12]}, r"out_weight must have shape \(10, 24\)"),
            ({"rope": tuple(part[:, :1] for part in rope)}, r"rope must have shape \(1, 7, 6\)"),
            ({"rope": angles(7, 8, seed=0)}, r"rope must have shape \(1, 7, 6\) .*; got \(1, 7, 8\)"),
        ):
            given_ = {
                "query": query,
                "key": key,
                "value_inputs": x,
                "attention_probs": probs,
                "out_weight": out,
                "rope": rope,
            }
            with pytest.raises(InputError, match=message):
                attention_factors(**given_ | changed)
