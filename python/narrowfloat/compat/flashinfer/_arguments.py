"""The common handling of arguments: arrays of any library, names in errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

from narrowfloat._arrays import is_torch
from narrowfloat.compat.flashinfer._dlpack import PLAIN, imported
from narrowfloat.compat.flashinfer._errors import AssertedError, CheckError

P = ParamSpec("P")
R = TypeVar("R")


def check_array(argument: str, value: Any) -> None:
    """TypeError unless it is an array of NumPy or a tensor of torch; ValueError for a scalar."""
    if not (isinstance(value, np.ndarray) or is_torch(value)):
        raise TypeError(
            f"{argument}: expected an array of NumPy, a tensor of torch or an array that speaks "
            f"DLPack, got {type(value).__name__}"
        )
    if not len(value.shape):
        raise ValueError(f"{argument}: expected at least one axis, got a scalar")


def check_axes(argument: str, array: Any, *axes: str) -> None:
    """ValueError for another number of axes; axes: what each of them counts."""
    shape = tuple(array.shape)
    if len(shape) != len(axes):
        raise ValueError(f"{argument}: expected [{', '.join(axes)}], got shape {shape}")


def in_words_of_the_caller(text: str, names: Mapping[str, str]) -> str | None:
    """A message with the name before its colon replaced; None if the table does not have it."""
    name, colon, rest = text.partition(":")
    found = names.get(name) if colon else None
    return None if found is None else f"{found}:{rest}"


def kind_of(error: Exception, text: str) -> type[Exception]:
    """The class that FlashInfer raises for what the library refuses, which is ours as well.

    Its quantizers assert that columns are whole blocks; its compiled code checks the rest.
    """
    if type(error) is not ValueError:
        return type(error)
    return AssertedError if text.startswith("cols:") else CheckError


def accepts(
    *arrays: str, names: Mapping[str, str] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A function that takes arrays of any library (imported()) and names its arguments in errors.

    arrays: arguments that must be arrays with at least one axis.
    names: what messages begin with, up to the colon -> what they shall begin with instead: an
        argument of the function.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = list(inspect.signature(function).parameters)
        places = [(name, parameters.index(name)) for name in arrays]
        call: Callable[..., R] = function
        table = names or {}

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            known = [value if type(value) in PLAIN else imported(name, value)
                     for name, value in zip(parameters, args, strict=False)]  # fmt: skip
            given = {name: value if type(value) in PLAIN else imported(name, value)
                     for name, value in kwargs.items()}  # fmt: skip
            for name, place in places:  # Python itself complains where none is given.
                if place < len(known):
                    check_array(name, known[place])
                elif name in given:
                    check_array(name, given[name])
            try:
                return call(*known, *args[len(parameters) :], **given)
            except (NotImplementedError, TypeError, ValueError) as error:
                text = in_words_of_the_caller(str(error), table)
                if text is None:
                    raise
                raise kind_of(error, str(error))(text) from error

        return checked

    return decorate
