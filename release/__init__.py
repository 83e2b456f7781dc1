"""Tools that make what is published: the wheel's test, and the kernel for the Hugging Face hub."""
