"""Hides all modules that are loaded before this one from the garbage collector; the fork server imports it last.

Modules live to the end of a process. Otherwise a collection, such as that behind each run, would walk through all of
them, and copy the pages of memory that a process shares with the server.
"""

import atexit
import gc

gc.collect()
gc.freeze()
# Triton's bindings report objects as leaked that are still hidden at the end of a process
atexit.register(gc.unfreeze)
