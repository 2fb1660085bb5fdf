"""Hand-written mistakes: wrong code is found and mended where that is sure, right code is left in peace."""

import ast
from pathlib import Path

import pytest
from mistaken_programs import HEAD, WRONG

from narrowcast.migrate import Settings, migrate_text
from narrowcast.migrate._mistakes_rules import RULES

ROOT = Path(__file__).parents[2]


def rules_in(text, target="torch"):
    """The rule and line of every mistake, lines counted from the end of HEAD."""
    lines = HEAD.count("\n") if text.startswith(HEAD) else 0
    outcome = migrate_text(text, Settings(target=target))
    return [(one.rule, one.line - lines, one.fixed) for one in outcome.findings if one.rule in RULES]


@pytest.mark.parametrize("name", WRONG)
def test_wrong_code_is_found_and_mended_where_that_is_sure(name):
    rule, line, wrong, right = WRONG[name]
    assert rules_in(HEAD + wrong) == [(rule, line, right is not None)]
    outcome = migrate_text(HEAD + wrong, Settings())
    assert outcome.text == HEAD + (wrong if right is None else right)
    ast.parse(outcome.text)


@pytest.mark.parametrize("name", [name for name, case in WRONG.items() if case[3] is not None])
def test_what_was_mended_is_left_in_peace(name):
    right = HEAD + WRONG[name][3]
    assert rules_in(right) == []
    assert migrate_text(right, Settings()).text == right


def test_every_rule_has_a_wrong_program():
    assert {case[0] for case in WRONG.values()} | {"scaler-with-bf16"} == set(RULES)


@pytest.mark.parametrize(
    ("made", "region", "told"),
    [
        ("GradScaler(device)", 'autocast("cuda", torch.bfloat16)', True),
        ("GradScaler(device)", 'autocast("cpu")', True),
        ("GradScaler(device)", 'autocast("cuda")', False),
        ("GradScaler(device)", "autocast(device, dtype)", False),
        ("GradScaler(device, enabled=dtype is torch.float16)", 'autocast("cuda", torch.bfloat16)', False),
    ],
)
def test_a_scaler_with_bf16(made, region, told):
    text = f"import torch\nscaler = torch.amp.{made}\nwith torch.{region}:\n    loss = model(x)\n"
    assert rules_in(text) == ([("scaler-with-bf16", 2, False)] if told else [])


@pytest.mark.parametrize("name", WRONG)
def test_a_comment_on_the_line_switches_its_rule_off(name):
    rule, line, wrong, _ = WRONG[name]
    lines = wrong.splitlines(keepends=True)
    code = lines[line - 1].rstrip("\n")
    for comment, silent in ((f"ignore[{rule}]", True), ("ignore", True), ("ignore[another]", False)):
        lines[line - 1] = f"{code}  # narrowcast: {comment}\n"
        assert (rules_in(HEAD + "".join(lines)) == []) is silent
        assert (migrate_text(HEAD + "".join(lines), Settings()).text == HEAD + "".join(lines)) or not silent


@pytest.mark.parametrize("name", ["clipped between backward and step", "no update at all", "update twice"])
def test_line_ends_are_kept(name):
    _, _, wrong, right = WRONG[name]
    windows = (HEAD + wrong).replace("\n", "\r\n")
    assert migrate_text(windows, Settings()).text == (HEAD + right).replace("\n", "\r\n")


def test_several_mistakes_of_one_loop_are_mended_together():
    wrong = """\
for x in loader:
    with torch.autocast(device, torch.float16):
        loss = model(x).sum()
        scaler.scale(loss).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
"""
    right = """\
for x in loader:
    with torch.autocast(device, torch.float16):
        loss = model(x).sum()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""
    assert migrate_text(HEAD + wrong, Settings()).text == HEAD + right
    assert {rule for rule, _, _ in rules_in(HEAD + wrong)} >= {
        "backward-in-region", "step-in-region", "clip-before-unscale", "step-without-scaler"
    }  # fmt: skip


def test_one_unscaling_serves_all_clippings_behind_it():
    wrong = """\
for x in loader:
    scaler.scale(model(x).sum()).backward()
    clip_grad_norm_(model[0].parameters(), 1.0)
    if both:
        clip_grad_norm_(model[1].parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""
    right = wrong.replace(
        "    clip_grad_norm_(model[0]", "    scaler.unscale_(optimizer)\n    clip_grad_norm_(model[0]"
    )
    assert migrate_text(HEAD + wrong, Settings()).text == HEAD + right
    assert rules_in(HEAD + wrong) == [("clip-before-unscale", 3, True)]


@pytest.mark.parametrize(
    "imported",
    [
        "from torch.amp import GradScaler",
        "from torch.amp import GradScaler as S; GradScaler = S",
        "from narrowcast import GradScaler",
        "from apex.transformer.amp import GradScaler",
    ],
)
def test_scalers_are_known_by_their_full_names(imported):
    text = f"{imported}\nimport torch\ngrads = GradScaler()\n" + (
        "def step(loss, net, opt):\n"
        "    grads.scale(loss).backward()\n"
        "    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)\n"
        "    grads.step(opt)\n"
        "    grads.update()\n"
    )
    target = "narrowcast" if "narrowcast" in imported else "torch"
    assert [rule for rule, _, _ in rules_in(text, target)] == ["clip-before-unscale"]


def test_names_from_their_new_home_or_else_their_old_one():
    text = (
        "import torch\ntry:\n    from torch.amp import GradScaler, autocast\nexcept ImportError:\n"
        "    from torch.cuda.amp import GradScaler, autocast\nscaler = GradScaler()\n"
        "def step(x, net, opt):\n    with autocast('cuda'):\n        loss = net(x)\n"
        "        loss.backward()\n    scaler.step(opt)\n    scaler.update()\n"
    )
    assert [rule for rule, _, _ in rules_in(text)] == ["backward-in-region", "scale-missing"]


def test_the_old_names_are_mended_too():
    text = (
        "import torch\nscaler = torch.cuda.amp.GradScaler()\n"
        "def step(loss, net, opt):\n"
        "    with torch.cuda.amp.autocast():\n"
        "        loss = net(loss)\n"
        "        scaler.scale(loss).backward()\n"
        "    scaler.step(opt)\n"
        "    scaler.update()\n"
    )
    assert (
        "\n        loss = net(loss)\n    scaler.scale(loss).backward()\n"
        in migrate_text(text, Settings()).text
    )


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.py")), ids=lambda path: path.name)
def test_the_examples_hold_no_mistake_but_reads_that_they_are_about(path):
    told = rules_in(path.read_text(encoding="utf-8"))
    assert {rule for rule, _, _ in told} <= ({"host-sync"} if path.name == "loss_scaling.py" else set())
