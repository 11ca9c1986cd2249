"""What a sweep amounts to, in numbers and words."""
