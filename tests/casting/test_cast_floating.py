"""Casting inside nested values: what is cast, what stays the same object, and the original as it was."""

import collections
import copy
import dataclasses
import gc
import types
import typing
import weakref

import pytest
import torch
from torch import distributions
from torch.nn.utils import rnn

from narrowcast.casting import cast_floating

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Point(typing.NamedTuple):
    x: torch.Tensor
    y: object = None


class Tagged(Point):
    """A named tuple with attributes of its own."""


@dataclasses.dataclass
class Plain:
    x: torch.Tensor
    more: object = None
    not_given: torch.Tensor = dataclasses.field(init=False)


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: torch.Tensor
    y: int = 2


class Names(list):
    pass


class AttributeDict(dict):
    """The idiom in which items are the attributes."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class WithExtra(dict):
    extra = None


class ModelOutput(collections.OrderedDict):
    """As Hugging Face's: fields that are given are items too, by name or position; no plain dict writes."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)

    def __delitem__(self, *args, **kwargs):
        raise Exception("not here")

    update = setdefault = pop = __delitem__

    def __getitem__(self, key):
        return dict(self.items())[key] if isinstance(key, str) else self.to_tuple()[key]

    def __setattr__(self, name, value):
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def to_tuple(self):
        return tuple(self[key] for key in self.keys())


@dataclasses.dataclass
class Output(ModelOutput):
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    states: tuple | None = None


class Unknown:
    def __init__(self, x):
        self.x = x


def half(*shape, dtype=BF16):
    return torch.randn(*shape or (2,)).to(dtype)


T = half(3)

CASES = {
    "tensor": T,
    "tuple": (T, 1, "text"),
    "list": [T, None],
    "dict": {"a": T, "b": 2},
    "set": {T},
    "frozenset": frozenset([T]),
    "deque": collections.deque([T, 1], maxlen=5),
    "deep": [({"a": [(T,)]},)],
    "namedtuple": Point(T, 3),
    "subclass of a namedtuple": Tagged(T, 3),
    "subclass of a list": Names([T]),
    "OrderedDict": collections.OrderedDict(b=T, a=1),
    "defaultdict": collections.defaultdict(list, a=T),
    "attribute dict": AttributeDict(a=T),
    "UserDict": collections.UserDict(a=T),
    "UserList": collections.UserList([T]),
    "SimpleNamespace": types.SimpleNamespace(a=T, b=1),
    "dataclass": Plain(T, [T]),
    "frozen dataclass": Frozen(T),
    "slotted frozen dataclass": Slotted(T),
    "return type": torch.max(half(2, 3), 1),
    "return type of two": torch.linalg.slogdet(torch.eye(2))._replace(logabsdet=T)
    if hasattr(torch.return_types.linalg_slogdet, "_replace")
    else torch.sort(half(4)),
    "packed sequence": rnn.pack_sequence([half(3), half(2)]),
    "model output": Output(loss=half(1), states=(T, T)),
}


def tensors(value):
    """Every tensor reachable through what a person would write: items, attributes, iteration."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, collections.abc.Mapping):
        return [t for part in value.values() for t in tensors(part)]
    if isinstance(value, list | tuple | set | frozenset | collections.deque | collections.UserList):
        return [t for part in value for t in tensors(part)]
    if dataclasses.is_dataclass(value):
        names = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
        return [t for name in names for t in tensors(getattr(value, name))]
    if isinstance(value, types.SimpleNamespace):
        return tensors(vars(value))
    return []


@pytest.mark.parametrize("name", CASES)
def test_every_container(name):
    value = CASES[name]
    before = [(t, t.dtype, t.clone()) for t in tensors(value)]
    result = cast_floating(value, FP32)
    assert type(result) is type(value)
    assert result is not value
    got = tensors(result)
    assert len(got) == len(before) > 0
    pairs = zip(sorted(got, key=lambda t: t.shape), sorted(before, key=lambda b: b[0].shape), strict=True)
    for after, (original, dtype, values) in pairs:
        assert after.dtype == (FP32 if dtype in (BF16, FP16) else dtype)
        assert torch.equal(after, values.to(after.dtype))
        assert original.dtype == dtype  # the input is as it was
        assert torch.equal(original, values)
    for after, (original, *_) in zip(tensors(value), before, strict=True):
        assert after is original
    assert cast_floating(result, FP32) is result, "nothing left to cast: the very same object"


def test_what_is_not_asked_for_stays():
    value = {
        "f": torch.ones(1),
        "d": torch.ones(1).double(),
        "i": torch.ones(1).long(),
        "c": torch.ones(1) * 1j,
    }
    assert cast_floating(value, FP32) is value
    assert cast_floating(value, BF16) is value, "fp32 is cast only when named"
    assert cast_floating((half(2),), BF16)[0].dtype == BF16
    mixed = (half(1), half(1, dtype=FP16), torch.ones(1))
    only = cast_floating(mixed, FP32, only=[FP16])
    assert [t.dtype for t in only] == [BF16, FP32, FP32]
    assert only[0] is mixed[0]
    assert cast_floating(torch.ones(1), BF16, only={FP32, FP64}).dtype == BF16
    assert cast_floating(torch.ones(1, dtype=torch.long), BF16, only={torch.long}).dtype == torch.long


def test_what_it_does_not_know_passes_through():
    value = Unknown(half(2))
    assert cast_floating(value, FP32) is value
    inside = (value, half(2))
    assert cast_floating(inside, FP32)[0] is value
    for other in (
        "text",
        b"bytes",
        3,
        None,
        torch.Size([2]),
        range(3),
        iter([half(1)]),
        Output,
        Exception(half(1)),
    ):
        assert cast_floating(other, FP32) is other


def test_parts_without_a_cast_are_shared():
    kept = [torch.ones(1)]
    result = cast_floating({"kept": kept, "cast": [half(1)]}, FP32)
    assert result["kept"] is kept


def test_an_object_that_occurs_twice_does_so_in_the_copy():
    t, inner = half(2), [half(1)]
    result = cast_floating((t, t, inner, {"again": inner}), FP32)
    assert result[0] is result[1]
    assert result[2] is result[3]["again"]


def test_values_that_contain_themselves_end():
    loop = [half(1)]
    loop.append(loop)
    result = cast_floating(loop, FP32)
    assert result[1] is result
    assert result[0].dtype == FP32
    through_a_tuple = []
    pair = (through_a_tuple, half(1))
    through_a_tuple.append(pair)
    result = cast_floating(pair, FP32)
    assert result[0][0] is result
    nothing_to_cast = {"x": torch.ones(1)}
    nothing_to_cast["self"] = nothing_to_cast
    assert cast_floating(nothing_to_cast, FP32) is nothing_to_cast
    space = types.SimpleNamespace(x=half(1))
    space.me = space
    assert cast_floating(space, FP32).me.me.x.dtype == FP32


def test_attributes_of_containers_follow():
    value = Tagged(half(1), 3)
    value.note = {"t": half(1)}
    assert cast_floating(value, FP32).note["t"].dtype == FP32
    value = WithExtra(a=1)
    value.extra = half(1)
    result = cast_floating(value, FP32)
    assert (result["a"], result.extra.dtype) == (1, FP32)
    assert value.extra.dtype == BF16
    result = cast_floating(AttributeDict(a=half(1)), FP32)
    assert result.a is result["a"]
    result.b = 5
    assert result["b"] == 5


def test_containers_keep_what_they_are_made_with():
    result = cast_floating(CASES["defaultdict"], FP32)
    assert result["new"] == []
    assert cast_floating(CASES["deque"], FP32).maxlen == 5
    assert list(cast_floating(CASES["OrderedDict"], FP32)) == ["b", "a"]
    assert not hasattr(cast_floating(CASES["dataclass"], FP32), "not_given")


def test_a_model_output_agrees_with_itself():
    value = Output(loss=half(1), states=(half(2),))
    result = cast_floating(value, FP32)
    assert result.loss is result["loss"] is result[0]
    assert result.states is result["states"] is result[1]
    assert result.logits is None
    assert list(result.keys()) == ["loss", "states"]
    assert result.states[0].dtype == FP32
    assert value.loss is value["loss"]
    assert value.loss.dtype == BF16
    result.loss = None
    assert copy.copy(value).loss is value.loss


def test_a_packed_sequence_goes_on_working():
    sequence = rnn.pack_sequence([half(3), half(2), half(1)], enforce_sorted=False)
    result = cast_floating(sequence, FP32)
    assert isinstance(result, rnn.PackedSequence)
    padded, lengths = rnn.pad_packed_sequence(result)
    assert padded.dtype == FP32
    assert lengths.tolist() == [3, 2, 1]


def test_return_types_keep_their_names():
    result = cast_floating(torch.max(half(2, 3), 1), FP32)
    assert type(result) is torch.return_types.max
    assert (result.values.dtype, result.indices.dtype) == (FP32, torch.int64)


DISTRIBUTIONS = {
    "Normal": lambda x: distributions.Normal(x, x.abs() + 1),
    "Categorical": lambda x: distributions.Categorical(logits=x),
    "Bernoulli": lambda x: distributions.Bernoulli(probs=x.sigmoid()),
    "Independent": lambda x: distributions.Independent(distributions.Normal(x, x.abs() + 1), 1),
    "MixtureSameFamily": lambda x: distributions.MixtureSameFamily(
        distributions.Categorical(logits=x), distributions.Normal(x, x.abs() + 1)
    ),
    "TransformedDistribution": lambda x: distributions.TransformedDistribution(
        distributions.Normal(x, x.abs() + 1), [distributions.transforms.SigmoidTransform()]
    ),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions(name):
    x = half(4)
    original = DISTRIBUTIONS[name](x)
    result = cast_floating({"policy": original}, FP32)["policy"]
    expected = DISTRIBUTIONS[name](x.float())
    assert type(result) is type(original)
    sample = torch.zeros(()) if name in ("Categorical", "Bernoulli") else torch.full((4,), 0.25)
    assert result.log_prob(sample).dtype == FP32
    # The parameters were computed in bf16 before the cast, hence to a bf16 rounding of each (2**-8).
    assert torch.allclose(result.log_prob(sample), expected.log_prob(sample), rtol=2**-5, atol=2**-5)
    assert DISTRIBUTIONS[name](x).log_prob(sample.to(BF16)).dtype == original.log_prob(sample.to(BF16)).dtype
    assert all(t.dtype != FP32 for t in vars(original).values() if isinstance(t, torch.Tensor))
    single = DISTRIBUTIONS[name](x.float())
    assert cast_floating(single, FP32) is single


def test_gradients_flow_through_the_cast():
    x = torch.randn(3, dtype=BF16, requires_grad=True)
    result = cast_floating({"a": Frozen(x * 2)}, FP32)
    (result["a"].x * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert torch.equal(x.grad, torch.tensor([2.0, 4.0, 6.0], dtype=BF16))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_16_bit_pattern_is_widened_exactly(dtype):
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    (result,) = cast_floating((values,), FP32)
    oracle = torch.from_numpy(_widen(values.view(torch.int16).numpy().view("uint16"), dtype))
    number = ~values.isnan()
    assert torch.equal(result[number].view(torch.int32), oracle[number].view(torch.int32))
    assert torch.equal(result.isnan(), oracle.isnan())


def _widen(bits, dtype):
    if dtype == FP16:
        return bits.view("float16").astype("float32")
    return (bits.astype("uint32") << 16).view("float32")


def test_classes_are_not_kept_alive():
    def once():
        made = dataclasses.make_dataclass("Made", ["x"])
        assert cast_floating(made(half(1)), FP32).x.dtype == FP32
        return weakref.ref(made)

    reference = once()
    gc.collect()
    assert reference() is None


def plain_tree(x):
    inside = cast_floating({"a": (x.to(BF16), 1), "b": [Point(x.half())]}, FP32)
    return inside["a"][0], inside["b"][0].x, cast_floating(x.half(), FP32)


def other_tree(x):
    return (cast_floating([Plain(x.half())], FP32)[0].x,)


@pytest.mark.parametrize(("f", "whole"), [(plain_tree, True), (other_tree, False)])
def test_it_is_traced_and_plain_trees_without_a_graph_break(f, whole):
    x = torch.randn(3)
    compiled = torch.compile(f, backend="eager", fullgraph=whole)
    for result, expected in zip(compiled(x), f(x), strict=True):
        assert result.dtype == FP32
        assert torch.equal(result, expected)
