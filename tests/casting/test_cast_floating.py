"""Casting inside nested values: what is cast, what stays the same object, and the original as it was."""

import collections
import dataclasses
import typing
import warnings

import pytest
import torch
from casting_cases import BF16, FP16, FP32, FP64, assert_same
from torch import distributions
from torch.nn.utils import rnn
from torch.utils import _pytree

from narrowcast.casting import cast_floating


class Point(typing.NamedTuple):
    x: torch.Tensor
    y: object = None


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


class Registered(collections.OrderedDict):
    """Registered with pytree, as Hugging Face's ModelOutput."""


_pytree.register_pytree_node(
    Registered,
    lambda value: (list(value.values()), list(value)),
    lambda parts, keys: Registered(zip(keys, parts, strict=True)),
    serialized_type_name="tests.casting.Registered",
)


class Unknown:
    def __init__(self, x):
        self.x = x


def half(*shape, dtype=BF16):
    return torch.randn(*shape or (2,)).to(dtype)


T = half(3)

CASES = {
    "tuple": (T, 1, "text"),
    "list": [T, None],
    "dict": {"a": T, "b": 2},
    "deque": collections.deque([T, 1], maxlen=5),
    "deep": [({"a": [(T,)]},)],
    "namedtuple": Point(T, 3),
    "OrderedDict": collections.OrderedDict(b=T, a=1),
    "defaultdict": collections.defaultdict(list, a=T),
    "registered": Registered(a=T, b=1),
    "dataclass": Plain(T, [T]),
    "frozen dataclass": Frozen(T),
    "slotted frozen dataclass": Slotted(T),
    "return type": torch.max(half(2, 3), 1),
    "packed sequence": rnn.pack_sequence([half(3), half(2)]),
}


def tensors(value):
    """Every tensor in items and attributes."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for part in value.values() for t in tensors(part)]
    if isinstance(value, list | tuple | collections.deque):
        return [t for part in value for t in tensors(part)]
    if dataclasses.is_dataclass(value):
        names = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
        return [t for name in names for t in tensors(getattr(value, name))]
    return []


@pytest.mark.parametrize("name", CASES)
def test_tensors_in_every_container_are_cast(name):
    value = CASES[name]
    before = [(t, t.dtype, t.clone()) for t in tensors(value)]
    result = cast_floating(value, FP32)
    assert type(result) is type(value)
    assert result is not value
    got = tensors(result)
    assert len(got) == len(before) > 0
    for after, (original, dtype, values) in zip(got, before, strict=True):
        assert after.dtype == (FP32 if dtype in (BF16, FP16) else dtype)
        assert torch.equal(after, values.to(after.dtype))
        assert torch.equal(original, values)  # the input is as it was
    for after, (original, *_) in zip(tensors(value), before, strict=True):
        assert after is original
    assert cast_floating(result, FP32) is result


def test_what_is_not_asked_for_stays():
    value = {
        "f": torch.ones(1),
        "d": torch.ones(1).double(),
        "i": torch.ones(1).long(),
        "c": torch.ones(1) * 1j,
    }
    assert cast_floating(value, FP32) is value
    assert cast_floating(value, BF16) is value  # fp32 is cast only when named
    mixed = (half(1), half(1, dtype=FP16), torch.ones(1))
    only = cast_floating(mixed, FP32, only=[FP16])
    assert [t.dtype for t in only] == [BF16, FP32, FP32]
    assert only[0] is mixed[0]
    assert cast_floating(torch.ones(1), BF16, only={FP32, FP64}).dtype == BF16
    assert cast_floating(torch.ones(1, dtype=torch.long), BF16, only={torch.long}).dtype == torch.long


def test_unknown_objects_with_tensors_are_named_once():
    value = Unknown(half(2))
    with pytest.warns(UserWarning, match=r"tensors in a .*Unknown were not cast"):
        assert cast_floating((value, half(2)), FP32)[0] is value
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cast_floating(value, FP32)
        for other in ("text", b"bytes", 3, None, torch.Size([2]), range(3), iter([half(1)]), Plain):
            assert cast_floating(other, FP32) is other


def test_containers_share_parts_and_keep_what_they_are_made_with():
    kept, t = [torch.ones(1)], half(2)
    result = cast_floating({"kept": kept, "cast": [t], "again": t}, FP32)
    assert result["kept"] is kept
    assert result["cast"][0] is result["again"]
    assert cast_floating(CASES["defaultdict"], FP32)["new"] == []
    assert cast_floating(CASES["deque"], FP32).maxlen == 5
    assert list(cast_floating(CASES["OrderedDict"], FP32)) == ["b", "a"]
    assert not hasattr(cast_floating(CASES["dataclass"], FP32), "not_given")


def test_a_packed_sequence_goes_on_working():
    sequence = rnn.pack_sequence([half(3), half(2), half(1)], enforce_sorted=False)
    padded, lengths = rnn.pad_packed_sequence(cast_floating(sequence, FP32))
    assert padded.dtype == FP32
    assert lengths.tolist() == [3, 2, 1]


def mixture(x):
    return distributions.MixtureSameFamily(
        distributions.Categorical(logits=x), distributions.Normal(x, x.abs() + 1)
    )


@pytest.mark.parametrize("make", [lambda x: distributions.Categorical(logits=x), mixture])
def test_the_parameters_of_a_distribution_are_cast(make):
    x, sample = half(4), torch.zeros(())
    original = make(x)
    result = cast_floating({"policy": original}, FP32)["policy"]
    assert type(result) is type(original)
    assert result.log_prob(sample).dtype == FP32
    # The parameters were computed in bf16 before the cast, hence to a bf16 rounding of each (2**-8).
    expected = make(x.float()).log_prob(sample)
    assert torch.allclose(result.log_prob(sample), expected, rtol=2**-5, atol=2**-5)
    assert all(t.dtype != FP32 for t in vars(original).values() if isinstance(t, torch.Tensor))


def test_gradients_flow_through_the_cast():
    x = torch.randn(3, dtype=BF16, requires_grad=True)
    result = cast_floating({"a": Frozen(x * 2)}, FP32)
    (result["a"].x * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert torch.equal(x.grad, torch.tensor([2.0, 4.0, 6.0], dtype=BF16))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_every_16_bit_pattern_is_widened_exactly(dtype):
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    (result,) = cast_floating((values,), FP32)
    bits = values.view(torch.int16).numpy().view("uint16")
    wide = bits.view("float16").astype("float32") if dtype == FP16 else bits.astype("uint32") << 16
    oracle = torch.from_numpy(wide.view("float32"))
    number = ~values.isnan()
    assert torch.equal(result[number].view(torch.int32), oracle[number].view(torch.int32))
    assert torch.equal(result.isnan(), oracle.isnan())


def test_it_is_traced_without_a_graph_break():
    def tree(x):
        inside = cast_floating({"a": (x.to(BF16), 1), "b": [Point(x.half())], "c": Plain(x.half())}, FP32)
        return inside["a"][0], inside["b"][0].x, inside["c"].x, cast_floating(x.half(), FP32)

    x = torch.randn(3)
    expected = tree(x)
    assert {one.dtype for one in expected} == {FP32}
    one_graph = hasattr(torch._dynamo.polyfills, "copy")  # torch 2.11 does not trace copy.copy
    assert_same(torch.compile(tree, backend="eager", fullgraph=one_graph)(x), expected)
