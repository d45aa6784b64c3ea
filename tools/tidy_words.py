"""The words that this project does not use, each with the field's word for it.

BANNED_WORDS is the table of the rule `banned-word` of tidy.py.  The rule covers names, comments,
strings and documents below WORD_PATHS; UNCHECKED_PATHS are exceptions.
"""

from __future__ import annotations

import re

# Between two words of a phrase: a blank, '_' or '-', or the end of a line of a comment.
_GAP = r"(?:[ _-]|[ \t]*\n[ \t]*(?://|#)?[ \t]*)"


def phrase(*words: str, is_name: bool = True) -> re.Pattern:
    """Matches words in prose and snake_case and, unless is_name is false, in CamelCase."""
    prose = rf"(?i:(?<![a-z]){_GAP.join(words)}(?![a-z]))"
    camel = "".join(word[0].upper() + word[1:] for word in words)
    return re.compile(rf"{prose}|{camel}(?![a-z])" if is_name else prose)


BANNED_WORDS = [  # Pattern, the field's word.
    (phrase("long", "tiles?"), "TMA kernel, 128 x 192"),
    (phrase("row", "teams?"), "cluster split along n"),
    (phrase("teams?", is_name=False), "cluster"),
    (phrase("few", "slots?"), "small batch"),
    # CodedRows is a name of the public interface.
    (phrase("coded?", "rows?", is_name=False), "quantize rows, quantized rows"),
    (phrase("decoded", "rows?"), "dequantized rows"),
    (phrase("coders?"), "quantizer"),
    (phrase("finishers?"), "epilogue"),
    (phrase("multiprocessors?", is_name=False), "SM"),
    (phrase("blocks?", "of", r"(?:\d+ )?threads", is_name=False), "CTA"),
    (phrase("blocks?", "of", r"(?:64 )?weight", "rows", is_name=False), "n sub-tile"),
    (phrase("next", "grid"), "programmatic dependent launch"),
    (phrase("grids?", "before"), "programmatic dependent launch"),
    (phrase("prepared", "images?"), "packed weights"),
    (phrase("weight", "images?"), "packed weights"),
    # scale_image_size() is a name of the public interface.
    (re.compile(r"(?i:\bscale[ -]images?\b|\bimages? of (?:the )?(?:block )?scales\b)"),
     "scale tensor, packed scales"),
    (phrase("work", "lists?"), "tile scheduler"),
    (phrase("work", "items?"), "output tile"),
    (phrase("dealt"), "static schedule"),
    (phrase("claim(?:s|ed)?", "(?:item|tile)s?"), "dynamic schedule"),
    (phrase("next", "items?"), "next tile"),
    (phrase("panels?"), "packed strip (CPU), shared-memory tile (GPU)"),
    (phrase("ordinary", "(?:way|path)"), "fast path"),
    (phrase("way", "of", "ordinary", is_name=False), "fast path"),
    (phrase("tak(?:e|es|ing)", "turns", is_name=False), "alternate"),
    (phrase("behind", is_name=False), "after"),
    (phrase("in", "front", "of", is_name=False), "before"),
    (phrase("nonsense"), "bad values"),
    (phrase("anew", is_name=False), "again"),
]
WORD_PATHS = re.compile(
    r"(?:src|include|tests|python|tools|bench|examples|docs|cmake|models)/|README\.md$"
    r"|CONTRIBUTING\.md$|(?:test|quickstart)\.sh$|CMakeLists\.txt$|CMakePresets\.json$"
    r"|pyproject\.toml$")
UNCHECKED_PATHS = re.compile(
    r"bench/results/|tests/golden/.*\.(?:txt|json)$|models/.*\.txt$|tools/tidy_words\.py$"
    r"|.*\.svg$")
