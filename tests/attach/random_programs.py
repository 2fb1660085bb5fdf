"""Random small training programs in plain FP32 PyTorch, and the same with amp by hand.

Marks in the templates (``random_programs.toml``): ``{a|b}`` is a choice; ``; `` begins a line and ``;; `` an
indented one; ``[[...]]`` is a call of a model and ``<<...>>`` a loss to scale; ``~/~`` and ``~*~`` divide by
the scale and multiply with it; ``#A`` begins a line of amp. Words in capitals stand for other rows.
"""

import random
import re
import tomllib
from pathlib import Path

TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
BLOCKS, LOOPS, HEAD, AMP, TRAINING, LBFGS = (
    TABLES.pop(name) for name in ("blocks", "loops", "head", "amp", "training", "lbfgs")
)
ROWS = {f"{name} {index}" for name, table in TABLES.items() for index in range(len(table))}
KINDS = {*BLOCKS, *LOOPS, *ROWS, "LBFGS", "exception"}
BY_HAND = {"by_hand", "sharpness_aware"}  # loops that fp16 refuses, since no step can be skipped


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
        parts = [self._model("Net", [self._in_turn(BLOCKS)]), self._model("Net2", []), self._training()]
        self.marked = "\n".join([HEAD, *parts])

    def plain(self):
        return re.sub(r"\[\[|\]\]|<<|>>|~/~|~\*~", "", re.sub(r"\n *#A .*", "", self.marked))

    def with_amp(self, dtype, scale):
        text = self.marked.replace("#A ", "").replace("[[", "amp(lambda: ").replace("]]", ")")
        text = text.replace("<<", "scaler.scale(").replace(">>", ")")
        text = text.replace("~/~", " / scaler.get_scale()").replace("~*~", " * scaler.get_scale()")
        text = re.sub(r"(\w*opt)\.step\(\)", r"scaler.step(\1)", text)
        amp = AMP.replace("DTYPE", str(dtype)).replace("SCALE", str(scale))
        return text.replace("torch.manual_seed", f"{amp}\ntorch.manual_seed", 1)

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
        init = lines("super().__init__()" + re.sub("; (?!self)", "; self.", f"; {init}"), 2)
        header = f"class {name}(nn.Module):{lines('def __init__(self):', 1)}{init}"
        return f"{header}{lines('def forward(self, x):', 1)}{lines(forward, 2)}\n"

    def _model(self, name, kinds):
        kinds += self._rng.choices(list(BLOCKS), k=self._rng.randint(1 - len(kinds), 2))
        self.kinds |= set(kinds)
        blocks = "".join(self._class(f"{name}B{i}", *BLOCKS[kind]) for i, kind in enumerate(kinds))
        forward = []
        for i in range(len(kinds)):
            call = self._one("calls").replace("BLOCK", f"self.b{i}")
            forward.append(f"x = {{x + |x + ||0.5 * x + }}{call}")
        if self._rng.random() < 0.1:
            forward.append("if x.requires_grad: x.register_hook(lambda g: {g * 0.5|None|see(g)})")
        forward += [
            "if self.fail: {boom(x)|x.requires_grad and x.register_hook(boom)}",
            "return self.head(x)",
        ]
        made = "".join(f"b{i} = {name}B{i}(); " for i in range(len(kinds)))
        return blocks + self._class(name, f"{made}head = nn.Linear(12, 3); fail = False", "; ".join(forward))

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
        body = lines(self._draw(LOOPS[self.loop])).replace("LOSS", f"({self._one('losses')})")
        body = body.replace("UPDATE", "\n".join(steps)).replace("AFTER", "\n".join(after))
        if self._rng.random() < 0.15:
            self.kinds.add("exception")
            body = body.replace("\n", "\n    ")
            body = f"\nmodel.fail = step == 2\ntry:{body}\nexcept ValueError: log.append('failed')"
        words = {"BODY": body.strip().replace("\n", "\n    "), "ZERO": self._one("zero")}
        words |= {"OPT": f"torch.optim.{opt}", "PARAMETERS": parameters, "SCHEDULER": scheduler}
        other = self._one("optimizers").replace("PARAMETERS", "other.parameters()")
        words |= {"OTHER": other, "BEFORE": "\n".join(self._some("before", 3))}
        text = TRAINING.replace("NUMBER", str(self.number))
        for word, meant in words.items():
            text = text.replace(word, meant)
        return text
