"""`python -m energy_attn.cli.first_light OPTIONS`: the process of the measurements, started by the suite."""

import json
import os
import sys

from ._steps import Options, measure

if __name__ == "__main__":
    status = measure(Options(*json.loads(sys.argv[1])))
    sys.stdout.flush()
    os._exit(status)  # a broken context of the device may not come to an end
