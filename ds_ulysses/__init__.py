"""Exact long-context training of Hugging Face models on DeepSpeed.

Names are loaded when they are asked for: importing this package loads neither torch nor deepspeed.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

__version__ = "0.2.0"
