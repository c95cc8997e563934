"""What a user's machine was tuned to is not what tests are about."""

import os

os.environ["DTCOMM_TUNE"] = "off"
