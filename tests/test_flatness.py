"""Flatness measures against dense Hessians and closed forms."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from heedful._flatness import batch_loss, device_generators, perturb_
from heedful.errors import ConvergenceError, HeedfulError, HeedfulWarning, InputError, ParameterError
from heedful.optim import flatness, hessian_eigenvalues, neighbourhood_loss


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def network(seed=0):
    """49 parameters, with batch normalisation and dropout, which evaluation mode must fix."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [nn.Linear(4, 5), nn.Tanh(), nn.BatchNorm1d(5, affine=False), nn.Dropout(0.5), nn.Linear(5, 4)]
        return nn.Sequential(*layers).double()


def data(n=24, seed=0):
    generator = seeded(seed)
    return torch.randn(n, 4, dtype=torch.float64, generator=generator), torch.randint(4, (n,), generator=generator)


def dense_hessian(model, inputs, targets):
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    shapes = [model.get_parameter(name).shape for name in names]
    flat = torch.cat([model.get_parameter(name).detach().flatten() for name in names])
    model.eval()

    def loss(vector):
        parts = vector.split([math.prod(shape) for shape in shapes])
        state = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        return cross_entropy(torch.func.functional_call(model, state, (inputs,)), targets)

    return torch.autograd.functional.hessian(loss, flat)


class Bowl(nn.Module):
    """L(θ) = ½ Σ h θ², whatever the batch."""

    def __init__(self, h, start=None):
        super().__init__()
        self.h = torch.as_tensor(h, dtype=torch.float64)
        self.w = nn.Parameter(
            torch.zeros_like(self.h) if start is None else torch.as_tensor(start, dtype=torch.float64)
        )

    def forward(self, inputs):
        return 0.5 * (self.h * self.w**2).sum().expand(len(inputs))


def mean(outputs, targets):
    return outputs.mean()


ONE_BATCH = [(torch.zeros(3, 1), torch.zeros(3))]


def test_eigenvalues_equal_those_of_the_dense_hessian(seed):
    model = network(seed)
    inputs, targets = data(seed=seed)
    expected = torch.linalg.eigvalsh(dense_hessian(model, inputs, targets)).flip(0)[:5]
    found = hessian_eigenvalues(model, cross_entropy, [(inputs, targets)], generator=seeded(seed))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(expected[0]))
    assert found.dtype == torch.float64


def test_eigenvalues_in_float32():
    inputs, targets = data()
    model = network()
    expected = torch.linalg.eigvalsh(dense_hessian(model, inputs, targets)).flip(0)[:2]
    found = hessian_eigenvalues(model.float(), cross_entropy, [(inputs.float(), targets)], k=2, generator=seeded())
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)
    assert found.dtype == torch.float32


def test_batches_of_unequal_length_are_one_large_batch():
    model, (inputs, targets) = network(), data()
    parts = ((inputs[a:b], targets[a:b]) for a, b in ((0, 3), (3, 20), (20, 24)))  # an iterator: read once
    settings = {"k": 3, "tol": 1e-9}
    whole = hessian_eigenvalues(model, cross_entropy, [(inputs, targets)], generator=seeded(), **settings)
    split = hessian_eigenvalues(model, cross_entropy, parts, generator=seeded(), **settings)
    torch.testing.assert_close(split, whole)


def test_frozen_parameters_are_left_out():
    model, (inputs, targets) = network(), data()
    model[0].weight.requires_grad_(False)
    expected = torch.linalg.eigvalsh(dense_hessian(model, inputs, targets)).flip(0)[:3]
    found = hessian_eigenvalues(model, cross_entropy, [(inputs, targets)], k=3, tol=1e-9, generator=seeded())
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("h", [[3.0, -1.0, 0.5], [7.0], [0.0, 0.0], [2.0, 2.0, 2.0]], ids=str)
def test_all_eigenvalues_of_small_and_degenerate_bowls(h):
    found = hessian_eigenvalues(Bowl(h), mean, ONE_BATCH, k=len(h), generator=seeded())
    torch.testing.assert_close(found, torch.tensor(h, dtype=torch.float64).sort(descending=True).values)


def test_a_loss_linear_in_the_weights_has_no_curvature():
    model = nn.Linear(3, 1, bias=False)
    found = hessian_eigenvalues(model, mean, [(torch.ones(2, 3), torch.ones(2))], k=2, generator=seeded())
    assert torch.equal(found, torch.zeros(2))


def test_too_few_iterations_are_told():
    bowl = Bowl(torch.linspace(1, 2, 200))
    with pytest.warns(
        HeedfulWarning, match=r"^hessian_eigenvalues: after 5 products the relative error bound is .*Raise"
    ):
        hessian_eigenvalues(bowl, mean, ONE_BATCH, k=5, max_iter=5, generator=seeded())


def test_measuring_leaves_the_model_and_the_global_generator_as_they_were():
    model, batch = network(), [data()]
    model[3].eval()  # modes of its own
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    hessian_eigenvalues(model, cross_entropy, batch, k=1, generator=seeded())
    neighbourhood_loss(model, cross_entropy, batch, std=0.1, n_samples=3, generator=seeded())
    flatness(model, cross_entropy, batch, [0.1, 1.0], n_samples=3, generator=seeded())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(state, torch.get_rng_state())


def test_the_model_comes_back_when_the_loss_raises():
    model, calls = network(), []
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def failing(outputs, targets):
        calls.append(None)
        return outputs.mean() / (1 if len(calls) < 3 else 1 // 0)

    with pytest.raises(ZeroDivisionError):
        neighbourhood_loss(model, failing, [data()], std=0.1, generator=seeded())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training


def test_neighbourhood_loss_of_a_bowl_has_the_mean_and_variance_of_theory():
    """½ Σ h ε² with ε ~ N(0, s²): mean ½ s² Σ h, variance ½ s⁴ Σ h²."""
    h = torch.linspace(0.1, 1.0, 200, dtype=torch.float64)
    found = neighbourhood_loss(Bowl(h), mean, ONE_BATCH, std=0.5, n_samples=2000, generator=seeded())
    expected, variance = 0.5 * 0.25 * h.sum(), 0.5 * 0.5**4 * (h**2).sum()
    assert found.mean == pytest.approx(float(expected), abs=4 * math.sqrt(variance / 2000))
    assert found.variance == pytest.approx(float(variance), rel=0.15)  # relative standard error √(2/2000), 3 %
    assert found.max == found.losses.max()
    assert found.losses.shape == (2000,)
    assert set(found.to_dict()) == {"mean", "variance", "max", "losses"}


def test_flatness_of_a_round_bowl_is_half_the_radius_squared():
    bowl = Bowl(torch.full((50,), 3.0))
    found = flatness(bowl, mean, ONE_BATCH, [0.1, 2.0], n_samples=5, generator=seeded())
    torch.testing.assert_close(found, torch.tensor([0.5 * 3 * 0.01, 0.5 * 3 * 4], dtype=torch.float64))


def test_flatness_of_a_bowl_is_its_mean_curvature(seed):
    """On a sphere of radius r in d dimensions E ε_i² = r²/d, wherever the centre is."""
    h, start = torch.tensor([1.0, 2.0, 6.0]), torch.tensor([0.3, -0.2, 0.1])
    found = flatness(Bowl(h, start), mean, ONE_BATCH, [0.5], n_samples=4000, generator=seeded(seed))
    assert found.item() == pytest.approx(0.5 * 3.0 * 0.25, abs=0.04)  # more than four standard errors


def test_flatness_at_no_radius_is_empty():
    assert flatness(Bowl([1.0]), mean, ONE_BATCH, []).shape == (0,)


def test_perturbation_spans_all_tensors_and_repeats():
    home = [torch.ones(3, 2), torch.full((4,), -1.0)]
    first, second = ([tensor.clone() for tensor in home] for _ in range(2))
    for tensors in (first, second):
        perturb_(tensors, home, device_generators(seeded(), tensors), lambda norm: torch.full_like(norm, 0.5))
    assert all(map(torch.equal, first, second))
    distance = torch.cat([(a - b).flatten() for a, b in zip(first, home, strict=True)]).norm()
    assert distance == pytest.approx(0.5, rel=1e-5)


def test_a_batch_is_a_pair_or_a_mapping():
    model = nn.Linear(2, 1)
    x, y = torch.ones(3, 2), torch.ones(3, 1)
    pair = batch_loss(model, mse_loss, (x, y))
    mapping = batch_loss(model, lambda output, batch: mse_loss(output, y), {"input": x})
    assert torch.equal(pair, mapping)
    assert torch.equal(pair, batch_loss(model, mse_loss, [x, y]))  # as DataLoader collates
    with pytest.raises(
        InputError, match=r"^A batch must be a pair \(inputs, targets\) or a mapping of model arguments; "
    ):
        batch_loss(model, mse_loss, x)


def test_mappings_are_measured_too():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.bowl = Bowl([5.0, 1.0])

        def forward(self, features):
            return self.bowl(features)

    found = hessian_eigenvalues(Named(), mean, [{"features": torch.zeros(3, 1)}], k=1, generator=seeded())
    torch.testing.assert_close(found, torch.tensor([5.0], dtype=torch.float64), rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("measure", "message"),
    [
        (lambda m, b: hessian_eigenvalues(m, mean, b, k=0), "k must be an int >= 1 and <= 2; got 0."),
        (lambda m, b: hessian_eigenvalues(m, mean, b, k=3), "k must be an int >= 1 and <= 2; got 3."),
        (lambda m, b: hessian_eigenvalues(m, mean, b, k=2, max_iter=1), "max_iter must be an int >= 2; got 1."),
        (lambda m, b: hessian_eigenvalues(m, mean, b, k=1, tol=-1.0), "tol must be a number >= 0; got -1.0."),
        (
            lambda m, b: neighbourhood_loss(m, mean, b),
            "neighbourhood_loss needs either std or radius; got std=None, radius=None.",
        ),
        (
            lambda m, b: neighbourhood_loss(m, mean, b, std=1.0, radius=1.0),
            "neighbourhood_loss needs either std or radius; got std=1.0, radius=1.0.",
        ),
        (lambda m, b: neighbourhood_loss(m, mean, b, std=-1.0), "std must be a number > 0; got -1.0."),
        (lambda m, b: neighbourhood_loss(m, mean, b, radius=0.0), "radius must be a number > 0; got 0.0."),
        (lambda m, b: neighbourhood_loss(m, mean, b, std=1.0, n_samples=1), "n_samples must be an int >= 2; got 1."),
    ],
)
def test_settings_out_of_range_are_refused(measure, message):
    with pytest.raises(ParameterError) as error:
        measure(Bowl([1.0, 2.0]), ONE_BATCH)
    assert str(error.value) == message
    assert isinstance(error.value, HeedfulError)


def test_no_batches_and_a_bare_tensor_are_refused():
    with pytest.raises(InputError, match=r"^batches is empty; give at least one batch"):
        flatness(Bowl([1.0]), mean, [], [1.0])
    with pytest.raises(
        InputError, match=r"^batches must be an iterable of batches, e\.g\. \[\(inputs, targets\)\]; got one"
    ):
        flatness(Bowl([1.0]), mean, torch.zeros(3), [1.0])


def test_attention_has_eigenvalues_in_spite_of_fused_kernels():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [nn.TransformerEncoderLayer(4, 1, 4, batch_first=True), nn.Flatten(), nn.Linear(12, 2)]
        model = nn.Sequential(*layers)
    batches = [(torch.randn(5, 3, 4, generator=seeded()), torch.tensor([0, 1, 0, 1, 1]))]
    (top,) = hessian_eigenvalues(model, cross_entropy, batches, k=1, generator=seeded())
    assert top > 0


@pytest.mark.parametrize("measure", [hessian_eigenvalues, lambda *a: neighbourhood_loss(*a, std=0.1)])
def test_a_frozen_model_is_told(measure):
    with pytest.raises(InputError, match="Unfreeze"):
        measure(nn.Linear(1, 2).requires_grad_(False), cross_entropy, ONE_BATCH)


def test_weights_that_are_not_finite_have_no_eigenvalues():
    with pytest.raises(ConvergenceError, match="NaN"):
        hessian_eigenvalues(Bowl([1.0, math.nan]), mean, ONE_BATCH, k=1, generator=seeded())
