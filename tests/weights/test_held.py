"""What a held optimizer does is what the same optimizer does in float32; only what is kept differs."""

import copy

import pytest
import torch

from narrowcast.weights import hold, lower
from narrowcast.weights._lower import round_stochastically

STEPS = 5
SCALE = {torch.bfloat16: 1.0, torch.float16: 2.0**11}


def bits(tensor):
    return tensor.detach().view(torch.int16 if tensor.dtype in SCALE else torch.int32)


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def floats(parameters):
    return [torch.nn.Parameter(p.detach().float()) for p in parameters]


def state_of(optimizer):
    return {
        (i, key): value
        for i, entry in optimizer.state_dict()["state"].items()
        for key, value in entry.items()
    }


def same_state(a, b):
    a, b = state_of(a), state_of(b)
    assert a.keys() == b.keys()
    for key, value in a.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == b[key].dtype, key
            assert torch.equal(value, b[key]), key
        else:
            assert value == b[key], key
    return True


def split(full, dtype):
    """p and c of one value, in exact arithmetic apart from the two roundings."""
    p = full.to(dtype)
    scaled = ((full.double() - p.double()) * SCALE[dtype]).to(torch.float32).to(dtype)
    moved = (p.double() + scaled.double() / SCALE[dtype]).float().to(dtype) != p
    towards_zero = torch.nextafter(scaled.float(), torch.zeros(())).to(torch.float64)
    below = scaled.abs().double() * (1 - 2.0 ** -(8 if dtype == torch.bfloat16 else 11))
    shorter = torch.copysign(below, towards_zero).to(dtype)
    return p, torch.where(moved, shorter, scaled)


@pytest.fixture
def beside_float32(make_optimizer, parameters, give_gradients):
    """A function that steps a held optimizer and one in float32, and yields the handle and the pairs."""

    def steps(*held, **settings):
        reference = floats(parameters)
        expected, optimizer = make_optimizer(reference), make_optimizer(parameters)
        handle = hold(optimizer, *held, **settings)
        for step in range(STEPS):
            give_gradients(parameters, reference, seed=step)
            expected.step()
            optimizer.step()
            yield handle, list(zip(parameters, reference, strict=True))
        assert same_state(optimizer, expected)

    return steps


def test_masters_are_a_float32_run_bit_for_bit(beside_float32):
    for handle, pairs in beside_float32("masters"):
        for (low, full), (same_low, master) in zip(pairs, handle.parameters, strict=True):
            assert same_low is low
            assert same_bits(master, full)
            assert same_bits(low, full.to(low.dtype))
    assert any(not torch.equal(p.float(), full) for p, full in pairs)


def test_kahan_is_a_float32_run_from_low_plus_residual(beside_float32, dtype):
    for handle, pairs in beside_float32("kahan"):
        values = handle.full_values()
        for low, full in pairs:
            p, c = split(full, dtype)
            assert same_bits(low, p)
            rebuilt = (p.double() + c.double() / SCALE[dtype]).float()
            assert same_bits(values[low], rebuilt)
            # The residual is at most 2**-8 (2**-11) of the value and off by 2**-9 (2**-12) of itself, twice
            # that where it was shortened.
            bound = full.abs() * 2.0 ** (-16 if dtype == torch.bfloat16 else -22) + 2.0**-36
            assert ((rebuilt - full).abs() <= bound).all()
            full.data.copy_(rebuilt)


def test_stochastic_is_a_float32_run_from_the_low_parameter(beside_float32, dtype):
    ours, theirs = (torch.Generator().manual_seed(4) for _ in range(2))
    for _, pairs in beside_float32("stochastic", generator=ours):
        for low, full in pairs:
            rounded = round_stochastically(full.detach(), dtype, theirs)
            assert same_bits(low, rounded)
            full.data.copy_(rounded)


def test_replicas_with_random_states_of_their_own_round_alike(parameters, give_gradients):
    """As on the ranks of a data-parallel run, whose dropout is seeded apart."""
    twins = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    for seed, replica in enumerate((parameters, twins)):
        torch.manual_seed(seed)
        optimizer = torch.optim.SGD(replica, lr=1e-3)
        hold(optimizer, "stochastic")
        before = torch.get_rng_state()
        for step in range(3):
            give_gradients(replica, seed=step)
            optimizer.step()
        assert torch.equal(torch.get_rng_state(), before), "dropout draws what it drew without"
    for p, q in zip(parameters, twins, strict=True):
        assert same_bits(p, q)


def test_a_residual_never_moves_the_parameter_it_belongs_to(dtype):
    """Values next to the middle of two numbers, where the rounded residual would be the whole half."""
    numbers = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    numbers = numbers[numbers.isfinite()]
    middles = (numbers[:-1].double() + numbers[1:].double()) / 2
    near = torch.cat([middles.float().nextafter(numbers[:-1]), middles.float().nextafter(numbers[1:])])
    near = torch.cat([near, -near, middles.float(), torch.tensor([0.0, -0.0, 2.0**-149])])
    low = torch.nn.Parameter(near.to(dtype))
    optimizer = torch.optim.SGD([low], lr=1.0)
    handle = hold(optimizer, "kahan", originals={low: near})
    value, before = handle.full_values()[low], low.detach().clone()
    # A residual is off by half a unit of its own, or a whole one, downwards, where it was shortened; that
    # unit is never below 2**-35 in float16 and 2**-133 in bfloat16.
    bound = (near - low.float()).abs() * 1.01 * torch.finfo(dtype).eps / 2
    assert ((value - near).abs() <= bound + (2.0**-36 if dtype == torch.float16 else 2.0**-133)).all()
    assert torch.equal(value.to(dtype), before)
    low.grad = torch.zeros_like(low)
    optimizer.step()
    assert same_bits(low, before)
    assert same_bits(handle.full_values()[low], value)


def test_nan_infinity_and_overflow(dtype, updates):
    values = [float("nan"), float("inf"), -float("inf"), -0.0, 1.0, torch.finfo(dtype).max]
    low = torch.nn.Parameter(torch.tensor(values).to(dtype))
    optimizer = torch.optim.SGD([low], lr=1.0)
    handle = hold(optimizer, updates)
    low.grad = torch.zeros_like(low)
    optimizer.step()
    assert low[0].isnan()
    assert same_bits(low[1:], torch.tensor(values[1:]).to(dtype))
    low.grad = torch.tensor([0, 0, 0, 0, float("nan"), -torch.finfo(dtype).max / 2]).to(dtype)
    optimizer.step()
    assert low[4].isnan()
    assert low[5] == float("inf")
    assert handle.full_values()[low][3] == 0
    low.grad = torch.tensor([0, 0, 0, 0, 0, torch.finfo(dtype).max / 2]).to(dtype)
    optimizer.step()
    # In float16 a master has kept the value that float16 could not; in bfloat16 float32 overflowed too.
    comes_back = updates == "masters" and dtype == torch.float16
    assert low[5] == (torch.finfo(dtype).max if comes_back else float("inf"))


# ---- what is kept between steps


@pytest.mark.parametrize(("updates", "per_element"), [("masters", 4), ("kahan", 2), ("stochastic", 0)])
def test_bytes_kept_between_steps(updates, per_element):
    low = torch.nn.Parameter(torch.randn(256, 256).bfloat16())
    optimizer = torch.optim.SGD([low], lr=0.1)
    handle = hold(optimizer, updates)
    for _ in range(2):
        kept = {working.untyped_storage() for _, working in handle.parameters}
        kept |= {tensor.untyped_storage() for tensor in handle.state_dict()["kept"]}
        bytes_by_place = {storage.data_ptr(): storage.nbytes() for storage in kept}
        # Working parameters without memory share one NaN.
        assert 0 <= sum(bytes_by_place.values()) - per_element * 256 * 256 <= 4
        low.grad = torch.randn(256, 256).bfloat16()
        optimizer.step()
        optimizer.zero_grad()
    assert handle.parameters[0][1].isnan().all() == (updates != "masters")


def test_float32_parameters_are_left_alone(parameters):
    wide = torch.nn.Parameter(torch.randn(3))
    optimizer = torch.optim.SGD([parameters[0], wide], lr=0.1)
    handle = hold(optimizer, "kahan")
    assert optimizer.param_groups[0]["params"][1] is wide
    assert [low for low, _ in handle.parameters] == [parameters[0]]
    wide.grad = torch.ones(3)
    before = wide.detach().clone()
    optimizer.step()
    assert torch.equal(wide, before - 0.1)


def test_state_there_before_is_moved_and_widened(make_low_optimizer, parameters, give_gradients):
    optimizer = make_low_optimizer(parameters)
    for step in range(2):
        give_gradients(parameters, seed=step)
        optimizer.step()
    reference = floats(parameters)
    expected = make_low_optimizer(reference)
    expected.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    hold(optimizer, "masters")
    assert set(optimizer.state) == set(optimizer.param_groups[0]["params"])
    for (_, key), value in state_of(optimizer).items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            assert value.dtype == torch.float32, key
    give_gradients(parameters, reference, seed=9)
    expected.step()
    optimizer.step()
    for low, full in zip(parameters, reference, strict=True):
        assert same_bits(low, full.to(low.dtype))
    assert same_state(optimizer, expected)


def test_strides_stay(dtype):
    low = torch.nn.Parameter(torch.randn(2, 3, 4, 5).to(dtype).to(memory_format=torch.channels_last))
    optimizer = torch.optim.Adam([low], lr=0.1)
    hold(optimizer, "kahan")
    low.grad = torch.ones_like(low)
    optimizer.step()
    assert low.is_contiguous(memory_format=torch.channels_last)
    (state,) = optimizer.state.values()
    assert state["exp_avg"].is_contiguous(memory_format=torch.channels_last)


# ---- starting from float32


@pytest.mark.parametrize("updates", ["masters", "kahan"])
def test_a_lowered_model_starts_from_its_float32_values(dtype, updates):
    model = torch.nn.Linear(30, 40)
    full = {name: p.detach().clone() for name, p in model.named_parameters()}
    originals = lower(model, dtype)
    handle = hold(torch.optim.SGD(model.parameters(), lr=0.1), updates, originals=originals)
    values = handle.full_values()
    for name, parameter in model.named_parameters():
        if updates == "masters":
            assert torch.equal(values[parameter], full[name])
        assert ((values[parameter] - full[name]).abs() <= full[name].abs() * 2.0**-16).all()
        assert not torch.equal(parameter.float(), full[name])
    for original in originals.values():
        original.zero_()
    for name, parameter in model.named_parameters():
        assert torch.equal(handle.full_values()[parameter], values[parameter]), name


def test_an_original_that_does_not_fit_its_parameter(dtype):
    low = torch.nn.Parameter(torch.tensor([1.0, 2.0]).to(dtype))
    handle = hold(torch.optim.SGD([low], lr=0.1), originals={low: torch.tensor([1.0 + 2.0**-14, 3.0])})
    assert handle.full_values()[low].tolist() == [1.0 + 2.0**-14, 2.0]


# ---- others write to the low parameters


def test_what_others_write_is_never_overwritten(dtype, updates, give_gradients):
    low = torch.nn.Parameter(torch.randn(50).to(dtype))
    optimizer = torch.optim.SGD([low], lr=0.01)
    handle = hold(optimizer, updates)
    give_gradients([low], seed=1)
    optimizer.step()
    kept = handle.full_values()[low]
    with torch.no_grad():
        low.clamp_(-0.5, 0.5)
    changed = low.float() != kept.to(dtype).float()
    assert changed.any()
    assert not changed.all()
    expected = torch.where(changed, low.float(), kept)
    if updates == "kahan":
        # A residual that does not change which number is nearest may stay.
        expected = torch.where(changed, handle.full_values()[low], expected)
        assert torch.equal(expected.to(dtype), low)
    assert torch.equal(handle.full_values()[low], expected)
    low.grad = torch.zeros_like(low)
    optimizer.step()
    assert torch.equal(handle.full_values()[low], expected)
    assert low.abs().max() <= 0.5


def test_writes_through_data_before_the_first_step_count(dtype):
    """Such a write leaves no trace that could be asked for at every step."""
    low = torch.nn.Parameter(torch.randn(50).to(dtype))
    kept = low.detach().float() * (1 + 2.0**-14)
    optimizer = torch.optim.SGD([low], lr=0.01)
    handle = hold(optimizer, "masters", originals={low: kept})
    low.data[:20] = 0.25
    low.grad = torch.zeros_like(low)
    optimizer.step()
    assert torch.equal(low[:20].float(), torch.full((20,), 0.25))
    after = handle.full_values()[low]
    assert torch.equal(after[:20], torch.full((20,), 0.25))
    assert torch.equal(after[20:], kept[20:])


# ---- steps that do not happen, or not to the end


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD, torch.optim.AdamW])
def test_a_fused_step_left_out_changes_no_bit(dtype, updates, kind, device):
    low = torch.nn.Parameter(torch.randn(1000, device=device).to(dtype))
    optimizer = kind([low], lr=0.01, fused=True)
    handle = hold(optimizer, updates)
    for found in (0.0, 1.0, 0.0, 1.0):
        low.grad = torch.randn_like(low)
        optimizer.grad_scale = torch.tensor(4.0, device=device)
        optimizer.found_inf = torch.tensor(found, device=device)
        before, value = low.detach().clone(), handle.full_values()[low]
        optimizer.step()
        assert same_bits(low, before) == bool(found)
        assert same_bits(handle.full_values()[low], value) == bool(found)


class BreaksHalfWay(torch.optim.SGD):
    broken = True

    def step(self, closure=None):
        first, second = self.param_groups[0]["params"]
        with torch.no_grad():
            first.sub_(first.grad)
            if self.broken:
                raise KeyError("half-way")
            second.sub_(second.grad)


@pytest.mark.parametrize("then", ["step", "state_dict", "remove"])
def test_a_step_that_raises_loses_nothing(dtype, updates, then):
    first, second = (torch.nn.Parameter(torch.full((2,), v).to(dtype)) for v in (1.0, 2.0))
    optimizer = BreaksHalfWay([first, second], lr=0.1)
    handle = hold(optimizer, updates)
    first.grad, second.grad = torch.full_like(first, 0.25), torch.full_like(second, 0.5)
    with pytest.raises(KeyError):
        optimizer.step()
    assert first.tolist() == [1.0, 1.0], "the low parameters wait for the end of the step"
    if then == "step":
        optimizer.broken = False
        optimizer.step()
        assert (first.tolist(), second.tolist()) == ([0.5, 0.5], [1.5, 1.5])
        assert first.grad.tolist() == [0.25, 0.25]
        return
    getattr(handle, then)()
    assert (first.tolist(), second.tolist()) == ([0.75, 0.75], [2.0, 2.0])
    if then == "remove":
        assert first.grad.tolist() == [0.25, 0.25]


class DecaysAround(torch.optim.Adam):
    """Its step calls the step it inherits, so that hooks are called twice."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.9)


def test_a_step_that_calls_the_inherited_one(parameters, updates, give_gradients):
    torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])  # torch wraps a class when it is first made
    reference = floats(parameters)
    expected, optimizer = DecaysAround(reference, lr=0.1), DecaysAround(parameters, lr=0.1)
    handle = hold(optimizer, updates, generator=None)
    give_gradients(parameters, reference, seed=0)
    expected.step()
    optimizer.step()
    for low, full in zip(parameters, reference, strict=True):
        if updates != "stochastic":
            assert same_bits(low, full.to(low.dtype))
        assert ((low.float() - full).abs() <= torch.finfo(low.dtype).eps * full.abs() + 2.0**-24).all()
        assert low.grad is not None
    assert handle.updates == updates


# ---- closures


@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("zero", ["optimizer", "model"])
def test_lbfgs_sees_the_low_weights_and_converges(dtype, updates, by_keyword, zero):
    model = torch.nn.Linear(6, 1)
    inputs = torch.randn(40, 6)
    targets = inputs @ torch.randn(6, 1) + 0.3
    lower(model, dtype)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=8, line_search_fn="strong_wolfe")
    hold(optimizer, updates)
    seen = []

    def closure():
        (optimizer if zero == "optimizer" else model).zero_grad()
        seen.append(model.weight.detach().clone())
        loss = (torch.nn.functional.linear(inputs, model.weight.float(), model.bias.float()) - targets) ** 2
        loss.mean().backward()
        return loss.mean()

    start = closure().item()
    for _ in range(3):
        assert model.weight.dtype == dtype
        loss = optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
    assert loss.item() < start
    assert len({tuple(weight.flatten().tolist()) for weight in seen}) > 5
    # Seven weights about 1, each off by at most one unit of its format, with inputs of variance 1.
    assert closure().item() <= 7 * (4 * torch.finfo(dtype).eps) ** 2


# ---- groups


def test_a_group_added_later_is_held_from_the_next_step(dtype, give_gradients):
    first, second = (torch.nn.Parameter(torch.randn(3).to(dtype)) for _ in range(2))
    reference = floats([first, second])
    optimizer = torch.optim.SGD([first], lr=0.1)
    handle = hold(optimizer, "masters")
    optimizer.add_param_group({"params": [second], "lr": 0.01})
    expected = torch.optim.SGD([{"params": reference[:1]}, {"params": reference[1:], "lr": 0.01}], lr=0.1)
    give_gradients([first, second], reference, seed=0)
    optimizer.step()
    expected.step()
    assert [low for low, _ in handle.parameters] == [first, second]
    for (_, master), full in zip(handle.parameters, reference, strict=True):
        assert same_bits(master, full)


def test_marks_on_parameters_are_seen_by_the_optimizer(parameters):
    parameters[0].decays = False
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    hold(optimizer)
    assert optimizer.param_groups[0]["params"][0].decays is False


# ---- and back


def test_removed_is_as_if_never_held(make_optimizer, parameters, give_gradients):
    optimizer = make_optimizer(parameters)
    before = dict(vars(optimizer))
    handle = hold(optimizer, "kahan")
    give_gradients(parameters, seed=0)
    optimizer.step()
    state = state_of(optimizer)
    handle.remove()
    handle.remove()
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], parameters, strict=True))
    assert vars(optimizer).keys() == before.keys()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    for (_, key), value in state_of(optimizer).items():
        if isinstance(value, torch.Tensor) and value.dim():
            assert value.dtype == parameters[0].dtype, key
    assert state.keys() == state_of(optimizer).keys()
    give_gradients(parameters, seed=1)
    optimizer.step()
    assert hold(optimizer, "masters").updates == "masters"


# torch's compiler warns of its own deprecations.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_step_writes_the_low_parameters(updates, give_gradients):
    parameters = [torch.nn.Parameter(torch.randn(5, 3).bfloat16())]
    twins = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    for replica, compiled in ((parameters, False), (twins, True)):
        optimizer = torch.optim.SGD(replica, lr=0.1)
        hold(optimizer, updates)

        def step(optimizer=optimizer):
            optimizer.step()

        step = torch.compile(step, backend="eager") if compiled else step
        for seed in range(2):
            give_gradients(replica, seed=seed)
            step()
            optimizer.zero_grad()
            assert replica[0].grad is None
    for p, q in zip(parameters, twins, strict=True):
        assert same_bits(p, q)
    torch.compiler.reset()


# ---- values that are set from outside

FULL = torch.tensor([1.0 + 2.0**-12, -3.0 - 2.0**-15, 2.0**-20])
BITS = {torch.bfloat16: 16, torch.float16: 22}  # of low plus residual


def test_values_that_are_set_count_in_full_and_in_the_next_step(updates, dtype):
    parameters = [torch.nn.Parameter(torch.full((3,), value, dtype=dtype)) for value in (5.0, 7.0)]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    held = hold(optimizer, updates)
    held.set_values({1: FULL.double()})
    assert torch.equal(parameters[1], FULL.to(dtype))
    assert torch.equal(parameters[0], torch.full((3,), 5.0, dtype=dtype))
    value = held.full_values()[parameters[1]]
    if updates == "kahan":
        assert torch.allclose(value, FULL, rtol=2.0 ** -BITS[dtype], atol=0)
    else:
        assert torch.equal(value, FULL if updates == "masters" else FULL.to(dtype).float())
    parameters[1].grad = torch.full((3,), 0.5, dtype=dtype)
    optimizer.step()
    if updates == "masters":
        assert torch.equal(held.full_values()[parameters[1]], FULL - 0.5)
        assert torch.equal(parameters[1], (FULL - 0.5).to(dtype))
