"""The apex part of a file becomes ``torch.amp`` or narrowcast as a whole, or stays."""

import re
import textwrap

import pytest
from rewriting import left_alone, migrated, sides, told

HEAD = """\
import torch
from apex import amp

model = torch.nn.Linear(4, 1).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
NEW_HEAD = """\
import torch

model = torch.nn.Linear(4, 1).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
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


def test_the_smallest_script_to_narrowcast():
    text = migrated(HEAD + INITIALIZE + LOOP, "narrowcast").text
    new = (NEW_HEAD + SCALER + NEW_LOOP).replace("torch.autocast", "nc.autocast")
    assert text == new.replace("torch.amp.Grad", "nc.Grad").replace(
        "import torch\n", "import torch\nimport narrowcast as nc\n"
    )


@pytest.mark.parametrize(("given", "added"), [("weight_decay=0.1", ""), ("lr=0.1", "weight_decay=0.0, ")])
def test_fused_adam_is_torchs_adamw(given, added):
    made = "optimizer = torch.optim.{}(model.parameters(), {})\n"
    head = HEAD.replace(made.format("SGD", "lr=0.1"), "")
    old = "from apex.optimizers import FusedAdam\n" + head
    text = migrated(old + f"optimizer = FusedAdam(model.parameters(), {given})\n" + INITIALIZE + LOOP).text
    new = NEW_HEAD.replace(made.format("SGD", "lr=0.1"), made.format("AdamW", f"{given}, {added}fused=True"))
    assert text == new + SCALER + NEW_LOOP


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
def test_by_whatever_name_it_was_imported(imports, amp):
    text = (HEAD + INITIALIZE + LOOP).replace("from apex import amp\n", imports)
    assert (
        migrated(text.replace("amp.", f"{amp}.").replace("apex.apex", "apex")).text
        == NEW_HEAD + SCALER + NEW_LOOP
    )


# What initialize is called with, and the arguments of the scaler; None: without one that is on.
SETTINGS = {
    'opt_level="O1"': "",
    "": "",
    'opt_level="O2"': "",
    'opt_level="O2", keep_batchnorm_fp32=True, loss_scale="dynamic"': "",
    'opt_level="O1", verbosity=0': "",
    'opt_level="O1", loss_scale=128.0': ", init_scale=float(128.0), growth_interval=2**31 - 1",
    'opt_level="O1", loss_scale="64"': ", init_scale=float(64), growth_interval=2**31 - 1",
    'opt_level="O1", num_losses=2': "",
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_what_initialize_asks_for(settings):
    call = f"model, optimizer = amp.initialize(model, optimizer, {settings})\n"
    scaler = f'scaler = torch.amp.GradScaler("cuda"{SETTINGS[settings]})\n'
    assert migrated(HEAD + call + LOOP).text == NEW_HEAD + scaler + NEW_LOOP


@pytest.mark.parametrize(
    ("settings", "enabled"),
    [
        ('opt_level="O0"', "False"),
        ('enabled=args.fp16, opt_level="O1"', "args.fp16"),
        ("opt_level=args.level", 'args.level != "O0"'),
        ("opt_level=args.level, enabled=a or b", '(a or b) and args.level != "O0"'),
    ],
)
def test_what_is_not_always_on(settings, enabled):
    call = f"model, optimizer = amp.initialize(model, optimizer, {settings})\n"
    scaler = f'scaler = torch.amp.GradScaler("cuda", enabled={enabled})\n'
    loop = NEW_LOOP.replace("dtype=torch.float16)", "dtype=torch.float16, enabled=scaler.is_enabled())")
    assert migrated(HEAD + call + LOOP).text == NEW_HEAD + scaler + loop


def test_a_loss_scale_that_the_script_reads():
    call = "model, optimizer = amp.initialize(model, optimizer, loss_scale=args.scale)\n"
    assert (
        'scaler = torch.amp.GradScaler("cuda", init_scale=2.0**16 if args.scale in (None, "dynamic") '
        'else float(args.scale), growth_interval=2000 if args.scale in (None, "dynamic") else 2**31 - 1)'
    ) in migrated(HEAD + call + LOOP).text
    assert (
        'scaler = nc.GradScaler("cuda", loss_scale=None if args.scale in (None, "dynamic") '
        "else nc.scaling.Static(scale=float(args.scale)))"
    ) in migrated(HEAD + call + LOOP, "narrowcast").text


# What follows the backward pass in the loop, and what it becomes.
BETWEEN = {
    "clipping masters": (
        "norm = clip_grad_norm_(amp.master_params(optimizer), 1.0)\n",
        "scaler.unscale_(optimizer)\n    norm = clip_grad_norm_(model.parameters(), 1.0)\n",
    ),
    "clipping the model": (
        "clip_grad_norm_(model.parameters(), 1.0)\n",
        "scaler.unscale_(optimizer)\n    clip_grad_norm_(model.parameters(), 1.0)\n",
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


def test_masters_that_are_clipped_become_one_call_of_the_scaler():
    clip = "    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)\n    optimizer.step()"
    loop = textwrap.indent(LOOP.replace("    optimizer.step()", clip), "    ")
    text = HEAD.replace("\n\n", f"\n\ndef train(model, optimizer):\n{loop}\n") + INITIALIZE
    made = migrated(text, "narrowcast").text
    assert (
        "backward()\n        scaler.clip_grad_norm_(optimizer, 1.0)\n        scaler.step(optimizer)\n" in made
    )


def test_an_optimizer_of_several_groups_is_named_by_its_groups():
    head = HEAD.replace("model.parameters()", "[{'params': model.parameters()}]")
    loop = LOOP.replace(
        "    optimizer.step()\n", "    clip(amp.master_params(optimizer))\n    optimizer.step()\n"
    )
    expected = '    clip([p for group in optimizer.param_groups for p in group["params"]])\n'
    assert expected in migrated(head + INITIALIZE + loop).text


def test_two_losses_share_a_scaler_that_is_updated_once():
    loop = """\
    a, b = net(x)
    first = loss_of(a)
    second = loss_of(b)
    with amp.scale_loss(first, one, loss_id=0) as scaled:
        scaled.backward(retain_graph=True)
    with amp.scale_loss(second, [one, two], loss_id=1) as scaled:
        scaled.backward()
    one.step()
    two.step()
    """
    new = """\
    with torch.autocast("cuda", dtype=torch.float16):
        a, b = net(x)
        first = loss_of(a)
        second = loss_of(b)
    scaler.scale(first).backward(retain_graph=True)
    scaler.scale(second).backward()
    scaler.step(one)
    scaler.step(two)
    scaler.update()
    """
    call = "net, [one, two] = amp.initialize(net, [one, two], num_losses=2)\n"
    outcome = migrated("import torch\nfrom apex import amp\n" + call + textwrap.dedent(loop))
    assert outcome.text == "import torch\n" + SCALER + textwrap.dedent(new)
    assert sum("skips only its own step" in message for message in told(outcome)) == 1


def test_two_models_that_train_in_turns():
    before, after = sides("""\
     import torch
    +scaler = torch.amp.GradScaler("cuda")
    -from apex import amp
    -[g, d], [og, od] = amp.initialize([g, d], [og, od], opt_level="O1")
     for real in batches:
    +    with torch.autocast("cuda", dtype=torch.float16):
    -    fake = g(noise)
    +        fake = g(noise)
    -    loss_d = loss(d(fake.detach())) + loss(d(real))
    +        loss_d = loss(d(fake.detach())) + loss(d(real))
    -    with amp.scale_loss(loss_d, od) as scaled:
    -        scaled.backward()
    -    od.step()
    +    scaler.scale(loss_d).backward()
    +    scaler.step(od)
    +    scaler.update()
         og.zero_grad()
    +    with torch.autocast("cuda", dtype=torch.float16):
    -    loss_g = loss(d(fake))
    +        loss_g = loss(d(fake))
    -    with amp.scale_loss(loss_g, og) as scaled:
    -        scaled.backward()
    -    og.step()
    +    scaler.scale(loss_g).backward()
    +    scaler.step(og)
    +    scaler.update()
         od.zero_grad()
    """)
    assert migrated(before).text == after


def test_a_script_in_functions():
    before, after = sides("""\
     '''Trains.'''
     import torch
    -from apex import amp
    +
    +scaler = torch.amp.GradScaler("cuda", enabled=False)


     def save(model, path):
         state = {"model": model.state_dict()}
         if args.fp16:
    -        state["amp"] = amp.state_dict()
    +        state["amp"] = scaler.state_dict()
         torch.save(state, path)


     def step(net, opt, x, y):
    +    with torch.autocast("cuda", dtype=torch.float16, enabled=scaler.is_enabled()):
    -    out = net(x)
    +        out = net(x)
    -    loss = torch.nn.functional.mse_loss(out, y)
    +        loss = torch.nn.functional.mse_loss(out, y)
         if args.fp16:
    -        with amp.scale_loss(loss, opt) as scaled_loss:
    -            scaled_loss.backward()
    +        scaler.scale(loss).backward()
         else:
             loss.backward()
    -    opt.step()
    +    scaler.step(opt)
    +    scaler.update()
         opt.zero_grad()
         return loss.item()


     @torch.no_grad()
     def evaluate(net, x):
         net.eval()
         return net(x)


     def main():
    +    global scaler
         model = torch.nn.Linear(4, 1).cuda()
         optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
         if args.fp16:
    -        model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    +        scaler = torch.amp.GradScaler("cuda")
         step(model, optimizer, x, y)
         evaluate(net=model, x=x)
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


def test_the_name_of_the_scaler_is_free():
    head = HEAD + "scaler = StandardScaler()\n"
    assert 'grad_scaler = torch.amp.GradScaler("cuda")\n' in migrated(head + INITIALIZE + LOOP).text


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
    "batch norms": (
        "import torch\nfrom apex.parallel import convert_syncbn_model\nm = convert_syncbn_model(m)\n",
        "import torch\nm = torch.nn.SyncBatchNorm.convert_sync_batchnorm(m)\n",
    ),
    "torch is imported where it is needed": (
        "import os\nfrom apex.parallel import convert_syncbn_model\nm = convert_syncbn_model(m)\n",
        "import os\nimport torch\nm = torch.nn.SyncBatchNorm.convert_sync_batchnorm(m)\n",
    ),
    "imports that nothing uses": (
        "import torch\nfrom apex.multi_tensor_apply import multi_tensor_applier\n",
        "import torch\n",
    ),
}


@pytest.mark.parametrize("name", AROUND)
def test_what_stands_around_amp(name):
    before, after = AROUND[name]
    assert migrated(before).text == after


BESIDE = "    model(x).sum().backward()\n    with amp"
REFUSED = {
    "a backward pass beside the block": (
        INITIALIZE + LOOP.replace("    with amp", BESIDE, 1), 10, "a backward pass without amp.scale_loss"
    ),
    "O3": (INITIALIZE.replace("O1", "O3") + LOOP, 6, "opt_level O3"),
    "arguments from elsewhere": (INITIALIZE.replace(")", ", **how)") + LOOP, 6, "not written out"),
    "an edit of the lists": (
        "amp.lists.torch_overrides.FP16_FUNCS.append('exp')\n" + INITIALIZE + LOOP,
        6, "use nc.rule.op('exp', compute=...)",
    ),
    "a branch for apex beside torch.amp": (
        "scaler = torch.amp.GradScaler('cuda')\nif by_apex:\n    amp.initialize(model, optimizer)\n",
        6, "remove the branches for apex",
    ),
    "registered functions": (
        "amp.register_float_function(torch, 'sigmoid')\n" + INITIALIZE + LOOP, 6, "register_float_function",
    ),
    "no initialize": (LOOP, 9, "amp.initialize is not in this file"),
    "no backward pass": (INITIALIZE, 6, "scale_loss is not in this file: the backward"),
    "a plain backward pass alone": (
        INITIALIZE + "loss_of(model(x)).backward()\n", 6, "not in this file: the backward pass is elsewhere"
    ),
    "fp16_utils": (
        "from apex.fp16_utils import FP16_Optimizer\nFP16_Optimizer(o)\n" + INITIALIZE + LOOP,
        7, "keep the weights in fp32 and use a GradScaler",
    ),
    "no step": (INITIALIZE + LOOP.replace("optimizer.step", "engine.step"), 10, "step() of optimizer"),
    "a closure": (INITIALIZE + LOOP.replace("r.step()", "r.step(closure)"), 12, "closure"),
    "amp itself": ("keep(amp)\n" + INITIALIZE + LOOP, 6, "amp itself"),
    "no forward": (INITIALIZE + LOOP.replace("model(x)", "x"), 6, "no call of the model"),
    "clipping more often than stepping": (
        INITIALIZE
        + LOOP.replace(
            "    optimizer.step()",
            "    clip_grad_norm_(amp.master_params(optimizer))\n    if c:\n        optimizer.step()",
        ),
        12,
        "gradients are read here",
    ),
    "adam": (
        "from apex.optimizers import FusedAdam\nFusedAdam(p, 0.1)\n" + INITIALIZE + LOOP,
        7,
        "write torch.optim.AdamW(params",
    ),
    "binary cross entropy": (
        INITIALIZE + LOOP.replace("loss_of", "torch.nn.functional.binary_cross_entropy"), 8, "BCEWithLogits",
    ),
    "a block that shares its line": (
        INITIALIZE + LOOP.replace("scaled_loss:\n        ", "scaled_loss: "), 10, "shares its line"
    ),
    "gradients that are never cleared": (
        INITIALIZE + LOOP.replace("    optimizer.zero_grad()\n", ""), 11, "zero_grad() does not stand"
    ),
    "a scaled loss that is used later": (INITIALIZE + LOOP + "    print(scaled_loss)\n", 10, "used outside"),
    "an exception that is caught": (
        INITIALIZE
        + LOOP.replace("    optimizer.step", "    try:\n        optimizer.step")
        + "    except E:\n        pass\n",
        13,
        "another block",
    ),
    "everything of amp": ("from apex.amp import *\n" + INITIALIZE + LOOP, 6, "star import"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_leaves_the_whole_file_alone(name):
    rest, line, words = REFUSED[name]
    outcome = migrated(HEAD + rest)
    assert outcome.text == HEAD + rest
    assert any(at == line and words in message for at, message in left_alone(outcome)), outcome.findings


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_runs_on_with_narrowcast_apex(name):
    rest, _, _ = REFUSED[name]
    outcome = migrated(HEAD + rest, "narrowcast")
    # narrowcast.apex has no fp16_utils.
    kept = re.sub(r"from apex(?!\.fp16)", "from narrowcast.apex", HEAD + rest)
    if "GradScaler(" in rest:
        kept = kept.replace("torch.amp.Grad", "nc.Grad").replace("amp\n", "amp\nimport narrowcast as nc\n", 1)
    assert outcome.text == kept
    assert any(message.startswith("kept, with narrowcast.apex: ") for message in told(outcome))


def test_o2_and_a_level_that_is_read_keep_narrowcast_apex():
    for level in ('"O2"', "args.level"):
        text = HEAD + INITIALIZE.replace('"O1"', level) + LOOP
        assert migrated(text, "narrowcast").text == text.replace("from apex", "from narrowcast.apex")


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
def test_imports_that_stay(before, after):
    used = "apex.amp.y()\nSyncBatchNorm()\namp.x()\n"
    assert migrated(before + used, "narrowcast").text == after + used


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


def test_a_model_that_was_moved_is_known_by_its_new_name():
    text = HEAD + INITIALIZE + "net = model.to(device)\n" + LOOP.replace("model(x)", "net(x)")
    assert "        loss = loss_of(net(x), y)  # both\n" in migrated(text).text


@pytest.mark.parametrize(
    ("target", "words"), [("torch", "leave this line out once"), ("narrowcast", "from_state")]
)
def test_what_helps_with_a_state_that_apex_saved(target, words):
    messages = told(migrated(HEAD + INITIALIZE + "amp.load_state_dict(amp.state_dict())\n" + LOOP, target))
    assert sum(words in message for message in messages) == 1


NOTES = {
    "a level that is read": (INITIALIZE.replace('"O1"', "args.level") + LOOP, "misspelt"),
    "delayed unscaling": (
        INITIALIZE + LOOP.replace("optimizer) as", "optimizer, delay_unscale=last) as"), "delay_unscale goes"
    ),
    "batch norms": (
        "from apex.parallel import convert_syncbn_model\nm = convert_syncbn_model(m)\n" + INITIALIZE + LOOP,
        "in a process group it needs CUDA",
    ),
    "O2": (INITIALIZE.replace("O1", "O2") + LOOP, "half weights and fp32 masters"),
    "a static scale": (INITIALIZE.replace(")", ", loss_scale=8)") + LOOP, "halves it after an overflow"),
    "a limit": (INITIALIZE.replace(")", ", min_loss_scale=1.0)") + LOOP, "no such limit"),
    "several losses": (INITIALIZE.replace(")", ", num_losses=3)") + LOOP, "one scaler serves all losses"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOTES)
def test_a_difference_is_reported(name):
    rest, words = NOTES[name]
    assert sum(words in message for message in told(migrated(HEAD + rest))) == 1
    assert not any(words in message for message in told(migrated(HEAD + INITIALIZE + LOOP)))


def test_a_call_of_the_model_elsewhere_is_reported():
    outcome = migrated(HEAD + INITIALIZE + LOOP + "print(model(x))\n")
    assert outcome.text.endswith("scaler.update()\nprint(model(x))\n")
    assert any("this runs in fp32 now" in message for message in told(outcome))


def test_a_condition_over_several_lines_is_read():
    call = "if (a and\n        b):\n    " + INITIALIZE
    assert 'scaler = torch.amp.GradScaler("cuda", enabled=False)\n' in migrated(HEAD + call + LOOP).text
