#!/usr/bin/env python3
"""Prints docstrings, errors and commits that would stop a reader; the exit status is 1 if there are any.

- A first line names its subject: it begins with a verb, "Whether" or a noun phrase, points at no noun by a pronoun, and
  has at most 110 characters. In each folder, at most 3% of them may differ; of public names, none.
- An error message has at most 200 characters, each value put into it counted as three.
- Phrases that were replaced do not come back, in code, comments, docstrings and pages.
- Each commit since the merge base with `origin/main`, or the last commit where there is none, has an imperative subject
  of at most 72 characters, and a body if it changes the library.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from budgets import ROOMS, ROOT, report, sources
from check_structure import exports

FOLDERS = (*ROOMS, "benchmarks", "papers", "tools", "examples")
SHARE, LONGEST_LINE, LONGEST_ERROR, LONGEST_SUBJECT = 0.03, 110, 200, 72
HEADLESS = re.compile(
    r"(that|those|these|this|it|they|its|their|which|whose|whom|what|such|likewise|also|so|as|of|in|by|where|here|there"
    r"|none|nothing|only|both|each|all of|some of|one of|the (one|ones|same|like|rest|others?)|the (first|last) of"
    r"|for (a|an|the|each))\b"
)
POINTING = re.compile(
    r"\b((that|those) of|(of|by|to) which|of (whose|whom)|what (is|was|are|were|it|they)|so (many|much)|likewise"
    r"|besides?|is no matter|of one's own|as (it is|they are)|where (it lies|they lie)|in their place"
    r"|numbers? of (each|rows?|keys?|units?))\b",
    re.IGNORECASE,
)
# Verbs that end like a participle or a third person.
IMPERATIVES = re.compile(r"(Bring|String|Need|Feed|Embed|Seed|Speed|Shed|Proceed|Focus|.*ss)$")

# Phrases that were replaced: "fixed point", "with replacement", "fully masked row", "sharded over", "rendezvous" and
# "iterates over" are the field's. Spaces stand for any white space, also for the start of a comment's next line.
OLD_PHRASES = re.compile(
    r"\b(?:(?-i:Raises nothing)|points? of rest|with returning|(?:rows?|query|queries) (?:that|which) sees? no key"
    r"|spread over|roll call|what walks over)\b".replace(" ", r"[\s#>]+"),
    re.IGNORECASE,
)
# Files that may tell what was.
HISTORY = ("CHANGELOG.md", "tools/check_prose.py", "tests/repository/test_prose.py")

DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class FirstLine(NamedTuple):
    """The first line of a docstring, and whether the documentation shows it."""

    where: str
    folder: str
    public: bool
    text: str


def objection(line: str) -> str | None:
    """Returns why a reader stops at a first line, or None."""
    if HEADLESS.match(line[:1].lower() + line[1:]):
        return "begins without its noun"
    if POINTING.search(line):
        return "points at a noun by a pronoun"
    return "is too long" if len(line) > LONGEST_LINE else None


def first_lines(root: Path) -> Iterator[FirstLine]:
    """Reads the first line of every docstring."""
    public_names = {name for _, name in exports(root)}
    for path in (path for folder in FOLDERS for path in sources(root, folder)):
        relative = path.relative_to(root)
        tree = ast.parse(path.read_text("utf-8"))
        shown = [x for x in tree.body if getattr(x, "name", "_") in public_names]
        shown = shown if relative.parts[0] in ROOMS else []
        members = (x for node in shown if isinstance(node, ast.ClassDef) for x in node.body)
        public = [*shown, *(x for x in members if not getattr(x, "name", "_").startswith("_"))]
        for node in ast.walk(tree):
            if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
                where = f"{relative}:{getattr(node, 'lineno', 1)}"
                folder = "/".join(relative.parts[:-1][:2])
                yield FirstLine(where, folder, node in public, text.splitlines()[0])


def stumbling_lines(root: Path) -> Iterator[str]:
    """First lines that stop a reader: all that are public, and the rest in folders with too many."""
    lines: dict[str, list[FirstLine]] = {}
    for line in first_lines(root):
        lines.setdefault(line.folder, []).append(line)
    for folder in lines.values():
        odd = [line for line in folder if objection(line.text)]
        for line in odd:
            if line.public or len(odd) > SHARE * len(folder):
                yield f"{line.where}: {objection(line.text)}: {line.text}"


def spelled(node: ast.expr) -> str:
    """The text of a string expression, with `...` for each value put into it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(spelled, node.values))
    if isinstance(node, ast.BinOp):
        return spelled(node.left) + spelled(node.right)
    return "..."


def long_errors(root: Path) -> Iterator[str]:
    """Messages of raised errors that are too long."""
    for path in (path for folder in FOLDERS for path in sources(root, folder)):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                message = spelled(node.exc.args[0])
                if len(message) > LONGEST_ERROR:
                    where = f"{path.relative_to(root)}:{node.lineno}"
                    yield f"{where}: an error of {len(message)} characters: {message[:80]}..."


def old_phrases(root: Path) -> Iterator[str]:
    """Phrases that were replaced."""
    pages = [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *root.glob("papers/*/*.md")]
    folders = (*FOLDERS, "tests", "docs")
    for path in [*pages, *(path for folder in folders for path in sources(root, folder))]:
        where = str(path.relative_to(root))
        text = "" if where in HISTORY else path.read_text(encoding="utf-8")
        for match in OLD_PHRASES.finditer(text):
            line = 1 + text.count("\n", 0, match.start())
            yield f"{where}:{line}: the field has another word for {' '.join(match[0].split())!r}"


def git(root: Path, *arguments: str) -> str:
    """The output of a git command, empty where it fails or git is missing."""
    try:
        run = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return "" if run.returncode else run.stdout.strip()


def is_imperative(subject: str) -> bool:
    """Whether a subject, without a prefix such as `docs: `, may begin with an imperative."""
    verb = re.sub(r"^[\w/.`]+: ", "", subject).split(" ")[0].capitalize()
    return bool(IMPERATIVES.match(verb)) or not re.search(r"(ed|ing|s)$|^(The|An?|No)$", verb)


def commit_findings(root: Path) -> Iterator[str]:
    """Commits of the change with a subject or a body against the rules; none outside of a repository."""
    if git(root, "rev-parse", "--show-toplevel") != str(root.resolve()):
        return
    base, head = git(root, "merge-base", "HEAD", "origin/main"), git(root, "rev-parse", "HEAD")
    commits = [f"{base}..HEAD"] if base and base != head else ["-1", "HEAD"]
    for commit in git(root, "rev-list", "--no-merges", *commits).split():
        subject, _, body = git(root, "log", "-1", "--format=%B", commit).partition("\n")
        if len(subject) > LONGEST_SUBJECT:
            yield f"{commit[:8]}: a subject of {len(subject)} characters: {subject}"
        if not is_imperative(subject):
            yield f"{commit[:8]}: a subject that is not imperative: {subject}"
        # a commit whose parent is not there, as in a shallow clone, would list every file
        changed = git(root, "diff-tree", "-r", "--no-commit-id", "--name-only", commit).splitlines()
        if not body.strip() and any(x.startswith(ROOMS) and x.endswith(".py") for x in changed):
            yield f"{commit[:8]}: no body says why the library changes: {subject}"


RULES = (stumbling_lines, long_errors, old_phrases, commit_findings)

if __name__ == "__main__":
    sys.exit(report(finding for rule in RULES for finding in rule(ROOT)))
