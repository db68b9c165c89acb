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


def as_parameter(option: griffe.Attribute) -> griffe.Parameter:
    """An option as the signature of a function shows it."""
    return griffe.Parameter(
        option.name,
        annotation=option.annotation,
        kind=griffe.ParameterKind.keyword_only,
        default=default_of(option),
    )


class Options(griffe.Extension):
    """Replaces the variadic parameter of a function by what its `TypedDict` declares."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Called by Griffe with every function, when all of them are loaded."""
        for variadic in func.parameters:
            unpack = variadic.annotation
            if (
                not isinstance(unpack, griffe.ExprSubscript)
                or unpack.canonical_path != "typing.Unpack"
            ):
                continue
            options = declared(func.modules_collection[unpack.slice.canonical_path])
            for option in options.values():
                func.parameters.add(as_parameter(option))
            # a class documents the parameters of its `__init__`
            documented = func.parent if func.name == "__init__" else func
            if documented is not None and documented.docstring is not None:
                describe(documented.docstring, variadic.name, options)
            del func.parameters[variadic.name]
            return


def describe(
    docstring: griffe.Docstring, variadic: str, options: dict[str, griffe.Attribute]
) -> None:
    """Puts the descriptions of the options where the variadic parameter has its own."""
    for section in docstring.parsed:
        if isinstance(section, griffe.DocstringSectionParameters):
            named = [x for x in section.value if x.name.lstrip("*") != variadic]
            described = {x.name for x in named}
            section.value = named + [
                griffe.DocstringParameter(
                    x.name,
                    description=x.docstring.value if x.docstring else "",
                    annotation=x.annotation,
                    value=default_of(x),
                )
                for x in options.values()
                if x.name not in described
            ]
