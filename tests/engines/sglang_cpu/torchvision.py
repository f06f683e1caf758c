"""In place of torchvision, whose wheel needs CUDA: SGLang and transformers import names of it at their start, and use none for text."""

import sys
from unittest.mock import MagicMock

io = transforms = MagicMock()
for part in ("io", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    sys.modules[f"{__name__}.{part}"] = io
