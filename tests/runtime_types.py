"""The checker of annotations that tests install: beartype, with int taken for float, as mypy does."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
