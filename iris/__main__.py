"""``python -m iris``; see :mod:`iris.cli`."""

from iris.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
