"""What prefuse can say of a compilation: a node's history, why two nodes are not in one group, two pipelines side by side."""
