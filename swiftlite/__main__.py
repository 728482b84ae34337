"""`python -m swiftlite` and the `swiftlite` command."""


def main() -> None:
    from swiftlite.cli.app import main as run

    run()


if __name__ == "__main__":
    main()
