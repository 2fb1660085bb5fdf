"""Random small training programs in plain FP32 PyTorch, and the same with amp by hand.

Marks in the templates (``random_programs.toml``): ``{a|b}`` is a choice; ``; `` begins a line and ``;; `` an
indented one; ``[[...]]`` is a call of a model and ``<<...>>`` a loss to scale; ``~/~`` and ``~*~`` divide by
the scale and multiply with it; ``#A`` begins a line of amp; ``~f~`` and ``~w~`` stand behind the input and
the result of an operator that is computed in fp32, ``~fwd~`` and ``~bwd~`` before methods of a custom
Function, ``~gamma~`` and ``~p~`` where amp has no reference. Words in capitals stand for other rows.
"""

import random
import re
import tomllib
from pathlib import Path

TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
BLOCKS, LOOPS, HEAD, AMP, TRAINING, LBFGS, RETURNS, CONTAINERS = (
    TABLES.pop(name)
    for name in ("blocks", "loops", "head", "amp", "training", "lbfgs", "returns", "containers")
)
ROWS = {f"{name} {index}" for name, table in TABLES.items() for index in range(len(table))}
RETURNED = {f"returns {name}" for name in RETURNS} | {f"returns a {name}" for name in CONTAINERS}
KINDS = {*BLOCKS, *LOOPS, *ROWS, *RETURNED, "LBFGS", "exception"}
BY_HAND = {"by_hand", "sharpness_aware", "worker_copy"}  # loops that fp16 refuses: no step can be skipped

# Sums of two outputs are no probabilities, and a sample is none; under torch.func none is computed in fp32.
OF_FUNC = {"functional_gradients", "per_sample", "jacobian"}
OF_LOGITS = {"two_optimizers", "soft_actor", "latent", *OF_FUNC}

# torch.func cannot transform checkpoints, custom Functions, hooks and most writes in place.
TRANSFORMED = [
    "mlp", "conv1d", "unet", "attention_by_hand", "decoder", "tied", "hyper", "temperature", "maxout",
    "lists", "vectors", "stop", "distribution", "categorical", "bilinear",
]  # fmt: skip

# What the marks of operators mean in plain FP32, in amp, and where every operator rounds but these.
MARKS = {
    "~f~": ("", ".float()", ".double()"),
    "~w~": ("", "", ".float()"),
    "~fwd~": ("", "torch.amp.custom_fwd(device_type='cpu')", ""),
    "~bwd~": ("", "torch.amp.custom_bwd(device_type='cpu')", ""),
    "~gamma~": ("", ".amp_rounds_gamma_functions", ""),  # an error, since ``run`` computes them in fp32
    "~p~": ("", ".amp_keeps_probabilities_low", ""),  # the same: distributions take them in fp32
    "~/~": ("", " / scaler.get_scale()", ""),
    "~*~": ("", " * scaler.get_scale()", ""),
}


def lines(text, depth=0):
    return re.sub("(;+) ", lambda mark: "\n" + "    " * (depth + len(mark[1]) - 1), f"; {text}")


class Program:
    """The ``number``-th program; ``kinds`` are the names of what it drew, ``marked`` its text with marks.

    Half of what it draws follows from its number in turn, so that a few dozen programs draw everything.
    """

    def __init__(self, number):
        self._rng, self.number, self.kinds = random.Random(number), number, set()
        self.loop = self._in_turn(LOOPS)
        self.kinds.add(self.loop)
        self.returned, last, self.taken = self._returned()
        self.kinds |= {f"returns {self.returned}"}
        parts = [
            self._class("Last", "", f"return {last}"),
            self._model("Net", [self._in_turn(TRANSFORMED if self.loop in OF_FUNC else BLOCKS)]),
            self._model("Net2", []),
            self._training(),
        ]
        self.marked = "\n".join([HEAD, *parts])

    def plain(self):
        return self._without_amp(0)

    def rounded(self):
        """The plain program for a test that rounds what operators in fp32 return, without checkpoints."""
        return re.sub(r"checkpoint\(([^,]+), (\w+), use_reentrant=\w+\)", r"(\1)(\2)", self._without_amp(2))

    def with_amp(self, dtype, scale):
        text = self.marked.replace("#A ", "").replace("[[", "amp(lambda: ").replace("]]", ")")
        text = text.replace("<<", "scaler.scale(").replace(">>", ")")
        text = self._meant(text, 1)
        text = re.sub(r"(\w*opt)\.step\(\)", r"scaler.step(\1)", text)
        amp = AMP.replace("DTYPE", str(dtype)).replace("SCALE", str(scale))
        return text.replace("torch.manual_seed", f"{amp}\ntorch.manual_seed", 1)

    def _without_amp(self, column):
        text = re.sub(r"\n *#A .*", "", self.marked)
        return self._meant(re.sub(r"\[\[|\]\]|<<|>>", "", text), column)

    def _meant(self, text, column):
        for mark, meant in MARKS.items():
            text = text.replace(mark, meant[column])
        return text

    def _returned(self):
        """What the model returns, the expression of it, and what takes the tensor of the loss out of it."""
        kind, container = "logits", "alone"
        if self.loop not in OF_LOGITS:
            kind = self._rng.choice(["logits", *RETURNS])
            container = self._rng.choice(["alone", *CONTAINERS])
        self.kinds.add(f"returns a {container}")
        whole, taken = CONTAINERS[container]
        return kind, whole.replace("P", RETURNS[kind]), taken

    def _of_returned(self, name):
        """A row for losses or policies of what the model returns."""
        return self._one(name if self.returned == "logits" else f"{name}_of_{self.returned}")

    def _in_turn(self, rows):
        return list(rows)[(self.number + self.number // len(rows)) % len(rows)]

    def _draw(self, text):
        while found := re.search(r"\{([^{}|]*\|[^{}]*)\}", text):
            text = text[: found.start()] + self._rng.choice(found[1].split("|")) + text[found.end() :]
        return text

    def _some(self, name, most):
        rows = TABLES[name]
        picked = self._rng.choices(rows, k=self._rng.randint(most == 1, most))
        picked = picked if self._rng.random() < 0.5 else [self._in_turn(rows), *picked[1:]]
        picked = sorted({rows.index(row) for row in picked})
        self.kinds |= {f"{name} {index}" for index in picked}
        return [self._draw(rows[index]) for index in picked]

    def _one(self, name):
        return self._some(name, 1)[0]

    def _class(self, name, init, forward):
        act = self._draw("{F.relu|torch.tanh|F.gelu|F.silu|torch.sigmoid|F.mish}")
        init, forward = (self._draw(part).replace("ACT", act) for part in (init, forward))
        init = lines("super().__init__()" + re.sub("; (?!self)", "; self.", f"; {init}") * bool(init), 2)
        header = f"class {name}(nn.Module):{lines('def __init__(self):', 1)}{init}"
        return f"{header}{lines('def forward(self, x):', 1)}{lines(forward, 2)}\n"

    def _model(self, name, kinds):
        known = TRANSFORMED if self.loop in OF_FUNC else list(BLOCKS)
        kinds += self._rng.choices(known, k=self._rng.randint(1 - len(kinds), 2))
        self.kinds |= set(kinds)
        blocks = "".join(self._class(f"{name}B{i}", *BLOCKS[kind]) for i, kind in enumerate(kinds))
        forward = []
        for i in range(len(kinds)):
            call = "BLOCK(x)" if self.loop in OF_FUNC else self._one("calls")
            call = call.replace("BLOCK", f"self.b{i}")
            forward.append(f"x = {{x + |x + ||0.5 * x + }}{call}")
        if self._rng.random() < 0.1:
            forward.append("if x.requires_grad: x.register_hook(lambda g: {g * 0.5|None|see(g)})")
        forward += [
            "if self.fail: {boom(x)|x.requires_grad and x.register_hook(boom)}",
            "return self.last(self.head(x))" if name == "Net" else "return self.head(x)",
        ]
        made = "".join(f"b{i} = {name}B{i}(); " for i in range(len(kinds)))
        last = "last = Last(); " if name == "Net" else ""
        return blocks + self._class(
            name, f"{made}head = nn.Linear(12, 3); {last}fail = False", "; ".join(forward)
        )

    def _training(self):
        opt, parameters = self._one("optimizers"), self._one("parameters")
        if self.loop == "closure" and self._rng.random() < 0.7:
            self.kinds.add("LBFGS")
            opt, parameters = self._draw(LBFGS), "model.parameters()"
        after = self._some("after", 3)
        scheduler = self._one("schedulers") if self._rng.random() < 0.5 else "None"
        if scheduler != "None":
            after.append(f"scheduler.step({'float(loss)' if 'Plateau' in scheduler else ''})")
        steps = [
            "#A scaler.unscale_(opt)",
            *self._some("between", 3),
            "opt.step()",
            "#A scaler.update()",
            *after,
        ]
        body = lines(self._draw(LOOPS[self.loop])).replace("LOSS", f"({self._of_returned('losses')})")
        body = body.replace("POLICY", self._of_returned("policies"))
        body = body.replace("UPDATE", "\n".join(steps)).replace("AFTER", "\n".join(after))
        if self._rng.random() < 0.15:
            self.kinds.add("exception")
            body = body.replace("\n", "\n    ")
            body = f"\nmodel.fail = step == 2\ntry:{body}\nexcept ValueError: log.append('failed')"
        words = {"BODY": body.strip().replace("\n", "\n    "), "ZERO": self._one("zero")}
        words |= {"OPT": f"torch.optim.{opt}", "PARAMETERS": parameters, "SCHEDULER": scheduler}
        other = self._one("optimizers").replace("PARAMETERS", "other.parameters()")
        before = [] if self.loop in OF_FUNC else self._some("before", 3)
        words |= {"OTHER": other, "BEFORE": "\n".join(before)}
        text = TRAINING.replace("NUMBER", str(self.number))
        for word, meant in words.items():
            text = text.replace(word, meant)
        # Each call of the model, and of its copy, gives the tensor for the loss.
        return re.sub(r"\[\[(model|twin|torch\.func).*?\]\]", lambda call: call[0] + self.taken, text)
