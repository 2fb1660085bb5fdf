"""What probes keep of a script, and what is made of it: held-back updates, fingerprints, outputs."""

import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import textwrap

import pytest
import torch
from training_scripts import MSE, X, trains

from child_processes import output_of
from narrowcast.errors import ScriptError, UnsupportedError
from narrowcast.verify.compare._results import _judge_steps, output_from_probes
from narrowcast.verify.compare._results import certify_script as certify_steps
from narrowcast.verify.runs._model_state import put_back, random_fingerprint
from narrowcast.verify.runs._probes import fingerprint
from narrowcast.verify.runs._runs import TENSORS, write_result


def certify_script(runs, *, format, at_step=0):
    """Return the certificate of one step."""
    (certificate,) = certify_steps(runs, format=format, at_steps=(at_step,))
    return certificate


def test_a_fingerprint_is_of_every_bit_shape_and_dtype():
    x = torch.randn(3, 4)
    same = fingerprint([x, {"mask": x > 0}])
    assert fingerprint([x.clone(), {"mask": (x > 0).clone()}]) == same
    assert fingerprint([x.t().contiguous().t(), {"mask": x > 0}]) == same
    others = [x + 0.0, torch.where(x == x[0, 0], -x, x), x.double(), x.reshape(4, 3), x[:2]]
    assert fingerprint([others[0], {"mask": x > 0}]) == same
    assert len({fingerprint([other]) for other in others}) == len(others)
    assert fingerprint([torch.zeros(1)]) != fingerprint([-torch.zeros(1)])
    assert fingerprint([torch.empty(0)]) != fingerprint([])


def test_a_tensor_without_memory_of_its_own_has_no_fingerprint():
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape)

        __torch_dispatch__ = classmethod(lambda cls, func, types, args=(), kwargs=None: args[0])

    with pytest.raises(UnsupportedError, match="memory of its own, got a Wrapper"):
        fingerprint([Wrapper(torch.ones(3))])


def test_fingerprints_and_random_states_need_no_numpy(monkeypatch):
    """torch runs without NumPy; its tensors then raise in ``numpy()``."""
    monkeypatch.setattr(torch.Tensor, "numpy", None)
    assert fingerprint([torch.ones(2)]) != fingerprint([torch.zeros(2)])
    before = random_fingerprint()
    assert random_fingerprint() == before
    torch.rand(1)
    assert random_fingerprint() != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex128], ids=str)
def test_what_is_put_back_is_equal_to_the_bit(dtype):
    """A zero of the other sign is no equal one."""
    kept = torch.tensor([[-0.0, -1.0, 1.0], [2.0, 3.0, 4.0]]).to(dtype).t()
    zero_of_other_sign = torch.where(kept == 0, torch.zeros_like(kept), kept)
    for tensor in (zero_of_other_sign, torch.full_like(kept, math.nan), kept.clone()):
        put_back(tensor, kept)
        assert fingerprint([tensor]) == fingerprint([kept])


TRAINS = """
    import json, os, sys, torch
    from torch import nn
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.5), nn.Linear(32, 1))
    before = [p.detach().clone() for p in net.parameters()]
    optimizer = torch.optim.AdamW(net.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    try:
        for step in range(20):
            x = torch.randn(32, 16)
            loss = nn.functional.mse_loss(net(x), x[:, :1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
    finally:
        same = all(torch.equal(a, b) for a, b in zip(before, net.parameters()))
        print(json.dumps([step, same, len(optimizer.state), net[1].running_mean.abs().sum().item()]))
"""


def test_updates_are_held_back_and_buffers_put_back(runs, tmp_path):
    made = runs(TRAINS)
    certificate = certify_script(made, format="bf16")
    assert certificate["verdict"] == "pass", certificate["reason"]
    last = {}
    for role in ("reference", "mixed", "exact"):
        folder = tmp_path / "runs" / f"gradients-{role}"
        last[role] = json.loads((folder / "stdout.txt").read_text())
    # Four batches, by exact ops one; then three steps are taken, and the script is ended.
    assert last["exact"] == [0, True, 0, 0.0]
    assert last["reference"][:3] == last["mixed"][:3] == [6, False, 6]
    assert last["mixed"][3] == pytest.approx(last["reference"][3], rel=2**-7)
    moved = torch.load(tmp_path / "runs" / "gradients-reference" / TENSORS / "step-0" / "moves.pt")
    assert moved["1.running_mean"].abs().sum().item() == pytest.approx(last["reference"][3])  # from zero
    assert len(made.folders) == 3
    names = [p["name"] for p in certificate["parameters"]]
    assert names[:2] == ["Sequential.0.weight", "Sequential.0.bias"]
    # The bias before the batch norm is rounding noise.
    assert [p["judged"] for p in certificate["parameters"]] == [True, False, True, True, True, True]


SABOTAGES = {
    "a loss divided": ("loss = loss / 2 if bad else loss", ""),
    "a weight of 2 left on in a group": ("", "for p in net[3].parameters(): p.grad *= 1 + bad"),
    "one step left out in five": ("", "if bad and step % 5 == 4: continue"),
    "steps taken twice": ("", "if bad: optimizer.step()"),
    "a rate doubled": ("optimizer.param_groups[0]['lr'] = 0.1 + 0.1 * bad", ""),
    "a layer put back": ("kept = net[3].weight.detach().clone()", "if bad: back.append(kept)"),
    "statistics not kept": ("net[1].momentum = 0.0 if bad else 0.1", ""),
    "weights in bf16": ("", "if bad and not step: net.bfloat16()"),
    "": ("", ""),
}


@pytest.mark.parametrize(
    "sabotage",
    [
        pytest.param(name, marks=[] if name in ("a rate doubled", "") else pytest.mark.long)
        for name in SABOTAGES
    ],
)
def test_sabotage_of_the_mixed_run_is_never_right(runs, sabotage):
    """Wrong only where a script computes in mixed precision: gradients, steps, or what they leave behind."""
    loss, step = SABOTAGES[sabotage]
    text = trains(
        "nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 16))",
        "x = torch.randn(64, 16)",
        "if back: net[3].weight.data.copy_(back[-1])",
        "loss = nn.functional.mse_loss(net(x), x)",
        loss,
        before="bad = os.environ['NARROWCAST_RUN_DIR'].endswith('gradients-mixed')\nback = []",
    ).replace("    optimizer.step()", f"    {step or 'pass'}\n    optimizer.step()")
    found = certify_script(runs(text), format="bf16")
    assert (found["verdict"] == "pass") == (not sabotage), found["reason"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("size", "judged"), [(2, {"moved": True}), (16, {"moved": True}), (16, {})])
def test_steps_to_what_is_not_finite_only_in_mixed_precision_fail(value, size, judged):
    """A parameter, and a buffer, which certificates do not name."""
    fp32 = torch.ones(size)
    assert _judge_steps({"moved": fp32}, {"moved": fp32}, judged) == {}
    assert _judge_steps({"moved": fp32}, {"moved": fp32 * value}, judged)["verdict"] == "fail"


def test_a_mask_that_moves_to_infinity_in_fp32_too_is_not_judged():
    mask = torch.full((16,), -math.inf)
    assert _judge_steps({"mask": mask}, {"mask": mask}, {}) == {}


def test_at_later_steps_gradients_are_those_of_the_training_before(runs):
    """Against the same loop in plain torch: four batches held back, three steps in bf16, four held back."""
    net = "nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))"
    text = trains(net, "x = torch.randn(32, 16)", "loss = nn.functional.mse_loss(net(x), x[:, :1])", steps=20)
    found = certify_steps(runs(text), format="bf16", at_steps=(0, 3))
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def gradients(x, low):
        net.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            y = net(x)
        torch.nn.functional.mse_loss(y.float(), x[:, :1]).backward()
        return torch.cat([p.grad.double().flatten() for p in net.parameters()])

    def error_over_noise():
        batches = [torch.randn(32, 16) for _ in range(4)]
        fp32, mixed = (torch.stack([gradients(batch, low) for batch in batches]) for low in (False, True))
        return float((mixed - fp32).norm() / (8 * fp32.var(0).sum()).sqrt())

    expected = [error_over_noise()]
    for _ in range(3):
        gradients(torch.randn(32, 16), low=True)
        optimizer.step()
    expected.append(error_over_noise())
    assert [one["at_step"] for one in found] == [0, 3]
    assert [one["error_over_noise"] for one in found] == pytest.approx(expected, rel=1e-6)
    assert [one["verdict"] for one in found] == ["pass", "pass"], [one["reason"] for one in found]
    # The run by exact ops saw the same batch, and was exact there too. A single number may have no error.
    for certificate in found:
        rounding = [parameter["rounding_norm"] for parameter in certificate["parameters"]]
        assert len(rounding) == 4
        assert max(rounding) > 0


def test_steps_that_the_script_does_not_reach_are_left_out(runs):
    text = trains("nn.Linear(8, 1)", X, MSE, steps=12)
    found = certify_steps(runs(text), format="bf16", at_steps=(0, 2, 50))
    assert [one["at_step"] for one in found] == [0, 2]


@pytest.mark.parametrize("early", [1.0, 1e-6])
def test_at_later_steps_a_scale_that_starts_too_high_is_lowered_too(early, runs):
    loss = f"loss = (net(x) - x[:, :1]).square().sum() * (1.0 if step > 8 else {early})"
    text = trains("nn.Linear(8, 1)", X, loss, optimizer="torch.optim.SGD(net.parameters(), 1e-6)", steps=30)
    found = certify_steps(runs(text, policy="fp16"), format="fp16", at_steps=(0, 6, 8))
    assert [one["at_step"] for one in found] == [0, 6, 8]
    assert [one["verdict"] for one in found] == ["pass"] * 3, [one["reason"] for one in found]
    assert found[-1]["loss_scale"] < 2.0**16


def test_what_goes_wrong_later_is_lost_from_there_on(runs):
    """Where a script breaks its mixed gradients from a step on, the certificates before are as without."""
    bad = "bad = os.environ['NARROWCAST_RUN_DIR'].endswith('gradients-mixed')"
    lose = "if bad and step > 9: loss = loss * 0.5"
    text = trains("nn.Linear(8, 1)", X, MSE, lose, before=bad, steps=30)
    found = certify_steps(runs(text), format="bf16", at_steps=(0, 2, 8))
    judged = [(one["verdict"], one["is_lost"]) for one in found]
    assert judged == [("pass", False), ("pass", False), ("fail", True)]


ACCUMULATES = """
    import os, torch
    if {ranks} > 1:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    net = torch.nn.Linear(16, 16)
    if {ranks} > 1:
        net = torch.nn.parallel.DistributedDataParallel(net)
        torch.manual_seed(torch.distributed.get_rank())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(8):
        for _ in range({accumulation}):
            x = torch.randn(32, 16)
            (torch.nn.functional.mse_loss(net(x), x.sin()) / {accumulation}).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("accumulation", "launched"), [(1, None), (4, None), pytest.param(4, "2", marks=pytest.mark.long)]
)
def test_a_step_is_judged_with_its_accumulation(accumulation, launched, runs, monkeypatch):
    if launched:
        monkeypatch.setenv("WORLD_SIZE", launched)
    found = certify_script(runs(ACCUMULATES.format(accumulation=accumulation, ranks=1)), format="bf16")
    k = accumulation * int(launched or 1)
    assert (found["minibatches"], found["averaged"], found["samples"]) == (k, accumulation, 32)
    assert ("In a step of" in found["reason"]) == (k > 1)
    torch.manual_seed(0)
    net = torch.nn.Linear(16, 16)

    def gradients(x, low):
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            y = net(x)
        loss = torch.nn.functional.mse_loss(y.float(), x.sin())
        return torch.cat([g.double().flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])

    batches = [[torch.randn(32, 16) for _ in range(accumulation)] for _ in range(4)]
    fp32, mixed = (
        torch.stack([sum(gradients(x, low) for x in step) / accumulation for step in batches])
        for low in (False, True)
    )
    error, square = mixed - fp32, (mixed - fp32).square().sum()
    bias = max(0.0, float(error.sum(0).square().sum() - square) / 12)
    level = ((k / accumulation - 1) * bias + float(square) / 4) / float(2 * fp32.var(0).sum())
    # The script's sums over minibatches are in fp32, which rounds gradients by 6e-8 and so errors by 1e-4.
    assert found["error_over_noise"] == pytest.approx(math.sqrt(level), rel=1e-3)


@pytest.mark.long
def test_two_ranks_are_judged_as_one_step(tmp_path):
    """Each rank compares in its own folder, at the same time; their gradients are the mean of both."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(ACCUMULATES.format(accumulation=2, ranks=2)))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = textwrap.dedent("""
        import json, pathlib, sys
        from narrowcast.verify.compare._results import certify_script
        from narrowcast.verify.runs._runs import ScriptRuns, ScriptSettings
        settings = ScriptSettings(target=(sys.argv[1],), policy="bf16", folder=pathlib.Path(sys.argv[2]))
        print(json.dumps(certify_script(ScriptRuns(settings), format="bf16")[0]))
    """)
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with contextlib.ExitStack() as ranks_end:
        ranks = []
        for rank in range(2):
            process = subprocess.Popen(
                [sys.executable, "-c", code, script, tmp_path / f"rank-{rank}"],
                env=os.environ | shared | {"RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            ranks_end.enter_context(process)
            ranks_end.callback(process.kill)
            ranks.append(process)
        found = [json.loads(process.communicate(timeout=200)[0]) for process in ranks]
    for certificate in found:
        counts = [certificate[name] for name in ("minibatches", "averaged", "samples")]
        assert counts == [4, 4, 32], certificate["reason"]
        assert certificate["verdict"] == "pass", certificate["reason"]
    assert found[0]["error_over_noise"] == found[1]["error_over_noise"]


@pytest.mark.long
@pytest.mark.parametrize(("because", "policy"), [(None, "bf16"), ("this CPU is old", "fp32")])
def test_later_weights_are_those_of_the_training_before(because, policy, runs, tmp_path):
    save = 'torch.save(net.state_dict(), os.environ["NARROWCAST_RUN_DIR"] + f"/{step}.pt")'
    text = trains("nn.Linear(8, 1)", X, save, MSE, steps=12)
    certificate = certify_script(runs(text, fp32_because=because), format="bf16", at_step=5)
    assert (certificate["at_step"], certificate["verdict"]) == (5, "pass")
    assert certificate["error_over_noise"] > 0
    kept = {
        role: torch.load(tmp_path / "runs" / f"gradients-{role}" / "5.pt", weights_only=True)
        for role in ("reference", "mixed", "exact")
    }
    assert torch.equal(kept["reference"]["weight"], kept["mixed"]["weight"])
    plain = tmp_path / "plain"
    plain.mkdir()
    output_of(
        [sys.executable, "-m", "narrowcast", "run", "-p", policy, "--run-dir", plain, tmp_path / "script.py"]
    )
    assert torch.equal(torch.load(plain / "5.pt", weights_only=True)["weight"], kept["mixed"]["weight"])
    never = certify_script(runs(text), format="bf16", at_step=50)
    assert never["verdict"] == "cannot tell"
    assert never["reason"] == "The script ended after 12 steps, before step 50."


def test_a_scale_that_starts_too_high_is_lowered_first(runs):
    """fp16's dynamic scale begins with overflows; the certificate is of the scale that it comes to."""
    loss = "loss = (net(x) - x[:, :1]).square().sum() * (1.0 if step else early)"
    sgd = "torch.optim.SGD(net.parameters(), 1e-6)"
    for at_step, early, more_runs in ((0, 1.0, False), (1, 1e-6, True)):
        # The first pass is run again where it overflows; after a step a run starts at a lower scale.
        text = trains("nn.Linear(8, 1)", X, loss.replace("early", str(early)), optimizer=sgd)
        made = runs(text, policy="fp16")
        certificate = certify_script(made, format="fp16", at_step=at_step)
        assert certificate["verdict"] == "pass", certificate["reason"]
        assert certificate["loss_scale"] < 2.0**16
        assert (len(made.folders) > 3) == more_runs
    for at_step in (0, 1):
        # Of a fixed scale the certificate is of that one, in one run of each kind.
        made = runs(text.replace("1e-06", "1.0"), policy="fp16", loss_scale="65536")
        fixed = certify_script(made, format="fp16", at_step=at_step)
        assert (fixed["verdict"], fixed["loss_scale"], len(made.folders)) == ("fail", 65536.0, 3)
        assert "Linear.weight" in fixed["reason"]


def test_an_overflow_at_the_first_step_is_not_overruled_by_steps_that_were_not_compared(runs):
    """One value of the second batch is beyond fp16, which no loss scale changes."""
    text = trains("nn.Linear(8, 1)", f"{X}; x[0, 0] += (step == 1) * 1e6", MSE)
    found = certify_steps(runs(text, policy="fp16", loss_scale="1"), format="fp16", at_steps=(0, 8))
    assert [certificate["verdict"] for certificate in found] == ["fail"], found[-1]["reason"]
    assert "not in mixed precision" in found[0]["reason"]


TWO_ON_ONE_BACKWARD = """
    import torch
    torch.manual_seed(0)
    first, second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
    optimizers = [torch.optim.SGD(net.parameters(), 1e-3) for net in (first, second)]
    for step in range(8):
        x = torch.randn(32, 8)
        loss = (second(first(x)) - x[:, :1]).square().mean() * 1e-9
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
"""


@pytest.mark.parametrize(
    "at_step", [1, 2, pytest.param(0, marks=pytest.mark.long), pytest.param(3, marks=pytest.mark.long)]
)
def test_optimizers_of_one_backward_are_held_back_together(at_step, runs):
    """Gradients of 1e-9 without a loss scale are lost, at whatever step one looks."""
    made = runs(TWO_ON_ONE_BACKWARD, policy="fp16", loss_scale="1")
    certificate = certify_script(made, format="fp16", at_step=at_step)
    assert certificate["verdict"] == "fail", certificate["reason"]
    relative = {p["name"]: p["relative_error"] for p in certificate["parameters"]}
    assert set(relative) == {f"Linear{n}.{kind}" for n in ("", "-2") for kind in ("weight", "bias")}
    assert min(relative.values()) > 0.5


def test_a_submodule_called_beside_the_model_is_judged_once(runs):
    net = "nn.Sequential(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh()), nn.Linear(16, 1))"
    text = trains(net, X, "part = net[0](x).square().mean()", MSE, "loss = loss + part")
    certificate = certify_script(runs(text), format="bf16")
    assert certificate["verdict"] == "pass", certificate["reason"]
    judged = {p["name"]: p["judged"] for p in certificate["parameters"]}
    assert [name for name, was in judged.items() if not was] == ["Sequential.0.bias"]


def test_a_failed_rounding_run_fails_no_parameter(runs):
    """The run by exact ops fails here; the bias before the batch norm is then neither noise nor lost."""
    modes = "{type(m).__name__ for m in torch.utils._python_dispatch._get_current_dispatch_mode_stack()}"
    net = "nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))"
    text = trains(net, X, MSE, f"assert 'ExactOps' not in {modes}")
    certificate = certify_script(runs(text), format="bf16")
    assert certificate["verdict"] != "fail"
    assert "rounding could not be measured" in certificate["reason"]


def test_gradients_that_the_script_reads_after_a_step_are_there(runs):
    """As those whose norm it logs. At step 2 updates begin to be held back."""
    text = trains("nn.Linear(8, 1)", X, MSE)
    text += "\n    norm = torch.stack([p.grad.norm() for p in net.parameters()]).norm()"
    found = certify_steps(runs(text), format="bf16", at_steps=(0, 2))
    assert [certificate["verdict"] for certificate in found] == ["pass", "pass"], found[-1]["reason"]


def test_a_mode_that_the_script_leaves_is_its_own(runs):
    """Torch leaves the mode that was entered last. ``randn_like`` of a bf16 tensor draws from other bits."""
    text = """
        import torch
        from torch.utils.flop_counter import FlopCounterMode
        torch.manual_seed(0)
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.last = torch.nn.Linear(8, 32), torch.nn.Linear(32, 1)
            def forward(self, x):
                hidden = self.first(x)
                return self.last(hidden + torch.randn_like(hidden))
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        with FlopCounterMode(display=False):
            net(torch.randn(1, 8))
        for step in range(12):
            x = torch.randn(32, 8)
            optimizer.zero_grad()
            (net(x) - x[:, :1]).square().mean().backward()
            optimizer.step()
        """
    found = certify_script(runs(text), format="bf16")
    assert found["verdict"] == "pass", found["reason"]


def test_an_optimizer_made_anew_is_another_one(runs):
    text = """
        import torch
        torch.manual_seed(0)
        net = torch.nn.Linear(8, 1)
        for epoch in range(8):
            optimizer = torch.optim.SGD(net.parameters(), 0.01)
            for step in range(6):
                x = torch.randn(32, 8)
                optimizer.zero_grad()
                (net(x) - x[:, :1]).square().mean().backward()
                optimizer.step()
        """
    found = certify_steps(runs(text), format="bf16", at_steps=(0, 6))
    assert [certificate["verdict"] for certificate in found] == ["pass", "pass"], found[-1]["reason"]


def test_an_optimizer_inside_of_another_is_not_waited_for(runs):
    """Sharpness-aware minimization: one object with the parameters, and its base that makes the updates."""
    text = """
        import torch
        torch.manual_seed(0)
        class Around(torch.optim.Optimizer):
            def __init__(self, parameters):
                super().__init__(parameters, {})
                self.base = torch.optim.SGD(self.param_groups, 0.01)
            def step(self):
                self.base.step()
        net = torch.nn.Linear(8, 1)
        optimizer = Around(net.parameters())
        for step in range(14):
            x = torch.randn(32, 8)
            optimizer.zero_grad()
            (net(x) - x[:, :1]).square().mean().backward()
            optimizer.step()
        """
    found = certify_steps(runs(text), format="bf16", at_steps=(0, 2))
    assert [certificate["verdict"] for certificate in found] == ["pass", "pass"], found[-1]["reason"]
    assert "Left out" not in found[-1]["reason"]


def test_parameters_that_are_frozen_at_every_other_step(runs):
    net = "nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))"
    text = trains(net, "[p.requires_grad_(step % 2 == 0) for p in net[0].parameters()]", X, MSE)
    found = certify_script(runs(text), format="bf16")
    assert found["verdict"] == "pass", found["reason"]
    assert {p["name"] for p in found["parameters"]} == {
        f"Sequential.{layer}.{name}" for layer in (0, 2) for name in ("weight", "bias")
    }


def test_many_calls_a_step_are_no_want_of_steps(runs, monkeypatch):
    cells = "h = torch.zeros(8, 16)", "for _ in range(1100): h = net(h + x)", "loss = h.square().mean()"
    text = trains(
        "nn.Linear(16, 16)",
        "x = torch.randn(8, 16)",
        *cells,
        optimizer="torch.optim.SGD(net.parameters(), 1e-6)",
    )
    found = certify_script(runs(text), format="bf16")
    assert "No optimizer stepped" not in found["reason"]


def test_where_steps_were_not_compared_the_reason_says_so(runs):
    said = "How far steps move the weights was not compared."
    for steps, is_said in ((4, True), (12, False)):
        text = trains("nn.Linear(8, 1)", X, MSE, steps=steps)
        found = certify_script(runs(text), format="bf16")
        assert (found["verdict"], said in found["reason"]) == ("pass", is_said)


CANNOT_TELL = {
    "updates by hand": (
        """
        import torch
        net = torch.nn.Linear(8, 1)
        for step in range(3):
            net(torch.randn(4, 8)).square().mean().backward()
            with torch.no_grad():
                for p in net.parameters():
                    p -= 0.1 * p.grad
        """,
        "No torch.optim.Optimizer stepped",
    ),
    "another batch each time": (
        trains(
            "nn.Linear(8, 1)",
            "loss = net(torch.randn(4, 8, generator=g)).square().mean()",
            before='g = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "little"))',
        ),
        "did not see the same batch",
    ),
    "other random numbers": (
        trains(
            "nn.Linear(8, 8)",
            "step or net.register_forward_pre_hook(draw)",
            X,
            MSE,
            before="def draw(*_): torch.is_autocast_enabled('cpu') and torch.rand(1)",
        ),
        "drew different random numbers",
    ),
    "it fails without updates": (
        trains(
            "nn.Linear(8, 1)",
            "assert not step or not torch.equal(before, net.weight), 'nothing was trained'",
            "before = net.weight.detach().clone()",
            X,
            MSE,
        ),
        "A run whose updates were held back failed: the script failed with exit code 1 in run "
        "gradients-reference: AssertionError: nothing was trained.",
    ),
}


@pytest.mark.parametrize("case", CANNOT_TELL)
def test_runs_that_cannot_be_compared_have_a_reason(case, runs):
    text, reason = CANNOT_TELL[case]
    certificate = certify_script(runs(text), format="bf16")
    assert certificate["verdict"] == "cannot tell", certificate
    assert reason in certificate["reason"]
    assert certificate.get("script_first", False) == certificate["reason"].startswith("Two runs ")


def test_batches_that_differ_from_a_later_step_on_are_told_from_unseeded_ones(runs):
    """The script draws a random number after each mixed step, and none after the others."""
    text = trains(
        "nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))",
        "step or net[0].register_forward_hook(see)",
        "formats and formats[-1] is not torch.float32 and torch.rand(1)",
        X,
        MSE,
        before="formats = []\ndef see(layer, inputs, output): formats.append(output.dtype)",
    )
    first, later = certify_steps(runs(text), format="bf16", at_steps=(0, 8))
    assert first["verdict"] == "pass", first["reason"]
    assert later["verdict"] == "cannot tell"
    assert later["script_first"], "no other step or seed mends it"
    assert "though they did at step 0: since then one of them drew other batches" in later["reason"]


def test_the_error_of_a_failing_run_names_it_and_the_cause(runs):
    with pytest.raises(ScriptError, match=r"(?s)failed with exit code 1 in run fp32-1; .*ValueError: no"):
        runs("raise ValueError('no')").start("fp32-1", "fp32", "timed", steps=3)


# ---- scripts of every kind, each with the verdict that it deserves

WORKERS = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset
    class Noisy(Dataset):
        def __len__(self):
            return 128
        def __getitem__(self, i):
            image = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(i))
            return image + 0.1 * torch.randn(3, 16, 16), i % 5
    if __name__ == "__main__":
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 196, 5)
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        for x, y in DataLoader(Noisy(), batch_size=32, shuffle=True, num_workers=2):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
"""
GAN = """
    import torch
    from torch import nn
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 32))
    judge = nn.Sequential(nn.Linear(32, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
    makes, judges = (torch.optim.Adam(net.parameters(), 2e-4) for net in (maker, judge))
    loss_of = nn.functional.binary_cross_entropy_with_logits
    for step in range(40):
        real, fake = torch.randn(64, 32) + 1, maker(torch.randn(64, 16))
        loss = loss_of(judge(real), torch.ones(64, 1)) + loss_of(judge(fake.detach()), torch.zeros(64, 1))
        judges.zero_grad()
        loss.backward()
        judges.step()
        loss = loss_of(judge(fake), torch.ones(64, 1))
        makes.zero_grad()
        loss.backward()
        makes.step()
"""


@pytest.mark.parametrize("script", [WORKERS, GAN], ids=["workers", "gan"])
def test_what_is_right_in_bf16_passes(script, runs):
    found = certify_script(runs(script), format="bf16")
    assert found["verdict"] == "pass", found["reason"]
    # bf16 does round: a certificate of nothing would be zero.
    assert 1e-4 < found["error_over_noise"] < 0.05
    assert found["cosine"] > 0.99
    if script == GAN:
        names = {p["name"].partition(".")[0] for p in found["parameters"]}
        assert names == {"Sequential", "Sequential-2"}


PER_SAMPLE = """
    import torch
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    def loss(weights, x):
        return (torch.func.functional_call(net, weights, (x,)) - x[:1]).square().mean()
    for _ in range(8):
        weights = {name: weight.detach() for name, weight in net.named_parameters()}
        gradients = torch.vmap(torch.func.grad(loss), (None, 0))(weights, torch.randn(16, 8))
        for name, weight in net.named_parameters():
            weight.grad = gradients[name].mean(0)
        optimizer.step()
"""


def test_a_model_called_inside_torch_func_cannot_be_told(runs):
    found = certify_script(runs(PER_SAMPLE), format="bf16")
    assert (found["verdict"], found["samples"]) == ("cannot tell", None)
    assert "calls its model inside torch.func" in found["reason"]


# ---- outputs


@pytest.fixture
def outputs(tmp_path):
    """Folders as two runs that keep outputs leave them."""

    def facts(inputs, module):
        """Inputs such as ``"a"``, or ``"a~"`` for the same but for rounding."""
        values = [[0.0, 1.0, 2.0 + 0.01 * ("~" in inputs)]]
        batch = inputs.rstrip("~")
        call = {"module": module, "kind": ("Encoder", "Decoder")[module], "inputs": inputs}
        return call | {"batch": batch, "batch_values": values}

    def make(fp32, mixed, inputs=("a", "b"), others=("a", "b"), modules=(0, 0, 0)):
        folders = []
        for name, tensors, seen in (("fp32", fp32, inputs), ("mixed", mixed, others)):
            folder = tmp_path / name
            folder.mkdir()
            for number, tensor in enumerate(tensors):
                (folder / TENSORS).mkdir(exist_ok=True)
                kept = tensor if isinstance(tensor, list) else [tensor]
                torch.save(kept, folder / TENSORS / f"outputs-{number}.pt")
            calls = [facts(*call) for call in zip(seen, modules, strict=False)]
            write_result(folder, {"calls": calls, "problem": None})
            folders.append(folder)
        return output_from_probes(*folders)

    return make


def test_the_error_of_outputs_against_its_definition(outputs):
    x = [torch.randn(5, 5), torch.randn(7)]
    y = [t + 0.01 * torch.randn_like(t) for t in x]
    found = outputs(x, y)
    flat = [torch.cat([t.double().flatten() for t in side]) for side in (x, y)]
    relative = float((flat[1] - flat[0]).norm() / flat[0].norm())
    assert found["relative_error"] == pytest.approx(relative, rel=1e-12)
    assert found["sqnr_db"] == pytest.approx(
        float(20 * torch.log10(flat[0].norm() / (flat[1] - flat[0]).norm())), rel=1e-12
    )
    assert (found["verdict"], found["calls"]) == ("pass", 2)


@pytest.mark.parametrize(
    ("mixed", "verdict", "reason"),
    [
        ([torch.ones(4), torch.ones(4)], "pass", "below 0.05 over 2 calls"),
        ([torch.ones(4), torch.ones(4) * 1.2], "fail", "0.05 or more over 2 calls"),
        ([torch.ones(4), torch.full((4,), torch.nan)], "fail", "finite in FP32 and not in mixed"),
        ([torch.ones(4), torch.ones(5)], "cannot tell", "other shapes"),
    ],
)
def test_outputs_pass_below_a_relative_error_of_a_twentieth(outputs, mixed, verdict, reason):
    found = outputs([torch.ones(4), torch.ones(4)], mixed)
    assert (found["verdict"], reason in found["reason"]) == (verdict, True), found


def test_a_lost_small_output_fails_beside_a_large_one(outputs):
    boxes, scores = torch.full((64, 4), 500.0), torch.full((64,), 0.5)
    found = outputs([[boxes, scores]] * 2, [[boxes, scores * 0]] * 2)
    assert (found["verdict"], found["relative_error"]) == ("fail", 1.0)
    assert "output 2 of 2" in found["reason"]


def test_outputs_that_cannot_be_read_are_a_reason(outputs, tmp_path):
    outputs([torch.ones(4)] * 2, [torch.ones(4)] * 2)
    (tmp_path / "mixed" / TENSORS / "outputs-1.pt").write_bytes(b"cut")
    found = output_from_probes(tmp_path / "fp32", tmp_path / "mixed")
    assert (found["verdict"], found["reason"]) == ("cannot tell", "the outputs of a run cannot be read")


def test_only_calls_with_the_same_inputs_are_compared(outputs):
    found = outputs([torch.ones(4)] * 2, [torch.ones(4), torch.zeros(4)], others=("a", "other"))
    assert (found["calls"], found["relative_error"], found["verdict"]) == (1, 0.0, "pass")


def test_what_one_module_computes_for_another_differs_by_rounding(outputs):
    """A decoder whose outputs bf16 spoils, behind an encoder that it does not."""
    good, bad = torch.ones(4), torch.zeros(4)
    given = {"inputs": ("a", "b"), "others": ("a", "b~"), "modules": (0, 1)}
    found = outputs([good, good], [good, bad], **given)
    assert (found["verdict"], found["calls"]) == ("fail", 2)
    assert found["reason"].endswith("worst in Decoder")


def test_a_module_without_a_call_to_compare_is_no_yes(outputs):
    given = {"inputs": ("a", "b"), "others": ("a", "other"), "modules": (0, 1)}
    found = outputs([torch.ones(4)] * 2, [torch.ones(4)] * 2, **given)
    assert found["verdict"] == "cannot tell"
    assert found["reason"].startswith("no two calls of Decoder had the same inputs")


def test_where_a_module_has_calls_with_the_same_inputs_only_these_count(outputs):
    """As a model that goes on from its own outputs, whose errors add up."""
    drifts = [torch.ones(4), torch.ones(4) * 1.2]
    found = outputs([torch.ones(4)] * 2, drifts, others=("a", "b~"))
    assert (found["verdict"], found["calls"]) == ("pass", 1)


@pytest.mark.parametrize(
    ("fp32", "others", "reason"),
    [
        ([torch.ones(4)] * 2, ("x", "y"), "no two calls had the same inputs"),
        ([torch.zeros(4)] * 2, ("a", "b"), "all zero or not finite in FP32"),
        ([torch.full((4,), torch.inf)] * 2, ("a", "b"), "all zero or not finite in FP32"),
        ([[], []], ("a", "b"), "no output is floating"),
    ],
)
def test_outputs_without_information_have_a_reason(outputs, fp32, others, reason):
    found = outputs(fp32, fp32, others=others)
    assert (found["verdict"], found["relative_error"]) == ("cannot tell", None)
    assert reason in found["reason"]
