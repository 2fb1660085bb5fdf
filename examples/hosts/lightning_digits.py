"""Handwritten digits in Lightning's Trainer, in fp16 by a policy of narrowcast.

Run it:

    python examples/hosts/lightning_digits.py

What to look at: the last line, `test accuracy 0.9455`. It should be above 0.9.
"""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from narrowcast.integrations.lightning import NarrowcastPrecision


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 10))

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 3e-3)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=290)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


torch.manual_seed(0)
images, labels = (torch.tensor(values) for values in load_digits(return_X_y=True))
images = images.float() / 16
model, plugin = Digits(), NarrowcastPrecision("fp16")
trainer = lightning.Trainer(max_epochs=10, plugins=[plugin], logger=False, enable_checkpointing=False)
trainer.fit(model, DataLoader(TensorDataset(images[:898], labels[:898]), batch_size=32, shuffle=True))
print(f"test accuracy {(model.net(images[898:]).argmax(1) == labels[898:]).float().mean():.4f}")
