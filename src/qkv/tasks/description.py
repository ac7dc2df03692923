"""How does a task show itself?"""

from qkv.cost import count_parameters
from qkv.models import Model


def describe_task(kind: str, model: Model, name: str) -> str:
    """`LanguageModel(stories, gpt, 12,205,056 parameters, context 512)`, without the last parenthesis."""
    parts = [
        model.config.family,
        f"{count_parameters(model.config).total:,} parameters",
        f"context {model.config.context_length:,}",
    ]
    return f"{kind}({', '.join([name, *parts] if name else parts)}"
