"""Process groups between replica groups: each can be given up at any moment, and formed anew."""
