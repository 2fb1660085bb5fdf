"""Handwritten digits by Accelerate, in fp16 on any device, with one line of narrowcast.

Run it:

    python examples/hosts/accelerate_digits.py

What to look at: the accuracy, and the loss scale at the end, which the accelerator's scaler holds.
"""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn

from narrowcast.integrations.accelerate import prepare

EPOCHS = 5

digits = load_digits()
images = torch.tensor(digits.images / 16.0, dtype=torch.float32).flatten(1)
data = torch.utils.data.TensorDataset(images, torch.tensor(digits.target))
loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True)

torch.manual_seed(0)
accelerator = Accelerator(cpu=not torch.cuda.is_available())  # its mixed_precision stays "no"
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))
model, optimizer, scheduler, loader = prepare(accelerator, model, optimizer, scheduler, loader, policy="fp16")

for _epoch in range(EPOCHS):
    for inputs, targets in loader:
        accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
right = (model(images.to(accelerator.device)).argmax(1).cpu() == torch.tensor(digits.target)).float().mean()
print(f"accuracy {right:.3f}, loss scale {accelerator.scaler.get_scale():g}")
