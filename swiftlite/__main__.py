"""`python -m swiftlite` and the `swiftlite` command."""

import os
import signal
import sys

from swiftlite.ending import ENDED, end_without_finalizing


def main() -> None:
    try:
        _main()
    except KeyboardInterrupt:  # Ctrl-C while the program itself is imported, before anything can be told of it
        print("interrupted", file=sys.stderr)
        end_without_finalizing(128 + signal.SIGINT)


def _main() -> None:
    from swiftlite.cli.app import main as run
    from swiftlite.config.layout import under_torchrun

    try:
        run()
    except SystemExit as stop:
        # Where Ctrl-C came in an `exec` and was caught, Python ends by the signal all the same.
        if stop.code in ENDED or under_torchrun(os.environ):
            end_without_finalizing(stop.code)
        raise


def _working_folder_last() -> None:
    """`python -m` looks for modules in the working folder first, where somebody's `random.py` or `tokenizers.py` would
    be taken for the library's. Only a checkout that this package itself came from stays first."""
    first, own = sys.path[0], os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    if first and not sys.flags.safe_path and os.path.realpath(first) != own:  # "": the folder is gone, as is told later
        sys.path.append(sys.path.pop(0))


if __name__ == "__main__":
    _working_folder_last()
    main()
