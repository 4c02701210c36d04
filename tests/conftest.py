"""Shared by all tests: the leak check, the model fixtures, and few threads for each process."""

import importlib.util
import os
import signal

# Before torch is loaded anywhere. Tests start several processes at once; with a pool as wide as the machine
# in each of them they would mostly wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Also before triton is imported, by whichever test comes first: without a GPU its kernels run interpreted.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell starts its background jobs with Ctrl-C ignored, and every child inherits that; tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["leaks"]
if importlib.util.find_spec("oracle") is not None and importlib.util.find_spec("oracle.fixtures") is not None:
    pytest_plugins.append("oracle.fixtures")
