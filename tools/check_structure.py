#!/usr/bin/env python3
"""Print each violation of the repository's structure; the exit status is 1 if there is any.

The rules are the functions in `RULES`, and the budgets of `tools/budgets.toml`. The rooms `kernels` and `distributed`
are links in the package: bare, these names are other people's packages.
"""

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from budgets import ROOMS, ROOT, over_budget, report, sources

LINKED = ("kernels", "distributed")
MAY_IMPORT = {
    "kernels": {"kernels"},
    "distributed": {"kernels", "distributed"},
    "energy_attn": {"kernels", "distributed", "energy_attn"},
}
MAX_LINES, MAX_ANY = 400, 0.05
PRIVATE_NAMES, PROGRAMS = "kernels/_imports.py", "kernels/program/"
DOOR = "internal"
# Public names of two packages: `masks.Function` and `scores.Function`.
IN_TWO_PACKAGES = {"Function"}
# The modules that may know the lodger `energy_attn.models`, by its public names: for the lazy name in the package, and
# for the kind of a model in a report.
KNOW_MODELS = ("energy_attn/__init__.py", "energy_attn/report/_report.py")
LODGERS = ("energy_attn/models/", "energy_attn/cli/")
# `Any` by itself or in a union, quoted or not; `list[Any]` and `Callable[..., Any]` do not match.
ANY = re.compile(r"'?(\w+ \| |(typing\.)?Optional\[)*(typing\.)?Any\]?( \| \w+)*'?")


class Module(NamedTuple):
    """A source file: its path, from the root and in full, and its syntax tree."""

    where: str
    path: Path
    tree: ast.Module


parsed = functools.cache(ast.parse)  # several rules read each module


def modules(root: Path, *folders: str) -> Iterator[Module]:
    """Parses all source files of some folders."""
    for folder in folders:
        for path in sources(root, folder):
            yield Module(str(path.relative_to(root)), path, parsed(path.read_text("utf-8")))


def module_name(root: Path, path: Path) -> str:
    """The name that a source file is imported by: `energy_attn.kernels._merge`."""
    parts = path.relative_to(root).with_suffix("").parts
    if parts[0] in LINKED:
        parts = ("energy_attn", *parts)
    return ".".join(parts)


def imports(module: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything that a module imports, inside functions, too."""
    package = module.split(".")[:-1]  # also right for a/b/__init__.py, whose module is a.b.__init__
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            for alias in node.names:
                yield node.lineno, ".".join([*base, alias.name])


def room_of(name: str) -> str | None:
    """The room of an imported name; None for other packages."""
    first, *inner = name.split(".")
    if first != "energy_attn":
        return None
    return inner[0] if inner and inner[0] in LINKED else "energy_attn"


def lazy_block(tree: ast.Module) -> list[ast.stmt]:
    """The statements under `if TYPE_CHECKING:`: in an `__init__.py`, the names that users get when first used."""
    return [
        node
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test).endswith("TYPE_CHECKING")
        for node in block.body
    ]


def exports(root: Path) -> list[tuple[str, str]]:
    """Package and name of every public name: an `__init__.py` imports it `as` itself, at once or lazily."""
    return [
        (module_name(root, module.path).removesuffix(".__init__"), alias.name)
        for module in modules(root, *ROOMS)
        if module.path.name == "__init__.py"
        for node in [*module.tree.body, *lazy_block(module.tree)]
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name and not alias.name.startswith("_")
    ]


def broken_links(root: Path) -> Iterator[str]:
    """The rooms that are not linked into the package, by a relative link of their name."""
    for room in LINKED:
        link = root / "energy_attn" / room
        if not link.is_symlink() or link.readlink() != Path("..", room):
            yield f"energy_attn/{room}: should be a link to ../{room}"
        elif not link.is_dir():
            yield f"energy_attn/{room}: its target ../{room} is missing"


def imported(root: Path, *folders: str) -> Iterator[tuple[str, str, str]]:
    """Every import of some folders: `file:line`, the importing module and the imported name."""
    for where, path, tree in modules(root, *folders):
        importer = module_name(root, path)
        for line, name in imports(importer, tree):
            yield f"{where}:{line}", importer, name


def wrong_imports(root: Path) -> Iterator[str]:
    """Imports of a room above, or of bare `kernels` or `distributed`."""
    for where, _, name in imported(root, *ROOMS, "benchmarks", "papers", "tests", "tools", "docs"):
        folder, room = where.split("/")[0], room_of(name)
        if name.split(".")[0] in LINKED:
            yield f"{where}: imports bare {name}; say energy_attn.{name}"
        elif folder in ROOMS and room is not None and room not in MAY_IMPORT[folder]:
            yield f"{where}: {folder} imports {name}, against the direction"


def other_doors(root: Path) -> Iterator[str]:
    """Imports of another room that bypass its public packages and `internal`."""
    for where, importer, name in imported(root, *ROOMS, "benchmarks", "papers", "examples", "docs"):
        room = room_of(name)
        if room is None or room == room_of(importer):
            continue
        if any(part.startswith("_") for part in name.split(".") if part != "__version__"):
            yield f"{where}: imports {name}, past the doors of {room}"


def folder_of(root: Path, name: str) -> str | None:
    """The folder of a module, or of a name in it, such as `kernels/xla`; None for other packages."""
    parts = name.split(".")[1:]
    for count in range(len(parts), 0, -1):
        path = Path("energy_attn", *parts[:count])
        if (root / path).is_dir() or (root / path.with_suffix(".py")).is_file():
            folder = path if (root / path).is_dir() else path.parent
            return str(folder.relative_to("energy_attn"))
    return None


def circles(root: Path) -> Iterator[str]:
    """Folders that import each other, directly or through others.

    Imports of an `__init__.py`, which re-exports names, and of `internal.py` do not count.
    """
    uses: dict[str, set[str]] = {}
    for where, importer, name in imported(root, *ROOMS):
        if where.split(":")[0].endswith(("/__init__.py", "/__main__.py", f"/{DOOR}.py")):
            continue
        importing = folder_of(root, importer)
        imported_folder = folder_of(root, name) if room_of(name) == room_of(importer) else None
        if importing and imported_folder and importing != imported_folder:
            uses.setdefault(importing, set()).add(imported_folder)
    for folder in sorted(uses):
        seen, ahead = set[str](), [folder]
        while ahead:
            for imported_folder in uses.get(ahead.pop(), ()):
                if imported_folder == folder:
                    yield f"{folder}: imports itself around a circle, through {sorted(uses[folder])}"
                elif imported_folder not in seen:
                    seen.add(imported_folder)
                    ahead.append(imported_folder)


def private_names(root: Path) -> Iterator[str]:
    """Private names of JAX that are imported, written as attributes or in strings, outside of the module for them."""
    for where, path, tree in modules(root, *ROOMS):
        names = list(imports(module_name(root, path), tree))
        bound = {
            alias.asname or alias.name.split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
            if (getattr(node, "module", None) or alias.name).split(".")[0] == "jax"
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.append((node.lineno, node.value))
            elif isinstance(node, ast.Attribute):
                name = ast.unparse(node)
                if name.split(".")[0] in bound:
                    names.append((node.lineno, f"jax.{name}"))
        for line, name in names if where != PRIVATE_NAMES else ():
            if re.match(r"jax\.([\w.]*\.)?_(?!_)", name):  # `jax.__version__` is public
                yield f"{where}:{line}: {name} is private; {PRIVATE_NAMES} is for such names"


def readers_of_programs(root: Path) -> Iterator[str]:
    """Modules outside of `kernels/program` that read the equations of a jaxpr."""
    for where, _, tree in modules(root, *ROOMS):
        for node in ast.walk(tree) if not where.startswith(PROGRAMS) else ():
            if isinstance(node, ast.Attribute) and node.attr == "eqns":
                yield f"{where}:{node.lineno}: reads a jaxpr; {PROGRAMS} is for that"


def long_modules(root: Path) -> Iterator[str]:
    """Modules of more than `MAX_LINES` lines."""
    for folder in (*ROOMS, "benchmarks"):
        for path in sources(root, folder):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > MAX_LINES:
                yield f"{path.relative_to(root)}: {lines} lines, more than {MAX_LINES}"


def repeated_classes(root: Path) -> Iterator[str]:
    """Class names that are defined more than once, with or without an underscore, and the places."""
    places: dict[str, list[str]] = {}
    for where, _, tree in modules(root, *ROOMS):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(f"{where}:{node.lineno}")
    for name, found in sorted(places.items()):
        if len(found) > 1 and name not in IN_TWO_PACKAGES:
            yield f"{found[0]}: class {name} is defined {len(found)} times: {', '.join(found)}"


def too_many_any(root: Path) -> Iterator[str]:
    """Rooms in which more than `MAX_ANY` of the annotated parameters are `Any`, with these parameters."""
    for room in ROOMS:
        annotated = [
            (f"{where}:{x.lineno}: {x.arg}: Any", ast.unparse(x.annotation))
            for where, _, tree in modules(root, room)
            for x in ast.walk(tree)
            if isinstance(x, ast.arg) and x.annotation
        ]
        untyped = [place for place, annotation in annotated if ANY.fullmatch(annotation)]
        if len(untyped) > MAX_ANY * len(annotated):
            counts = f"{len(untyped)} of {len(annotated)} annotated parameters are `Any`"
            yield "\n    ".join([f"{room}: {counts}", *untyped])


def leaning_on_models(root: Path) -> Iterator[str]:
    """Imports of `energy_attn.models` by modules that may not know it, or past its public names."""
    for where, _, name in imported(root, *ROOMS):
        if where.startswith(LODGERS) or not f"{name}.".startswith("energy_attn.models."):
            continue
        if where.split(":")[0] not in KNOW_MODELS or any(
            x.startswith("_") for x in name.split(".")
        ):
            yield f"{where}: imports {name}; the library does not lean on its models"


def undocumented_exports(root: Path) -> Iterator[str]:
    """Public names that no API page shows."""
    pages = "\n".join(
        page.read_text(encoding="utf-8") for page in sorted((root / "docs" / "api").glob("*.md"))
    )
    shown = set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))
    all_shown = set[str]()  # packages of which a page shows all that they export
    for package, block in re.findall(r"^::: (\S+)\n((?: .*\n)+)", pages, re.MULTILINE):
        shown |= {f"{package}.{name}" for name in re.findall(r"^ +- (\w+)$", block, re.MULTILINE)}
        if "members:" not in block:
            all_shown.add(package)
    for package, name in exports(root):
        if package not in all_shown and f"{package}.{name}" not in shown:
            yield f"docs/api: no page has `::: {package}.{name}`"


RULES = (
    broken_links,
    wrong_imports,
    other_doors,
    circles,
    private_names,
    readers_of_programs,
    long_modules,
    repeated_classes,
    too_many_any,
    leaning_on_models,
    over_budget,
    undocumented_exports,
)


if __name__ == "__main__":
    sys.exit(report(finding for rule in RULES for finding in rule(ROOT)))
