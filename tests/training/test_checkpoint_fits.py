"""A checkpoint is compared with what it is loaded into before anything changes; differences are refused."""

import copy
import itertools
import random
import re

import pytest
import torch
from stepper_runs import train
from torch import nn
from torch.optim import lr_scheduler

import narrowcast as nc
from kept_rates import keep_rates
from narrowcast.errors import CheckpointError, PolicyError
from narrowcast.training import load_checkpoint, save_checkpoint


def net(*sizes, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Linear(a, b) for a, b in itertools.pairwise(sizes)])


def loop(model, kind=torch.optim.AdamW, steps=2, **options):
    """An optimizer that has a state."""
    optimizer = kind(model.parameters(), 1e-2, **options)
    for _ in range(steps):
        model(torch.ones(2, 4, dtype=model[0].weight.dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.fixture
def path(tmp_path):
    return tmp_path / "one.ckpt"


def refused(path, *parts, **options):
    """The error of a load, after which nothing has changed."""
    live = [one for one in (*parts, *options.values()) if hasattr(one, "state_dict")]

    def now():
        return str([[one.state_dict() for one in live], torch.get_rng_state().tolist(), random.getstate()])

    before = now()
    with pytest.raises(CheckpointError, match=r"Nothing was loaded$") as error:
        load_checkpoint(path, *parts, **options)
    assert now() == before
    return str(error.value)


# ---- models


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: net(4, 3, 2, 2), "the checkpoint lacks 2.weight, 2.bias"),
        (lambda: net(4, 3), "the model has no 1.weight, 1.bias"),
        (
            lambda: net(4, 5, 2),
            r"0.weight is float32 of shape \(5, 4\) here, and was .* \(3, 4\)",
        ),
        (lambda: net(4, 3, 2).bfloat16(), "0.weight is bfloat16 of shape .* here, and was float32"),
    ],
    ids=["larger", "smaller", "wider", "bf16"],
)
def test_another_model_is_refused(path, make, message):
    model = net(4, 3, 2)
    save_checkpoint(path, model, loop(model))
    other = make()
    assert re.search(message, refused(path, other, loop(other)))


def test_wrappers_do_not_show_in_names(path):
    model = net(4, 3, 2)
    model[0] = torch.compile(model[0], backend="eager")
    wrapped = nn.DataParallel(torch.compile(model, backend="eager"))
    save_checkpoint(path, wrapped, torch.optim.SGD(wrapped.parameters(), 0.1))
    bare = net(4, 3, 2, seed=1)
    assert load_checkpoint(path, bare, torch.optim.SGD(bare.parameters(), 0.1)).notes == ()
    assert torch.equal(bare[0].weight, model[0].weight)
    save_checkpoint(path, bare)
    with torch.no_grad():
        model[1].weight.zero_()
    load_checkpoint(path, wrapped)
    assert torch.equal(bare[1].weight, model[1].weight)


def test_the_flat_pieces_of_the_older_fsdp_are_refused(path):
    flat = type("FullyShardedDataParallel", (nn.Module,), {})()
    with pytest.raises(CheckpointError, match=r"shard the model with torch.distributed.fsdp.fully_shard"):
        save_checkpoint(path, flat)


# ---- optimizers, schedulers, scalers


def test_another_optimizer_is_refused(path):
    model = net(4, 4, 4)
    save_checkpoint(path, model, loop(model))
    kind = refused(path, model, loop(model, torch.optim.Adam))
    assert "the optimizer '0' is of Adam, and was of AdamW" in kind
    swapped = [model[1].weight, model[1].bias, model[0].weight, model[0].bias]
    message = refused(path, model, torch.optim.AdamW(swapped, 1e-2))
    assert "parameter 0 of the optimizer '0' is 1.weight, float32 of shape (4, 4), and was 0" in message
    groups = torch.optim.AdamW([{"params": [one]} for one in model.parameters()], 1e-2)
    assert "has groups of [1, 1, 1, 1] parameters, and had [4]" in refused(path, model, groups)


def test_a_missing_part_is_refused_unless_the_model_is_alone(path):
    model = net(4, 2)
    optimizer = loop(model)
    scheduler, scaler = lr_scheduler.StepLR(optimizer, 1), nc.GradScaler()
    save_checkpoint(path, model, optimizer, scaler=scaler, position=3)
    assert "Give it as scaler=..." in refused(path, model, optimizer)
    message = refused(path, model, optimizer, scheduler=scheduler, scaler=scaler)
    assert "it holds no scheduler '0' (it has none)" in message
    evaluated = net(4, 2, seed=1)
    torch.rand(5)
    before = torch.get_rng_state()
    alone = load_checkpoint(path, evaluated)
    assert torch.equal(evaluated[0].weight, model[0].weight)
    assert torch.equal(torch.get_rng_state(), before), "an evaluation leaves the random state alone"
    assert alone.position == 3
    assert alone.notes == (
        "it holds the optimizer '0' (AdamW), which was not given: not loaded",
        "it holds the scaler '0' (GradScaler), which was not given: not loaded",
    )


def test_several_by_name_and_in_order(path):
    model = net(4, 4, 2)
    halves = {
        "first": torch.optim.SGD(model[0].parameters(), 0.1),
        "second": torch.optim.Adam(model[1].parameters()),
    }
    schedulers = [lr_scheduler.StepLR(halves["first"], 1), lr_scheduler.ExponentialLR(halves["second"], 0.5)]
    save_checkpoint(path, model, halves, scheduler=schedulers)
    assert load_checkpoint(path, model, dict(reversed(halves.items())), scheduler=schedulers).notes == ()
    message = refused(path, model, {"first": halves["first"]}, scheduler=schedulers)
    assert "holds the optimizer 'second' (Adam), which was not given" in message


def linear(optimizer):
    return lr_scheduler.LinearLR(optimizer)


SCHEDULERS = {  # with states of every kind: functions, a Counter, states of other schedulers, infinities
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 4]),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "chained": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(o, 2), linear(o)]),
    "sequential": lambda o: lr_scheduler.SequentialLR(o, [linear(o), lr_scheduler.StepLR(o, 2)], [3]),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "averaged": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=5),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_of_torch_go_on(path, name):
    def made():
        model = net(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        return model, optimizer, SCHEDULERS[name](optimizer)

    def rates(optimizer, scheduler, count):
        found = []
        for _ in range(count):
            optimizer.step()
            scheduler.step(*([1.0] if name == "plateau" else []))
            found.append(optimizer.param_groups[0]["lr"])
        return found

    model, optimizer, scheduler = made()
    rates(optimizer, scheduler, 3)
    save_checkpoint(path, model, optimizer, scheduler=scheduler)
    expected = rates(optimizer, scheduler, 5)
    model, optimizer, scheduler = made()
    optimizer.step()
    assert load_checkpoint(path, model, optimizer, scheduler=scheduler).notes == ()
    assert rates(optimizer, scheduler, 5) == expected


class InFp32(torch.optim.SGD):
    """Keeps a state in fp32 for weights in bf16, as some optimizers do."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            kept = self.state[parameter].setdefault("mean", torch.zeros_like(parameter, dtype=torch.float32))
            kept.add_(1.0 / 3.0)


def test_states_keep_their_dtypes(path):
    model = net(4, 2).bfloat16()
    optimizer = InFp32(model.parameters(), 0.1)
    optimizer.step()
    save_checkpoint(path, model, optimizer)
    other = InFp32(model.parameters(), 0.1)
    load_checkpoint(path, model, other)
    for mine, theirs in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert torch.equal(mine["mean"], theirs["mean"])
        assert theirs["mean"].dtype == torch.float32


def test_a_state_that_cannot_be_loaded_is_one_error(path):
    class Refuses(lr_scheduler.StepLR):
        def load_state_dict(self, state_dict):
            raise ValueError("not today")

    model = net(4, 2)
    optimizer = loop(model)
    save_checkpoint(path, model, optimizer, scheduler=Refuses(optimizer, 1))
    before = str([model.state_dict(), optimizer.state_dict()])
    with pytest.raises(CheckpointError, match="could not be loaded, and was in part: ValueError: not today"):
        load_checkpoint(path, model, optimizer, scheduler=Refuses(optimizer, 1))
    assert str([model.state_dict(), optimizer.state_dict()]) == before, "schedulers come first"


def test_a_scaler_of_torch_is_of_another_kind_than_ours(path):
    model = net(4, 2)
    theirs = torch.amp.GradScaler("cpu", init_scale=64.0)
    save_checkpoint(path, model, scaler=theirs)
    assert load_checkpoint(path, model, scaler=theirs).notes == ()
    message = refused(path, model, scaler=nc.GradScaler("cpu"))
    assert "the scaler '0' is of GradScaler, and was of torch.amp.GradScaler" in message


def test_what_is_given_is_checked(path):
    model = net(4, 2)
    stepper = nc.Stepper(model, loop(model), "bf16")
    for options, message in (
        ({"optimizer": "adam"}, "expected a torch.optim.Optimizer, got str"),
        ({"optimizer": stepper}, "expected a torch.optim.Optimizer, got Stepper: write stepper="),
        ({"scheduler": 3}, "expected schedulers with state_dict"),
        ({"stepper": model}, "expected stepper to be a nc.Stepper, got Sequential"),
    ):
        with pytest.raises(CheckpointError, match=message):
            save_checkpoint(path, model, **options)
    with pytest.raises(CheckpointError, match=r"expected the model, a torch.nn.Module, got OrderedDict"):
        save_checkpoint(path, model.state_dict())
    assert not path.exists()


# ---- held weights


@pytest.mark.parametrize("updates", ["masters", "kahan", "stochastic"])
def test_held_weights_are_found_by_their_optimizer(path, updates):
    def made(seed, hold=updates):
        model = net(4, 2, seed=seed).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        if hold:
            nc.weights.hold(optimizer, hold)
        return model, optimizer

    model, optimizer = made(0)
    save_checkpoint(path, model, optimizer)
    other, fresh = made(1)
    assert load_checkpoint(path, other, fresh).notes == ()
    full = [nc.weights.held_by(one).full_values() for one in (optimizer, fresh)]
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(full[0][mine], full[1][theirs])
    other, bare = made(1, hold=None)
    message = refused(path, other, bare)
    assert f"held weights '0' ({updates}), which was not given. Hold the optimizer's weights" in message
    other, fresh = made(1, hold="kahan" if updates == "masters" else "masters")
    assert "this state of held weights does not fit" in refused(path, other, fresh)


# ---- Steppers and policies


def stepper_of(policy="bf16", seed=0, **options):
    model = net(4, 2, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return model, optimizer, nc.Stepper(model, optimizer, policy, **options)


def test_what_the_stepper_has_may_be_given_too(path):
    model, optimizer, stepper = stepper_of()
    train(model, stepper, 2)
    save_checkpoint(path, model, optimizer, stepper=stepper, scaler=stepper.scaler)
    other, optimizer, stepper = stepper_of(seed=1)
    assert load_checkpoint(path, other, optimizer, stepper=stepper).notes == ()
    assert stepper.steps == 2


def test_another_policy_is_refused(path):
    model, _, stepper = stepper_of("bf16")
    save_checkpoint(path, model, stepper=stepper)
    other, _, wide = stepper_of("fp32", seed=1)
    assert "saved under the policy bf16, and here is fp32" in refused(path, other, stepper=wide)
    with pytest.raises(PolicyError, match="the Stepper has the policy fp32, and bf16 was given"):
        load_checkpoint(path, other, stepper=wide, policy="bf16")


@pytest.fixture
def auto_is(monkeypatch, tmp_path):
    """Gives this machine rates after which "auto" is this format."""

    def make(name):
        folder = tmp_path / name
        keep_rates(folder, (0.5, 0.5, 0.5) if name == "fp32" else (2.0, 2.0, 2.0))
        monkeypatch.setenv("NARROWCAST_CACHE_DIR", str(folder))

    return make


KEPT = r"resumed in {} on cpu, as saved; auto would now choose {} \(measured on 20.*, bf16 against fp32: "


@pytest.mark.parametrize(("before", "now"), [("bf16", "fp32"), ("fp32", "bf16")])
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_resume_after_new_rates_keeps_its_format(path, auto_is, before, now, by_hand):
    auto_is(before)
    model, _, stepper = stepper_of("auto")
    train(model, stepper, 2)
    save_checkpoint(path, model, stepper=stepper)
    kept = copy.deepcopy([model.state_dict(), stepper.state_dict()])
    train(model, stepper, 3)
    auto_is(now)
    other, _, resumed = stepper_of("auto", seed=1)
    assert resumed.formats != stepper.formats
    with pytest.warns(UserWarning, match=KEPT.format(before, now)):
        resumed.load_state_dict(kept[1]) if by_hand else load_checkpoint(path, other, stepper=resumed)
    other.load_state_dict(kept[0])
    assert resumed.formats == stepper.formats
    train(other, resumed, 3)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_a_loop_that_resumes_is_told_its_format(path, auto_is):
    auto_is("bf16")
    model = net(4, 2)
    save_checkpoint(path, model, loop(model), policy="auto")
    found = load_checkpoint(path, model, loop(model), policy="auto")
    assert found.policy == nc.Policy.preset("auto")
    auto_is("fp32")
    with pytest.warns(UserWarning, match=KEPT.format("bf16", "fp32")):
        found = load_checkpoint(path, model, loop(model), policy="auto")
    assert (found.policy, found.notes) == (nc.Policy(compute="bf16"), ())
    assert load_checkpoint(path, model, loop(model), policy="bf16").policy == found.policy


def test_a_loop_without_an_optimizer_is_told_its_format(path, auto_is):
    """The model is all that it has, so that a run continues where it is loaded alone."""
    auto_is("bf16")
    model = net(4, 2)
    save_checkpoint(path, model, policy="auto")
    auto_is("fp32")
    with pytest.warns(UserWarning, match=KEPT.format("bf16", "fp32")):
        found = load_checkpoint(path, model, policy="auto")
    assert found.policy == nc.Policy(compute="bf16")


def test_a_format_that_cannot_be_kept_is_refused(path, auto_is):
    auto_is("bf16")
    model, _, stepper = stepper_of(nc.Policy(compute="auto", rules=(nc.rule.module("0", compute="fp32"),)))
    save_checkpoint(path, model, stepper=stepper)
    auto_is("fp32")
    model, _, stepper = stepper_of(nc.Policy(compute="auto", rules=(nc.rule.module("0", compute="fp32"),)))
    message = (
        "the Stepper computes in fp32 on cpu, and computed in bf16. Make it with a policy that computes in"
    )
    assert message in refused(path, model, stepper=stepper)
    model, _, stepper = stepper_of(nc.Policy(compute="bf16", rules=(nc.rule.module("0", compute="fp32"),)))
    load_checkpoint(path, model, stepper=stepper)


def test_a_policy_with_rules_comes_back(path):
    policy = nc.Policy.preset("bf16").with_rules(nc.rule.op("softmax", compute="fp16"))
    save_checkpoint(path, net(4, 2), policy=policy)
    found = load_checkpoint(path, net(4, 2), policy=policy)
    assert found.policy == policy
    assert found.notes == ()


def test_named_optimizers_of_a_stepper(path):
    def made(names):
        model = nn.ModuleDict({name: net(4, 2) for name in names})
        optimizers = {name: torch.optim.SGD(model[name].parameters(), 0.1) for name in names}
        return model, nc.Stepper(model, optimizers, "fp32")

    model, stepper = made("gd")
    save_checkpoint(path, model, stepper=stepper)
    other, fresh = made("gd")
    assert load_checkpoint(path, other, stepper=fresh).notes == ()
    other = nn.ModuleDict({"g": net(4, 2), "d": net(4, 2)})
    single = nc.Stepper(other, torch.optim.SGD(other.parameters(), 0.1), "fp32")
    assert "holds the optimizer 'g 0' (SGD), which was not given" in refused(path, other, stepper=single)


def test_a_loop_and_a_stepper_do_not_load_each_other(path):
    model, optimizer, stepper = stepper_of()
    save_checkpoint(path, model, stepper=stepper)
    message = refused(path, model, optimizer, scaler=stepper.scaler)
    assert "it was saved from a Stepper, and none was given. Give what was saved, or the model" in message
    save_checkpoint(path, model, optimizer, scaler=stepper.scaler)
    message = refused(path, model, stepper=stepper)
    assert "it was saved from a loop without a Stepper, and one was given" in message
    assert len(load_checkpoint(path, model).notes) == 2
