"""The paper's propositions and its theorem in numbers, one file per result."""
