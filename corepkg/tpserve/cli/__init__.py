"""The ``tpserve`` command. Nothing else in the package imports this one."""
