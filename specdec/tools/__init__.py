"""What people start: the command line, the doctor, estimates, and the runner of the book."""
