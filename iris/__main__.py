"""``python -m iris``; see :mod:`iris.cli`."""

from iris.cli import main
from iris.startup import started

if __name__ == "__main__":
    started()
    raise SystemExit(main())
