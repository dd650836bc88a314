"""`python -m mpxla`: plans, schedules and traces on the command line."""

import sys

from mpxla.cli.main import main

sys.exit(main())
