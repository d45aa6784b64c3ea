"""Errors that are FlashInfer's kind of error and the library's own kind at once.

Callers of FlashInfer catch RuntimeError or AssertionError where it raises those; callers of
narrowfloat catch ValueError for an argument that can never work. NotImplementedError is a
RuntimeError already.
"""


class CheckError(ValueError, RuntimeError):
    """An argument that FlashInfer's compiled code refuses, with a RuntimeError."""


class AssertedError(ValueError, AssertionError):
    """An argument that an assertion of FlashInfer's refuses."""
