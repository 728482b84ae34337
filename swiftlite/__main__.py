"""`python -m swiftlite` and the `swiftlite` command."""

import atexit
import os
import signal
import sys

INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    try:
        _main()
    except KeyboardInterrupt:  # Ctrl-C while the program itself is imported, before anything can be told of it
        print("interrupted", file=sys.stderr)
        atexit.register(os._exit, INTERRUPTED)


def _main() -> None:
    from swiftlite.cli.app import main as run
    from swiftlite.config.layout import under_torchrun

    try:
        run()
    except SystemExit as stop:
        if under_torchrun(os.environ):
            from swiftlite.parallel.start import end_without_finalizing

            end_without_finalizing(stop.code)
        if stop.code == INTERRUPTED:  # caught, but where it came in an `exec`, Python ends by the signal all the same
            atexit.register(os._exit, INTERRUPTED)
        raise


if __name__ == "__main__":
    main()
