"""Python imports this module at its start, in each process of SGLang, whose first import needs torchvision."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import torchvision_shim

torchvision_shim.install()
