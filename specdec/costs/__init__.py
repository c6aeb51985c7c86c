"""What a cycle costs: the model of time, published machines, and this machine measured."""
