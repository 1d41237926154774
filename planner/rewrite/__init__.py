"""Graph → graph, one pass a file; every pass keeps what the program computes."""
