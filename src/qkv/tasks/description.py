"""Format the `repr` of tasks."""

from qkv.models import Model


def task_repr_prefix(class_name: str, model: Model, name: str) -> str:
    """Return the `repr` of a task without the closing parenthesis.

    For example: `LanguageModel(stories, gpt, 12,205,056 parameters, context 512`.
    """
    from qkv.cost import count_parameters

    parts = [
        model.config.family,
        f"{count_parameters(model.config).total:,} parameters",
        f"context {model.config.context_length:,}",
    ]
    return f"{class_name}({', '.join([name, *parts] if name else parts)}"
