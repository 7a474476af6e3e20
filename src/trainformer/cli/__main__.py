"""`python -m trainformer.cli`, where the command is not on the path."""

import sys

from trainformer.cli.app import main

sys.exit(main())
