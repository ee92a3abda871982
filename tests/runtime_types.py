"""The checker of annotations that tests install: beartype, with int taken for float, as mypy does."""

from typing import Self, TextIO

from beartype import BeartypeConf, FrozenDict, beartype

# What pytest puts in the place of the standard streams works as a stream, but lacks some of `TextIO`'s names.
# Functions are checked one by one, where beartype cannot know the class that `Self` stands for.
check = beartype(
    conf=BeartypeConf(is_pep484_tower=True, hint_overrides=FrozenDict({TextIO: object, Self: object}))
)
