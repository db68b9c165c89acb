"""No TPU and no metadata server are looked for, no logs are kept, and several processes may load libtpu."""

import os

from tests.support.tpu import ALONE

os.environ.update(ALONE)
