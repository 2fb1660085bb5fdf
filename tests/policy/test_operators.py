"""Names of operators that rules understand, and the errors for all others."""

import pytest
import torch

from narrowcast.errors import PolicyError
from narrowcast.policy import base_of, every_operator, operator, overloads_of, rule
from narrowcast.policy._ops import canonical_op


@pytest.fixture
def own_library():
    """A library with one operator of two overloads."""
    library = torch.library.Library("narrowcast_names", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.define("twice.more(Tensor x, int n) -> Tensor")
    library.define("stamp_(Tensor(a!) x) -> Tensor(a!)")
    yield library
    library._destroy()


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("softmax", "softmax"),
        ("softmax.int", "softmax.int"),
        ("aten::softmax.int", "softmax.int"),
        ("aten.softmax", "softmax"),
        ("torch.softmax", "softmax"),
        ("torch.ops.aten.softmax.int", "softmax.int"),
        ("torch.nn.functional.softmax", "softmax"),
        ("nn.functional.gelu", "gelu"),
        ("F.gelu", "gelu"),
        ("torch.Tensor.add", "add"),
        ("Tensor.add", "add"),
        ("torch.linalg.cross", "linalg_cross"),
        ("torch.cross", "cross"),
        ("torch.special.expm1", "special_expm1"),
        ("torch.fft.fft", "fft_fft"),
        ("sum", "sum"),
        ("sum.default", "sum.default"),
        ("linear.default", "linear"),
        ("_weight_norm", "_weight_norm"),
    ],
)
def test_names_as_in_python_are_understood(written, name):
    assert canonical_op(written) == name
    assert canonical_op(name) == name
    assert rule.op(written, compute="fp32").op == name


def test_a_name_stands_for_its_overloads():
    assert overloads_of("linear") == ("linear",)
    assert {"sum", "sum.dim_IntList"} <= set(overloads_of("sum"))
    assert overloads_of("sum.default") == ("sum",)
    assert overloads_of("sum.dim_IntList") == ("sum.dim_IntList",)
    assert overloads_of("softmax_of_tomorrow") == overloads_of("softmax.of_tomorrow") == ()
    assert base_of("sum.dim_IntList") == base_of("sum") == "sum"
    assert operator("sum") is operator("sum.default") is torch.ops.aten.sum.default
    assert operator("sum.dim_IntList") is torch.ops.aten.sum.dim_IntList


@pytest.mark.long
def test_no_rule_selects_what_writes_to_an_argument():
    """By the schema, overload by overload, of all there are."""
    known = set(every_operator())
    assert len(known) > 1500
    for op in known:
        schema = operator(op)._schema
        assert not any(one.alias_info is not None and one.alias_info.is_write for one in schema.arguments)
    assert {"add.Tensor", "index_add", "cat"} <= known
    assert not {"add.out", "add_.Tensor", "index_add_", "empty", "rand"} & known
    assert {one for op in known for one in overloads_of(base_of(op))} == known


def test_operators_of_other_libraries_are_found_once_defined(own_library):
    assert canonical_op("narrowcast_names::twice") == "narrowcast_names::twice"
    assert canonical_op("torch.ops.narrowcast_names.twice.more") == "narrowcast_names::twice.more"
    assert overloads_of("narrowcast_names::twice") == (
        "narrowcast_names::twice",
        "narrowcast_names::twice.more",
    )
    assert operator("narrowcast_names::twice.more") is torch.ops.narrowcast_names.twice.more
    assert "narrowcast_names::twice" in every_operator()
    own_library.define("thrice(Tensor x) -> Tensor")  # after the names were read
    assert canonical_op("narrowcast_names::thrice") == "narrowcast_names::thrice"
    own_library.define("thrice.more(Tensor x, int n) -> Tensor")
    assert len(overloads_of("narrowcast_names::thrice")) == 2
    with pytest.raises(PolicyError, match=r"autocast never casts .*, which writes to an argument$"):
        canonical_op("narrowcast_names::stamp_")


OPERATOR = 'expected the name of an operator, as "softmax" or "softmax.int", got '
NOT_NAMES = [
    ("sofmax", 'operator \'sofmax\'. Did you mean "softmax" or "fmax" or "log_softmax"?'),
    ("torch.liner", 'operator \'torch.liner\'. Did you mean "linear" or "inner" or "bilinear"?'),
    ("cross_entropy", 'Did you mean "cross_entropy_loss"?'),
    ("nn.LayerNorm", 'Did you mean "layer_norm"?'),
    ("F.normalize", "It is a Python function: write rules for the operators that it calls."),
    ("elsewhere::op", "Import the library that defines 'elsewhere' first."),
    ("xyzzyq", 'For an operator of another library, import the library and write "mylib::op".'),
    ("linear.sideways", "operator 'linear' has no overload 'linear.sideways' for rules. Known: linear."),
    ("linear.out", "operator 'linear' has no overload 'linear.out' for rules. Known: linear."),
    ("relu_", "casts 'relu_', which writes to an argument; write the rule for \"relu\""),
    ("randperm", "casts 'randperm', which takes no tensor or writes to an argument"),
    ("", f"{OPERATOR}''"),
    (None, f"{OPERATOR}None"),
]


@pytest.mark.parametrize(("written", "message"), NOT_NAMES)
def test_other_names_are_refused_with_a_guess(written, message):
    with pytest.raises(PolicyError) as refused:
        canonical_op(written)
    assert str(refused.value).endswith(message)
