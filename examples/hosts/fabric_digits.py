"""Handwritten digits in a loop with Fabric, in fp16 by a policy of narrowcast.

Run it:

    python examples/hosts/fabric_digits.py

What to look at: the last line, `test accuracy 0.9444`. It should be above 0.9.
"""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from narrowcast.integrations.lightning import FabricPrecision

torch.manual_seed(0)
images, labels = (torch.tensor(values) for values in load_digits(return_X_y=True))
images = images.float() / 16
plugin = FabricPrecision("fp16")
fabric = lightning.Fabric(plugins=[plugin], devices=1)
net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 10))
model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), 3e-3))
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=290)
loader = DataLoader(TensorDataset(images[:898], labels[:898]), batch_size=32, shuffle=True)
for _epoch in range(10):
    for inputs, classes in fabric.setup_dataloaders(loader):
        loss = nn.functional.cross_entropy(model(inputs), classes)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
        if not plugin.last_result.skipped:
            scheduler.step()
print(f"loss {loss.item():.4f}, {plugin.last_result}")
with torch.no_grad():
    correct = model(images[898:].to(fabric.device)).argmax(1).cpu() == labels[898:]
print(f"test accuracy {correct.float().mean():.4f}")
