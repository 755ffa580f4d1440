"""``python -m dledger`` is the command ``dledger``."""

import sys

from dledger.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
