"""What a record comes to, in lines: the end of an output is what is read."""

from collections.abc import Iterator

from ..runner import OURS
from ._record import Result

Steps = dict[str, dict[str, Result]]
_MOST, _BEST = 25, 3  # lines of a list, and of a sweep
_KNOWN = (
    "kernel",
    "case",
    "mode",
    "dtype",
    "call",
    "tiles",
    "good",
    "moved",
)  # of a wrong result, in its label


def summary(steps: Steps) -> Iterator[str]:
    """Short tables: what is wrong, what did not run, and what was fast."""
    yield "== ceilings"
    for label, x in steps.get("roof", {}).items():
        found = (f"{k} {v:.4g}" for k, v in x.items() if isinstance(v, float))
        yield f"  {label}: {', '.join(found)}"
    lists: dict[str, list[str]] = {
        "WRONG": [],
        "differs from run to run (gradients of queries by cudnn and flash may)": [],
        "declined": [],
        "did not run": [],
    }
    wrong, moved, declined, errors = lists.values()
    for step, found in steps.items():
        for label, x in found.items():
            where = f"{step}: {label}: "
            if x.get("good") is False:
                wrong.append(where + ", ".join(f"{k} {x[k]}" for k in x if k not in _KNOWN))
            if x.get("moved"):
                moved.append(where + ", ".join(x["moved"]))
            if "declined" in x:
                declined.append(where + x["declined"][:160])
            if "error" in x:
                errors.append(where + x["error"].splitlines()[0][:160])
    for title, lines in lists.items():
        yield f"== {title}: {len(lines)}"
        yield from (f"  {line}" for line in lines[:_MOST])
        if len(lines) > _MOST:
            yield f"  and {len(lines) - _MOST} more"
    yield "== TFLOP/s (causal: half the products counted)"
    groups: dict[str, dict[str, float]] = {}
    for step in ("prefill", "torch"):
        for label, x in steps.get(step, {}).items():
            if "tflop_per_s" in x:
                where = label.removesuffix(x["kernel"])
                groups.setdefault(where, {})[x["kernel"]] = x["tflop_per_s"]
    for where, rates in groups.items():
        ordered = sorted(rates.items(), key=lambda item: -item[1])
        yield f"  {where}: " + ", ".join(f"{name} {rate:.0f}" for name, rate in ordered)
    yield "== decoding"
    for label, x in steps.get("decode", {}).items():
        if "us_per_step" in x:
            share = f", {x['of_copy']:.0%} of copying" if x["of_copy"] else ""
            small = " (may stay in a cache)" if x["cached"] else ""
            rate = x["bytes_per_s"] / 1e12
            yield f"  {label}: {x['us_per_step']:.1f} us, {rate:.2f} TB/s{share}{small}"
    yield "== tiles: the best, beside those that are chosen"
    calls: dict[str, dict[str, float]] = {}
    for x in steps.get("sweep", {}).values():
        if x.get("good"):
            calls.setdefault(x["call"], {})[x["tiles"]] = x["seconds"]
    for call, seconds in calls.items():
        own = seconds.pop(OURS, None)
        for tiles in sorted(seconds, key=seconds.__getitem__)[:_BEST]:
            gain = f", {own / seconds[tiles]:.2f} times as fast" if own else ""
            yield f"  {call}: {tiles}: {seconds[tiles] * 1e6:.1f} us{gain}"
