"""How parts are found, checked and chosen. :class:`tpserve.plugins.registry.Registry` is the way in."""
