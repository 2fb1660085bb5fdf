"""Two trainings side by side: one under torch's scaler, one under ours, on equal numbers."""

import copy

import torch

SGD, AdamW = torch.optim.SGD, torch.optim.AdamW
OPTIMIZERS = {
    "SGD with momentum": lambda ps: SGD(ps, lr=0.1, momentum=0.9),
    "SGD for-loop": lambda ps: SGD(ps, lr=0.1, momentum=0.9, nesterov=True, foreach=False),
    "SGD fused": lambda ps: SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "AdamW foreach": lambda ps: AdamW(ps, lr=0.01, foreach=True),
    "AdamW for-loop": lambda ps: AdamW(ps, lr=0.01, foreach=False),
    "AdamW fused": lambda ps: AdamW(ps, lr=0.01, amsgrad=True, fused=True),
    "Adagrad fused": lambda ps: torch.optim.Adagrad(ps, lr=0.1, fused=True),
    "SparseAdam": lambda ps: torch.optim.SparseAdam(ps, lr=0.01),
}
# Of one clipped gradient against another: the norm is summed in another order and on scaled numbers, and
# (g / s) * (s / d) is rounded twice where g * (1 / s) * c is rounded twice: a few times 2**-24 each.
CLIPPED = 1e-6
# Of a step made with it: the difference may be divided by a second moment, and is added up with momentum.
STEPPED = {"rtol": 1e-4, "atol": 1e-6}


class Side:
    """A scaler, and models with an optimizer each."""

    def __init__(self, scaler, kinds, dtype):
        self.scaler = scaler
        self.sparse = [kind == "SparseAdam" for kind in kinds]
        self.models = [_parameters(sparse, dtype) for sparse in self.sparse]
        self.optimizers = [OPTIMIZERS[kind](ps) for kind, ps in zip(kinds, self.models, strict=True)]

    def loss(self, models, seed, planted, where):
        """A loss that reaches ``models``; its gradients are drawn from ``seed``.

        ``planted`` (an infinity or NaN, or 1) multiplies the whole loss, or the gradient of one parameter.
        """
        drawn = torch.Generator().manual_seed(seed)
        total = torch.zeros(())
        for model in models:
            for index, parameter in enumerate(self.models[model]):
                here = planted if where == index else 1.0
                if self.sparse[model]:
                    rows = torch.randint(0, len(parameter), (3,), generator=drawn)
                    used = torch.nn.functional.embedding(rows, parameter, sparse=True)
                else:
                    used = parameter
                weights = torch.randn(used.shape, generator=drawn)
                total = total + (used * weights * here).sum() + 0.1 * used.square().sum()
        return total * planted if where is None else total


def _parameters(sparse, dtype):
    shapes = ((5, 2),) if sparse else ((3,), (2, 2))
    drawn = torch.Generator().manual_seed(len(shapes))
    return [torch.nn.Parameter(torch.randn(shape, generator=drawn).to(dtype)) for shape in shapes]


def tensors_in(value):
    """Every tensor and number inside a nesting of containers, in order."""
    if isinstance(value, dict):
        return [t for key in value for t in tensors_in(value[key])]
    if isinstance(value, list | tuple):
        return [t for item in value for t in tensors_in(item)]
    return [value]


def same(ours, theirs):
    """Equal to the bit, NaN included; for sparse tensors as they are stored."""
    if ours is None or theirs is None:
        return ours is theirs
    if not isinstance(ours, torch.Tensor):
        return ours == theirs
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape or ours.layout != theirs.layout:
        return False
    if ours.is_sparse:
        return same(ours._indices(), theirs._indices()) and same(ours._values(), theirs._values())
    return torch.equal(ours.nan_to_num(nan=1.25), theirs.nan_to_num(nan=1.25)) and torch.equal(
        ours.isnan(), theirs.isnan()
    )


def iterate(scaler, optimizer, loss):
    """One iteration on the loss that ``loss`` returns; the result of its step."""
    optimizer.zero_grad()
    scaler.scale(loss()).backward()
    result = scaler.step(optimizer)
    scaler.update()
    return result


def gradients(model):
    return [None if p.grad is None else p.grad.detach() for p in model]


def state_of(optimizer):
    return [optimizer.state.get(p, {}) for p in optimizer.param_groups[0]["params"]]


def put_state(optimizer, states):
    for parameter, state in zip(optimizer.param_groups[0]["params"], states, strict=True):
        optimizer.state.pop(parameter, None)
        if state:
            optimizer.state[parameter] = copy.deepcopy(state)


def put_gradients(model, values):
    for parameter, value in zip(model, values, strict=True):
        parameter.grad = None if value is None else value.clone()
