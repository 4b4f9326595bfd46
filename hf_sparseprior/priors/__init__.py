"""The five slots of a prior, what fills them, and the attention layer that has one."""
