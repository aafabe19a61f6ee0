"""Libraries that the tools in ``scripts/`` share. A tool finds them because Python puts its folder on the path."""
