"""``python -m dtcomm`` is ``dtcomm``."""

import sys

from dtcomm.cli.main import main

sys.exit(main())
