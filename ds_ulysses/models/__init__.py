"""Hugging Face models: facts of a config, what is supported, how mixers are injected, loading.

What needs torch or transformers is loaded when it is asked for: `facts` needs neither.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
