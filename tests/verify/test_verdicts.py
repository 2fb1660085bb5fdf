"""Unmodified scripts of every kind, each with the verdict on its gradients that it deserves."""

import pytest
from training_scripts import trains

from narrowcast.verify.compare._results import certify_script

ADAM = "torch.optim.Adam(net.parameters(), 1e-3)"
# A loss of 1e-8 times the usual one, as a weight on an auxiliary loss may make it: gradients of 1e-9.
TINY = trains(
    "nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))",
    "x = torch.randn(256, 32)",
    "loss = nn.functional.mse_loss(net(x), x[:, :1].sin()) * 1e-8",
    optimizer=ADAM,
)
DROPOUT = trains(
    "nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, 256), nn.ReLU(), "
    "nn.Dropout(0.5), nn.Linear(256, 10))",
    "x = torch.randn(64, 32)",
    "loss = nn.functional.cross_entropy(net(x), x[:, :10].argmax(1))",
)
FULL_BATCH = trains(
    "nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 1))",
    "loss = nn.functional.mse_loss(net(x), x[:, :1].sin())",
    before="torch.manual_seed(0); x = torch.randn(512, 32)",
    optimizer=ADAM,
)
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


@pytest.fixture
def certify(runs):
    def run(text, policy="bf16", loss_scale=None):
        return certify_script(runs(text, policy=policy, loss_scale=loss_scale), format=policy)

    return run


def test_gradients_of_1e_9_are_lost_in_fp16_without_a_scale(certify):
    found = certify(TINY, policy="fp16", loss_scale="1")
    gradients = [p["gradient_norm"] for p in found["parameters"]]
    assert all(1e-10 < norm < 1e-8 for norm in gradients)
    assert (found["verdict"], found["loss_scale"]) == ("fail", 1.0)
    assert found["error_over_noise"] > 1
    assert found["worst_parameter"]["name"] in found["reason"]


def test_gradients_of_1e_9_are_kept_by_a_dynamic_scale(certify):
    found = certify(TINY, policy="fp16")
    assert found["verdict"] == "pass", found["reason"]
    assert found["loss_scale"] == 2.0**16


@pytest.mark.parametrize("script", [DROPOUT, WORKERS, GAN], ids=["dropout", "workers", "gan"])
def test_what_is_right_in_bf16_passes(script, certify):
    found = certify(script)
    assert found["verdict"] == "pass", found["reason"]
    # bf16 does round: a certificate of nothing would be zero.
    assert 1e-4 < found["error_over_noise"] < 0.05
    assert found["cosine"] > 0.99
    if script == GAN:
        names = {p["name"].partition(".")[0] for p in found["parameters"]}
        assert names == {"Sequential", "Sequential-2"}


def test_a_full_batch_is_judged_by_its_relative_error(certify):
    found = certify(FULL_BATCH)
    assert (found["error_over_noise"], found["verdict"]) == (None, "pass")
    assert 1e-4 < found["relative_error"] < 0.05
    assert "no minibatch noise" in found["reason"]
