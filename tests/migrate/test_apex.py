"""The canonical training loop of apex is rewritten as a whole; every other file keeps apex's calls."""

import importlib
import re
import textwrap

import pytest
from rewriting import left_alone, migrated, sides, told

import narrowcast.apex
from narrowcast.migrate.apex._file import _NAMES_IN_NARROWCAST

HEAD = """\
import torch
from apex import amp

model = torch.nn.Linear(4, 1).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
NEW_HEAD = HEAD.replace("from apex import amp\n", "")
LOOP = """\
for x, y in batches:
    loss = loss_of(model(x), y)  # both
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
"""
NEW_LOOP = """\
for x, y in batches:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = loss_of(model(x), y)  # both
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
INITIALIZE = 'model, optimizer = amp.initialize(model, optimizer, opt_level="O1")\n'
SCALER = 'scaler = torch.amp.GradScaler("cuda")\n'


def test_the_smallest_script_becomes_narrowcast():
    text = migrated(HEAD + INITIALIZE + LOOP, "narrowcast").text
    new = (NEW_HEAD + SCALER + NEW_LOOP).replace("torch.autocast", "nc.autocast")
    assert text == new.replace("torch.amp.Grad", "nc.Grad").replace(
        "import torch\n", "import torch\nimport narrowcast as nc\n"
    )


@pytest.mark.parametrize(
    ("imports", "amp"),
    [
        ("import apex.amp as mixed\n", "mixed"),
        ("import apex\n", "apex.amp"),
        ("import apex.amp\n", "apex.amp"),
        ("from apex import amp as a, parallel\n", "a"),
        ("try:\n    from apex import amp\nexcept ImportError:\n    raise ImportError('get apex')\n", "amp"),
    ],
)
def test_amp_is_known_by_the_name_it_was_imported_as(imports, amp):
    text = (HEAD + INITIALIZE + LOOP).replace("from apex import amp\n", imports)
    text = text.replace("amp.", f"{amp}.").replace("apex.apex", "apex")
    assert migrated(text).text == NEW_HEAD + SCALER + NEW_LOOP


@pytest.mark.parametrize(
    "setup",
    [
        "model, optimizer = amp.initialize(model, optimizer)\n",
        "(model, optimizer) = amp.initialize(model, optimizer, enabled=True)\n",
        'amp.initialize(model, optimizer, opt_level="O1", verbosity=0, loss_scale="dynamic")\n',
        'level = "O1"\nmodel, optimizer = amp.initialize(model, optimizer, opt_level=level)\n',
    ],
)
def test_o1_with_its_defaults_is_rewritten(setup):
    before = setup if "level =" not in setup else setup.splitlines(keepends=True)[0]
    new = migrated(HEAD + setup + LOOP).text
    assert new == NEW_HEAD + (before if "level =" in setup else "") + SCALER + NEW_LOOP


# What follows the backward pass in the loop, and what it becomes.
BETWEEN = {
    "clipping masters": (
        "norm = clip_grad_norm_(amp.master_params(optimizer), 1.0)\n",
        "scaler.unscale_(optimizer)\n    norm = clip_grad_norm_(model.parameters(), 1.0)\n",
    ),
    "clipping inside the block": (
        "    # how far\n        clip_grad_norm_(amp.master_params(optimizer), 1.0)\n",
        "# how far\n    scaler.unscale_(optimizer)\n    clip_grad_norm_(model.parameters(), 1.0)\n",
    ),
    "a loop over gradients": (
        "for p in model.parameters():\n        p.grad.clamp_(-1, 1)\n",
        "scaler.unscale_(optimizer)\n    for p in model.parameters():\n        p.grad.clamp_(-1, 1)\n",
    ),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_gradients_are_unscaled_before_they_are_read(name):
    before, after = BETWEEN[name]
    loop = LOOP.replace("backward()\n", f"backward()\n    {before}")
    outcome = migrated(HEAD + INITIALIZE + loop)
    assert f"    scaler.scale(loss).backward()\n    {after}    scaler.step(optimizer)\n" in outcome.text
    assert any("still scaled" in message for message in told(outcome)) == ("inside" in name)


def test_clipping_of_the_masters_becomes_one_call_of_narrowcasts_scaler():
    clip = "torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)\n"
    for before in (f"    {clip}", f"        {clip}"):
        loop = LOOP.replace("backward()\n", f"backward()\n{before}")
        assert (
            "backward()\n    scaler.clip_grad_norm_(optimizer, 1.0)\n    scaler.step(optimizer)\n"
            in migrated(HEAD + INITIALIZE + loop, "narrowcast").text
        )


def test_an_optimizer_of_several_groups_is_named_by_its_groups():
    head = HEAD.replace("model.parameters()", "[{'params': model.parameters()}]")
    loop = LOOP.replace("    optimizer.s", "    clip(amp.master_params(optimizer))\n    optimizer.s")
    expected = '    clip([p for group in optimizer.param_groups for p in group["params"]])\n'
    assert expected in migrated(head + INITIALIZE + loop).text


def test_a_decorated_forward_pass_keeps_its_decorator():
    forward = "    @torch.enable_grad()\n    def forward():\n        return loss_of(model(x), y)\n\n"
    loop = LOOP.replace("    loss = loss_of(model(x), y)  # both\n", f"{forward}    loss = forward()\n")
    region = '    with torch.autocast("cuda", dtype=torch.float16):\n'
    expected = region + textwrap.indent(f"{forward}    loss = forward()\n", "    ")
    assert expected in migrated(HEAD + INITIALIZE + loop).text


def test_a_script_in_functions_shares_its_scaler():
    before, after = sides("""\
     '''Trains.'''
     import torch
    -from apex import amp
    +
    +scaler = torch.amp.GradScaler("cuda", enabled=False)


     def save(model, path, amp_run):
         state = {"model": model.state_dict()}
         if amp_run:
    -        state["amp"] = amp.state_dict()
    +        state["amp"] = scaler.state_dict()
         torch.save(state, path)


     def main(args):
    +    global scaler
         model = torch.nn.Linear(4, 1).cuda()
         optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
         if args.amp:
    -        model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    +        scaler = torch.amp.GradScaler("cuda")
         for x, y in batches:
             model.zero_grad()
    +        with torch.autocast("cuda", dtype=torch.float16, enabled=scaler.is_enabled()):
    -        out = model(x)
    +            out = model(x)
    -        loss = torch.nn.functional.mse_loss(out, y)
    +            loss = torch.nn.functional.mse_loss(out, y)
             total = loss.item()
             if args.amp:
    -            with amp.scale_loss(loss, optimizer) as scaled_loss:
    -                scaled_loss.backward()
    -            norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    +            scaler.scale(loss).backward()
    +            scaler.unscale_(optimizer)
    +            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
             else:
                 loss.backward()
                 norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    -        optimizer.step()
    +        scaler.step(optimizer)
    +        scaler.update()
    """)
    assert migrated(before).text == after


def test_strings_over_several_lines_keep_their_indentation():
    loop = LOOP.replace(
        "    loss = loss_of(model(x), y)  # both\n",
        '    out = model(x, """one\n  two\n    three""")\n\n    loss = loss_of(\n        out,\n'
        "    # low\n        y)\n",
    )
    assert (
        '        out = model(x, """one\n  two\n    three""")\n\n        loss = loss_of(\n            out,\n'
        "        # low\n            y)\n"
    ) in migrated(HEAD + INITIALIZE + loop).text


@pytest.mark.parametrize(
    "binding", ["scaler = StandardScaler()\n", "match settings:\n    case {**scaler}:\n        pass\n"]
)
def test_the_name_of_the_scaler_is_free(binding):
    text = migrated(HEAD + binding + INITIALIZE + LOOP).text
    assert 'grad_scaler = torch.amp.GradScaler("cuda")\n' in text


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ('torch.device("cpu")', '"cpu"'),
        ('torch.device("cuda:1")', '"cuda"'),
        ("args.device", '"cuda"'),
        ('"cuda" if torch.cuda.is_available() else "cpu"',) * 2,
    ],
)
def test_the_device_is_that_of_the_script(device, expected):
    text = migrated(HEAD.replace(".cuda()", f".to({device})") + INITIALIZE + LOOP).text
    assert f"torch.amp.GradScaler({expected})" in text
    assert f"torch.autocast({expected}, dtype=torch.float16)" in text


AROUND = {
    "ddp": (
        "from apex.parallel import DistributedDataParallel as DDP\nm = DDP(m, delay_allreduce=True)\n",
        "from torch.nn.parallel import DistributedDataParallel as DDP\nm = DDP(m)\n",
    ),
    "ddp by its full name": (
        "import torch\nimport apex\nm = apex.parallel.DistributedDataParallel(m)\n",
        "import torch\nm = torch.nn.parallel.DistributedDataParallel(m)\n",
    ),
    "batch norms, for which torch is imported": (
        "import os\nfrom apex.parallel import convert_syncbn_model\nm = convert_syncbn_model(m)\n",
        "import os\nimport torch\nm = torch.nn.SyncBatchNorm.convert_sync_batchnorm(m)\n",
    ),
    "two models, for which torch is imported once": (
        "import apex\na = apex.parallel.convert_syncbn_model(a)\nb = apex.parallel.convert_syncbn_model(b)\n",
        "import torch\na = torch.nn.SyncBatchNorm.convert_sync_batchnorm(a)\n"
        "b = torch.nn.SyncBatchNorm.convert_sync_batchnorm(b)\n",
    ),
    "imports that nothing uses": (
        "import torch\nfrom apex.multi_tensor_apply import multi_tensor_applier\n",
        "import torch\n",
    ),
}


@pytest.mark.parametrize("name", AROUND)
def test_parallel_layers_become_torchs(name):
    before, after = AROUND[name]
    assert migrated(before).text == after


def settings(added):
    return INITIALIZE.replace(")", f", {added})")


# What follows HEAD, the line that is named, and a part of the reason.
KEPT = {
    "O2": (INITIALIZE.replace("O1", "O2") + LOOP, 6, "half weights and fp32 masters"),
    "O3": (INITIALIZE.replace("O1", "O3") + LOOP, 6, "opt_level O3"),
    "a level that is read": (INITIALIZE.replace('"O1"', "args.level") + LOOP, 6, "when the script runs"),
    "a static scale": (settings("loss_scale=128.0") + LOOP, 6, "loss_scale of amp.initialize"),
    "arguments from elsewhere": (INITIALIZE.replace(")", ", **how)") + LOOP, 6, "not written out"),
    "two models": (INITIALIZE.replace("(model", "([model, other]") + LOOP, 6, "one name as models"),
    "a new name": ("self." + INITIALIZE + LOOP, 6, "expected model, optimizer = amp.initialize"),
    "under two conditions": ("if a:\n    if b:\n        " + INITIALIZE + LOOP, 8, "another block"),
    "no initialize": (LOOP, 9, "amp.initialize is not in this file"),
    "no scale_loss": (INITIALIZE, 6, "amp.scale_loss is not in this file"),
    "two blocks": (INITIALIZE + LOOP * 2, 16, "a second amp.scale_loss"),
    "delayed unscaling": (
        INITIALIZE + LOOP.replace("optimizer) as", "optimizer, delay_unscale=c) as"), 10, "delay_unscale of"
    ),
    "a block under another condition": (
        INITIALIZE + LOOP.replace("    with", "    if x:\n     with"),
        10, "in an if, whose condition",
    ),
    "a second pair of names": (
        INITIALIZE.replace("optimizer =", "optimizer = self.model, self.optimizer =", 1) + LOOP,
        6, "expected model, optimizer = amp.initialize",
    ),
    "a level that is a parameter": (
        "opt_level = 'O1'\ndef train(opt_level):\n    "
        + INITIALIZE.replace('"O1"', "opt_level") + textwrap.indent(LOOP, "    "), 8, "when the script runs"
    ),
    "a block that begins on the second line of its header": (
        INITIALIZE
        + LOOP.replace(", optimizer) as", ",\n     optimizer) as").replace("loss:\n        ", "loss: "),
        10, "shares its line"
    ),
    "a block that shares its line": (
        INITIALIZE + LOOP.replace("scaled_loss:\n        ", "scaled_loss: "), 10, "shares its line"
    ),
    "another call in the block": (
        INITIALIZE + LOOP.replace("backward()\n", "backward()\n        print()\n"), 12, "else but clipping"
    ),
    "a scaled loss that is used later": (INITIALIZE + LOOP + "    print(scaled_loss)\n", 13, "used outside"),
    "a loss that is computed in the call": (
        INITIALIZE + LOOP.replace("(loss,", "(loss.mean(),"), 10, "compute it before"
    ),
    "a loss of another model": (INITIALIZE + LOOP.replace("model(x)", "net(x)"), 10, "loss with model"),
    "a step under a condition": (
        INITIALIZE + LOOP.replace("    optimizer.step", "    if i % 4 == 0:\n        optimizer.step"),
        10, "no optimizer.step() follows",
    ),
    "a closure": (INITIALIZE + LOOP.replace("r.step()", "r.step(closure)"), 10, "no optimizer.step()"),
    "a second step": (INITIALIZE + LOOP + "    optimizer.step()\n", 13, "another step of this optimizer"),
    "a backward pass beside": (
        INITIALIZE + LOOP.replace("    with amp", "    penalty.backward()\n    with amp"), 10, "without amp."
    ),
    "gradients that are read in a helper": (
        "def limit(net):\n    net.weight.grad.clamp_(-1, 1)\n" + INITIALIZE + LOOP, 7, "gradients are used"
    ),
    "gradients that are never cleared": (
        INITIALIZE + LOOP.replace("    optimizer.zero_grad()\n", ""), 11, "zero_grad() does not stand"
    ),
    "a way out before the step": (
        INITIALIZE + LOOP.replace("    optimizer.step", "    if bad:\n        continue\n    optimizer.step"),
        13, "this may leave",
    ),
    "an exception that is caught": (
        INITIALIZE + "try:\n" + textwrap.indent(LOOP, "    ") + "except E:\n    pass\n", 7, "exception"
    ),
    "an edit of the lists": (
        "amp.lists.torch_overrides.FP16_FUNCS.append('exp')\n" + INITIALIZE + LOOP,
        6, "use nc.rule.op('exp', compute=...)",
    ),
    "a branch for apex beside torch.amp": (
        "scaler = torch.amp.GradScaler('cuda')\nif by_apex:\n    amp.initialize(model, optimizer)\n",
        8, "remove the branches for apex",
    ),
    "registered functions": (
        "amp.register_float_function(torch, 'sigmoid')\n" + INITIALIZE + LOOP, 6, "register_float_function",
    ),
    "fp16_utils": (
        "from apex.fp16_utils import FP16_Optimizer\nFP16_Optimizer(o)\n" + INITIALIZE + LOOP,
        7, "keep the weights in fp32 and use a GradScaler",
    ),
    "adam": (
        "from apex.optimizers import FusedAdam\nFusedAdam(p, 0.1)\n" + INITIALIZE + LOOP,
        7, "write torch.optim.AdamW(params",
    ),
    "amp itself": ("keep(amp)\n" + INITIALIZE + LOOP, 6, "amp itself"),
    "everything of amp": ("from apex.amp import *\n" + INITIALIZE + LOOP, 6, "star import"),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_another_shape_is_left_alone_with_its_line_and_reason(name):
    rest, line, words = KEPT[name]
    outcome = migrated(HEAD + rest)
    assert outcome.text == HEAD + rest
    ((at, message),) = [found for found in left_alone(outcome) if "narrowcast.apex" in found[1]]
    assert at == line
    assert words in message


@pytest.mark.parametrize("name", KEPT)
def test_another_shape_runs_on_with_narrowcast_apex(name):
    rest, _, words = KEPT[name]
    outcome = migrated(HEAD + rest, "narrowcast")
    # narrowcast.apex has no fp16_utils.
    kept = re.sub(r"from apex(?!\.fp16)", "from narrowcast.apex", HEAD + rest)
    if "GradScaler(" in rest:
        kept = kept.replace("torch.amp.Grad", "nc.Grad").replace("amp\n", "amp\nimport narrowcast as nc\n", 1)
    assert outcome.text == kept
    (why,) = [message for message in told(outcome) if message.startswith("kept, with narrowcast.apex: ")]
    assert words in why


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import apex\n", "from narrowcast import apex\n"),
        ("import apex.amp as amp\n", "import narrowcast.apex.amp as amp\n"),
        ("import os, apex.amp\n", "import os\nimport narrowcast.apex.amp\nfrom narrowcast import apex\n"),
        (
            "from apex.parallel import (\n    SyncBatchNorm,  # r\n)\n",
            "from narrowcast.apex.parallel import (\n    SyncBatchNorm,  # r\n)\n",
        ),
    ],
)
def test_kept_calls_find_their_names_in_narrowcast_apex(before, after):
    used = "apex.amp.state_dict()\nSyncBatchNorm()\namp.state_dict()\n"
    assert migrated(before + used, "narrowcast").text == after + used


LACKING = {
    "a module that it has not": (
        "from apex.normalization import FusedLayerNorm as LN\n",
        "from apex.normalization import FusedLayerNorm as LN\n",
        "narrowcast.apex has no",
    ),
    "one name of several": (
        "from apex.parallel import SyncBatchNorm as R, LARC\n",
        "from apex.parallel import LARC\nfrom narrowcast.apex.parallel import SyncBatchNorm as R\n",
        "narrowcast.apex has no",
    ),
    "a plain import": (
        "import os, apex.contrib.xentropy as xe, apex.amp as a\n",
        "import os, apex.contrib.xentropy as xe\nimport narrowcast.apex.amp as a\n",
        "contrib.xentropy",
    ),
    "an optimizer of an old apex": (
        "from apex.optimizers import FP16_Optimizer as LN, FusedSGD as a\n",
        "from apex.optimizers import FP16_Optimizer as LN\n"
        "from narrowcast.apex.optimizers import FusedSGD as a\n",
        "narrowcast.apex has no optimizers.FP16_Optimizer",
    ),
    "the file of an optimizer": (
        "from apex.optimizers.fused_adam import FusedAdam as a\n",
        "from apex.optimizers.fused_adam import FusedAdam as a\n",
        "narrowcast.apex has no optimizers.fused_adam",
    ),
    "lists and the state, which are modules": (
        "from apex.amp.lists import torch_overrides\nfrom apex.amp._amp_state import _amp_state\n",
        "from narrowcast.apex.amp.lists import torch_overrides\n"
        "from narrowcast.apex.amp._amp_state import _amp_state\n",
        None,
    ),
}


@pytest.mark.parametrize("name", LACKING)
def test_narrowcast_apex_is_imported_for_what_it_has(name):
    before, after, reason = LACKING[name]
    rest = "from apex import amp\nm = amp.initialize(m, opt_level='O3')\nuse(LN, LARC, R, xe, a)\n"
    outcome = migrated(before + rest, "narrowcast")
    assert outcome.text == after + rest.replace("from apex", "from narrowcast.apex")
    left = [message for _, message in left_alone(outcome)]
    assert not left if reason is None else any(reason in message for message in left)


@pytest.mark.parametrize("package", narrowcast.apex.__all__)
def test_the_names_that_narrowcast_apex_has_are_known(package):
    names = set(importlib.import_module(f"narrowcast.apex.{package}").__all__)
    assert set(_NAMES_IN_NARROWCAST[package]) == names - {"init"}


@pytest.mark.parametrize("start", ["from apex import amp\namp.", "import apex\napex.amp."])
def test_imports_for_what_narrowcast_apex_lacks_stay(start):
    outcome = migrated(start + "init()\n", "narrowcast")
    assert outcome.text == start + "init()\n"
    assert any("narrowcast.apex has no amp.init:" in message for _, message in left_alone(outcome))


def test_a_package_may_hand_apex_on():
    outcome = migrated("from apex import amp\n", path="pkg/__init__.py")
    assert outcome.text == "from apex import amp\n"
    assert "may import this name of apex" in left_alone(outcome)[0][1]


def test_a_file_that_asks_for_apex_keeps_its_question():
    text = "try:\n    from apex import amp\n    there = True\nexcept ImportError:\n    there = False\n"
    assert migrated(text).text == text


@pytest.mark.parametrize(
    ("target", "words"), [("torch", "leave this line out once"), ("narrowcast", "from_state")]
)
def test_what_helps_with_a_state_that_apex_saved(target, words):
    messages = told(migrated(HEAD + INITIALIZE + "amp.load_state_dict(amp.state_dict())\n" + LOOP, target))
    assert sum(words in message for message in messages) == 1


def test_a_call_of_the_model_elsewhere_is_reported():
    outcome = migrated(HEAD + INITIALIZE + LOOP + "print(model(x))\n")
    assert outcome.text.endswith("scaler.update()\nprint(model(x))\n")
    assert any("this runs in fp32 now" in message for message in told(outcome))
