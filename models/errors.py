"""The one error type of this package."""


class ModelError(ValueError):
    """What is wrong with a model that the user asked for, as one sentence: what, where, and what to type instead.

    Only this type is shown as a sentence; any other ValueError is a bug and keeps its traceback.
    """
