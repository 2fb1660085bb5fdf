"""Training scripts as text."""

import textwrap

X = "x = torch.randn(32, 8)"
MSE = "loss = (net(x) - x[:, :1]).square().mean()"
SGD = "torch.optim.SGD(net.parameters(), 0.1)"


def trains(net, *step, steps=40, optimizer=SGD, before=""):
    """Return a script that takes ``steps`` optimizer steps; the lines ``step`` compute the loss of one."""
    lines = ["import os, torch", "from torch import nn", before, "torch.manual_seed(0)"]
    lines += [f"net = {net}", f"optimizer = {optimizer}", f"for step in range({steps}):"]
    inside = [*step, "optimizer.zero_grad()", "loss.backward()", "optimizer.step()"]
    return "\n".join([*lines, *(textwrap.indent(line, "    ") for line in inside)])
