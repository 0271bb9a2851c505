"""Settings for every test."""

import signal

import torch
from hypothesis import settings

# Tests run side by side (pytest-xdist); one thread each keeps them from fighting over the cores.
torch.set_num_threads(1)

# A shell that starts the tests in the background makes them ignore Ctrl-C; the tests of Ctrl-C need Python's own way.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A shared core makes single examples slow now and then; that is no failure.
settings.register_profile("esper", deadline=None)
settings.load_profile("esper")
