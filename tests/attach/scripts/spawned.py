"""Plain FP32 training in processes that the script starts itself; each prints its layer's format."""

import multiprocessing
import sys

import torch
import torch.multiprocessing


class Recording(torch.nn.Linear):
    def forward(self, x):
        out = super().forward(x)
        self.seen = out.dtype
        return out


def train(rank, settings=None):
    torch.manual_seed(rank)
    model = Recording(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    sys.stdout.write(f"process {rank}: {model.seen}\n")  # at once: another process writes there too
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "torch":
        torch.multiprocessing.spawn(train, nprocs=2)
    else:
        # The keyword is also the name of a parameter of the function that attaches in the process.
        context = multiprocessing.get_context(sys.argv[1])
        process = context.Process(target=train, args=(0,), kwargs={"settings": "unused"})
        process.start()
        process.join()
        assert process.exitcode == 0
