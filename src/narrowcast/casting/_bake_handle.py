"""The handle of a baked model: the hooks that find the format of each weight, store it, and keep it true.

A call is watched where formats are to be found: the first, and later ones as long as modules are called whose
weights were not read before. A watched call computes with fp32 weights throughout. Memory is exchanged only
while no call is under way in any thread.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch

from narrowcast.casting._bake_calls import Calls, calling_frame, has_ended
from narrowcast.casting._bake_places import find_candidates, flatten_rnns, who_is_called_for
from narrowcast.casting._bake_reads import Reads
from narrowcast.casting._bake_weights import StoredWeight
from narrowcast.casting._modules import Applied
from narrowcast.casting._torch_internals import unseen_by_the_compiler
from narrowcast.casting._weight_casts import drop_casts
from narrowcast.errors import OrderError
from narrowcast.policy import Policy, format_name

_LOW = (torch.bfloat16, torch.float16)


class _Watch:
    """A watched call."""

    def __init__(self, frame: FrameType, weights: list[torch.nn.Parameter]) -> None:
        self.frame = frame
        self.thread = threading.get_ident()
        self.exception = sys.exc_info()[1]  # that somebody handles around the call
        self.called: set[torch.nn.Parameter] = set()
        self.reads = Reads(weights)
        self._cache_before = torch.is_autocast_cache_enabled()
        if threading.active_count() > 1:
            # PyTorch holds the lock of its cache while it casts, which goes through Python while this looks.
            # A thread that leaves a region waits for that lock, and lets no Python run meanwhile.
            torch.set_autocast_cache_enabled(False)
        self.reads.begin()

    def end(self) -> None:
        here = self.thread == threading.get_ident()
        self.reads.end(here=here)
        if here:
            torch.set_autocast_cache_enabled(self._cache_before)


class Baked:
    """The handle of a baked model, made by ``bake``. Also a context manager that restores at its end.

    Attributes:
        policy: what the model computes by.
    """

    def __init__(self, model: torch.nn.Module, policy: Policy, *, frozen_only: bool, keep_fp32: bool) -> None:
        self.policy = policy
        self._frozen_only = frozen_only
        self._keep_fp32 = keep_fp32
        self._stored: dict[torch.nn.Parameter, StoredWeight] = {}
        self._to_store: dict[torch.nn.Parameter, torch.dtype] = {}
        self._stays_wide: set[torch.nn.Parameter] = set()
        self._restless: set[StoredWeight] = set()  # widened, or with values that somebody may write to
        self._wants_to_watch = True
        self._ended = False
        self._begin_in_process()
        self._applied: Applied | None = Applied(model, policy)
        # Outermost: weights change their format outside of the region and of every other hook.
        self._handles: list[Any] = [
            *self._applied.handles,
            model.register_forward_pre_hook(self._before, prepend=True),
            model.register_forward_hook(self._after, always_call=True),
        ]
        self._listeners: list[Any] = []
        for module in model.modules():
            if module._parameters:
                self._follow_state_dicts(module)

    def _begin_in_process(self) -> None:
        """What belongs to this process and moment, and is not copied."""
        self._lock = threading.RLock()
        self._calls = Calls()
        self._watch: _Watch | None = None

    @property
    def formats(self) -> dict[str, torch.dtype]:
        """The stored weights by their path, with the format of each; the others are as they were."""
        return {stored.name: stored.dtype for stored in self._stored.values()}

    def restore(self) -> None:
        """Put the fp32 weights back, those written meanwhile included, and take the policy away.

        Raises:
            OrderError: a call of the model is under way.
        """
        with self._lock:
            if self._ended:
                return
            if not self._calls.are_over():
                raise OrderError(
                    "expected no call of the model under way when it is restored, got one that has not "
                    "returned: call restore() after it, outside of the model's hooks"
                )
            self._end_interrupted_watch()
            lost = [stored.dtype for stored in self._stored.values() if stored.kept is None]
            for stored in self._stored.values():
                stored.restore()
            drop_casts()
            self._ended = True
        for handle in (*self._handles, *self._listeners):
            handle.remove()
        if self._applied is not None:
            self._applied.remove(copies=False)
        self._stored.clear()
        if lost:
            formats = " and ".join(sorted({format_name(one) for one in lost}))
            warnings.warn(
                f"restore() widened {len(lost)} weights as they are in {formats}: with keep_fp32=False their "
                "fp32 values were not kept",
                UserWarning,
                stacklevel=2,
            )

    def __enter__(self) -> Baked:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def __repr__(self) -> str:
        return f"Baked({'restored' if self._ended else f'{len(self._stored)} weights in a low format'})"

    # ---- calls of the model

    def _before(self, module: torch.nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling():
            _untraced(self._begin_call, module)
        else:
            self._begin_call(module)

    def _after(self, module: torch.nn.Module, _args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            _untraced(self._end_call, module, output)
        else:
            self._end_call(module, output)

    def _begin_call(self, module: torch.nn.Module) -> None:
        if _is_replica(module):
            return  # of DataParallel, whose weights are copies
        frame = calling_frame()
        with self._lock:
            self._end_interrupted_watch()
            nobody_else = self._calls.are_over()
            if nobody_else:
                self._bring_up_to_date(module)
            self._calls.begin(frame)
            if self._wants_to_watch and nobody_else and not self._ended:
                self._begin_watch(module, frame)
        if torch.is_grad_enabled():
            for parameter, stored in self._stored.items():
                if parameter.requires_grad:
                    stored.guard()

    def _end_call(self, module: torch.nn.Module, output: Any) -> None:
        if _is_replica(module):
            return
        frame = calling_frame()
        with self._lock:
            self._calls.end(frame)
            watch = self._watch
            if watch is not None and watch.frame is frame:
                watch.end()
                self._watch = None
                if sys.exc_info()[1] is watch.exception:  # else the call failed
                    watch.reads.note_results(output)
                    self._learn(module, watch)
            if self._calls.are_over():
                self._bring_up_to_date(module)

    def _begin_watch(self, module: torch.nn.Module, frame: FrameType) -> None:
        candidates = find_candidates(module, self._may_store)
        if not candidates:
            # Under torch.func.functional_call others stand in for them for the length of a call.
            self._wants_to_watch = any(type(one) is torch.Tensor for one in module.parameters())
            return
        for stored in self._stored.values():
            stored.widen()
        self._restless.update(self._stored.values())
        drop_casts()  # of a region around this call, by which a read would not be seen
        self._watch = _Watch(frame, [*candidates, *self._stored])

    def _may_store(self, parameter: torch.nn.Parameter) -> bool:
        known = parameter in self._stored or parameter in self._stays_wide
        return not known and not (self._frozen_only and parameter.requires_grad)

    def _end_interrupted_watch(self) -> None:
        """After an interrupt, which ends a call without its hooks."""
        if self._watch is not None and has_ended(self._watch.frame):
            self._watch.end()
            self._watch = None

    def _learn(self, module: torch.nn.Module, watch: _Watch) -> None:
        self._wants_to_watch = False
        for parameter, formats in watch.reads.formats.items():
            stored = self._stored.get(parameter)
            (dtype,) = formats if len(formats) == 1 else (None,)
            if dtype in _LOW and (stored is None or stored.dtype == dtype):
                if stored is None:
                    self._to_store[parameter] = dtype
            elif formats or parameter in watch.called:
                self._stays_wide.add(parameter)
                if stored is not None and formats:
                    self._restless.discard(stored)
                    self._stored.pop(parameter).restore()
        self._stays_wide.intersection_update(module.parameters())
        self._listen(module)

    def _bring_up_to_date(self, module: torch.nn.Module) -> None:
        """Store what is to be stored, while no call is under way, and round anew what was written to."""
        if self._to_store:
            names = {parameter: name for name, parameter in module.named_parameters()}
            for parameter, dtype in self._to_store.items():
                if parameter in names and parameter.dtype is torch.float32 and self._may_store(parameter):
                    stored = StoredWeight(names[parameter], parameter, dtype, self._keep_fp32)
                    self._stored[parameter] = stored
            drop_casts()
            flatten_rnns(module, self._to_store)
            self._to_store.clear()
        if self._restless:
            for stored in self._restless:
                stored.narrow()
                stored.take_over()
            self._restless = {stored for stored in self._restless if stored.lent}

    # ---- weights whose modules were not called yet

    def _listen(self, module: torch.nn.Module) -> None:
        """Have the modules call ``_heard`` that the weights not read so far belong to."""
        for handle in self._listeners:
            handle.remove()
        self._listeners.clear()
        unread = [one for one in find_candidates(module, self._may_store) if one not in self._to_store]
        for owner, weights in who_is_called_for(module, unread):
            hook = functools.partial(self._heard, weights)
            self._listeners.append(owner.register_forward_pre_hook(hook))

    def _heard(self, weights: tuple[torch.nn.Parameter, ...], _module: Any, _args: Any) -> None:
        if torch.compiler.is_compiling() or self._ended:
            return
        watch = self._watch
        if watch is not None and watch.thread == threading.get_ident():
            watch.called.update(weights)
        elif watch is None:
            self._wants_to_watch = True

    # ---- state dicts

    def _follow_state_dicts(self, module: torch.nn.Module) -> None:
        hooked: Any = module  # these methods of it have no types
        if self._keep_fp32:
            # A partial, since what is registered gets an attribute, and a method can have none.
            self._handles.append(hooked.register_state_dict_post_hook(functools.partial(self._given)))
        self._handles.append(hooked.register_load_state_dict_pre_hook(self._loading))
        self._handles.append(hooked.register_load_state_dict_post_hook(self._loaded))

    def _given(self, module: torch.nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        with self._lock:
            for name, stored in self._stored_in(module).items():
                if state.get(prefix + name, stored.parameter) is not stored.parameter:  # keep_vars=True
                    state[prefix + name] = stored.handed_out()
                    self._restless.add(stored)

    def _loading(self, module: torch.nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        for name, stored in self._stored_in(module).items():
            stored.take_over()
            stored.incoming = state.get(prefix + name)

    def _loaded(self, module: torch.nn.Module, _keys: Any) -> None:
        with self._lock:
            for stored in self._stored_in(module).values():
                stored.load()
            drop_casts()
            # With assign=True there are other parameters now.
            ours = [one for one in module._parameters.values() if one is not None]
            self._wants_to_watch |= any(self._may_store(one) for one in ours)

    def _stored_in(self, module: torch.nn.Module) -> dict[str, StoredWeight]:
        own = module._parameters.items()
        return {name: self._stored[one] for name, one in own if one is not None and one in self._stored}

    # ---- copies

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_lock", "_calls", "_watch", "_applied")
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._applied = None
        self._begin_in_process()


def baked(model: torch.nn.Module) -> Baked | None:
    """The handle of a model that ``bake`` was called with, or of a copy of one; None for any other."""
    for hook in model._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, Baked):
            return owner
    return None


def _is_replica(module: torch.nn.Module) -> bool:
    return bool(getattr(module, "_is_replica", False))


@unseen_by_the_compiler
def _untraced(hook: Any, *args: Any) -> None:
    hook(*args)
