"""How other tools name the roles and the keys of a message, where `swiftlite.data.messages` knows the names."""

ROLES = {"system": ["system"], "user": ["user", "human"], "assistant": ["assistant", "gpt"], "tool": ["tool"]}
PROPERTIES = {"role": ("role", "from"), "content": ("content", "value")}
