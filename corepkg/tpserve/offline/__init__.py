"""The engine without a server: the same scheduler, fed and read in one process."""

from tpserve.offline.answers import Completion
from tpserve.offline.llm import LLM, Prompt, PromptError

__all__ = ["LLM", "Completion", "Prompt", "PromptError"]
