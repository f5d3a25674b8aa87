"""What ties the machine to training: real KnownDDPs, on gloo and in a group that is simulated."""
