"""The files that tools/tidy.py checks: their text, code without comments, includes; findings."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

CPP_SUFFIXES = (".h", ".cpp", ".cu", ".cuh")
TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)|(?P<number>\b\d[\w'.]*)
    |(?P<string>R"(?P<tag>[^(\s]*)\(.*?\)(?P=tag)"|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+')""",
    re.S | re.X)


@dataclass(frozen=True)
class Finding:
    path: str
    line: int
    rule: str
    message: str
    warning: bool = False

    def __str__(self) -> str:
        suffix = " (warning)" if self.warning else ""
        return f"{self.path}:{self.line}: {self.rule}: {self.message}{suffix}"


@dataclass
class SourceFile:
    path: str  # Relative to the root, with '/'.
    text: str

    @property
    def is_cpp(self) -> bool:
        return self.path.endswith(CPP_SUFFIXES)

    @property
    def is_header(self) -> bool:
        return self.path.endswith((".h", ".cuh"))

    @property
    def is_cmake(self) -> bool:
        return self.path.endswith(("CMakeLists.txt", ".cmake", ".cmake.in"))

    @property
    def is_script(self) -> bool:
        return self.path.endswith((".py", ".sh")) or self.text.startswith("#!")

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def without_comments(self) -> str:
        return self._blank("comment")

    @cached_property
    def code(self) -> str:
        """C++ without comments and the contents of literals; same line numbers."""
        return self._blank("comment", "string")

    def _blank(self, *kinds: str) -> str:
        def replace(match: re.Match) -> str:
            newlines = "\n" * match[0].count("\n")
            if match.lastgroup == "comment" and "comment" in kinds:
                return " " + newlines
            return '""' + newlines if match["string"] and "string" in kinds else match[0]
        return TOKEN.sub(replace, self.text)

    @cached_property
    def includes(self) -> list[tuple[int, str, str]]:
        """(line, quote, path) of every #include."""
        pattern = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)', re.M)
        return [(self.line_of(m.start(1)), m[1], m[2])
                for m in pattern.finditer(self.without_comments)]

    def line_of(self, position: int) -> int:
        return self.without_comments.count("\n", 0, position) + 1

    def code_matches(self, pattern: str, flags: int = re.M) -> Iterator[tuple[int, re.Match]]:
        for match in re.finditer(pattern, self.code, flags):
            yield self.code.count("\n", 0, match.start()) + 1, match


@dataclass
class Tree:
    files: list[SourceFile]  # Text files.
    paths: set[str] = field(default_factory=set)  # All files and folders.

    def under(self, *prefixes: str) -> list[SourceFile]:
        return [f for f in self.files if f.path.startswith(prefixes)]


def make_tree(contents: dict[str, str], other_paths: set[str] = frozenset()) -> Tree:
    paths = set(contents) | other_paths
    folders = {parent for path in paths for parent in map(str, Path(path).parents)}
    return Tree([SourceFile(p, t) for p, t in sorted(contents.items())], paths | folders)


def load(root: Path) -> Tree:
    """Files that git tracks or would track; without git, all but build folders."""
    command = ["git", "-C", str(root), "ls-files", "-coz", "--exclude-standard"]
    listing = subprocess.run(command, capture_output=True, text=True, check=False)
    if listing.returncode == 0:
        names = [name for name in listing.stdout.split("\0") if name]
    else:
        names = [p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()]
        names = [n for n in names if not n.startswith(("build/", ".venv/", ".git/"))]
    contents, others = {}, set()
    for name in names:
        try:
            contents[name] = (root / name).read_bytes().decode()
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            others.add(name)
    return make_tree(contents, others)
