"""Distributions that a model makes from its probabilities have the values and gradients of FP32."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import (
    Bernoulli,
    Categorical,
    ContinuousBernoulli,
    Geometric,
    Independent,
    NegativeBinomial,
    OneHotCategorical,
    OneHotCategoricalStraightThrough,
    RelaxedBernoulli,
)
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.attach import Attachment
from narrowcast.casting.kernels._distributions import DISTRIBUTIONS

CLASSES = 17
LABELS = torch.arange(8) % CLASSES
ONE_HOT = F.one_hot(LABELS, CLASSES).float()

# h is what a linear layer returns: most probabilities are far below bf16's eps.
KINDS = {
    "categorical": lambda h: Categorical(h.softmax(-1)).log_prob(LABELS),
    "by name": lambda h: Categorical(probs=h.softmax(-1)).log_prob(LABELS),
    "one-hot": lambda h: OneHotCategorical(h.softmax(-1)).log_prob(ONE_HOT),
    "straight-through": lambda h: OneHotCategoricalStraightThrough(h.softmax(-1)).log_prob(ONE_HOT),
    "bernoulli": lambda h: Bernoulli(h.sigmoid()).log_prob(ONE_HOT),
    "independent": lambda h: Independent(Bernoulli(probs=h.sigmoid()), 1).log_prob(ONE_HOT),
    "continuous bernoulli": lambda h: ContinuousBernoulli(h.sigmoid()).log_prob(ONE_HOT),
    "relaxed bernoulli": lambda h: RelaxedBernoulli(torch.tensor(0.5), h.sigmoid()).rsample(),
    "of a scaled sigmoid": lambda h: Geometric(0.05 + 0.9 * h.sigmoid()).log_prob(ONE_HOT),
    "after another parameter": lambda h: NegativeBinomial(5.0, 0.9 * h.sigmoid()).log_prob(ONE_HOT),
}


class Policy(nn.Module):
    def __init__(self, log_prob):
        super().__init__()
        self.linear = nn.Linear(4, CLASSES)
        self.log_prob = log_prob

    def forward(self, x):
        return self.log_prob(self.linear(x))


def log_probability_and_gradient(kind, wrap=lambda model: model):
    torch.manual_seed(0)
    model = Policy(KINDS[kind])
    x = 10 * torch.randn(8, 4)
    torch.manual_seed(1)
    log_prob = wrap(model)(x).float()
    log_prob.mean().backward()
    return log_prob.detach(), model.linear.weight.grad


def close(found, expected, eps):
    scale = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=8 * eps, atol=8 * eps * scale)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_and_gradients_are_those_of_fp32(kind, name):
    expected = log_probability_and_gradient(kind)
    with Attachment(name):
        found = log_probability_and_gradient(kind)
    eps = torch.finfo({"bf16": torch.bfloat16, "fp16": torch.float16}[name]).eps
    for one, other in zip(found, expected, strict=True):
        close(one, other, eps)


def test_probabilities_that_are_surely_wrong_have_a_gradient():
    """A sigmoid that bf16 rounds to 1 is computed again in fp32."""
    with Attachment("bf16"):
        model = Policy(lambda h: Bernoulli(h.sigmoid()).log_prob(torch.zeros(CLASSES)))
        nn.init.zeros_(model.linear.weight)
        nn.init.constant_(model.linear.bias, 10.0)
        log_prob = model(torch.ones(1, 4))
        log_prob.sum().backward()
    assert log_prob[0].tolist() == pytest.approx([-10.0] * CLASSES, rel=1e-3)
    assert model.linear.bias.grad.tolist() == pytest.approx([-1.0] * CLASSES, rel=1e-3)


@pytest.mark.parametrize("kind", ["categorical", "by name", "one-hot"])
def test_low_probabilities_are_taken_where_a_policy_promotes(kind):
    """Within what their rounding costs; torch.autocast refuses them, since they do not add up to 1."""
    expected, _ = log_probability_and_gradient(kind)
    found, gradient = log_probability_and_gradient(kind, applied)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    assert gradient.isfinite().all()
    assert gradient.any()


def applied(model):
    nc.apply(model, "bf16")
    return model


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["categorical", "bernoulli"])
def test_in_a_checkpoint_probabilities_are_cast(kind, reentrant):
    """The backward pass computes them again, and has to save as many tensors."""
    torch.manual_seed(0)
    linear, x = nn.Linear(4, CLASSES), torch.randn(8, 4)
    model = nn.Module()
    model.linear = linear
    model.forward = lambda x: checkpoint(KINDS[kind], linear(x), use_reentrant=reentrant)
    expected = KINDS[kind](linear(x)).detach()
    with Attachment("bf16"):
        found = model(x)
        found.mean().backward()
    close(found.detach(), expected, torch.finfo(torch.bfloat16).eps)
    assert linear.weight.grad.any()


def test_where_it_cannot_be_computed_again_it_is_told_and_the_rule_helps():
    """A hook on the probabilities would be passed by."""
    seen = []

    def log_probability(h):
        probabilities = h.sigmoid()
        if probabilities.requires_grad:
            probabilities.register_hook(seen.append)
        return Bernoulli(probabilities).log_prob(torch.zeros(CLASSES))

    def of_ten(policy):
        with Attachment(policy) as attached:
            model = Policy(log_probability)
            nn.init.zeros_(model.linear.weight)
            nn.init.constant_(model.linear.bias, 10.0)
            found = model(torch.ones(1, 4))
            found.sum().backward()
        notes = [note for note in attached.notes if "made a distribution of" in note]
        return found[0, 0].item(), notes

    rounded, (note,) = of_ten("bf16")
    rule = 'nc.rule.op("sigmoid", compute="fp32")'
    assert note == (
        "Policy made a distribution of a sigmoid that was computed in bf16, since a hook waits for its "
        f"gradient: {rule} computes it in fp32"
    )
    assert rounded < -15  # of 1 less fp32's eps
    exact, notes = of_ten(nc.Policy(compute="bf16").with_rules(nc.rule.op("sigmoid", compute="fp32")))
    assert exact == pytest.approx(-10, rel=1e-3)
    assert not notes
    assert len(seen) == 2


def test_elsewhere_distributions_are_torchs():
    low = torch.tensor([0.3, 0.7], dtype=torch.bfloat16)
    with Attachment("bf16"):
        Policy(KINDS["bernoulli"])(torch.ones(8, 4))  # from its first region on, constructors are replaced
        assert Bernoulli(low).probs.dtype == torch.bfloat16
        assert Bernoulli(0.5).probs.item() == 0.5
    before = DISTRIBUTIONS.users.copy()
    model = Policy(KINDS["bernoulli"])
    with nc.apply(model, "bf16"):
        model(torch.ones(8, 4))
        assert DISTRIBUTIONS.users > before
    assert DISTRIBUTIONS.users == before


def test_a_constructor_that_a_distribution_inherits_is_left_where_it_is():
    """Else ours, made of the parent's replaced one, would stay in the subclass after the last region."""
    with Attachment("bf16"):
        Policy(KINDS["straight-through"])(torch.ones(8, 4))
        assert DISTRIBUTIONS.users
        assert "__init__" not in vars(OneHotCategoricalStraightThrough)
    assert "__init__" not in vars(OneHotCategoricalStraightThrough)


@pytest.mark.parametrize("kind", ["categorical", "bernoulli"])
@pytest.mark.long
def test_compiled_distributions_take_fp32_probabilities(kind):
    expected = log_probability_and_gradient(kind)
    with Attachment("bf16"):
        found = log_probability_and_gradient(kind, lambda model: torch.compile(model, backend="aot_eager"))
    for one, other in zip(found, expected, strict=True):
        close(one, other, torch.finfo(torch.bfloat16).eps)
