"""The error tree, for code inside the package; :mod:`tpserve.api.errors` draws and documents it."""

from tpserve.api.errors import *  # noqa: F403
from tpserve.api.errors import __all__ as __all__
