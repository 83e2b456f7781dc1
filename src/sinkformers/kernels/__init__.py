"""Fast code only: plain functions on tensors, without autograd, validation or policy."""
