"""One run of a comparison, in a process of its own: see ``_child.py``."""

import sys

from narrowcast.verify._child import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
