"""Random sets of rules against a small emulator, which knows what the documentation says and casts by hand.

A module with rules is cast at its bounds; an operator computes by the rule that wins: of an operator inside a
module (innermost module first), of the innermost module with a rule of its own (for what is cast anyway), of
the operator, of PyTorch's table. At one module, and among rules for operators, a path with a class wins over
either, and then the later rule.
"""

import fnmatch
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WORDS = ("fp32", "bf16", "fp16", "lower", "promote")
OUTPUTS = (None, None, "fp32", "bf16", "fp16", "lower")
TABLE = {"linear": "lower", "prod": "fp32"}  # of the CPU; the other operators below are not on it
OPS = {
    "linear": F.linear,
    "gelu": lambda x, weight: F.gelu(x),
    "softmax": lambda x, weight: x.softmax(-1),
    "prod": lambda x, weight: x * x.prod(-1, keepdim=True),
}


class Part(nn.Module):
    def __init__(self, *children):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.parts = nn.ModuleList(children)

    def forward(self, x):
        for op in OPS.values():
            x = op(x, self.weight)
            for part in self.parts:
                x = part(x)
        return x


class Special(Part):
    pass


PATHS = ("parts.0", "parts.1", "parts.*", "*.parts.0", "parts.1.parts.0", "*")


def make_model():
    return Part(Special(), Part(Special()))


def random_rules(rng):
    rules, seen = [], set()
    for _ in range(rng.randint(1, 6)):
        target = rng.choice(("op", "path", "class", "both"))
        op = rng.choice(list(OPS)) if target == "op" or rng.random() < 0.5 else None
        path = rng.choice(PATHS) if target in ("path", "both") else None
        kind = rng.choice((Part, Special)) if target in ("class", "both") else None
        if (op, path, kind) in seen:
            continue
        seen.add((op, path, kind))
        how = {"compute": rng.choice(WORDS), "output": rng.choice(OUTPUTS), "op": op}
        if path is not None:
            rules.append(nc.rule.module(path, type=kind, **how))
        elif kind is not None:
            rules.append(nc.rule.module_type(kind, **how))
        else:
            rules.append(nc.rule.op(op, compute=how["compute"], output=how["output"]))
    return rules


class Emulator:
    def __init__(self, model, rules, lower):
        self.rules, self.lower = rules, lower
        self.paths = {id(module): path for path, module in model.named_modules()}

    def run(self, module, x, stack=()):
        own = [one for one in self.rules if self.names(one, module)]
        stack = (*stack, own)
        rule = self.best([one for one in own if one.op is None])
        if rule is not None:
            x = self.cast(x, self.dtype(rule.compute, [x]))
        for name in OPS:
            x = self.call(name, x, module.weight, stack)
            for part in module.parts:
                x = self.run(part, x, stack)
        return self.cast(x, self.dtype(rule.output, [x])) if rule is not None and rule.output else x

    def names(self, rule, module):
        if rule.module is None and rule.module_type is None:
            return False
        kinds = [f"{base.__module__}.{base.__qualname__}" for base in type(module).__mro__]
        by_path = rule.module is None or fnmatch.fnmatchcase(self.paths[id(module)], rule.module)
        return by_path and (rule.module_type is None or rule.module_type in kinds)

    def best(self, rules):
        rank = {id(one): index for index, one in enumerate(self.rules)}
        both = lambda one: one.module is not None and one.module_type is not None  # noqa: E731
        return max(rules, key=lambda one: (both(one), rank[id(one)]), default=None)

    def call(self, name, x, weight, stack):
        compute, output = self.decide(name, stack)
        if name == "prod":
            return x * self.plain(lambda a, _: a.prod(-1, keepdim=True), x, weight, compute, output)
        return self.plain(OPS[name], x, weight, compute, output)

    def plain(self, op, x, weight, compute, output):
        if compute is not None:
            given = [x, weight] if op is OPS["linear"] else [x]
            dtype = self.dtype(compute, given)
            x, weight = self.cast(x, dtype), self.cast(weight, dtype)
        result = op(x, weight)
        return self.cast(result, self.dtype(output, [result])) if output else result

    def decide(self, name, stack):
        for own in reversed(stack):
            inside = self.best([one for one in own if one.op == name])
            if inside is not None:
                return inside.compute, inside.output
        everywhere = self.best([one for one in self.rules if one.selector == (name, None, None)])
        for own in reversed(stack):
            plain = self.best([one for one in own if one.op is None])
            if plain is not None and (name in TABLE or everywhere is not None):
                return plain.compute, None
        if everywhere is not None:
            return everywhere.compute, everywhere.output
        return TABLE.get(name), None

    def dtype(self, word, tensors):
        if word == "promote":
            dtype = tensors[0].dtype
            for one in tensors[1:]:
                dtype = torch.promote_types(dtype, one.dtype)
            return dtype
        return DTYPES[self.lower if word == "lower" else word]

    def cast(self, tensor, dtype):
        return tensor.to(dtype)


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.long)])
def test_random_rules_are_what_an_emulator_computes(count):
    rng = random.Random(count)
    x = torch.randn(3, 4)
    for _ in range(count):
        lower = rng.choice(("bf16", "fp16", "fp32"))
        rules, model = random_rules(rng), make_model()
        policy = nc.Policy(compute=lower, rules=tuple(rules))
        with torch.no_grad():
            expected = Emulator(model, list(policy.rules), lower).run(model, x)
            try:
                handle = nc.apply(model, policy)
            except nc.NarrowcastError:
                continue  # a rule that names nothing in the model
            with handle:
                found = model(x)
        assert found.dtype == expected.dtype, list(map(str, rules))
        assert torch.equal(found, expected) or found.isnan().any(), list(map(str, rules))
