"""Chats, prompts, grammars and images become tokens and features, without an engine."""
