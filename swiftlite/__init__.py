"""swiftlite: fine-tune Hugging Face language models from one command."""

__version__ = "0.1.0"
