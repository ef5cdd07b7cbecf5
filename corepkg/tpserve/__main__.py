"""``python -m tpserve``: the command line."""

from tpserve.cli.main import main

if __name__ == "__main__":
    main()
