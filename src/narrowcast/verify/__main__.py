"""One run of a comparison, in a process of its own: see ``compare/_child.py``."""

import sys

from narrowcast.verify.compare._child import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
