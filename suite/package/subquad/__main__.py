"""The command line of an installation: `subquad`, and `python -m subquad`."""

import multiprocessing
import os
import signal

if multiprocessing.parent_process() is None:
    # until the command line handles it, which takes a second of imports, Ctrl-C ends the process without a traceback
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))

from subquad.run_suite import main

if __name__ == "__main__":
    main()
