"""``python -m narrowcast.apex script.py args...``: a script that says ``from apex import amp``, unchanged."""

import sys

from narrowcast.apex._command import main

sys.exit(main(sys.argv[1:]))
