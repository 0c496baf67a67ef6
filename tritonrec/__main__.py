"""The console script, and ``python -m tritonrec`` for torchrun."""

import atexit
import os
import signal
import sys
from contextlib import suppress


def main() -> None:
    """Run the command. A signal that ends it leaves no traceback, also while its modules are imported."""
    try:
        from .harness.cli import main as run

        run()
    except KeyboardInterrupt:
        _end(130)
    except SystemExit as left:
        if isinstance(left.code, int) and left.code > 128:
            _end(left.code)
        raise


def _end(code: int) -> None:
    """End after a signal. The interpreter's own end would wait for lanes that compile, or end threads of C++
    under way ("terminate called"), and has a traceback for a further Ctrl-C.
    """
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda number, _: os._exit(128 + number))
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
