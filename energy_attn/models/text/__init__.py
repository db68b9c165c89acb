"""Text to tokens, chats to text, and tokens to text as they come."""
