"""Of apex and native mixed precision side by side the native one stays."""

import textwrap

import pytest
from rewriting import migrated, told

HEAD = "import torch\nfrom apex import amp\nscaler = torch.amp.GradScaler('cuda')\n"
NEW_HEAD = "import torch\nscaler = torch.amp.GradScaler('cuda')\n"
APEX = """\
    # by apex
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
"""
NATIVE = """\
    # by torch
    scaler.scale(loss).backward()
"""
PLAIN = "    loss.backward()\n"
DEDENTED = textwrap.dedent(NATIVE)

GOLDEN = {
    "native, then apex": (
        f'if amp_by == "torch":\n{NATIVE}elif amp_by == "apex":\n{APEX}else:\n{PLAIN}',
        f'if amp_by == "torch":\n{NATIVE}else:\n{PLAIN}',
    ),
    "apex, then native": (
        f'if amp_by == "apex":\n{APEX}elif amp_by == "torch":\n{NATIVE}else:\n{PLAIN}',
        f'if amp_by == "torch":\n{NATIVE}else:\n{PLAIN}',
    ),
    "apex last": (
        f'if amp_by == "torch":\n{NATIVE}elif amp_by == "apex":\n{APEX}',
        f'if amp_by == "torch":\n{NATIVE}',
    ),
    "apex, else native": (f"if use_apex:\n{APEX}else:\n{NATIVE}", DEDENTED),
    "apex alone": (
        f'if args.fp16 and args.amp == "apex":\n{APEX}if native:\n{NATIVE}',
        f"if native:\n{NATIVE}",
    ),
    "nothing else in the suite": (
        f'if args.fp16:\n    if args.amp == "apex":\n{textwrap.indent(APEX, "    ")}if native:\n{NATIVE}',
        f"if args.fp16:\n    pass\nif native:\n{NATIVE}",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_native_branch_stays(name):
    before, after = GOLDEN[name]
    outcome = migrated(HEAD + before)
    assert outcome.text == NEW_HEAD + after
    assert any("the branch for apex goes" in message for message in told(outcome))


def test_apex_outside_a_branch_of_its_own_keeps_all_of_it():
    text = HEAD + f'if amp_by == "torch":\n{NATIVE}elif amp_by == "apex":\n{APEX}amp.state_dict()\n'
    assert migrated(text).text == text


def test_to_narrowcast_too():
    text = migrated(HEAD + f"if use_apex:\n{APEX}else:\n{NATIVE}", "narrowcast").text
    assert text == f"import torch\nimport narrowcast as nc\nscaler = nc.GradScaler('cuda')\n{DEDENTED}"


@pytest.mark.parametrize("test", ["not use_apex", "amp_by != 'apex'", "native"])
def test_a_branch_for_apex_in_an_else_is_not_removed(test):
    text = HEAD + f"if {test}:\n{NATIVE}else:\n{APEX}"
    assert migrated(text).text == text
