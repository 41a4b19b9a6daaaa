"""Who holds which piece of which document: layouts, head splits, which queries meet which keys. Pure integers.

What needs torch is loaded when it is asked for, so that planning starts without.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
