"""Scripts that train through Lightning and Fabric, as the command runs them: ranks, and where time goes."""

import json
import os
import socket
import sys
import textwrap

import pytest

from child_processes import finished
from narrowcast.capture import read_capture

pytestmark = pytest.mark.long

FABRIC = """\
    import sys, lightning, torch
    fabric = lightning.Fabric(devices=2, accelerator="cpu", strategy="ddp")
    fabric.launch()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1))
    seen = []
    net[0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    for step in range(6):
        loss = model(torch.randn(8, 8)).square().mean()
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
    total = sum(p.double().sum().item() for p in net.parameters())
    sys.stdout.write(f"rank {fabric.global_rank}: {seen[-1]} {total}\\n")
    """
TRAINER = """\
    import sys, lightning, torch
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
            self.seen = []
            self.net[0].register_forward_hook(lambda module, inputs, output: self.seen.append(output.dtype))
        def training_step(self, batch, number):
            return torch.nn.functional.mse_loss(self.net(batch), batch[:, :1])
        def configure_optimizers(self):
            return torch.optim.Adam(self.net.parameters(), 1e-3)
    if __name__ == "__main__":
        module = Module()
        trainer = lightning.Trainer(
            accelerator="cpu", devices=DEVICES, strategy="STRATEGY", max_epochs=1, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )
        trainer.fit(module, torch.utils.data.DataLoader(torch.randn(512, 64), batch_size=8))
        total = sum(p.double().sum().item() for p in module.parameters())
        sys.stdout.write(f"rank {trainer.global_rank}: {module.seen[-1]} {total}\\n")
    """
ON_TWO = TRAINER.replace("DEVICES", "2").replace("STRATEGY", "ddp")
ON_ONE = TRAINER.replace("DEVICES", "1").replace("STRATEGY", "auto")


@pytest.fixture
def narrowcast(tmp_path):
    """Run the command with a script in place of SCRIPT."""

    def run(text, *words, launcher=()):
        script = tmp_path / "train.py"
        script.write_text(textwrap.dedent(text))
        words = [script if word == "SCRIPT" else word for word in words]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "10000"}
        if not launcher:
            environment["MASTER_PORT"] = port
        return finished([sys.executable, *launcher, "-m", "narrowcast", *words], env=environment)

    return run


@pytest.mark.parametrize("script", [FABRIC, ON_TWO], ids=["fabric", "trainer"])
def test_ranks_that_lightning_starts_run_in_mixed_precision(script, narrowcast, tmp_path):
    done = narrowcast(script, "run", "--policy", "bf16", "--run-dir", tmp_path / "run", "SCRIPT")
    assert done.returncode == 0, done.stderr
    ranks = sorted(line.split() for line in done.stdout.splitlines() if line.startswith("rank "))
    assert [rank[1:3] for rank in ranks] == [["0:", "torch.bfloat16"], ["1:", "torch.bfloat16"]]
    assert ranks[0][3] == ranks[1][3]
    assert done.stderr.count("narrowcast: bf16 on cpu") == 1
    names = ("capture.jsonl", "capture-rank1.jsonl")
    steps = [read_capture(tmp_path / "run" / name).end["steps"] for name in names]
    assert steps[0] == steps[1] > 0


def test_ranks_that_lightning_starts_are_refused_where_measured(narrowcast):
    done = narrowcast(ON_TWO, "explain", "--policy", "bf16", "SCRIPT")
    assert done.returncode == 3
    assert "write torchrun --nproc-per-node 2 -m narrowcast in place of narrowcast" in done.stderr


def test_explain_under_torchrun_as_the_refusal_says(narrowcast):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = narrowcast(ON_TWO, "explain", "--policy", "bf16", "SCRIPT", launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert " ".join(done.stdout.split()).count("bf16 on this CPU, by the policy bf16") == 2, "each rank"


def test_the_step_of_lightning_is_not_all_the_optimizers(narrowcast):
    done = narrowcast(ON_ONE, "explain", "--policy", "bf16", "--json", "SCRIPT")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout[done.stdout.index("{") :])
    of_optimizer = {site["op"] for site in found["sites"] if site["phase"] == "optimizer"}
    assert of_optimizer
    assert not of_optimizer & {"mse_loss", "gelu", "linear"}
    (loss,) = [site for site in found["sites"] if site["op"] == "mse_loss"]
    assert loss["phase"] == "outside"
