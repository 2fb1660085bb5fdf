"""``python -m narrowcast`` is the ``narrowcast`` command."""

import sys

from narrowcast.cli import main

sys.exit(main())
