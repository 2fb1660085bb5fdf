"""How far the region and the scale reach, and that they end there."""

import gc
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from scenarios import data, network
from torch import nn
from torch.utils.data import DataLoader

import narrowcast as nc
from narrowcast.attach import Attachment, _leaves
from narrowcast.attach._torch_internals import register_hook_first
from narrowcast.casting import autocast
from narrowcast.errors import OrderError, ScaleError, UnsupportedError
from narrowcast.scaling import Dynamic, Static

SCALE = 2.0**8


class Recording(nn.Module):
    """Tells in which format its layer computed."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.dtypes = []

    def forward(self, x):
        out = self.layer(x)
        self.dtypes.append(out.dtype)
        return out


@pytest.mark.parametrize(("policy", "inside"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_region_is_the_outermost_call(policy, inside):
    model, x = Recording(), torch.randn(2, 4)
    with Attachment(policy):
        out = model(x)
        assert model.dtypes == [inside]
        assert out.dtype == torch.float32
        assert not torch.is_autocast_enabled("cpu")
        assert (x @ model.layer.weight).dtype == torch.float32
        assert F.mse_loss(out, x).dtype == torch.float32
    assert model(x).dtype == model.dtypes[-1] == torch.float32


def test_an_argument_of_forward_may_be_named_module():
    class Selecting(Recording):
        def forward(self, x, module):
            return super().forward(x) * module

    model = Selecting()
    with Attachment("bf16"):
        out = model(torch.randn(2, 4), module=2)
    assert model.dtypes == [torch.bfloat16]
    assert out.dtype == torch.float32


def test_an_argument_of_a_checkpointed_function_may_be_named_original():
    def shifted(x, original):
        return model(x) + original

    model, x = Recording(), torch.randn(2, 4)
    with Attachment("bf16"):
        torch.utils.checkpoint.checkpoint(shifted, x, original=x, use_reentrant=False)
    assert model.dtypes == [torch.bfloat16]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_the_region_closes_whatever_is_raised_in_it(error):
    def raises(*_):
        raise error

    model = Recording()
    handle = model.layer.register_forward_hook(raises)
    with Attachment("bf16"):
        with pytest.raises(error):
            model(torch.randn(2, 4))
        handle.remove()
        assert not torch.is_autocast_enabled("cpu")
        assert model(torch.randn(2, 4)).dtype == torch.float32


def test_a_local_region_that_turns_casting_off_is_honoured():
    class Careful(Recording):
        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                super().forward(x)
            return super().forward(x)

    model = Careful()
    with Attachment("bf16") as attached:
        model(torch.randn(2, 4))
    assert model.dtypes == [torch.float32, torch.bfloat16]
    assert attached.left_alone is None


@pytest.mark.parametrize("workers", [0, 2])
def test_no_region_opens_in_a_data_loader_worker(workers):
    encoder, inputs = Recording(), list(torch.ones(4, 4))

    def collate(batch):
        encoder(torch.stack(batch))
        return encoder.dtypes[-1] == torch.float32

    with Attachment("bf16") as attached, torch.no_grad():
        found = list(DataLoader(inputs, batch_size=2, num_workers=workers, collate_fn=collate))
    assert found == [workers > 0] * 2
    assert attached.facts["steps"] == 0


def test_each_of_two_threads_trains_as_alone():
    """Two models in two threads, each with its own scaled backward: each gradient is unscaled once."""
    x, y = data()

    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for _ in range(10):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    expected = [train(network(seed=seed)) for seed in (11, 12)]
    found, models = {}, {seed: network(seed=seed) for seed in (11, 12)}
    with Attachment("fp16", Static(scale=SCALE)):
        threads = [threading.Thread(target=lambda s=s: found.update({s: train(models[s])})) for s in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for want, seed in zip(expected, (11, 12), strict=True):
        # Ten steps of gradients with an error of at most 7 roundoffs of fp16 (see test_scenarios).
        assert (found[seed] - want).norm() / want.norm() < 7 * 2.0**-11


# ---- gradients that the script looks at


HOOKS = {
    "tensor": lambda model, hidden, see: hidden.register_hook(see),
    "parameter": lambda model, hidden, see: model[0].weight.register_hook(see),
    "post accumulate": lambda model, hidden, see: model[0].weight.register_post_accumulate_grad_hook(
        lambda p: see(p.grad)
    ),
    "module": lambda model, hidden, see: model[4].register_full_backward_hook(
        lambda m, inputs, outputs: see(*inputs, *outputs)
    ),
    "module, before": lambda model, hidden, see: model[4].register_full_backward_pre_hook(
        lambda m, outputs: see(*outputs)
    ),
    "all modules": lambda model, hidden, see: nn.modules.module.register_module_full_backward_hook(
        lambda m, inputs, outputs: see(*outputs) if m is model[4] else None
    ),
}


def assert_near(found, expected, tolerance):
    assert len(found) == len(expected) > 0
    for f, e in zip(found, expected, strict=True):
        assert (f - e).norm() / e.norm() < tolerance


def assert_as_in_fp32(run, scale=2.0**12, tolerance=2.0**-8):
    """``run`` returns the same gradients in fp16; by default with up to 16 roundoffs on the way."""
    with Attachment("fp32"):
        expected = run()
    with Attachment("fp16", Static(scale=scale)):
        found = run()
    assert_near(found, expected, tolerance)


@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
def test_hooks_see_true_gradients(register):
    def seen():
        (model, (x, y)), found = (network(), data()), []
        hidden = model[:2](x)
        handle = register(model, hidden, lambda *gradients: found.extend(one.clone() for one in gradients))
        F.mse_loss(model[2:](hidden), y).backward()
        handle.remove()
        return found

    assert_as_in_fp32(seen)


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_module_hook_changes_gradients_by_a_list_or_a_tuple(kind):
    """torch takes both; the second hook sees what the first returned."""

    def seen():
        (model, (x, y)), found = (network(), data()), []
        loss = nn.MSELoss()
        loss.register_full_backward_hook(lambda m, gi, go: kind(None if g is None else g * 2 for g in gi))
        loss.register_full_backward_hook(lambda m, gi, go: found.append(gi[0].clone()))
        (loss(model(x), y) * 1e-3).backward()
        return [*found, *(p.grad for p in model.parameters())]

    assert_as_in_fp32(seen)


def test_a_hook_registered_first_runs_first():
    leaf, order = torch.ones(1, requires_grad=True), []
    early = leaf.register_hook(lambda g: order.append("early"))
    leaf.register_hook(lambda g: order.append("late"))
    register_hook_first(leaf, lambda g: order.append("first"))
    (leaf * 2).backward()
    assert order == ["first", "early", "late"]
    early.remove()
    order.clear()
    (leaf * 2).backward()
    assert order == ["first", "late"]


@pytest.mark.usefixtures("no_hooks_of_others")
def test_an_interrupt_before_a_leaf_is_known_to_be_hooked_does_not_hook_it_twice():
    """A Ctrl-C right after the hook was registered; a hook that runs twice would divide twice."""
    register = _leaves.register_hook_first

    def interrupted(*args):
        register(*args)
        raise KeyboardInterrupt

    layer, x = nn.Linear(4, 4, bias=False), torch.randn(2, 4)

    def gradient(**options):
        layer.zero_grad()
        layer(x).square().sum().backward(**options)
        return layer.weight.grad.clone()

    with nc.attached("bf16", Static(scale=2.0**10)):
        expected = gradient()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_leaves, "register_hook_first", interrupted)
            with pytest.raises(KeyboardInterrupt):
                gradient(inputs=[layer.weight])
        assert torch.equal(gradient(inputs=[layer.weight]), expected)
    assert not layer.weight._backward_hooks


class Seen(torch.autograd.Function):
    """The identity, whose backward calls ``see``."""

    @staticmethod
    def forward(ctx, x, see):
        ctx.see = see
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        ctx.see()
        return g, None


def stepped(model, see):
    """An optimizer that steps on the last layer from a hook of the graph, before the pass ends."""
    optimizer = torch.optim.SGD(model[4].parameters(), 0.0)

    def step(*_):
        optimizer.step()
        see()

    accumulates = model[0].weight.view_as(model[0].weight).grad_fn.next_functions[0][0]
    accumulates.register_hook(step)
    return accumulates  # a hook lives as long as Python holds its node


EARLY = {
    "leaf": lambda model, see: model[0].weight.register_hook(lambda g: see()),
    "post accumulate": lambda model, see: model[0].weight.register_post_accumulate_grad_hook(lambda p: see()),
    "tensor": lambda model, see: model[0].register_forward_hook(
        lambda m, x, out: (out.register_hook(lambda g: see()), None)[1]
    ),
    "module": lambda model, see: model[1].register_full_backward_hook(lambda *_: see()),
    "Function": lambda model, see: model[0].register_forward_hook(lambda m, x, out: Seen.apply(out, see)),
    "optimizer": stepped,
}


@pytest.fixture
def no_hooks_of_others():
    gc.collect()  # hooks of earlier tests may wait in cycles


@pytest.mark.usefixtures("no_hooks_of_others")
@pytest.mark.parametrize("look", EARLY.values(), ids=EARLY)
@pytest.mark.parametrize("before", [False, True])
def test_gradients_of_a_leaf_are_true_while_the_pass_goes_on(look, before):
    """Read from where the first layer's backward calls the script, when the last layer has its gradient."""

    def seen():
        (model, (x, y)), found = (network(), data()), []
        if before:
            F.mse_loss(model(x), y).backward()
        held = look(model, lambda: found.append(model[4].weight.grad.clone()))
        F.mse_loss(model(x), y).backward()
        assert held is not None
        return [*found, *(p.grad for p in model.parameters())]

    assert_as_in_fp32(seen)


def checked_at_once(run):
    """How often ``run`` unscaled a list of gradients in one operation."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        run()
    return sum(e.name == "aten::_amp_foreach_non_finite_check_and_unscale_" for e in profiled.events())


@pytest.mark.usefixtures("no_hooks_of_others")
def test_gradients_that_nobody_looks_at_are_unscaled_together():
    model, (x, y) = network(), data()
    with Attachment("fp16", Static(scale=SCALE)):
        assert checked_at_once(lambda: F.mse_loss(model(x), y).backward()) == 1
        assert checked_at_once(lambda: F.mse_loss(model(x), y).backward()) == 0  # there are gradients already
        model.zero_grad()
        model[1].register_full_backward_hook(lambda *_: None)
        assert checked_at_once(lambda: F.mse_loss(model(x), y).backward()) == 0


def shared(a, b):
    return [a.view(2, 8) + b.view(2, 8), torch.cat([a, b]), a + b]


@pytest.mark.usefixtures("no_hooks_of_others")
@pytest.mark.parametrize("way", range(3))
def test_gradients_of_two_leaves_in_one_memory_are_unscaled_once(way):
    a, b = (torch.ones(16, requires_grad=True) for _ in range(2))
    with Attachment("fp16", Static(scale=SCALE)):
        (shared(a, b)[way] * 3).sum().backward()
    assert a.grad.tolist() == b.grad.tolist() == [3.0] * 16


@pytest.mark.usefixtures("no_hooks_of_others")
def test_the_gradient_of_one_leaf_in_the_middle_of_anothers_is_unscaled_once():
    a, b = torch.ones(24, requires_grad=True), torch.ones(8, requires_grad=True)

    def backward():
        ((a.view(3, 8).flatten() + torch.cat([torch.zeros(8), b, torch.zeros(8)])) * 3).sum().backward()

    backward()
    assert a.grad.data_ptr() < b.grad.data_ptr() < a.grad.data_ptr() + a.grad.nbytes
    a.grad = b.grad = None
    with Attachment("fp16", Static(scale=SCALE)):
        backward()
    assert a.grad.tolist() == [3.0] * 24
    assert b.grad.tolist() == [3.0] * 8


@pytest.mark.usefixtures("no_hooks_of_others")
def test_gradients_that_came_before_an_error_are_true():
    def raises(saved):
        raise KeyError

    def arrived():
        model, (x, y) = network(), data()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, raises):
            hidden = model[:2](x)
        with pytest.raises(KeyError):
            F.mse_loss(model[2:](hidden), y).backward()
        assert model[0].weight.grad is None
        return [p.grad for p in model[2:].parameters()]

    assert_as_in_fp32(arrived)


@pytest.mark.usefixtures("no_hooks_of_others")
def test_another_thread_begins_a_pass_before_the_gradients_are_unscaled():
    """Where a saved tensor is unpacked; it adds to the leaf of the first pass and to one of its own."""

    def added():
        weight, own = (torch.ones(16, requires_grad=True) for _ in range(2))
        thread = threading.Thread(target=(weight * 2 + own * 3).sum().backward)

        def unpack(saved):
            thread.start()
            thread.join(0.1)
            return saved

        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            product = torch.ones(16) * weight
        product.sum().backward()
        thread.join()
        return [weight.grad, own.grad]

    assert_as_in_fp32(added)


@pytest.mark.parametrize("way", ["retain_grad", "retain_grad, twice", "inputs"])
def test_gradients_inside_the_graph_are_true_and_accumulate(way):
    def kept():
        model, (x, y) = network(), data()
        hidden = model[:2](x)
        if "retain" in way:
            hidden.retain_grad()
        loss = F.mse_loss(model[2:](hidden), y)
        for _ in range(1 + ("twice" in way)):
            loss.backward(retain_graph=True, inputs=[hidden, model[4].weight] if way == "inputs" else None)
        assert (model[0].weight.grad is None) == (way == "inputs")
        with warnings.catch_warnings(action="ignore"):
            return hidden.grad, model[4].weight.grad

    assert_as_in_fp32(kept)


def test_autograd_grad_is_true_also_where_the_scale_overflows():
    def slopes():
        model, (x, y) = network(), data()
        return torch.autograd.grad(F.mse_loss(model(x), y) * 100, list(model.parameters()))

    for scale in (2.0**4, 2.0**24):
        assert_as_in_fp32(slopes, scale, 2.0**-7)


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_backward_takes_iterators_as_torch_does(policy):
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    with nc.attached(policy):
        model(x).sum().backward(inputs=model.parameters())
        torch.autograd.backward(model(x).sum() for _ in range(2))
    assert torch.equal(model.weight.grad, torch.full((4, 4), 6.0))


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_autograd_grad_takes_iterators_as_torch_does(policy):
    """In fp16 the default scale overflows here, so that the pass is run again."""
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    with nc.attached(policy):
        outputs = (model(x).sum() for _ in range(2))
        seeds = (torch.ones(()) for _ in range(2))
        weight, bias = torch.autograd.grad(outputs, model.parameters(), seeds)
    assert torch.equal(weight, torch.full((4, 4), 4.0))
    assert torch.equal(bias, torch.full((4,), 4.0))


@pytest.mark.parametrize("scale", [2.0**4, 2.0**24])
def test_autograd_grad_leaves_true_gradients_where_they_are_kept(scale):
    """It adds to ``grad`` of a tensor inside the graph, also where it is run again as the scale overflows."""

    def kept():
        model, (x, y) = network(), data()
        (hidden := model[:2](x)).retain_grad()
        loss = F.mse_loss(model[2:](hidden), y) * 100
        for _ in range(2):
            torch.autograd.grad(loss, model[0].weight, retain_graph=True)
        return [hidden.grad]

    assert_as_in_fp32(kept, scale, 2.0**-7)


def test_autograd_grad_takes_and_returns_a_dict():
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        pytest.skip("torch takes a dict of inputs from 2.13 on")

    def slopes():
        model, (x, y) = network(), data()
        parameters = dict(model.named_parameters())
        found = torch.autograd.grad(F.mse_loss(model(x), y), parameters)
        assert list(found) == list(parameters)
        return list(found.values())

    assert_as_in_fp32(slopes)


def test_a_pass_in_a_hook_starts_from_true_gradients():
    def gradients():
        (model, (x, y)), other = (network(), data()), nn.Linear(4, 1)
        with torch.no_grad():
            other.weight.fill_(0.25)
        hidden = model[:2](x)

        @hidden.register_hook
        def other_pass(_):
            with torch.enable_grad():
                other(x[:, :4]).square().mean().backward()

        F.mse_loss(model[2:](hidden), y).backward()
        return [other.weight.grad, model[0].weight.grad]

    assert_as_in_fp32(gradients)


def test_a_hook_of_an_fp64_tensor_gets_its_gradient_in_fp64():
    seen = []
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with Attachment("fp16", Static(scale=2.0**8)):
        model, (x, y) = network(), data()
        middle = weight * 1.0000000001
        middle.register_hook(seen.append)
        (F.mse_loss(model(x), y).double() + middle.sum()).backward()
    assert [gradient.dtype for gradient in seen] == [torch.float64]
    assert torch.equal(weight.grad, torch.full_like(weight, 1.0000000001))


def test_autograd_grad_inside_a_model_is_true():
    class Slopes(torch.nn.Linear):
        def forward(self, x):
            return torch.autograd.grad(super().forward(x).sum(), x)[0]

    model, x = Slopes(1, 1), torch.ones(1, 1, requires_grad=True)
    torch.nn.init.ones_(model.weight)
    with Attachment("fp16") as attached:
        assert model(x).item() == 1  # 65536, the loss scale, is beyond fp16, in which the sum is
    assert not any("full_like" in note for note in attached.notes)


def test_a_function_that_runs_a_pass_inside_its_backward():
    """As adjoint solvers do: torch.autograd.grad there is not unscaled, or it would be unscaled twice."""

    class Adjoint(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return torch.tanh(x @ weight)

        @staticmethod
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors
            with torch.enable_grad():
                x, copy = x.detach().requires_grad_(), weight.detach().requires_grad_()
                out = torch.tanh(x @ copy)
            if ctx.needs_input_grad[0]:
                (dx,) = torch.autograd.grad(out, x, gradient, retain_graph=True)
                out.backward(gradient)
                return dx, copy.grad
            out.backward(gradient)
            return None, copy.grad

    def train():
        torch.manual_seed(0)
        layer, x = nn.Linear(4, 4), torch.randn(8, 4)
        weight = nn.Parameter(torch.randn(4, 4))
        Adjoint.apply(layer(x), weight).square().mean().backward()
        return layer.weight.grad, weight.grad

    assert_as_in_fp32(train, 2.0**10)


# ---- what is refused, and what is left to the script


def _by_no_grad(parameters):
    with torch.no_grad():
        for p in parameters:
            p.sub_(0.1 * p.grad)


def _by_data(parameters):
    for p in parameters:
        p.data.sub_(0.1 * p.grad)


def _by_new_data(parameters):
    for p in parameters:
        p.data = p.data - 0.1 * p.grad


@pytest.mark.parametrize("update", [_by_no_grad, _by_data, _by_new_data])
def test_updates_by_hand_are_refused_in_fp16_and_right_in_bf16(update):
    def train(steps=3):
        model, (x, y) = network(), data()
        for _ in range(steps):
            F.mse_loss(model(x), y).backward()
            update(model.parameters())
            model.zero_grad()
        return model[0].weight.detach()

    expected = train()
    with Attachment("bf16") as attached:
        found = train()
    assert_near([found], [expected], 7 * 2.0**-8)
    assert any("by hand" in note for note in attached.recorder.notes)
    with Attachment("fp16"), pytest.raises(UnsupportedError, match=r"updated by hand.*--policy bf16"):
        train(steps=2)
    train()


@pytest.mark.parametrize("region", [
    lambda: torch.autocast("cpu", torch.bfloat16), lambda: autocast("cpu", torch.bfloat16),
    lambda: torch.amp.autocast("cpu"),
], ids=["torch", "narrowcast", "torch.amp"])  # fmt: skip
def test_a_script_that_uses_autocast_is_left_to_it(region):
    model = Recording()
    with Attachment("fp16") as attached:
        with region():
            model(torch.randn(2, 4))
        model(torch.randn(2, 4))
    assert model.dtypes == [torch.bfloat16, torch.float32]
    assert attached.recorder.notes == [
        "the script or its trainer uses autocast itself, so narrowcast added nothing"
    ]
    assert attached.facts["final_scale"] is None


@pytest.mark.parametrize("enabled", [True, False])
def test_a_script_with_an_enabled_grad_scaler_is_left_alone(enabled):
    model, (x, y) = network(), data()
    with Attachment("bf16") as attached:
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler.scale(F.mse_loss(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert (attached.left_alone is not None) == enabled


def test_one_attachment_at_a_time():
    with Attachment("bf16"), pytest.raises(OrderError, match="in force already"), Attachment("bf16"):
        pass


def test_optimizer_classes_and_leaves_are_torchs_own_afterwards():
    class Fresh(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    model, (x, y) = network(), data()
    with Attachment("fp16", Dynamic(scale=SCALE)) as attached:
        optimizer = Fresh(model.parameters(), 0.1)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        assert hasattr(Fresh.step, "narrowcast_wraps")
        model[4].register_full_backward_hook(lambda *_: None)  # so that gradients are unscaled one by one
        F.mse_loss(model(x), y).backward()
        assert model[0].weight._backward_hooks
    assert attached.facts["steps"] == 1
    assert not model[0].weight._backward_hooks
    assert not hasattr(Fresh.step, "narrowcast_wraps")
    assert Fresh.step.hooked
    optimizer.step()


def test_backward_from_a_gradient_edge_is_refused_in_fp16():
    model, (x, y) = network(), data()
    with Attachment("fp16"):
        edge = torch.autograd.graph.get_gradient_edge(F.mse_loss(model(x), y))
        with pytest.raises(UnsupportedError, match="GradientEdge cannot be scaled"):
            torch.autograd.backward(edge)


def test_error_if_nonfinite_meets_overflows():
    model, (x, y) = network(), data()
    with Attachment("fp16", Static(scale=SCALE)):
        (F.mse_loss(model(x), y) * 1e6).backward()
        with pytest.raises(RuntimeError, match="non-finite"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


class Labelled(torch.Tensor):
    """A tensor subclass as people write them: torch dispatches to it, and calls itself again by name."""


def test_a_loss_of_a_tensor_subclass_is_scaled_once():
    def gradient():
        model, (x, y) = network(), data()
        torch.autograd.backward(F.mse_loss(model(x), y).as_subclass(Labelled))
        return [model[0].weight.grad]

    assert_as_in_fp32(gradient)


def test_backward_may_start_at_a_leaf():
    leaf = torch.ones(3, requires_grad=True)
    with Attachment("fp16", Static(scale=2.0**12)):
        leaf.backward(torch.tensor([1.0, 2.0, 3.0]))
        torch.autograd.backward([leaf, (leaf * 2).sum()], [torch.ones(3), None])
    assert leaf.grad.tolist() == [4.0, 5.0, 6.0]


def test_nc_attached_does_what_run_does():
    model, (x, y) = network(), data()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with nc.attached("fp16") as run:
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    assert (run.facts["steps"], run.left_alone) == (1, None)
    with pytest.raises(ScaleError, match=r"Static\(scale=8.0\), got 0.0"):
        nc.attached("fp16", 0.0)


@pytest.mark.parametrize("name", ["__call__", "forward"])
def test_training_that_calls_forward_itself_is_noted(name):
    model = nn.Linear(4, 4)
    with Attachment("bf16") as attached:
        getattr(model, name)(torch.ones(2, 4)).sum().backward()
        model(torch.ones(2, 4))
    assert any("module.forward(x) does not" in note for note in attached.notes) == (name == "forward")
