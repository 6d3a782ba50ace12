"""How weight matrices are kept: a scheme is a LinearMethod that creates a weight, which packs and applies itself."""
