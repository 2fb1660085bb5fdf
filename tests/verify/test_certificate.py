"""The certificate as data: hand-made gradients with known ratios, float64 as the oracle, and the text."""

import functools
import itertools
import json
import math

import pytest
import torch

from narrowcast.capture import TOTAL_LIMIT
from narrowcast.errors import SettingError
from narrowcast.verify.certificate._sums import Batches, Measured, compared
from narrowcast.verify.certificate._verdict import certificate_of

FINISH = {"policy": "bf16", "format": "bf16", "at_step": 0, "loss_scale": None, "cannot_tell": None}


def finished(*parameters, **changed):
    """A certificate of (name, fp32, other, mixed, perturbed) each."""
    second_batch = changed.pop("second_batch", None)
    measured = [
        Measured(
            name=name,
            shape=next((tuple(g.shape) for g in (fp32, other, mixed, perturbed) if g is not None), (1,)),
            error=compared(fp32, mixed),
            noise=compared(fp32, other) if second_batch or other is not None else None,
            rounding=None if perturbed is None else compared(fp32, perturbed),
        )
        for name, fp32, other, mixed, perturbed in parameters
    ]
    return certificate_of(measured, **FINISH | changed)


def made(error=0.01, noise=1.0, rounding=1e-6, size=1.0, name="weight", scale=1.0, dtype=torch.float32):
    """A parameter whose norms are these: the four directions are orthogonal."""
    basis = torch.eye(4, dtype=torch.float64)
    fp32 = size * basis[0]
    gradients = [fp32, fp32 + noise * basis[1], fp32 + error * basis[2], fp32 + rounding * basis[3]]
    return name, *[(scale * gradient).to(dtype) for gradient in gradients]


# ---- arithmetic


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_numbers_are_those_of_hand_made_gradients_at_any_scale(scale):
    found = finished(made(error=0.03, noise=2.0, size=1.5, scale=scale, dtype=torch.float64))
    (parameter,) = found.parameters
    for one, expected in (
        (parameter.gradient_norm, 1.5 * scale),
        (parameter.error_norm, 0.03 * scale),
        (parameter.noise_norm, 2.0 * scale),
        (parameter.rounding_norm, 1e-6 * scale),
        (parameter.error_over_noise, 0.015),
        (parameter.relative_error, 0.02),
        (parameter.cosine, 1.5 / math.hypot(1.5, 0.03)),
        (found.error_over_noise, 0.015),
        (found.relative_error, 0.02),
        (found.cosine, 1.5 / math.hypot(1.5, 0.03)),
    ):
        assert one == pytest.approx(expected, rel=1e-9)
    assert found.verdict == "pass"
    assert parameter.reason is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_sums_are_those_of_float64(dtype):
    a, b = torch.randn(7, 9).to(dtype), torch.randn(9, 7).to(dtype).t()
    found = compared(a, b, scale=4.0)
    x, y = a.double(), b.double() / 4
    # A thousandth of float64's error over 63 summands would be exact; a single float32 step is 1e9 times it.
    assert found.first == pytest.approx(float((x * x).sum()), rel=1e-14)
    assert found.second == pytest.approx(float((y * y).sum()), rel=1e-14)
    assert found.product == pytest.approx(float((x * y).sum()), rel=1e-12)
    assert found.difference == pytest.approx(float(((x - y) ** 2).sum()), rel=1e-14)


def test_close_fp32_gradients_differ_in_float64_sums():
    a = torch.full((1000,), 1.0)
    b = a + 2**-23
    assert compared(a, b).difference == pytest.approx(1000 * 2.0**-46, rel=1e-12)


def test_sparse_gradients_count_equal_indices_together():
    made_sparse = functools.partial(torch.sparse_coo_tensor, size=(4, 2), check_invariants=True)
    a = made_sparse([[0, 0, 2]], [[1.0, 2], [3, 4], [5, 6]])
    b = made_sparse([[1, 2]], [[7.0, 8], [5, 6]])
    dense = compared(a.to_dense(), b.to_dense())
    for one in (compared(a, b), compared(a.to_dense(), b), compared(a, b.to_dense())):
        for name in ("first", "second", "product", "difference"):
            assert getattr(one, name) == pytest.approx(getattr(dense, name), rel=1e-12)
    half = compared(a, b, scale=2.0)
    assert half.second == pytest.approx(dense.second / 4)
    assert compared(a, None).first == pytest.approx(dense.first)


def test_complex_gradients_count_both_parts():
    a, b = torch.tensor([3 + 4j, 1j]), torch.tensor([3 - 4j, 0j])
    found = compared(a, b)
    assert (found.first, found.second, found.product, found.difference) == pytest.approx((26, 25, -7, 65))


def test_totals_are_of_all_parameters_as_one_vector():
    parameters = [made(0.01, 1.0, name="a"), made(0.04, 0.5, size=3.0, name="b")]
    found = finished(*parameters)
    whole = [torch.cat([p[column].double() for p in parameters]) for column in range(1, 4)]
    error, noise = whole[2] - whole[0], whole[1] - whole[0]
    assert found.error_over_noise == pytest.approx(float(error.norm() / noise.norm()), rel=1e-12)
    assert found.relative_error == pytest.approx(float(error.norm() / whole[0].norm()), rel=1e-12)
    assert found.cosine == pytest.approx(float(torch.cosine_similarity(whole[0], whole[2], dim=0)), rel=1e-12)
    assert found.worst_parameter.name == "b"
    assert [p.name for p in found.parameters] == ["a", "b"]


# ---- several batches: bias, variance, and steps of many minibatches


def drawn(count, *, bias=0.03, spread=0.1, noise=1.0, elements=400, seed=0):
    """FP32 and mixed gradients of batches: a mean of 1, noise, and errors of known bias and variance."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    fp32 = 1 + noise * draw(count, elements)
    return fp32, fp32 + bias + spread * draw(count, elements)


def measured(fp32, mixed, name="weight"):
    sums = Batches(fp32.shape[1])
    for one, other in zip(fp32, mixed, strict=True):
        sums.add(one, other)
    return sums.measured(name, (fp32.shape[1],), compared(fp32[0], fp32[0] * (1 + 1e-7)))


def judged(*parameters, **settings):
    return certificate_of(parameters, **FINISH | settings)


@pytest.mark.parametrize("count", [4, 7, 8, 21])
def test_bias_and_variance_are_those_of_pairs_of_batches(count):
    """The definition in float64: products of different batches, and differences of all pairs."""
    fp32, mixed = drawn(count)
    errors, pairs = mixed - fp32, range(count)
    others = [(i, j) for i in pairs for j in pairs if i != j]
    bias = float(sum(errors[i] @ errors[j] for i, j in others)) / len(others)
    total = float((errors * errors).sum()) / count
    noise = float(sum((fp32[i] - fp32[j]).square().sum() for i, j in others)) / len(others)
    found = judged(measured(fp32, mixed))
    (parameter,) = found.parameters
    # Sums of groups are kept in fp32, with a roundoff of 6e-8.
    assert parameter.bias_norm == pytest.approx(math.sqrt(bias), rel=1e-6)
    assert parameter.error_norm == pytest.approx(math.sqrt(total), rel=1e-9)
    assert parameter.noise_norm == pytest.approx(math.sqrt(noise), rel=1e-6)
    for k in (1, 2, 32, 1024):
        expected = math.sqrt((k * bias + total - bias) / noise)
        assert found.at(k).value == pytest.approx(expected, rel=1e-6)
        assert judged(measured(fp32, mixed), minibatches=k).error_over_noise == pytest.approx(
            expected, rel=1e-6
        )
    # Gradients that are the mean of four minibatches have half the noise already.
    of_means = judged(measured(fp32, mixed), averaged=4, minibatches=4)
    assert of_means.at(4) == found.at(1)
    # The largest k may be below that of the measured gradients.
    for k in (0.5, 1.0, 32.0):
        assert of_means._moments.most(of_means._moments.at(k).value) == pytest.approx(k, rel=1e-6)


def test_the_bias_is_estimated_without_bias_and_intervals_hold_it():
    squares, held = [], 0
    truth = [math.sqrt((k * 0.03**2 + 0.1**2) / 2) for k in (1, 32, 1024)]
    for seed in range(100):
        found = judged(measured(*drawn(4, elements=40, seed=seed)))
        squares.append(found._moments.squares.bias)
        held += sum(
            found.at(k).low <= t <= found.at(k).high for k, t in zip((1, 32, 1024), truth, strict=True)
        )
    # The squares' deviation is 0.016 in theory: six pairs, each 0.01 * sqrt(40), and the bias itself.
    assert sum(squares) / 100 == pytest.approx(40 * 0.03**2, abs=3 * 0.032 / 10)
    assert min(squares) < sum(squares) / 100
    assert held >= 0.93 * 300


def test_bias_widens_the_interval():
    """Four batches know a bias worse than a spread."""
    found = judged(measured(*drawn(4, bias=0.05, seed=1)))
    one, many = (estimate.high / estimate.low for estimate in (found.at(1), found.at(256)))
    assert one < 3
    assert many > 4


def test_a_cast_that_only_spreads_holds_for_any_batch():
    fp32, _ = drawn(64, seed=3)
    found = judged(measured(fp32, fp32 + drawn(64, bias=0.0, spread=0.02, noise=0.0, seed=4)[1] - 1))
    assert found.at(4096).value < 5 * found.at(1).value  # alone with bias it would be 64 times that
    assert found.holds_up_to > 4096


def test_it_holds_up_to_the_batch_at_which_a_limit_is_reached():
    found = judged(measured(*drawn(8, bias=0.01, spread=0.02)), samples=64)
    k = found.holds_up_to
    assert found.at(k).value < 0.05 <= found.at(k + 1).value
    holds = f"Holds for batches of up to {64 * k:,} samples ({k:,} of yours averaged)."
    assert found.reason.endswith(f"{holds} Larger batches have less noise to hide the error.")
    # No bias can be seen: the search ends before a limit.
    best = judged(measured(*drawn(8, bias=0.0, spread=1e-6)), samples=64)
    end = "4,194,304 samples (65,536 of yours averaged), the largest that were looked at. Larger"
    assert end in best.reason
    # One parameter, a thousandth of the whole, with a bias of its own; 15 elements are too few to tell.
    for elements, expected in ((16, True), (15, False)):
        small = [0.01 * one for one in drawn(8, bias=0.2, spread=0.01, elements=elements)]
        both = judged(measured(*drawn(8, bias=0.01, spread=0.02)), measured(*small, "head.bias"))
        assert (both.holds_up_to < k) == expected
        at_k = judged(
            measured(*drawn(8, bias=0.003, spread=0.02)), measured(*small, "head.bias"), minibatches=32
        )
        assert (at_k.verdict, "head.bias" in at_k.reason) == (("fail", True) if expected else ("pass", False))
        assert at_k.parameters[1].lost == expected


@pytest.mark.parametrize(("k", "verdict"), [(1, "pass"), (2, "fail"), (64, "fail")])
def test_a_small_relative_error_passes_little_noise_for_one_minibatch_only(k, verdict):
    one = measured(*drawn(4, bias=0.003, spread=0.0, noise=0.01))
    assert judged(one, minibatches=k).verdict == verdict


@pytest.mark.parametrize("order", list(itertools.permutations(("worst", "unknown", "over"))))
def test_the_worst_parameter_of_a_step_is_named_beside_one_that_is_not_known(order):
    """That whose gradient differs in one batch alone: without this batch there is no noise."""
    fp32, mixed = drawn(4, bias=0.08, spread=0.05, elements=16)
    unknown = torch.ones_like(fp32)
    unknown[3] += 1
    made_of = {"worst": (fp32, mixed + 0.04), "over": (fp32, mixed), "unknown": (unknown, unknown + 0.01)}
    large = [100 * gradients for gradients in drawn(4, bias=0.001, spread=0.02)]
    parameters = [measured(*made_of[name], name) for name in order]
    found = judged(measured(*large), *parameters, minibatches=32)
    assert (found.verdict, ", most that of worst; " in found.reason) == ("cannot tell", True)


def test_the_bias_of_a_gradient_that_is_not_finite_is_infinite():
    for value in (math.nan, math.inf, -math.inf):
        fp32, mixed = drawn(4)
        mixed[2, 5] = value
        (parameter,) = judged(measured(fp32, mixed)).parameters
        assert (parameter.error_norm, parameter.bias_norm) == (math.inf, math.inf)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_table_says_why_it_is_not_known_how_far_it_holds(value):
    def holds_for(found):
        assert found.holds_up_to is None
        (line,) = [line for line in str(found).splitlines() if line.startswith("holds for")]
        return line.removeprefix("holds for").strip()

    fp32, mixed = drawn(4)
    mixed[2, 5] = value
    not_finite = judged(measured(fp32, mixed))
    assert all(math.isnan(number) for number in not_finite.at(1))
    assert holds_for(not_finite) == "not known: a gradient is not finite in mixed precision"
    assert holds_for(judged(measured(*drawn(3)))) == "not known: that needs four batches with noise"


def test_fewer_than_four_batches_tell_nothing_of_larger_ones():
    few = measured(*drawn(3))
    found = judged(few)
    assert found.holds_up_to is None
    assert all(math.isnan(value) for value in found.at(1))
    assert found.to_dict()["error_over_noise_interval"] is None
    found = judged(few, minibatches=2)
    assert (found.verdict, "it takes 4 batches" in found.reason) == ("cannot tell", True)
    # One batch: what rounding alone does passes for one minibatch, and what no noise could hide fails.
    for error, of_one, of_several in (
        (0.0, "pass", "pass"),
        (0.009, "pass", "cannot tell"),
        (0.3, "fail", "fail"),
    ):
        one = without_second_batch(error=error)
        assert finished(one).verdict == of_one
        assert finished(one, minibatches=2).verdict == of_several
    with pytest.raises(SettingError, match="at least 1, got 0"):
        found.at(0)


def test_batches_without_noise_have_no_interval():
    same = torch.ones(4, 30)
    assert judged(measured(same, same * 1.001)).holds_up_to is None
    exact = judged(measured(drawn(4)[0], drawn(4)[0]))
    assert (exact.at(1000), exact.verdict) == ((0, 0, 0), "pass")


# ---- verdicts


ANOTHER = "of what another minibatch does"
SMALLER = "the first batch's gradient is far smaller than the second's"
ALONE = "There was no second batch to measure minibatch noise by"
SAME = "Both batches give the same gradient"


@pytest.mark.parametrize(
    ("settings", "verdict", "words"),
    [
        ({"error": 0.0499}, "pass", f"by 0.0499 {ANOTHER}"),
        ({"error": 0.0501}, "cannot tell", f"by 0.0501 {ANOTHER}"),
        ({"error": 0.0999}, "cannot tell", f"by 0.0999 {ANOTHER}"),
        ({"error": 0.1001}, "fail", f"by 0.1 {ANOTHER}"),
        ({"error": 0.24}, "fail", f"by 0.24 {ANOTHER}"),
        ({"error": 0.004, "noise": 0.01}, "pass", "these batches have little noise"),
        ({"error": 0.02, "noise": 0.05}, "fail", "from 0.1 on fails"),
        ({"error": 0.0099, "size": 0.04}, "pass", "below 0.05 passes"),
        ({"error": 0.0101, "size": 0.04}, "cannot tell", SMALLER),
        ({"error": 0.041, "size": 0.04}, "cannot tell", SMALLER),
        ({"error": 0.009, "noise": None}, "pass", ALONE),
        ({"error": 0.02, "noise": None}, "cannot tell", ALONE),
        ({"error": 0.3, "noise": None}, "fail", ALONE),
        ({"error": 0.0034, "noise": 0.0}, "pass", SAME),
        ({"error": 0.0034, "noise": 1.5e-6}, "pass", SAME),  # summed in another order
        ({"error": 0.06, "noise": 0.0}, "cannot tell", SAME),
        ({"error": 0.26, "noise": 1.5e-6}, "fail", SAME),
    ],
)
def test_one_parameter_is_judged_by_the_limits(settings, verdict, words):
    noise = settings.get("noise", 1.0)
    name, fp32, other, mixed, perturbed = made(**settings | {"noise": noise or 0.0}, dtype=torch.float64)
    found = finished((name, fp32, None if noise is None else other, mixed, perturbed))
    assert (found.verdict, words in found.reason) == (verdict, True), found.reason
    if words in (ALONE, SAME):
        assert found.error_over_noise is None
        assert "noise" in found.parameters[0].reason


def test_one_lost_layer_fails_though_the_total_is_small():
    lost = made(error=1e-4, noise=1e-4, size=1e-4, rounding=1e-12, name="deep.weight")
    lost = (*lost[:3], torch.zeros(4), lost[4])
    found = finished(made(name="head.weight"), lost)
    assert found.error_over_noise < TOTAL_LIMIT
    assert found.verdict == "fail"
    assert found.worst_parameter.name == "deep.weight"
    assert [one.lost for one in found.parameters] == [False, True]
    assert found.parameters[1].reason == "its gradient is zero in mixed precision"
    assert found.reason == (
        "The gradient of deep.weight is lost in mixed precision: it is off by 1 of its own size or of "
        "minibatch noise, whichever is larger, where 0.25 is the limit for a single parameter."
    )


@pytest.mark.parametrize(("error", "verdict"), [(0.249, "pass"), (0.251, "fail")])
@pytest.mark.parametrize(("noise", "size"), [(1.0, 0.1), (0.1, 1.0)])
def test_the_limit_of_a_parameter_is_against_noise_or_gradient(noise, size, error, verdict):
    one = made(error=error, noise=noise, size=size, name="small", dtype=torch.float64)
    assert finished(one, made(name="large", scale=100, dtype=torch.float64)).verdict == verdict


def test_rounding_noise_in_fp32_itself_is_not_judged():
    bias = made(error=3e-5, noise=1e-7, size=1e-7, rounding=1.4e-7, name="bias")
    found = finished(made(), bias)
    assert found.verdict == "pass"
    assert found.error_over_noise == pytest.approx(0.01, rel=1e-4)
    assert not found.parameters[1].judged
    assert found.parameters[1].reason == "its gradient is rounding noise in FP32 itself"
    assert found.worst_parameter.name == "weight"
    assert found.reason.endswith(
        "Not judged: 1 of 2 parameters, whose gradient is rounding noise in FP32 itself (bias)."
    )
    large = made(error=0.5, noise=0.5, size=1e-7, rounding=1.4e-7, name="bias")
    assert finished(made(), large).error_over_noise == found.error_over_noise
    # Without the perturbed pass nobody can know.
    assert finished(made(), (*bias[:4], None)).verdict == "fail"


@pytest.mark.parametrize(
    ("elements", "second_batch", "verdict"),
    [(15, True, "pass"), (16, True, "fail"), (15, False, "cannot tell"), (16, False, "fail")],
)
def test_a_layer_lost_without_noise_fails_unless_tiny(elements, second_batch, verdict):
    """A sum of few elements may be near zero by chance."""
    bias = torch.full((elements,), 0.01 if second_batch else 1e-6)
    lost = ("bias", bias, bias if second_batch else None, 0 * bias, bias * (1 + 1e-6))
    found = finished(made(noise=0.0 if second_batch else 1.0), lost)
    assert found.verdict == verdict
    assert ("where 0.5 is the limit for a single parameter" in found.reason) == (verdict == "fail")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_mixed_gradient_that_is_not_finite_fails_and_is_named(value):
    name, fp32, other, mixed, perturbed = made(name="broken")
    mixed = mixed.clone()
    mixed[3] = value
    found = finished(made(), (name, fp32, other, mixed, perturbed), cannot_tell="Masks differ.")
    assert found.verdict == "fail"
    assert found.reason == "Finite in FP32 and not in mixed precision: the gradient of broken."
    assert found.worst_parameter.name == "broken"
    assert found.worst_parameter.error_over_noise == math.inf
    assert found.worst_parameter.cosine is None
    # A parameter that would not be judged, too.
    noise = made(size=1e-7, rounding=1e-7, name="bias")
    assert finished(made(), (*noise[:3], mixed, noise[4])).verdict == "fail"


@pytest.mark.parametrize("column", [1, 2])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_fp32_that_is_not_finite_is_no_reference(column, value):
    parameter = list(made(name="broken"))
    parameter[column] = torch.full((4,), value)
    found = finished(made(), tuple(parameter))
    assert found.verdict == "cannot tell"
    assert "broken" in found.reason
    assert all(p.error_over_noise is None or math.isfinite(p.error_over_noise) for p in found.parameters)
    if column == 1:
        parameter[3] = torch.full((4,), value)  # in mixed precision as well
        assert finished(made(), tuple(parameter)).verdict == "cannot tell"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_second_batch_that_is_not_finite_is_a_second_batch(value):
    """The reason claims no missing batch, also where the mixed gradient is not finite either."""
    name, fp32, _, _, perturbed = made(name="broken")
    bad = torch.full((4,), value)
    found = finished(made(), (name, fp32, bad, bad, perturbed))
    assert found.verdict == "fail"
    assert found.reason == "Finite in FP32 and not in mixed precision: the gradient of broken."


def test_a_gradient_on_one_side_only_counts_as_zero():
    name, fp32, other, mixed, perturbed = made(name="one")
    gone = finished(made(), (name, fp32, other, None, perturbed))
    assert gone.verdict == "fail"
    assert gone.parameters[1].relative_error == 1
    assert gone.parameters[1].reason.startswith("it has a gradient in FP32 and none in mixed precision")
    assert gone.reason.endswith("A gradient on one side only, in FP32 or in mixed precision: one.")
    extra = finished(made(), (name, None, None, mixed, None), second_batch=True)
    assert extra.verdict == "fail"
    assert extra.parameters[1].reason.startswith("it has a gradient in mixed precision and none in FP32")
    # Not reached by the second batch, which was made: its noise is its gradient.
    unreached = finished(made(), (name, fp32, None, mixed, perturbed), second_batch=True)
    assert unreached.parameters[1].noise_norm == pytest.approx(1.0)
    assert unreached.verdict == "pass"


def without_second_batch(**settings):
    name, fp32, _, mixed, perturbed = made(**settings)
    return name, fp32, None, mixed, perturbed


@pytest.mark.parametrize(("error", "verdict"), [(0.049, "pass"), (0.051, "cannot tell")])
def test_parameters_without_a_second_batch_have_no_noise(error, verdict):
    """As of an optimizer that steps for one of the two batches only."""
    alone = without_second_batch(size=100.0, error=100 * error, name="critic", rounding=1e-4)
    found = finished(made(error=0.04), alone)
    assert found.error_over_noise == pytest.approx(0.04, rel=1e-4)
    assert found.verdict == verdict
    critic = found.parameters[1]
    assert (critic.noise_norm, critic.error_over_noise, critic.judged) == (None, None, True)
    assert critic.reason == "there was no second batch to measure noise by"
    assert found.relative_error == pytest.approx(error, rel=1e-2)
    assert found.reason.endswith(
        " There was no second batch for 1 of 2 parameters (critic): of them only the relative error counts, "
        f"{error:.3g}."
    )
    # Nor does it hide an error of the others.
    assert finished(made(error=0.2), alone).verdict == "fail"


def test_one_parameter_cannot_fail_if_rounding_is_unknown():
    unknown = "FP32's rounding is not known: the run by exact ops failed."
    bias = (*made(error=3e-5, noise=1e-7, size=1e-7, name="bias")[:4], None)
    assert finished(made(), bias).verdict == "fail"
    found = finished(made(), bias, rounding_unknown=unknown)
    assert found.verdict == "cannot tell"
    assert found.reason.startswith("The gradient of bias is lost in mixed precision: ")
    assert found.reason.endswith(f"for a single parameter. {unknown}")
    # All together may, and what passes passes.
    assert finished(made(error=0.11), bias, rounding_unknown=unknown).verdict == "fail"
    assert finished(made(), rounding_unknown=unknown) == finished(made())


def test_one_parameter_of_a_step_cannot_fail_if_rounding_is_unknown():
    unknown = "FP32's rounding is not known: the run by exact ops failed."
    bias = measured(*[0.01 * one for one in drawn(8, bias=0.2, spread=0.01, elements=16)], "head.bias")

    def of_step(total_bias, **settings):
        return judged(measured(*drawn(8, bias=total_bias, spread=0.02)), bias, minibatches=32, **settings)

    assert of_step(0.003).verdict == "fail"
    found = of_step(0.003, rounding_unknown=unknown)
    assert found.verdict == "cannot tell"
    assert "and the gradient of head.bias by " in found.reason
    assert found.reason.endswith(f"for a single parameter. {unknown}")
    # All together may.
    assert of_step(0.1, rounding_unknown=unknown).verdict == "fail"


def test_parameters_without_gradients_are_not_judged():
    unused = ("unused", None, None, None, None)
    zero = ("zero", *[torch.zeros(3)] * 4)
    found = finished(made(), unused, zero)
    assert [p.reason for p in found.parameters] == [None, "no gradient reaches it", "its gradient is zero"]
    assert found.verdict == "pass"
    assert found.reason.endswith(
        " Not judged: 2 of 3 parameters, which got no gradient or a zero one from this batch (unused, zero)."
    )
    for parameters, words in (
        ([zero], "No gradient can be judged (zero: its gradient is zero)."),
        ([unused], "No gradient can be judged (unused: no gradient reaches it)."),
        ([], "No parameter needs a gradient, so there is nothing to compare."),
    ):
        found = finished(*parameters)
        assert (found.verdict, found.reason) == ("cannot tell", words)
        assert found.error_over_noise is None
        assert found.worst_parameter is None


def test_a_gradient_zero_for_the_first_batch_tests_nothing():
    zero, ones = torch.zeros(4), torch.ones(4)
    for mixed in (zero, None):
        found = finished(("a", zero, ones, mixed, zero))
        assert found.verdict == "cannot tell"
        assert found.parameters[0].reason == "its FP32 gradient is zero for this batch, which tests nothing"
        assert not found.parameters[0].judged
    # Nor is its noise one that the error of others is divided by.
    both = finished(made(error=0.2), ("a", zero, 100 * ones, zero, zero))
    assert both.verdict == "fail"
    assert both.error_over_noise == pytest.approx(0.2)
    # A second batch that is not finite is named all the same.
    broken = finished(made(), ("a", zero, ones * math.nan, zero, zero))
    assert (broken.verdict, broken.reason) == ("cannot tell", "FP32 is not finite on the second batch: a.")


def test_gradients_that_are_zero_in_fp32_alone_do_not_pass():
    zero = torch.zeros(4)
    found = finished(("a", zero, zero, torch.ones(4), zero))
    assert (found.verdict, found.reason) == (
        "fail",
        "Every FP32 gradient is zero, and the mixed ones are not.",
    )
    assert finished(("a", zero, torch.ones(4), torch.ones(4) * 0.01, zero)).verdict == "cannot tell"
    assert finished(("a", zero, torch.ones(4), torch.ones(4) * 0.3, zero)).verdict == "fail"


def test_scalars_are_judged_and_empty_parameters_are_not():
    one = ("gain", torch.tensor(2.0), torch.tensor(1.0), torch.tensor(2.01), torch.tensor(2.000001))
    empty = ("empty", *[torch.zeros(0, 3)] * 4)
    found = finished(one, empty)
    assert found.parameters[0].shape == ()
    assert found.parameters[1].reason == "its gradient is zero"
    assert found.verdict == "pass"


# ---- as data and as text


def hard_ones():
    broken = (*made(name="<b>&\"'broken")[:3], torch.full((4,), math.inf), None)
    layers = [made(name=f"encoder.layers.{n}.attention.output.projection.weight") for n in range(20)]
    return finished(*layers, broken, ("bias", *[torch.zeros(3)] * 4), loss_scale=2.0**16, at_step=7)


def test_it_goes_through_json():
    found = hard_ones().to_dict()
    assert json.loads(json.dumps(found, allow_nan=False))["verdict"] == "fail"
    assert set(found) == {
        "policy", "format", "at_step", "loss_scale", "minibatches", "averaged", "samples", "error_over_noise",
        "error_over_noise_interval", "holds_up_to", "relative_error", "cosine", "worst_parameter",
        "parameters", "verdict", "reason",
    }  # fmt: skip
    assert found["worst_parameter"] == {
        "name": "<b>&\"'broken", "error_over_noise": "inf", "relative_error": "inf",
    }  # fmt: skip
    assert found["error_over_noise"] == "inf"


def test_the_table_has_the_numbers_of_the_certificate():
    verdict, *summary, head, row = str(
        finished(made(error=0.01, noise=2.0, dtype=torch.float64))
    ).splitlines()
    assert verdict == "gradient certificate: pass"
    assert "error over noise  0.005" in summary
    assert "cosine            0.999950" in summary
    assert "holds for         not known: that needs four batches with noise" in summary
    assert head.split("  ")[0] == "parameter (worst first)"
    assert row.split() == ["weight", "0.005", "0.01", "0.99995", "yes"]


def test_a_name_with_a_line_break_stays_on_its_line():
    text = str(finished(made(name="a\nb\x1b[31m"), policy="x" * 200))
    assert "a b" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_notebook_shows_every_parameter_escaped():
    certificate = hard_ones()
    assert repr(certificate).startswith(f"Certificate({certificate.verdict!r}, ")
    assert len(repr(certificate)) < 80
    text = certificate._repr_html_()
    assert "<b>" not in text
    assert "&lt;b&gt;&amp;&quot;&#x27;broken" in text
    assert len(text.splitlines()) > len(certificate.parameters)
