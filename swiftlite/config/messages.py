"""How rows, and what other tools say of rows, spell the roles and the keys of a message."""

ROLES = {  # a spelling -> the role
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "tool_response": "tool",
    "observation": "tool",
    "function": "tool",
    "function_call": "function_call",
    "tool_call": "function_call",
}
PROPERTIES = {"role": ("role", "from"), "content": ("content", "value")}  # what is read -> its keys
