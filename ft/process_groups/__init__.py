"""Process groups that connect replica groups: each can be abandoned at any moment, and formed anew."""
