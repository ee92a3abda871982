"""The commands, one file each: a frozen dataclass whose fields are the options and whose call runs it.

Modules import what is heavy (torch above all) inside `__call__`, so that help and errors come at once.
"""
