"""What makes planning quick without changing a number: answers remembered, the garbage collector out of the way."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

First = TypeVar("First")
P = ParamSpec("P")
R = TypeVar("R")


def remembered(most: int) -> Callable[[Callable[Concatenate[First, P], R]], Callable[Concatenate[First, P], R]]:
    """Remember the answers of a pure function by the identity of its first argument, which must be immutable, and the
    value of the others. The blocks of a profile are asked about thousands of times while one plan is made, and hashing
    them costs as much as answering.

    Args:
        most: answers; all are forgotten when there are more, which happens where a person goes on to other models.
    """

    def decorate(function: Callable[Concatenate[First, P], R]) -> Callable[Concatenate[First, P], R]:
        known: dict[Hashable, tuple[First, R]] = {}

        @functools.wraps(function)
        def asked(first: First, /, *args: Any, **kwargs: Any) -> R:
            key = (id(first), args, tuple(kwargs.items()))
            found = known.get(key)
            if found is None:  # the argument is kept, so that no other object gets its identity
                answer = function(first, *args, **kwargs)
                if len(known) >= most:
                    known.clear()
                known[key] = (first, answer)
                return answer
            return found[1]

        return asked

    return decorate


@contextmanager
def without_collecting() -> Iterator[None]:
    """Keep the cyclic garbage collector from running: it would look, again and again, through the hundred thousand
    records that a simulation makes, of which none is in a cycle, and that takes as long as making them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
