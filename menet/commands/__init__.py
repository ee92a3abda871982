"""The commands, one file each: a frozen dataclass whose fields are the options and whose call does it."""
