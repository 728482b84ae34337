"""`python -m swiftlite` and the `swiftlite` command."""

import os
import signal
import sys


def main() -> None:
    try:
        _main()
    except KeyboardInterrupt:  # Ctrl-C while the program itself is imported, before anything can be told of it
        print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


def _main() -> None:
    from swiftlite.cli.app import main as run
    from swiftlite.config.layout import under_torchrun

    try:
        run()
    except SystemExit as stop:
        if under_torchrun(os.environ):
            from swiftlite.parallel.start import end_without_finalizing

            end_without_finalizing(stop.code)
        raise


if __name__ == "__main__":
    main()
