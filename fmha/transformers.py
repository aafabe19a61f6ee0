"""Another name of `warpspec.engines.transformers`, which has the adapter for Hugging Face transformers."""

from warpspec.engines.transformers import *  # noqa: F403
from warpspec.engines.transformers import __all__  # noqa: F401
