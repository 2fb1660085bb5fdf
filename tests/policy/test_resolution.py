"""Which rule wins where: small policies against a slow oracle, written from the documentation."""

import gc
import itertools
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from narrowcast.policy import (
    LOWER,
    UNLISTED,
    Policy,
    Rule,
    _resolved,
    class_names,
    every_operator,
    native_table,
    resolved,
    rule,
    rules_for,
)

BASE, CHILD = "some.Base", "some.Child"
# Modules as they call each other, outermost first: path and names of classes.
PLACES = [
    [],
    [("a", (BASE,))],
    [("a", (BASE,)), ("a.b", (CHILD, BASE))],
    [("a", (BASE,)), ("a.b", (CHILD, BASE)), ("c", (BASE,))],  # called from inside, whatever its path
]
# What the selectors of the rules below mean, spelled out.
PATHS = {"a": {"a"}, "a*": {"a", "a.b"}, "*b": {"a.b"}, "*": {"a", "a.b", "c"}}
OVERLOADS = {
    "softmax": {"softmax.int"},
    "softmax.int": {"softmax.int"},
    "linear": {"linear"},
    "relu": {"relu"},
    "cat": {"cat"},
    "sum": {"sum", "sum.dim_IntList"},
    "sum.default": {"sum"},
    "binary_cross_entropy": {"binary_cross_entropy"},
}
OPS = sorted(
    set().union(*OVERLOADS.values()) | {"mkldnn_rnn_layer", "relu_", "sum.IntList_out", "softmax.int_out"}
)
FP8 = {"fp8_tensorwise", "fp8_rowwise"}


def kind_in(table, op):
    """The tables as far as these operators go."""
    return {
        "cpu": {
            "linear": "lower",
            "cat": "promote",
            "binary_cross_entropy": "fp32",
            "mkldnn_rnn_layer": "lower",
        },
        "cuda": {
            "linear": "lower",
            "softmax.int": "fp32 by dtype=",
            "sum": "fp32 by dtype=",
            "sum.dim_IntList": "fp32 by dtype=",
            "binary_cross_entropy": "refuse",
            "mkldnn_rnn_layer": "lower",  # cuDNN's layer has another name, and is on its table
        },
    }[table].get(op)


def is_named(one, path, names):
    by_path = one.module is None or path in PATHS[one.module]
    by_class = one.module_type is None or one.module_type in names
    return by_path and by_class and (one.module is not None or one.module_type is not None)


def reaches(one, op):
    return one.op is not None and op in OVERLOADS[one.op]


def winner(rules):
    """One overload before all of them, path and class before one of the two, the later one."""
    best = None
    for one in rules:
        rank = (one.op is not None and "." in one.op, one.module is not None and one.module_type is not None)
        if best is None or rank >= best[0]:
            best = (rank, one)
    return None if best is None else best[1]


def oracle(policy, place, op):
    """(compute, output, rule) of what becomes of a call of ``op`` inside the modules ``place``, or None."""
    rules = [one for one in policy.rules if one.compute not in FP8]
    for path, names in reversed(place):  # an operator inside a module, the innermost module first
        best = winner(one for one in rules if is_named(one, path, names) and reaches(one, op))
        if best is not None:
            return best.compute, best.output, best
    everywhere = winner(one for one in rules if one.selector[1:] == (None, None) and reaches(one, op))
    asked = kind_in("cpu" if policy.tables == "native" else policy.tables, op)
    if asked is not None or (everywhere is not None and everywhere.compute not in ("as-is", "refuse")):
        for path, names in reversed(place):  # a module, the innermost first
            best = winner(one for one in rules if is_named(one, path, names) and one.op is None)
            if best is not None:
                return best.compute, None, best
    if everywhere is not None:
        return everywhere.compute, everywhere.output, everywhere
    if asked != kind_in("cpu", op):
        return asked or UNLISTED, None, None
    return None


def scope_at(policy, place):
    scope = resolved(policy, "cpu", "bf16").root
    for path, names in place:
        scope = scope.inside(rules_for(policy, path, names))
    return scope


def check(policy):
    places = [(place, scope_at(policy, place)) for place in PLACES]
    kernels = set(resolved(policy, "cpu", "bf16").kernels())
    for place, scope in places:
        for op in OPS:
            decision = scope.decide(op)
            found = None if decision is None else (decision.compute, decision.output, decision.rule)
            assert found == oracle(policy, place, op), (policy, place, op)
            assert decision is None or op in kernels, (policy, place, op)
            if decision is not None:
                expected = "PyTorch's table for cuda" if decision.rule is None else str(decision.rule)
                assert decision.because == expected


def policies(pool, count):
    """Every choice of rules in every order, under two tables; not those that contradict each other."""
    for rules in itertools.permutations(pool, count):
        if len({one.selector for one in rules}) == len(rules):
            yield Policy(compute="bf16", rules=rules)
            yield Policy(compute="bf16", rules=rules, tables="cuda")


POOL = [
    *(rule.op(op, compute="fp16") for op in ("softmax", "softmax.int", "relu", "sum.default")),
    rule.op("sum", compute="bf16", output="fp32"),
    rule.op("relu", compute="as-is"),
    rule.op("cat", compute="refuse"),
    rule.op("linear", compute="fp8_rowwise"),
    *(rule.module(glob, compute="fp32") for glob in ("a", "a*", "*b")),
    rule.module("a", compute="fp32", type=BASE),
    rule.module("a*", compute="as-is"),
    rule.module("*", compute="refuse"),
    rule.module("*b", compute="promote", output="bf16"),
    rule.module("*b", compute="fp8_tensorwise"),
    rule.module_type(BASE, compute="lower"),
    rule.module_type(CHILD, compute="fp16", output="fp32"),
    rule.module("a", op="softmax", compute="bf16", output="lower"),
    rule.module("a*", op="softmax.int", compute="refuse"),
    rule.module("*b", op="linear", compute="as-is"),
    rule.module("*b", op="linear", compute="fp8_rowwise"),
    rule.module_type(CHILD, op="softmax", compute="fp32"),
    rule.module("*b", op="softmax", type=CHILD, compute="promote"),
]
SMALL_POOL = [
    rule.op("softmax", compute="fp16"),
    rule.op("softmax.int", compute="bf16"),
    rule.op("relu", compute="refuse"),
    rule.module("a*", compute="fp32"),
    rule.module("*b", compute="fp8_rowwise"),
    rule.module_type(CHILD, compute="as-is"),
    rule.module("a", op="softmax.int", compute="promote"),
    rule.module_type(BASE, op="softmax", compute="lower", output="fp32"),
]


@pytest.mark.parametrize(
    ("pool", "count"),
    [
        (POOL, 0),
        (POOL, 1),
        (SMALL_POOL, 2),
        pytest.param(POOL, 2, marks=pytest.mark.long),
    ],
    ids=["none", "one", "two of a few", "two"],
)
def test_the_oracle_agrees_on_every_choice_of_rules(pool, count):
    for policy in policies(pool, count):
        check(policy)


@pytest.mark.parametrize("tables", ["native", "cuda", "mps", "cpu"])
@pytest.mark.parametrize("compute", ["fp32", "lower", "promote", "as-is", "refuse", "fp8_rowwise", None])
def test_kernels_are_all_about_which_any_place_decides(compute, tables):
    rules = [rule.op("relu", compute="fp32"), rule.module("x", op="tanh", compute="fp32")]
    if compute is not None:
        rules.append(rule.module("*", compute=compute))
    policy = Policy(compute="bf16", tables=tables, rules=tuple(rules))
    scopes = [scope_at(policy, place) for place in ([], [("a", ())], [("x", ())], [("a", ()), ("x", ())])]
    decided = {op for op in every_operator() for scope in scopes if scope.decide(op) is not None}
    assert decided == set(resolved(policy, "cpu", "bf16").kernels())
    assert {"relu", "tanh"} <= decided
    assert ("linear" in decided) == (compute not in (None, "fp8_rowwise"))
    assert ("cat" in decided) == (tables in ("cuda", "mps") or "linear" in decided)


def test_a_policy_without_rules_decides_nothing():
    for device_type in ("cpu", "cuda", "mps", "hpu"):
        plain = resolved(Policy(compute="bf16"), device_type, "bf16")
        assert plain.kernels() == ()
        assert not any(plain.root.decide(op) for op in every_operator())
        assert plain.table == plain.native == native_table(device_type)


def test_another_devices_table_is_followed_where_it_differs():
    """Where it differs from that of the device, and in nothing else."""
    found = resolved(Policy(compute="bf16", tables="cuda"), "cpu", "bf16")
    for op in every_operator():
        asked, native = native_table("cuda").get(op), native_table("cpu").get(op)
        decision = found.root.decide(op)
        if op in ("mkldnn_rnn_layer", "_cudnn_rnn") or asked == native:
            assert decision is None, op
        else:
            assert (decision.compute, decision.rule) == (asked or UNLISTED, None)
    assert found.table_name == "cuda"
    # Recurrent layers call an operator that only their device has.
    assert (found.table["mkldnn_rnn_layer"], "_cudnn_rnn" in found.table) == (LOWER, False)
    on_cuda = resolved(Policy(compute="bf16", tables="cuda"), "cuda", "bf16")
    assert on_cuda.kernels() == ()


# ---- fp8


def test_fp8_rules_win_about_linear_layers_as_others_do():
    """``rule_of`` counts rules with an fp8 recipe, which ``decide`` does not."""
    wide, fp8 = rule.module("a*", compute="fp32"), rule.module("*b", compute="fp8_rowwise")
    op_fp8, op_wide = rule.op("linear", compute="fp8_tensorwise"), rule.op("linear", compute="fp32")
    inside_fp8 = rule.module("a", op="linear", compute="fp8_tensorwise")
    cases = [
        ((), [None, None, None]),
        ((op_fp8,), [op_fp8, op_fp8, op_fp8]),
        ((op_wide,), [op_wide, op_wide, op_wide]),
        ((wide,), [None, wide, wide]),
        ((fp8,), [None, None, fp8]),
        ((wide, fp8), [None, wide, fp8]),
        ((fp8, op_wide), [op_wide, op_wide, fp8]),
        ((op_fp8, wide), [op_fp8, wide, wide]),
        ((inside_fp8, wide), [None, inside_fp8, inside_fp8]),
        ((inside_fp8, fp8), [None, inside_fp8, inside_fp8]),
    ]
    for rules, expected in cases:
        policy = Policy(compute="bf16", rules=rules)
        found = [scope_at(policy, place).rule_of("linear") for place in PLACES[:3]]
        assert found == expected, rules


# ---- places


def test_places_with_the_same_rules_share_a_scope():
    wide, other = rule.module("a*", compute="fp32"), rule.module("z", compute="fp16")
    inside = rule.module("a*", op="softmax", compute="bf16")
    policy = Policy(compute="bf16", rules=(wide, other, inside))
    root = resolved(policy, "cpu", "bf16").root
    assert root is resolved(policy, "cpu", "bf16").root
    assert root.inside(()) is root
    first = root.inside((wide, inside))
    assert first is root.inside((wide, inside)) is first.inside((wide, inside))
    assert first is root.inside((other, wide)).inside((wide, inside))
    assert first is not root.inside((wide,))
    assert (first.rule, root.rule) == (wide, None)
    assert first.resolved is root.resolved
    assert root.identity != first.identity == root.inside((wide, inside)).identity
    same = Policy(compute="bf16", rules=(wide, other, inside))
    assert resolved(same, "cpu", "bf16").root is not root
    assert repr(resolved(same, "cpu", "bf16").root.identity) == repr(root.identity)
    assert resolved(policy, "cpu", "fp16").root.identity != root.identity
    assert resolved(Policy(compute="bf16", tables="cuda"), "cpu", "bf16").root.identity != root.identity


def test_what_is_resolved_is_freed_with_the_policy():
    policy = Policy(compute="bf16", rules=(rule.module("a", compute="fp32"),))
    found = resolved(policy, "cpu", "bf16")
    assert found is resolved(policy, "cpu", "bf16")
    assert found is not resolved(policy, "cpu", "fp16")
    assert found.names_modules
    place = scope_at(policy, PLACES[1])
    place.inside(policy.rules).actions["softmax.int"] = place  # as the eager engine's, which hold their place
    assert place.decide("linear").compute == "fp32"
    ended = weakref.ref(found)
    kept = len(_resolved._kept)
    gc.disable()
    try:
        del policy, found
        assert len(_resolved._kept) == kept - 1
        assert place.resolved is ended()  # a place in use goes on
        assert place.inside(ended().rules) is ended().scope(*[ended().rules[0]] * 2, ())
        ended().forget_scopes()
        del place
        assert ended() is None
    finally:
        gc.enable()


def test_threads_that_ask_at_once_get_one_object():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # Python changes threads as often as it can
    try:
        with ThreadPoolExecutor(4) as pool:
            for _ in range(200):
                policy = Policy(compute="bf16", rules=(rule.op("relu", compute="fp32"),))
                asked = [pool.submit(resolved, policy, "cpu", "bf16") for _ in range(4)]
                assert len({id(one.result().root) for one in asked}) == 1
    finally:
        sys.setswitchinterval(before)


# ---- which module a rule names


# By glob: paths that match it, and paths that do not.
GLOBS = {
    "": ([""], ["a"]),
    "*": (["", "a.b.c"], []),
    "a.*": (["a.b.c"], ["a"]),
    "a.*.norm": (["a.b.norm"], ["a.norm"]),
    "a.?.b": (["a.1.b"], ["a.b"]),
    "a.[0-3]": (["a.2"], ["a.4"]),
    "A": (["A"], ["a"]),
    "a": (["a"], ["A", "a.b"]),
}


@pytest.mark.parametrize("glob", GLOBS)
def test_a_glob_selects_paths(glob):
    policy = Policy(compute="bf16", rules=(rule.module(glob, compute="fp32"),))
    for paths, expected in zip(GLOBS[glob], (True, False), strict=True):
        assert all(bool(rules_for(policy, path, ())) == expected for path in paths)


def test_a_class_selects_its_subclasses():
    class Norm(torch.nn.LayerNorm):
        pass

    by_base = rule.module_type(torch.nn.LayerNorm, compute="fp32")
    by_own = rule.module_type(Norm, compute="fp32")
    both = rule.module("x", type=Norm, compute="fp16")
    policy = Policy(compute="bf16", rules=(by_base, by_own, both, rule.op("relu", compute="fp32")))
    assert rules_for(policy, "y", class_names(Norm)) == (by_base, by_own)
    assert rules_for(policy, "x", class_names(Norm)) == (by_base, by_own, both)
    assert rules_for(policy, "x", class_names(torch.nn.LayerNorm)) == (by_base,)
    assert rules_for(policy, "x", class_names(torch.nn.Linear)) == ()
    assert class_names(Norm)[0].endswith("<locals>.Norm")
    assert isinstance(by_own, Rule)
