"""The texts with which models mark up their outputs: chat templates tell which, and parsers look for them."""

REASONING_OPENING, REASONING_CLOSING = "<think>", "</think>"
HERMES_OPENING, HERMES_CLOSING = "<tool_call>", "</tool_call>"
LLAMA3_TAG = "<|python_tag|>"
MISTRAL_OPENING, MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
