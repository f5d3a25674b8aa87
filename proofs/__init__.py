"""What is claimed of the library beyond its tests, and the checks that could refute each claim; see README.md."""
