"""What docs/from-apex.md shows of ``migrate`` is what it does."""

import re
from pathlib import Path

import pytest
import torch
from rewriting import sides

import narrowcast as nc
from narrowcast.apex import optimizers, parallel
from narrowcast.apex._stand_in import _INSTEAD
from narrowcast.migrate import migrate_text
from narrowcast.migrate._lint import RULES
from narrowcast.migrate._torch_names import DEPRECATED, TO_NARROWCAST
from narrowcast.migrate.apex._rewrite import RULE

PAGE = (Path(__file__).parents[2] / "docs" / "from-apex.md").read_text(encoding="utf-8")


def test_the_difference_that_is_shown_is_the_one_that_is_made():
    (shown,) = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    before, after = sides(shown)
    outcome = migrate_text(before, "torch")
    assert outcome.text == after
    assert all(one.fixed for one in outcome.findings)


def test_every_rule_stands_on_the_page_with_its_reason():
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| (.+?) \| .+? \|$", PAGE, re.MULTILINE)
    assert rows == [(name, reason) for name, (reason, _) in RULES.items()]


def test_every_other_name_of_a_finding_stands_on_the_page():
    found = re.findall(r"^\| `([a-z-]+)` \| [^|]+ \|$", PAGE, re.MULTILINE)
    assert found == [RULE, DEPRECATED, TO_NARROWCAST]


@pytest.mark.parametrize(
    "call", re.findall(r"^\| `(Fused\w+\(params.*?)` \| `(torch\..+?)` \|", PAGE, re.MULTILINE)
)
def test_the_optimizers_that_stand_side_by_side_step_alike(call):
    weights = []
    for text in call:
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(8))
        scope = {"params": [weight], "torch": torch, **vars(optimizers)}
        optimizer = eval(text, scope)
        for _ in range(3):
            weight.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(weight.detach())
    assert torch.equal(*weights)


@pytest.mark.parametrize(
    "call", sorted(set(re.findall(r"`(nc\.(?:GradScaler|Stepper|rule)[\w.]*\([^`]*\))`", PAGE)))
)
def test_what_narrowcast_has_instead_can_be_called(call):
    model = torch.nn.Linear(2, 2)
    scope = {"nc": nc, "model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1), "group": None}
    # The documents say "cuda", and these machines may have none.
    assert eval(call.replace('"cuda"', '"cpu"'), scope) is not None


def test_the_page_names_what_is_not_provided_and_what_instead():
    (table,) = re.findall(r"^Not provided is.*?(?=^## )", PAGE, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| (.*`.*) \| (.*) \|$", table, re.MULTILINE)
    named = " ".join(left for left, _ in rows)
    assert all(f"`{name}`" in named for name in _INSTEAD)
    for name in set(re.findall(r"`(torch\.[\w.]+)", table)):
        assert eval(name, {"torch": torch}), name
    for name in set(re.findall(r"torch\.[\w.]+\w", " ".join(_INSTEAD.values()))):
        assert name in table, name


def test_every_name_of_apex_on_the_page_is_there():
    from narrowcast.apex import amp

    for name in set(re.findall(r"`?amp\.([a-z]\w+)", PAGE)) - {"autocast", "is_enabled"}:
        assert hasattr(amp, name) or hasattr(torch.amp, name), name
    answered = re.sub(r"^Not provided is.*?(?=^## )", "", PAGE, flags=re.MULTILINE | re.DOTALL)
    for name in re.findall(r"apex\.parallel\.(\w+)", answered):
        assert hasattr(parallel, name)
    for name in re.findall(r"\b(Fused\w+)", answered):
        assert hasattr(optimizers, name)
