"""The paper's propositions and its theorem, one file a result: each as numbers that can be checked."""
