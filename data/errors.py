"""The one error type of this package."""


class DataError(ValueError):
    """What is wrong with the user's data, as one sentence: what, where, and what to do about it.

    Only this type is shown as a sentence; any other ValueError is a bug and keeps its traceback.
    """
