"""What a compiled program is made of."""

import re
from collections import Counter

from energy_attn.distributed import collectives


def instructions(compiled) -> Counter:
    """How often each operation makes an array of each shape, in the optimised HLO."""
    pattern = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\(", re.MULTILINE)
    found = pattern.findall(compiled.as_text())
    return Counter((re.sub(r"\{[^}]*\}", "", shape), opcode) for shape, opcode in found)


def sent(program) -> list[tuple]:
    """What a program sends between devices, and between which."""
    return [(c.kind, c.bytes, c.count, c.groups) for c in collectives(program)]


def by_kind(found) -> Counter:
    """Bytes by kind of collective, all runs together, of collectives or of predicted transfers."""
    total = Counter()
    for c in found:
        total[c.kind] += c.bytes * c.count
    return total


def payload(program) -> Counter:
    return by_kind(collectives(program))
