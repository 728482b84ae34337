"""`python -m swiftlite` and the `swiftlite` command."""

import os
import signal
import sys

from swiftlite.ending import end_without_finalizing

INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM


def main() -> None:
    try:
        _main()
    except KeyboardInterrupt:  # Ctrl-C while the program itself is imported, before anything can be told of it
        print("interrupted", file=sys.stderr)
        end_without_finalizing(INTERRUPTED)


def _main() -> None:
    from swiftlite.cli.app import main as run
    from swiftlite.config.layout import under_torchrun

    try:
        run()
    except SystemExit as stop:
        # Where Ctrl-C came in an `exec` and was caught, Python ends by the signal all the same.
        if stop.code in (INTERRUPTED, TERMINATED) or under_torchrun(os.environ):
            end_without_finalizing(stop.code)
        raise


if __name__ == "__main__":
    main()
