"""`python -m streams` is the `streams` command."""

from streams.cli import main

if __name__ == "__main__":
    main()
