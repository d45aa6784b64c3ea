"""The library under the names of other software."""
