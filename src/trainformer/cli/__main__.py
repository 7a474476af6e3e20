"""`python -m trainformer.cli`, where the command is not on the path."""

import os
import sys

# Python searches the current folder first for `-m`; a file there must not stand in for an installed package.
if sys.path[:1] in ([""], [os.getcwd()]):
    del sys.path[0]

from trainformer.cli.app import main

sys.exit(main())
