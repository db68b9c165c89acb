"""Griffe extension: expands `**options: Unpack[Options]` in signatures and tables.

An option that the docstring of the function describes keeps that description; others have the one in their `TypedDict`.
Griffe's own extension ignores inherited options.
"""

from typing import Any

import griffe


def declared(options: griffe.Class | griffe.Alias) -> dict[str, griffe.Attribute]:
    """The keys of a `TypedDict`, those that it inherits first."""
    options_by_name = {}
    for base in options.resolved_bases:
        options_by_name |= declared(base)
    return options_by_name | options.attributes


def default_of(option: griffe.Attribute) -> str:
    """The default that a signature shows: None for an option that may be None."""
    return "None" if str(option.annotation).endswith("| None") else "..."


class Options(griffe.Extension):
    """Replaces the variadic parameter of a function by what its `TypedDict` declares."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Called by Griffe with every function, when all of them are loaded."""
        for variadic in func.parameters:
            unpack = variadic.annotation
            is_subscript = isinstance(unpack, griffe.ExprSubscript)
            if is_subscript and unpack.canonical_path == "typing.Unpack":
                break
        else:
            return
        options = declared(func.modules_collection[unpack.slice.canonical_path]).values()
        for x in options:
            kind = griffe.ParameterKind.keyword_only
            func.parameters.add(
                griffe.Parameter(x.name, annotation=x.annotation, kind=kind, default=default_of(x))
            )
        del func.parameters[variadic.name]
        # a class documents the parameters of its `__init__`
        documented = func.parent if func.name == "__init__" else func
        sections = documented.docstring.parsed if documented and documented.docstring else ()
        for section in sections:
            if isinstance(section, griffe.DocstringSectionParameters):
                named = [x for x in section.value if x.name.lstrip("*") != variadic.name]
                described = {x.name for x in named}
                section.value = named + [
                    griffe.DocstringParameter(
                        x.name,
                        description=x.docstring.value if x.docstring else "",
                        annotation=x.annotation,
                        value=default_of(x),
                    )
                    for x in options
                    if x.name not in described
                ]
