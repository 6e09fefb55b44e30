"""What stands beside the weights in a Hugging Face folder and goes where they go."""

from pathlib import Path

# What belongs to a tokenizer or to generation: all that loaders look for beside weights and config.
_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template.*",
    "generation_config.json",
    "*processor_config.json",
)


def companions(folder: Path) -> dict[str, Path]:
    """The files of a tokenizer and of generation settings in ``folder``, by name."""
    return {file.name: file for pattern in _PATTERNS for file in folder.glob(pattern) if file.is_file()}
