"""Observe an unmodified script, and run it in mixed precision. Public: ``narrowcast.attached``."""

from narrowcast.attach._attachment import Attachment, attached, run_attached
from narrowcast.attach._module_rules import RULE_NOTE
from narrowcast.attach._recorder import call_site
from narrowcast.attach._run import Observer
from narrowcast.attach._tensorboard import TensorBoard
from narrowcast.attach._torch_internals import is_functorch_wrapped

__all__ = [
    "RULE_NOTE",
    "Attachment",
    "Observer",
    "TensorBoard",
    "attached",
    "call_site",
    "is_functorch_wrapped",
    "run_attached",
]
