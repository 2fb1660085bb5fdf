"""What a model returns straight from a sigmoid, softmax or log_softmax is computed in fp32 under run."""

import dataclasses
import gc
import weakref
from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.attach import Attachment
from narrowcast.casting import tensors_inside
from narrowcast.casting.kernels import _direct_results
from narrowcast.policy import Policy, Rule, resolve, rule
from narrowcast.scaling import Off, Static

MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]
X = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """Returns ``head`` of a layer's low output, which it remembers."""

    def __init__(self, head, wraps=lambda function: function):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 4)
        self.head = wraps(head)

    def forward(self, x):
        low = self.layer(x)
        if low.requires_grad:
            low.retain_grad()
        self.low = low
        return self.head(low)


def with_compute(name: str, compute: str, *rules: Rule) -> Policy:
    return dataclasses.replace(Policy.preset(name).with_rules(*rules), compute=compute)


def attached(policy="bf16"):
    return Attachment(policy, Off())


def returned(head, policy="bf16", mode=torch.enable_grad):
    model = Model(head)
    with attached(policy) as run, mode():
        output = model(X)
    return output, model.low, run.notes


def computed_in_fp32(head, low):
    """The same from the low input, in FP32, and that input, to read its gradient."""
    low = low.detach().clone().requires_grad_(low.requires_grad)
    return head(low.float()), low


Named = namedtuple("Named", ["chance", "logits"])


@dataclasses.dataclass
class Record:
    chance: torch.Tensor
    logits: torch.Tensor


OPERATORS = {
    "sigmoid": torch.sigmoid,
    "method": lambda low: low.sigmoid(),
    "module": nn.Sigmoid(),
    "expit": torch.special.expit,
    "softmax": lambda low: F.softmax(low, dim=-1),
    "softmin": nn.Softmin(dim=0),
    "log_softmax": nn.LogSoftmax(dim=1),
    "in place": lambda low: (low * 1).sigmoid_(),
    "sure": lambda low: (low * 8).log_softmax(1),
    "squeezed": lambda low: low[:, :1].sigmoid().squeeze(1),
    "part": lambda low: low.softmax(0)[1:, 2],
    "transposed": lambda low: low.log_softmax(1).T.unsqueeze(0),
    "of a strided part": lambda low: low[:, :3].T.sigmoid()[1],
    "gathered": lambda low: low.log_softmax(1).gather(1, low.argmax(1, keepdim=True)).squeeze(1),
}


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPERATORS)
def test_values_and_gradients_are_those_of_fp32(name, mode, policy):
    head = OPERATORS[name]
    output, low, notes = returned(head, policy, mode)
    with mode():
        expected, input_of_fp32 = computed_in_fp32(head, low)
    assert low.dtype != torch.float32
    assert output.dtype == torch.float32
    assert torch.equal(output, expected)
    assert not any("returned" in note for note in notes)
    if mode is torch.enable_grad:
        arriving = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
        output.backward(arriving)
        expected.backward(arriving)
        assert torch.equal(low.grad, input_of_fp32.grad)


@pytest.mark.parametrize("make", [
    lambda *two: two, lambda *two: list(two), lambda *two: dict(zip("ab", two, strict=True)),
    Named, Record, lambda *two: {"inner": [Record(*two)]},
], ids=["tuple", "list", "dict", "named", "dataclass", "nested"])  # fmt: skip
def test_results_in_containers_are_computed_again(make):
    output, low, _ = returned(lambda low: make(low.softmax(1), low.log_softmax(1)))
    found = tensors_inside(output)
    assert type(output) is type(make(1, 2))
    for one, head in zip(found, (lambda low: low.softmax(1), lambda low: low.log_softmax(1)), strict=True):
        assert torch.equal(one, computed_in_fp32(head, low)[0])


@pytest.mark.parametrize("head", [
    lambda low: low.sigmoid() * 1,
    lambda low: low.softmax(1).mul_(2),
    lambda low: low.softmax(1, dtype=torch.float32).bfloat16(),
    lambda low: low.tanh(),
], ids=["multiplied", "written to", "another dtype", "another operator"])  # fmt: skip
@pytest.mark.parametrize("mode", MODES)
def test_other_results_are_rounded_ones(head, mode):
    output, low, notes = returned(head, mode=mode)
    assert torch.equal(output, head(low.detach()).float())
    assert not any("returned" in note for note in notes)


def losses(policy, model, loss_of, steps=12):
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    found = []
    with Attachment(policy, Static(scale=2.0**8)):
        for _ in range(steps):
            loss = loss_of(model)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach()))
    return found


def sure_model():
    model = nn.Sequential(nn.Linear(2, 1), nn.Sigmoid())
    nn.init.constant_(model[0].weight, 5.0)
    nn.init.zeros_(model[0].bias)
    return model


@pytest.mark.parametrize(
    "policy", ["bf16", "fp16", with_compute("safe", "bf16")], ids=["bf16", "fp16", "safe"]
)
def test_a_sigmoid_that_is_sure_and_wrong_trains_as_in_fp32(policy):
    """bf16 rounds the sigmoid of 10 to 1, where binary_cross_entropy had no gradient."""

    def loss_of(model):
        return F.binary_cross_entropy(model(torch.ones(8, 2)), torch.zeros(8, 1))

    expected, found = (losses(one, sure_model(), loss_of) for one in ("fp32", policy))
    assert expected[0] > 9
    assert found[-1] == pytest.approx(expected[-1], rel=0.02)


class Siamese(nn.Module):
    """Two inputs through one encoder; the chance that they are alike."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(5, 8), nn.ReLU())
        self.head = nn.Linear(16, 1)
        self.chance = nn.Sigmoid()
        nn.init.constant_(self.head.bias, 12.0)

    def forward(self, one, other):
        return self.chance(self.head(torch.cat((self.encoder(one), self.encoder(other)), 1)))


def test_preset_safe_trains_a_siamese_network():
    def loss_of(model):
        return nn.BCELoss()(model(X, X.flip(0)).squeeze(), torch.zeros(6))

    expected, found = (losses(p, Siamese(), loss_of) for p in ("fp32", with_compute("safe", "bf16")))
    assert found == pytest.approx(expected, rel=0.05, abs=0.01)


class Actor(nn.Module):
    """The rollout's log-probability is computed outside of any call of a module, the update's inside."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Sequential(nn.Linear(5, 16), nn.Tanh()), nn.Linear(16, 32)
        nn.init.normal_(self.head.weight, std=3.0)

    def act(self, x):
        chances = torch.log_softmax(self.head(self.body(x)), -1)
        action = torch.multinomial(chances.exp(), 1)
        return action, chances.gather(1, action)

    def forward(self, x, action):
        return torch.log_softmax(self.head(self.body(x)), -1).gather(1, action)


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_a_rollout_and_an_update_agree_on_log_probabilities(policy):
    actor = Actor()
    with attached(policy):
        with torch.no_grad():
            action, before = actor.act(X)
        assert torch.equal(actor(X, action), before)
        for mode in MODES:
            with mode():
                assert torch.equal(actor(X, action), before)


@pytest.mark.parametrize("rules", [
    [rule.op("sigmoid", compute="fp32")], [rule.op("sigmoid", compute="fp32", output="bf16")],
    [rule.op("sigmoid", compute="bf16")], [rule.module("head", op="sigmoid", compute="bf16")],
], ids=["fp32", "lowered", "bf16", "by module"])  # fmt: skip
def test_a_rule_of_the_user_comes_first(rules):
    output, low, _ = returned(nn.Sigmoid(), with_compute("bf16", "bf16", *rules))
    wide = low.detach().float().sigmoid()
    stays_low = rules[0].compute == "bf16" or rules[0].output == "bf16"
    assert torch.equal(output, wide.bfloat16().float() if stays_low else wide)


# ---- what is kept


class Attention(nn.Module):
    """Six layers that call softmax by hand; notes which of their scores live at the end of the forward."""

    def __init__(self, returns_all=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(6))
        self.returns_all = returns_all

    def forward(self, x):
        scores_of_layers, weights_of_layers = [], []
        for layer in self.layers:
            scores = layer(x)
            scores_of_layers.append(weakref.ref(scores))
            weights = scores.softmax(-1)
            weights_of_layers.append(weights)
            del scores
            x = weights * x
        self.kept = [scores() is not None for scores in scores_of_layers]
        self.scores = scores_of_layers
        return (x, weights_of_layers) if self.returns_all else x


@pytest.mark.parametrize(("limit", "value", "kept"), [
    ("_MOST_EARLIER", 0, 1), ("_MOST_EARLIER", 2, 3), ("_MOST_EARLIER", 9, 6),
    ("_MOST_EARLIER_BYTES", 60, 6), ("_MOST_EARLIER_BYTES", 59, 1),
])  # fmt: skip
def test_the_latest_input_is_kept_and_a_few_small_ones_before_it(monkeypatch, limit, value, kept):
    # X has 30 values of 2 bytes.
    monkeypatch.setattr(_direct_results, limit, value)
    model = Attention()
    with attached() as run:
        output = model(X)
        assert not any(scores() is not None for scores in model.scores)
    assert model.kept == [False] * (6 - kept) + [True] * kept
    assert output.requires_grad
    assert not any("returned" in note for note in run.notes)


def test_in_evaluation_nothing_is_kept_beyond_its_result():
    kept = []

    def head(low):
        scores = low * 2
        scores_of_layer = weakref.ref(scores)
        weights = scores.softmax(-1)
        del scores
        kept.append(scores_of_layer() is not None)
        low = weights * low
        del weights
        kept.append(scores_of_layer() is not None)
        return low

    returned(head, mode=torch.no_grad)
    assert kept == [True, False]


def test_what_was_not_kept_is_told_and_the_rule_for_it_helps(monkeypatch):
    monkeypatch.setattr(_direct_results, "_MOST_EARLIER", 0)
    model = Attention(returns_all=True)
    with attached() as run:
        _, weights = model(X)
    (note,) = [note for note in run.notes if "returned" in note]
    why = "too many results followed for its input to be kept"
    assert note.startswith(f"Attention returned a softmax that was computed in bf16, since {why}: nc.rule")
    assert [bool((one != one.bfloat16()).any()) for one in weights] == [False] * 5 + [True]
    with attached(with_compute("bf16", "bf16", rule.op("softmax", compute="fp32"))) as run:
        _, weights = model(X)
    assert all((one != one.bfloat16()).any() for one in weights)
    assert not any("returned" in note for note in run.notes)


def test_a_large_input_that_was_not_kept_is_told_with_its_size(monkeypatch):
    monkeypatch.setattr(_direct_results, "_MOST_EARLIER_BYTES", 59)  # X has 30 values of 2 bytes
    with attached() as run:
        Attention(returns_all=True)(X)
    (note,) = [note for note in run.notes if "returned" in note]
    assert "since its input of 0 MB was not kept until then" in note


def test_what_was_computed_again_goes_with_the_input(monkeypatch):
    """A distribution had it computed in the middle of the model."""
    monkeypatch.setattr(_direct_results, "_MOST_EARLIER", 0)
    is_alive = []

    def head(low):
        probs = low.softmax(-1)
        in_fp32 = torch.distributions.Bernoulli(probs).probs
        memory = weakref.ref(in_fp32.untyped_storage())
        del in_fp32
        is_alive.append(memory() is not None)
        result = low.sigmoid()
        is_alive.append(memory() is not None)
        return result + probs.sum()

    returned(head)
    assert is_alive == [True, False]


def test_nothing_is_left_after_an_error():
    inputs = []

    def head(low):
        scores = low * 2
        inputs.append(weakref.ref(scores))
        scores.softmax(-1)
        raise ArithmeticError

    model = Model(head)
    gc.disable()
    try:
        with attached(), pytest.raises(ArithmeticError):
            model(X)
        with attached():
            Model(lambda low: (inputs.append(weakref.ref(low)), low.sigmoid())[1])(X)
        model.low = None
    finally:
        gc.enable()
    assert inputs[0]() is None


# ---- what stands between


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(_ctx, gradient):
        return -gradient


def hooked(low):
    chance = low.sigmoid()
    chance.register_hook(lambda gradient: gradient * 0)
    return chance


def overwritten(low):
    scores = low * 1
    chance = scores.sigmoid()
    scores.zero_()
    return chance


@pytest.mark.parametrize(("head", "why"), [
    (lambda low: Reversal.apply(low.sigmoid()), "a reentrant checkpoint or a custom function"),
    (lambda low: checkpoint(torch.sigmoid, low, use_reentrant=True), "a reentrant checkpoint or"),
    (hooked, "a hook waits"), (overwritten, "its input was overwritten"),
], ids=["function", "reentrant", "hook", "overwritten"])  # fmt: skip
def test_where_it_cannot_be_computed_again_it_is_told(head, why):
    output, low, notes = returned(head)
    assert torch.equal(output, low.detach().sigmoid().float())
    assert [note for note in notes if f"returned a sigmoid that was computed in bf16, since {why}" in note]
    output.sum().backward()
    expected = low.detach().clone().requires_grad_()
    head(expected).float().sum().backward()
    assert torch.equal(low.grad, expected.grad)


def test_a_checkpoint_inside_a_model():
    def gradients(wraps):
        model = Model(lambda low: low.log_softmax(1), wraps)
        with attached():
            output = model(X)
            F.nll_loss(output, torch.arange(6) % 4).backward()
        return output, *(p.grad for p in model.parameters())

    plain = gradients(lambda head: head)
    inside = gradients(lambda head: lambda low: checkpoint(head, low, use_reentrant=False))
    for one, other in zip(plain, inside, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_a_model_under_accumulation(reentrant):
    def gradients(call):
        model = Model(lambda low: low.sigmoid())
        with attached():
            for micro_batch in (X[:3], X[3:]):
                part = micro_batch.clone().requires_grad_()
                F.binary_cross_entropy(call(model, part), torch.ones(3, 4)).backward()
        return [p.grad for p in model.parameters()]

    plain = gradients(lambda model, x: model(x))
    recomputed = gradients(lambda model, x: checkpoint(model, x, use_reentrant=reentrant))
    for one, other in zip(plain, recomputed, strict=True):
        assert torch.equal(one, other)


def test_weights_of_attention_are_a_result_unless_averaged():
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.randn(1, 3, 4)
    with attached():
        _, averaged = attention(x, x, x)
        _, single = attention(x, x, x, average_attn_weights=False)
    assert torch.equal(averaged, averaged.bfloat16().float())
    assert not torch.equal(single, single.bfloat16().float())


# ---- where it costs


def kernels():
    names = ("sigmoid", "sigmoid_", "_softmax", "_log_softmax", "gather")
    return [
        name
        for name in names
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU")
    ]


def test_gather_has_a_kernel_only_once_there_is_a_result_to_take_from():
    with attached():
        Model(lambda low: low.gather(1, torch.zeros(6, 1, dtype=torch.int64)))(X)
        assert kernels() == ["sigmoid", "sigmoid_", "_softmax", "_log_softmax"]
        Model(lambda low: low.sigmoid() + 1)(X)
        assert kernels()[-1] == "gather"
    gc.collect()
    assert kernels() == []


class WritesIntoItsArgument(nn.Module):
    """It returns nothing, as LoFTR and the detectors of OpenPCDet."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, data):
        data["y"] = self.linear(data["x"])
        data["parts"] = {"first": data["y"][0]}


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_what_a_model_writes_into_a_dict_is_in_fp32(policy):
    given = torch.ones(2, 8, dtype=torch.float64)
    data = {"x": torch.randn(4, 8), "given": given}
    with nc.attached(policy):
        WritesIntoItsArgument()(data)
    assert data["y"].dtype == torch.float32
    assert data["parts"]["first"].dtype == torch.float32
    assert torch.equal(data["y"], data["y"].to(resolve(policy, "cpu")).float())
    assert data["given"] is given


def test_what_the_script_put_into_the_dict_stays_as_it_is():
    low = torch.ones(4, 8, dtype=torch.bfloat16)
    data = {"x": low}
    with nc.attached("bf16"):
        WritesIntoItsArgument()(data)
    assert data["x"] is low


def test_a_run_in_fp32_leaves_what_a_model_casts_itself_into_a_dict():
    class CastsItself(WritesIntoItsArgument):
        def forward(self, data):
            data["y"] = self.linear(data["x"]).bfloat16()

    data = {"x": torch.ones(4, 8)}
    with nc.attached("fp32"):
        CastsItself()(data)
    assert data["y"].dtype == torch.bfloat16
