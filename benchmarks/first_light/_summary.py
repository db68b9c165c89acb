"""The summary of a record, in lines: the end of an output is read first."""

from collections.abc import Iterator

from ..runner import OURS
from ._record import Result

Steps = dict[str, dict[str, Result]]
_MOST, _BEST = 25, 3  # lines of a list, and of a sweep
# Of a wrong result, in its label.
_KNOWN = ("kernel", "case", "mode", "dtype", "call", "tiles", "good", "moved")


def summary(steps: Steps) -> Iterator[str]:
    """Short tables of wrong results, failures and times."""
    yield "== ceilings"
    for label, x in steps.get("roof", {}).items():
        figures = (f"{k} {v:.4g}" for k, v in x.items() if isinstance(v, float))
        yield f"  {label}: {', '.join(figures)}"
    for title, lines in _lists(steps).items():
        yield f"== {title}: {len(lines)}"
        yield from (f"  {line}" for line in lines[:_MOST])
        if len(lines) > _MOST:
            yield f"  and {len(lines) - _MOST} more"
    yield "== TFLOP/s (causal: half the products counted)"
    rates = _groups(steps, ("prefill", "torch"), "tflop_per_s", "kernel")
    for shape, by_kernel in rates.items():
        ordered = sorted(by_kernel.items(), key=lambda item: -item[1])
        yield f"  {shape}: " + ", ".join(f"{name} {rate:.0f}" for name, rate in ordered)
    yield "== decoding"
    for label, x in steps.get("decode", {}).items():
        if "us_per_step" in x:
            share = f", {x['of_copy']:.0%} of copying" if x["of_copy"] else ""
            small = " (may stay in a cache)" if x["cached"] else ""
            rate = x["bytes_per_s"] / 1e12
            yield f"  {label}: {x['us_per_step']:.1f} us, {rate:.2f} TB/s{share}{small}"
    yield "== tiles: the best, beside those that are chosen"
    for call, seconds in _groups(steps, ("sweep",), "seconds", "tiles").items():
        default_seconds = seconds.pop(OURS, None)
        for tiles in sorted(seconds, key=seconds.__getitem__)[:_BEST]:
            gain = (
                f", {default_seconds / seconds[tiles]:.2f} times as fast" if default_seconds else ""
            )
            yield f"  {call}: {tiles}: {seconds[tiles] * 1e6:.1f} us{gain}"


def _lists(steps: Steps) -> dict[str, list[str]]:
    """Wrong, irreproducible, declined and failed measurements, a line each."""
    moves = "differs from run to run (gradients of queries by cudnn and flash may)"
    lists: dict[str, list[str]] = {"WRONG": [], moves: [], "declined": [], "did not run": []}
    for step, results in steps.items():
        for label, x in results.items():
            prefix = f"{step}: {label}: "
            if x.get("good") is False:
                errors = ", ".join(f"{k} {x[k]}" for k in x if k not in _KNOWN)
                lists["WRONG"].append(prefix + errors)
            if x.get("moved"):
                lists[moves].append(prefix + ", ".join(x["moved"]))
            if "declined" in x:
                lists["declined"].append(prefix + x["declined"][:160])
            if "error" in x:
                lists["did not run"].append(prefix + x["error"].splitlines()[0][:160])
    return lists


def _groups(
    steps: Steps, names: tuple[str, ...], figure: str, by: str
) -> dict[str, dict[str, float]]:
    """A figure of results that are not wrong, by the rest of the label and by its end, which the result names."""
    groups: dict[str, dict[str, float]] = {}
    for name in names:
        for label, x in steps.get(name, {}).items():
            if figure in x and x.get("good") is not False:
                key = label.removesuffix(x[by]).rstrip(" :")
                groups.setdefault(key, {})[x[by]] = x[figure]
    return groups
