"""Guards a model while it is patched: one thread of one process at a time, and Ctrl-C waits until the model is restored.

Knows nothing about what is done with a model while it is in use.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import nn

from specdec.errors import SpecdecError

_users: weakref.WeakKeyDictionary[nn.Module, list] = weakref.WeakKeyDictionary()  # -> [(process, thread), nested uses]
_locks: dict[int, threading.RLock] = {}


def process_lock():
    """The lock of this process: a forked child has its own, which no lost thread holds."""
    return _locks.setdefault(os.getpid(), threading.RLock())


@contextlib.contextmanager
def in_one_thread(model: nn.Module) -> Iterator[None]:
    """Refuse a second thread or a fork: a model in use holds the mask and features of one forward. One thread may nest."""
    here = os.getpid(), threading.get_ident()
    with process_lock():
        user = _users.setdefault(model, [here, 0])
        if user[0][0] != here[0]:
            why = "this process was forked while the model was decoding, and its copy is half-way"
            raise SpecdecError(f"{why}; load the pair again here, or fork when nothing is decoded.")
        if user[0] != here:
            why = "this model is decoding in another thread"
            raise SpecdecError(f"{why}; wait until it has finished, or load a second pair for this one.")
        user[1] += 1
    try:
        yield
    finally:
        with process_lock():
            user[1] -= 1
            if user[1] == 0:
                _users.pop(model, None)


_eager: list = []  # one entry per use; the first holds what to exit


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, code compiled by torch.compile runs uncompiled: trees change shape every cycle, and each new shape would be
    compiled. Affects the whole process, until the last use ends."""
    if "torch._dynamo" not in sys.modules:  # then nothing has been compiled
        yield
        return
    with process_lock():
        _eager.append(None if _eager else torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with process_lock():
            first = _eager[0]
            _eager.pop()
            if not _eager:
                first.__exit__(None, None, None)


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Delays Ctrl-C to the end of the block. Does nothing in other threads, or if the signal has another handler."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    pressed = []
    try:
        signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pressed:
        raise KeyboardInterrupt


@contextlib.contextmanager
def atomic_context(enter: Callable[[contextlib.ExitStack], None]) -> Iterator[None]:
    """A context whose parts `enter` puts on a stack; Ctrl-C finds it entered or left as a whole."""
    stack, interrupt = contextlib.ExitStack(), None
    try:
        with interrupts_deferred():
            enter(stack)
        yield
    finally:
        left = False
        while not left:  # a second Ctrl-C does not stop the clean-up
            try:
                with interrupts_deferred():
                    stack.close()
                left = True
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt
