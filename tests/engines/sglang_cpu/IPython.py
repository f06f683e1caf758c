"""In place of IPython, of which SGLang imports two names at its start, for notebooks."""

import sys
from unittest.mock import MagicMock

sys.modules[f"{__name__}.display"] = display = MagicMock()
