"""What a compiled program is made of."""

import re
from collections import Counter


def instructions(compiled) -> Counter:
    """How often each operation makes an array of each shape, in the optimised HLO."""
    pattern = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\(", re.MULTILINE)
    found = pattern.findall(compiled.as_text())
    return Counter((re.sub(r"\{[^}]*\}", "", shape), opcode) for shape, opcode in found)
