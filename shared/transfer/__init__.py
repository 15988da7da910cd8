import os

# Debian's libfabric links libinfinipath, which on loading takes over SIGTERM, SIGSEGV, SIGABRT and more: a terminated process
# then exits with status 1, a crashed one leaves a `python*.btr` file in its working directory. Unless this is set before.
os.environ.setdefault("IPATH_NO_BACKTRACE", "1")
os.environ.setdefault("HFI_NO_BACKTRACE", "1")
