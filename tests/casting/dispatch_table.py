"""What PyTorch's dispatcher holds, and policies that put as much into it as can be."""

import functools

import torch

import narrowcast as nc
from narrowcast.casting.kernels._watching import _LEFT_ALONE
from narrowcast.policy import every_operator

FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def kernels(key="AutocastCPU"):
    """The operators that have a kernel on a dispatch key."""
    names = torch._C._dispatch_get_all_op_names()
    return {name for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)}


def whole_table(names=None):
    """Every operator's line for every key, as PyTorch writes it: which kernel a call would reach."""
    return {
        name: torch._C._dispatch_dump_table(name) for name in names or torch._C._dispatch_get_all_op_names()
    }


def changes_since(before):
    """Lines of the first few operators whose table has changed; pytest would compare whole tables for hours.

    Kernels that policies of other tests had before may go meanwhile, when these policies are collected.
    """
    after = whole_table()
    changed = [op for op in before.keys() | after.keys() if before.get(op) != after.get(op)]
    changed = [op for op in changed if "narrowcast" not in before.get(op, "")]
    return {
        op: set(before.get(op, "").splitlines()) ^ set(after.get(op, "").splitlines()) for op in changed[:5]
    }


@functools.cache
def rules_in_another_module():
    """A rule for every operator there is, in a module that nobody calls."""
    ops = [op for op in every_operator() if op.partition(".")[0] not in _LEFT_ALONE]
    return tuple(nc.rule.module("elsewhere", op=op, compute="fp32", output="fp32") for op in ops)


def everywhere(compute):
    """A policy by which every operator has a kernel of ours, and none a rule that is in force."""
    return nc.Policy(compute=compute, rules=rules_in_another_module())
